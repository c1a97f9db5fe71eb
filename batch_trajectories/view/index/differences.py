"""The differences of two runs, short enough for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.report.comparison import compare

_MAX_ITEMS = 200
_LISTS = ("changed", "judged_otherwise", "labelled_otherwise")


def differences(first: Path, second: Path) -> str:
    """JSON of `compare`, its lists of ids cut; `more` has how many are left out, by list."""
    found = compare(StoredRun(first), StoredRun(second))
    more: dict[str, Any] = {}
    for name in _LISTS:
        more[name] = max(0, len(found[name]) - _MAX_ITEMS)
        found[name] = found[name][:_MAX_ITEMS]
    more["only"] = [max(0, len(ids) - _MAX_ITEMS) for ids in found["only"]]
    found["only"] = [ids[:_MAX_ITEMS] for ids in found["only"]]
    return orjson.dumps({**found, "more": more}).decode()
