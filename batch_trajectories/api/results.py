"""Writes the training files, statistics and summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.engine.run_totals import RunTotals, compute_totals
from batch_trajectories.export.training_files import export_run, run_style
from batch_trajectories.records.files import has_batches, is_training_file, replace_json
from batch_trajectories.records.names import STATISTICS_FILE, SUMMARY_FILE


def write_results(
    path: Path, scan: Scan, config: RunConfig, *, last_start: dict[str, Any] | None = None
) -> RunTotals:
    """Write the training files, then the summary, from the files of the run.

    `last_start` describes the start that has just ended; None keeps the description in the
    summary. Raises `ConfigError` if the training file would overwrite the dataset, as the directory
    of the run was renamed or copied.
    """
    if is_training_file(config.dataset_file, path):
        raise ConfigError(
            f"{config.dataset_file}: the training file of this run would overwrite its dataset; "
            f"rename the directory {path}, or move it"
        )
    style = run_style(config.to_json())
    export_run(path, scan, num_samples=config.num_samples, style=style, config=config)
    totals = compute_totals(path, scan, config)
    statistics = orjson.loads((path / STATISTICS_FILE).read_bytes())
    if config.token_ids:
        no_token_ids = {"turns_with": 0, "turns_without": totals.turns}
        totals.token_ids = statistics.get("token_ids", no_token_ids)
    summary = path / SUMMARY_FILE
    if last_start is None:
        # A summary that is missing, damaged or no object has no `last_start`.
        with suppress(FileNotFoundError, orjson.JSONDecodeError, AttributeError):
            last_start = orjson.loads(summary.read_bytes()).get("last_start")
    content = {
        **totals.to_json(),
        "toolsets": _toolset_shares(path, statistics),
        "last_start": last_start,
    }
    if has_batches(path):
        from batch_trajectories.batch_api.batch_log import compute_batch_totals

        if (batches := compute_batch_totals(path)) is not None:
            content["batches"] = batches.to_json()
    replace_json(summary, content)
    return totals


def _toolset_shares(path: Path, statistics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The number of records with each toolset, and its wanted share by the distribution."""
    offered = statistics["toolsets"]
    wanted_shares = read_run_json(path)["meaning"].get("distribution") or {}
    never_offered = [
        {"toolset": name, "rows": 0, "percent": 0.0}
        for name in sorted(wanted_shares.keys() - {row["toolset"] for row in offered})
    ]
    return [
        {**row, "asked_percent": wanted_shares.get(row["toolset"])}
        for row in (*offered, *never_offered)
    ]
