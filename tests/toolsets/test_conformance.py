"""What every sandbox has to do, for ours: the suite that authors of others run, too."""

from __future__ import annotations

import pytest

from batch_trajectories.sandbox_conformance import *  # noqa: F403
from toolsets.sandbox import SANDBOXES
from toolsets.sandbox.factory import find_sandbox_class, sandbox_problem

OURS = [
    pytest.param(name, marks=[] if find_sandbox_class(name).is_isolated else pytest.mark.slow)
    for name in sorted(SANDBOXES)
    if not find_sandbox_class(name).needs_image
]


@pytest.fixture(params=OURS)  # type: ignore[no-redef]
def name(request: pytest.FixtureRequest) -> str:
    """Each of our sandboxes that needs no image."""
    if (problem := sandbox_problem(request.param)) is not None:
        pytest.skip(problem)
    return str(request.param)


@pytest.mark.parametrize("kind", SANDBOXES)
def test_the_table_of_sandboxes_says_which_ones_need_an_image(kind: str) -> None:
    assert SANDBOXES[kind].needs_image == find_sandbox_class(kind).needs_image
