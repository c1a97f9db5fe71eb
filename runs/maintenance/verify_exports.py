"""Whether the training files of a run are what its records give."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from runs.maintenance.problem import Problem
from runs.totals.run_totals import RunTotals


class _Said(NamedTuple):
    """What the manifest says of a file."""

    path: str
    holds: str
    bytes: int
    sha256: str


def check_exports(path: Path, totals: RunTotals, made: Path | None) -> Iterator[Problem]:
    """Check the manifest against the totals, and each file against the manifest.

    `made` is a run directory whose exports were just made from the same records; each file must
    be equal to its twin there. None leaves the contents alone.
    """
    manifest_path = path / "exports" / "manifest.json"
    try:
        manifest = orjson.loads(manifest_path.read_bytes())
        files = {
            _place(path, said["path"]): _Said(*itemgetter(*_Said._fields)(said))
            for said in manifest["files"]
        }
    except FileNotFoundError:
        if totals.done or totals.failed:
            yield _wrong(manifest_path, None, "missing")
        return
    except (orjson.JSONDecodeError, KeyError, TypeError):
        yield _wrong(manifest_path, None, "unreadable")
        return
    yield from _check_counts(manifest_path, manifest, totals)
    for file, said in files.items():
        yield from _check_file(file, said, contents=made is not None)
    if made is not None:
        twins = orjson.loads((made / "exports" / "manifest.json").read_bytes())["files"]
        places = {twin["holds"]: _place(made, twin["path"]) for twin in twins}
        for file, said in files.items():
            if said.holds in places:
                yield from _compare(file, places[said.holds])
            else:
                message = f"{said.path}: no run has a file of {said.holds!r}"
                yield _wrong(manifest_path, None, message)


def _place(path: Path, relative: str) -> Path:
    """Where a file of the run in `path` lies: in it, if the run was moved aside, with its files."""
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
            yield _wrong(path, None, message)
    written = sum(manifest.get(key, 0) for key in ("exported", "partial", "rejected"))
    if written != with_record:
        message = f"its files hold {written} tasks, {with_record} have a record"
        yield _wrong(path, None, message)


def _check_file(file: Path, said: _Said, *, contents: bool) -> Iterator[Problem]:
    try:
        size = file.stat().st_size
        if size != said.bytes:
            yield _wrong(file, None, f"{size} bytes, the manifest says {said.bytes}")
        elif contents:
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != said.sha256:
                    yield _wrong(file, None, "not the bytes that the manifest names")
    except FileNotFoundError:
        yield _wrong(file, None, "missing")


def _compare(file: Path, twin: Path) -> Iterator[Problem]:
    """Name the first line that is not what the records give."""
    if not file.exists() or not twin.exists():
        return
    with file.open("rb") as ours, twin.open("rb") as theirs:
        for number, (line, right) in enumerate(zip_longest(ours, theirs), start=1):
            if line == right:
                continue
            what = "it goes on after" if right is None else "not what the records give"
            if line is None:
                what = "it ends before"
            yield _wrong(file, number, f"{what}{_id_in(right or line)}")
            return


def _wrong(file: Path, line: int | None, message: str) -> Problem:
    return Problem("derived", file, line, f"{message}; `export` writes it again")


def _id_in(line: bytes) -> str:
    try:
        return f" ({orjson.loads(line)['id']})"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
