"""The bucket of the tests of mirrors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mirror.emulators import Emulated


@pytest.fixture(params=["s3", "az", "gs"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulated]:
    """An empty bucket of a running emulator."""
    from tests.mirror.emulators import run_emulator  # needs the extra `mirror`

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with run_emulator(request.param, tmp_path, monkeypatch) as bucket:
        yield bucket
