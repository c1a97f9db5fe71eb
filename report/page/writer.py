"""Write the report of a run: an HTML file, and files with its data if there is much."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from api.stored_run import StoredRun
from export.conversation.style import style_of_run
from export.reward_statistics import RewardStatistics
from report.facts import row_of
from report.page.page import render_page
from report.page.pieces import INLINE_BYTES, Pieces
from report.page.training_form import training_form
from runs.errors import RunDirError
from runs.sources.source import HUB_PREFIX
from runs.store.failures import failures_by_class
from runs.store.files import StorageError, replace_file
from runs.store.reader import stored_records
from runs.store.settled import NO_LIMIT
from runs.totals.spending import spent_by, spent_by_judges
from toolsets import exact_json

_BEGINNING = b"<!doctype html>"


class WrittenPage(NamedTuple):
    """The result of `write_report`."""

    path: Path
    trajectories: int
    files: Path | None
    """The directory with the data of the page; None if all data is in the page."""


def write_report(
    stored: StoredRun, output: Path | None = None, *, inline_bytes: int = INLINE_BYTES
) -> WrittenPage:
    """Write the report of a run to `output` (default: report.html in its directory).

    Reads one record at a time; more data than `inline_bytes` goes to files in
    `<output's stem>_files`. Raises `RunDirError` and `StorageError`.
    """
    run = stored.identity
    path = output or stored.path / "report.html"
    if path.is_dir() or not path.parent.is_dir():
        msg = f"{path}: cannot write the report there; --output names a file in a directory"
        raise RunDirError(msg)
    if path.exists() and not _is_page(path):
        msg = f"{path}: exists and is not a report; give a new file or an older report by --output"
        raise RunDirError(msg)
    report_id = secrets.token_hex(8)
    directory = path.with_name(f"{path.stem}_files")
    pieces = Pieces(directory, report_id, inline_bytes=inline_bytes)
    tools, systems = _Distinct(), _Distinct()
    style = style_of_run(run["config"])
    rewards = RewardStatistics(run["config"]["num_samples"])
    columns: list[str] = []
    count = 0
    try:
        for record in stored_records(stored.path, doing="report"):
            rewards.add(record)
            form = training_form(record, style=style, number_of=systems.number)
            row = row_of(record) | {"exported": form["file"]}
            columns = [*row, "chunk", "place"]
            shared = {"tools": list(map(tools.number, record.tools))}
            pieces.add(row, exact_json.dumps({**record.as_dict(), **shared, "training_form": form}))
            count += 1
        rows, records, row_pieces = pieces.finish()
    except OSError as error:
        msg = f"{path}: cannot write the report: {error.strerror or error}; make room, or --output"
        raise StorageError(msg) from error
    finally:
        pieces.discard()
    meta = {
        **_about(stored),
        "rewards": rewards.to_json(),
        "report_id": report_id,
        "columns": columns,
        "tools": tools.values,
        "systems": systems.values,
        "row_pieces": row_pieces,
        "files": directory.name if row_pieces else None,
    }
    replace_file(path, render_page(meta, rows=rows, records=records))
    return WrittenPage(path, count, directory if row_pieces else None)


def _is_page(path: Path) -> bool:
    """Whether a file is a page or empty, so the report may replace it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)).lower() in (_BEGINNING, b"")


def _about(stored: StoredRun) -> dict[str, Any]:
    run = stored.identity
    funnel, _ = stored.funnel_if_known()  # why not would name a path of this machine
    return {
        "run_name": run["run_name"],
        "created": run["created"],
        "written_at": time.time(),
        "is_running": stored.holder is not None,
        "tasks": run["dataset"]["rows"] * run["config"]["num_samples"],
        "bad_rows": run["dataset"]["bad_rows"],
        "dataset": _dataset_name(run["dataset"]),
        "meaning": run["meaning"],
        "history": run["history"],
        "versions": run["versions"],
        "funnel": funnel,
        "errors": failures_by_class(stored.path),
        "spent": spent_by(stored.path, run["config"].get("max_attempts", NO_LIMIT))._asdict(),
        "judges": spent_by_judges(stored.path)._asdict(),
    }


def _dataset_name(dataset: Mapping[str, Any]) -> str:
    """What the user gave as the dataset, without the directories of this machine.

    What is not JSONL was copied to a file whose name is a digest, which would tell nobody anything.
    """
    source = (dataset.get("source") or {}).get("source") or dataset["path"]
    return str(source) if source.startswith(HUB_PREFIX) else PurePath(source).name


class _Distinct:
    """Distinct values: most records of a run have the same tools."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Any) -> int:
        """The place of `value` in `values`."""
        key = exact_json.dumps(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]
