"""Refuse starts that would shorten the training file of a run by mistake.

Rows that were removed from the dataset leave the exports, as intended. An option given for a trial
or a truncated dataset file must not have this effect.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan
from runs.errors import ConfigError
from runs.store.records import load_index

NARROWING = ("max_samples", "num_samples", "dataset_file")
"""Keys of --accept_config_change that let finished rows leave the training file."""


def refuse_narrowing(
    path: Path, scan: Scan, config: RunConfig, before: dict[str, Any], accepted: Collection[str]
) -> None:
    """Raise `ConfigError` if finished tasks of the run in `path` would leave its training file.

    `before` is its run.json. Unless `accepted` names the reason, options may remove no finished
    task, and a shorter dataset at most half of them.
    """
    narrowed = _narrowing_option(before["config"], config)
    fewer = scan.rows < before["dataset"]["rows"]  # the same number of other rows is an edit
    if not narrowed and not fewer:
        return
    rows, gone = load_index(path).match(scan.keys)
    kept = len(rows) - rows.count(0)
    leaving = gone - _already_gone(path)
    why = narrowed or "dataset_file"
    if leaving <= 0 or why in accepted or (not narrowed and leaving <= kept):
        return
    finished = f"{leaving:,} of the {leaving + kept:,} finished tasks"
    if narrowed:
        then = before["config"].get(narrowed)
        what = f"--{narrowed}={getattr(config, narrowed)} leaves out {finished} of this run"
        keep = f"leave {narrowed} {'out' if then is None else f'at {then}'}"
    else:
        what = f"{scan.path}: {finished} of this run are no longer in it (was it cut off?)"
        keep = "restore their rows"
    msg = (
        f"{path}: {what}, and {'its row' if leaving == 1 else 'their rows'} would leave the "
        f"training file. To keep them, {keep}; for a trial use another --run_name; to leave them "
        f"out, give --accept_config_change={why} (their records stay)."
    )
    raise ConfigError(msg)


def _narrowing_option(before: dict[str, Any], config: RunConfig) -> str | None:
    """The option that leaves out tasks of the last start, if any."""
    limit = before.get("max_samples")
    if config.max_samples is not None and (limit is None or config.max_samples < limit):
        return "max_samples"
    return "num_samples" if config.num_samples < before.get("num_samples", 1) else None


def _already_gone(path: Path) -> int:
    """How many finished tasks are already missing from the training files."""
    try:
        gone = orjson.loads((path / "exports" / "manifest.json").read_bytes())["gone"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return 0  # no training files yet, or they will be made again
    return gone if isinstance(gone, int) else 0
