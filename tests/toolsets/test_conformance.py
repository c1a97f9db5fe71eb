"""What every sandbox has to do, for ours: the suite that authors of others run, too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("batch_trajectories.sandbox_conformance")

from batch_trajectories.sandbox_conformance import *  # noqa: E402, F403
from tests.toolsets.test_sandbox import needs_bwrap  # noqa: E402


@pytest.fixture(params=[pytest.param("bwrap", marks=needs_bwrap), "local"])  # type: ignore[no-redef]
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
