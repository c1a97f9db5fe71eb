"""Whether a start would make the training file of an existing run shorter by a slip.

Rows that are no longer in the dataset leave the exports, which is what an edit of the dataset asks
for. An option given for a trial, or a file that was cut off, must not do so by the way.
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
"""What --accept_config_change can name so that finished rows leave the training file."""


def refuse_narrowing(
    path: Path, scan: Scan, config: RunConfig, before: dict[str, Any], accepted: Collection[str]
) -> None:
    """Raise `ConfigError` where finished tasks of the run in `path` would leave its training file.

    `before` is its run.json. Options may leave out none of them, and a dataset that has become
    shorter at most half, unless `accepted` names why.
    """
    narrowed = _narrowed(before["config"], config)
    fewer = scan.rows < before["dataset"]["rows"]  # as many, and others, are an edit
    if not narrowed and not fewer:
        return
    rows, gone = load_index(path).match(scan.keys)
    kept = len(rows) - rows.count(0)
    leaving = gone - _gone_before(path)
    why = narrowed or "dataset_file"
    if leaving <= 0 or why in accepted or (not narrowed and leaving <= kept):
        return
    finished = f"{leaving:,} of the {leaving + kept:,} finished tasks"
    if narrowed:
        then = before["config"].get(narrowed)
        what = f"--{narrowed}={getattr(config, narrowed)} leaves out {finished} of this run"
        keep = f"set {narrowed} as before ({'not at all' if then is None else then})"
    else:
        what = f"{scan.path}: {finished} of this run are no longer in it (was it cut off?)"
        keep = "restore their rows"
    msg = (
        f"{path}: {what}, and {'its row' if leaving == 1 else 'their rows'} would leave the "
        f"training file. To keep them, {keep}; to try something, choose another --run_name; to "
        f"leave them out, use --accept_config_change={why} (their records stay)."
    )
    raise ConfigError(msg)


def _narrowed(before: dict[str, Any], config: RunConfig) -> str | None:
    """The option that leaves out what the last start had; None where there is none."""
    most = before.get("max_samples")
    if config.max_samples is not None and (most is None or config.max_samples < most):
        return "max_samples"
    return "num_samples" if config.num_samples < before.get("num_samples", 1) else None


def _gone_before(path: Path) -> int:
    """How many finished tasks the training files lack already."""
    try:
        gone = orjson.loads((path / "exports" / "manifest.json").read_bytes())["gone"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return 0  # there are none that could lose anything, or they are made anew
    return gone if isinstance(gone, int) else 0
