"""Computes the funnel from the rows of a dataset to training rows, from the files of a run.

Tasks and endings come from the totals of the run; counts of conversations that an export left out
come from the manifest of the export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.basics.text import plural
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.run_totals import RunTotals
from batch_trajectories.export.statistics.counts import Reasons
from batch_trajectories.records.files import training_path
from batch_trajectories.records.names import EXPORTS, MANIFEST_FILE

_LOST = "left out"
_LABELS = {"rows": "discarded", "audited": _LOST}
"""The word for tasks that do not reach the next step, by step; elsewhere the reason says it."""


def compute_funnel(
    run_dir: Path, scan: Scan, totals: RunTotals, dataset: Mapping[str, Any]
) -> dict[str, Any]:
    """The funnel of a run, JSON-ready; `dataset` is the key of this name in run.json.

    `steps` are audited (only with `--only_sound`), rows, tasks, completed and passed (only if
    anything was checked or scored). Each has `name`, `count`, and as `lost` the losses up to the
    next step by reason. Tasks are the remaining rows times `samples`.

    `exports` are the training file, and each format of the dataset in its default directory, with
    `rows`, `used` (conversations), `tasks` (bad rows included) and `lost`: `tasks` minus all `lost`
    is `used`. A format with masked turns also has `masked`, as in the manifest. An export is
    `outdated` if conversations have ended since it was made.

    Raises `RunDirError` for a manifest that cannot be read.
    """
    completed = totals.statuses.get("completed", 0)
    endings = Counter(totals.statuses)
    del endings["completed"], endings["failed"]
    endings.update({f"failed: {name}": count for name, count in totals.failures.items()})
    endings["pending"] = totals.pending
    passed, not_passed = totals.completed_passed, totals.completed_not_passed
    unknown = completed - passed - not_passed
    bad_rows = Reasons("bad row: ")
    for row in scan.bad_rows:
        bad_rows.add(row.reason)
    steps = [
        *_audit_steps(dataset),
        _step("rows", totals.prompts, bad_rows.to_json()),
        _step("tasks", totals.total - totals.discarded, endings),
        _step("completed", completed, {}),
    ]
    if passed or not_passed:
        lost = {"not_passed": not_passed, "neither checked nor scored": unknown}
        steps[-1:] = [_step("completed", completed, lost), _step("passed", passed, {})]
    return {
        "samples": totals.samples,
        **({} if totals.not_needed is None else {"not_needed": totals.not_needed}),
        "steps": steps,
        "exports": [*_training_file_exports(run_dir, totals), *_dataset_exports(run_dir, totals)],
    }


def _audit_steps(dataset: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if (audit := (dataset.get("source") or {}).get("only_sound")) is not None:
        lost = {f"task: {name}": n for name, n in audit["rows"].items() if name != "sound"}
        yield _step("audited", sum(audit["rows"].values()), lost)


def format_funnel(funnel: Mapping[str, Any]) -> Iterator[str]:
    """Format a funnel as lines."""
    samples = funnel["samples"]
    for step in funnel["steps"]:
        is_sampled = step["name"] == "tasks" and samples > 1
        note = f"  {samples:,} samples per row" if is_sampled else ""
        if is_sampled and "not_needed" in funnel:
            note = f"  up to {samples:,} samples per row; {funnel['not_needed']:,} not needed"
        yield f"{step['name']:<12}{step['count']:>12,}{note}"
        # A step counts tasks. How many of them a file has is a line of each export below.
        yield from _lost_lines(step["lost"], _LABELS.get(step["name"], "of these"))
    for export in funnel["exports"]:
        outdated = "; conversations have ended since, export again" if export["outdated"] else ""
        yield (
            f"{'exported':<12}{export['rows']:>12,}  {'row' if export['rows'] == 1 else 'rows'} of "
            f"{export['format']} in {export['path']}, from {export['used']:,} of "
            f"{plural(export['tasks'], 'task')}{outdated}"
        )
        yield from _lost_lines(export["lost"])
        if masked := export.get("masked"):
            yield f"  {'masked':<10}{masked['turns']:>12,}  of {masked['of']:,} turns carry no loss"
            for reason, count in masked["by_reason"].items():
                yield f"  {'':<10}{count:>12,}  {reason}"


def _lost_lines(lost: Mapping[str, int], label: str = _LOST) -> Iterator[str]:
    return (f"  {label:<10}{count:>12,}  {reason}" for reason, count in lost.items())


def _step(name: str, count: int, lost: Mapping[str, int]) -> dict[str, Any]:
    return {"name": name, "count": count, "lost": _sort_reasons(lost)}


def _sort_reasons(lost: Mapping[str, int]) -> dict[str, int]:
    """Sort reasons by count, the most frequent first; reasons that did not occur are left out."""
    ordered = sorted(lost.items(), key=lambda reason: (-reason[1], reason[0]))
    return {reason: count for reason, count in ordered if count}


def _training_file_exports(run_dir: Path, totals: RunTotals) -> Iterator[dict[str, Any]]:
    manifest = _read_manifest(run_dir / EXPORTS / MANIFEST_FILE)
    if manifest is None:
        return
    # Both kinds are in exports/partial.jsonl, whose manifest counts them together.
    wrong = min(manifest["partial"], totals.statuses.get("wrong_answer", 0))
    early = manifest["partial"] - wrong
    lost = {**_count_left_out(manifest), "wrong_answer": wrong, "ended early": early}
    rows = manifest["exported"]
    path = training_path(run_dir).name
    yield _describe_export(
        "hermes", path=path, manifest=manifest, totals=totals, lost=lost, rows=rows, used=rows
    )


def _dataset_exports(run_dir: Path, totals: RunTotals) -> Iterator[dict[str, Any]]:
    manifest = _read_manifest(run_dir / EXPORTS / "dataset" / MANIFEST_FILE)
    if manifest is None or manifest.get("unfinished"):
        return
    for part in (manifest, *manifest.get("earlier", ())):
        yield from _format_exports(part, totals)


def _format_exports(manifest: Mapping[str, Any], totals: RunTotals) -> Iterator[dict[str, Any]]:
    for part in manifest["formats"]:
        lost = Counter(_count_left_out(manifest)) + Counter(part["rejected_by_reason"])
        paths = (file["path"] for file in part["files"])
        path = f"exports/dataset/{next(paths, part['format']).partition('/')[0]}"
        found = _describe_export(
            part["format"],
            path=path,
            manifest=manifest,
            totals=totals,
            lost=lost,
            rows=part["rows"],
            used=part["used"],
        )
        yield {**found, "masked": part["masked"]} if "masked" in part else found


def _count_left_out(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The tasks that a manifest counts as left out of all files, by reason."""
    lost = Counter(manifest["rejected_by_reason"])
    lost["failed"] += manifest["failed"]
    lost["bad row"] += manifest["discarded"]
    lost["pending"] += manifest["pending"]
    return lost


def _describe_export(
    format_name: str,
    *,
    path: str,
    manifest: Mapping[str, Any],
    totals: RunTotals,
    lost: Mapping[str, int],
    rows: int,
    used: int,
) -> dict[str, Any]:
    tasks = manifest["tasks"]
    ended = tasks - manifest["discarded"] - manifest["failed"] - manifest["pending"]
    failed = manifest["rejected_by_reason"].get("failed", 0)
    statuses = totals.statuses
    # The same three counts when the export was made, and now.
    exported = (tasks, ended, failed)
    now = (totals.total, sum(statuses.values()), statuses.get("failed", 0))
    return {
        "format": format_name,
        "path": path,
        "rows": rows,
        "used": used,
        "tasks": tasks,
        "lost": _sort_reasons(lost),
        "outdated": exported != now,
    }


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a manifest; None if nothing was exported yet. Raises `RunDirError`."""
    try:
        manifest: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise RunDirError(f"{path}: cannot read it: {error}; export again") from error
    return manifest
