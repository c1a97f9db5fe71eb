"""Check that the training files of a run match its records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch_trajectories.engine.run_totals import RunTotals
from batch_trajectories.records.names import EXPORTS, MANIFEST_FILE
from batch_trajectories.records.problem import Problem


class _Entry(NamedTuple):
    """A file in the manifest."""

    path: str
    holds: str
    bytes: int
    sha256: str


def check_exports(path: Path, totals: RunTotals, made: Path | None) -> Iterator[Problem]:
    """Check the manifest against the totals, and each file against the manifest.

    `made` is a run directory with exports that were just made from the same records, to compare
    each file with; None skips the comparison of contents.
    """
    manifest_path = path / EXPORTS / MANIFEST_FILE
    try:
        manifest = orjson.loads(manifest_path.read_bytes())
        files = {
            _place(path, entry["path"]): _Entry(*itemgetter(*_Entry._fields)(entry))
            for entry in manifest["files"]
        }
    except FileNotFoundError:
        if totals.done or totals.failed:
            yield _export_problem(manifest_path, None, "missing")
        return
    except (orjson.JSONDecodeError, KeyError, TypeError):
        yield _export_problem(manifest_path, None, "unreadable")
        return
    yield from _check_counts(manifest_path, manifest, totals)
    for file, entry in files.items():
        yield from _check_file(file, entry, contents=made is not None)
    if made is not None:
        made_files = orjson.loads((made / EXPORTS / MANIFEST_FILE).read_bytes())["files"]
        places = {entry["holds"]: _place(made, entry["path"]) for entry in made_files}
        for file, entry in files.items():
            if entry.holds in places:
                yield from _compare(file, places[entry.holds])
            else:
                message = f"{entry.path}: no run has a file of {entry.holds!r}"
                yield _export_problem(manifest_path, None, message)


def _place(path: Path, relative: str) -> Path:
    """The path of a file of the run in `path`; inside that directory if the run was moved aside."""
    named = Path(os.path.normpath(path / relative))
    inside = path / named.name
    return inside if inside.exists() else named


def _check_counts(path: Path, manifest: dict[str, Any], totals: RunTotals) -> Iterator[Problem]:
    with_record = sum(totals.statuses.values())
    expected = {
        "tasks": totals.total,
        "discarded": totals.discarded,
        "failed": totals.done + totals.failed - with_record,
        "pending": totals.pending,
        "gone": totals.gone,
    }
    for key, value in expected.items():
        if manifest.get(key) != value:
            message = f"{key} {manifest.get(key)}, the records give {value}"
            yield _export_problem(path, None, message)
    written = sum(manifest.get(key, 0) for key in ("exported", "partial", "rejected"))
    if written != with_record:
        message = f"its files have {written} tasks, but {with_record} have a record"
        yield _export_problem(path, None, message)


def _check_file(file: Path, entry: _Entry, *, contents: bool) -> Iterator[Problem]:
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            yield _export_problem(file, None, f"{size} bytes, the manifest says {entry.bytes}")
        elif contents:
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != entry.sha256:
                    yield _export_problem(file, None, "its hash is not that in the manifest")
    except FileNotFoundError:
        yield _export_problem(file, None, "missing")


def _compare(file: Path, made: Path) -> Iterator[Problem]:
    """Report the first line that does not match the records."""
    if not file.exists() or not made.exists():
        return
    with file.open("rb") as stored, made.open("rb") as expected:
        for number, (line, right) in enumerate(zip_longest(stored, expected), start=1):
            if line == right:
                continue
            what = "not what the records give"
            if right is None:
                what = "more than the records give"
            elif line is None:
                what = "missing from here on"
            yield _export_problem(file, number, f"{what}{_id_in(right or line)}")
            return


def _export_problem(file: Path, line: int | None, message: str) -> Problem:
    return Problem("derived", file, line, f"{message}; `export` writes it again")


def _id_in(line: bytes) -> str:
    try:
        return f" ({orjson.loads(line)['id']})"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
