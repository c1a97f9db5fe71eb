"""The loopback service for tests, with the variables that lead clients to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback

pytest.register_assert_rewrite("batch_trajectories.sandbox_conformance")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """A service of this test alone; nothing may be left on it at the end."""
    if shutil.which("bwrap") is None:
        pytest.skip("the machines of the loopback service need bwrap")
    loopback = Loopback()
    for name in ("E2B_DOMAIN", "E2B_USER", "E2B_LIFETIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in loopback.environment.items():
        monkeypatch.setenv(name, value)
    yield loopback
    loopback.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a workspace, which the sandbox makes."""
    return tmp_path / "workspaces" / "one"
