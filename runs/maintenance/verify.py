"""Whether what lies in a run directory is whole, and whether its files agree with each other.

Reads only. Each problem is one line that names its file and says what it means;
`runs.maintenance.repair` mends what can be mended.

The records are the truth: the index, the summary and the exports are checked against them, and
the journals, workspaces and failures against what is settled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from runs.config.fingerprint import digest_of
from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan
from runs.dataset.scan_cache import NAME, load_scan
from runs.maintenance.problem import Problem
from runs.maintenance.verify_batches import check_batches
from runs.maintenance.verify_exports import check_exports
from runs.run_dir import stale_files_of
from runs.store.checksum import DamagedLine, is_whole, read_object
from runs.store.failures import is_failure
from runs.store.files import listed, tail_of
from runs.store.index import (
    MARK,
    ROW_BYTES,
    Index,
    IndexEntry,
    RowMaker,
    checked_bytes,
    index_fields,
    is_index,
)
from runs.store.journal import key_and_order, segments
from runs.store.records import id_in, lines_from, parse_record
from runs.store.settled import NO_LIMIT, Settled
from runs.supervisor.budget import is_loan
from runs.tasks import SCHEMA_VERSION
from runs.totals.run_totals import RunTotals, compute_totals
from toolsets import exact_json


@dataclass(slots=True)
class Report:
    """What a look at a run found."""

    problems: list[Problem] = field(default_factory=list)
    records: int = 0
    """Readable records, those included that a later one of their task stands for."""
    duplicates: list[int] = field(default_factory=list)
    """Offsets of the records that a later one of their task contradicts."""


def verify(
    path: Path, identity: dict[str, Any], scan: Scan | str, config: RunConfig, *, made: Path | None
) -> Report:
    """Check the run in directory `path`.

    `identity` is its run.json. `scan` says why where the dataset cannot be read; sums and exports
    are then not checked. `made` is a run directory whose exports were just made from the same
    records, or None not to compare contents.
    """
    report = Report()
    report.problems += _check_identity(path, identity)
    entries = _check_records(path, report)
    report.problems += _check_logs(path)
    settled = Settled(entries, config.max_attempts)
    report.problems += _check_journals(path, settled)
    report.problems += _check_leftovers(path, settled)
    report.problems += check_batches(path, settled=settled, ended=Settled(entries, NO_LIMIT))
    ledger = path / "batches.jsonl"
    report.problems += _check_tail(ledger, sum(1 for _ in lines_from(ledger, 0)))
    if isinstance(scan, str):
        message = f"its tasks cannot be told, nor sums and exports checked: {scan}"
        report.problems.append(Problem("contradiction", path / "run.json", None, message))
        return report
    report.problems += _check_kept_scan(path / NAME, scan)
    totals = compute_totals(path, scan, config, index=entries)
    report.problems += _check_sums(path, totals)
    report.problems += check_exports(path, totals, made)
    return report


def _check_identity(path: Path, identity: dict[str, Any]) -> Iterator[Problem]:
    if identity["digest"] != digest_of(identity["meaning"]):
        message = "the digest is not that of `meaning`: one of the two was edited"
        yield Problem("contradiction", path / "run.json", None, message)


def _check_records(path: Path, report: Report) -> Index:
    """The records that count, by task; adds to `report` what is wrong with any."""
    records = path / "records.jsonl"
    index = _Index(path / "records.idx")
    maker = RowMaker()
    rows = bytearray(MARK)
    lines = array("I", [0])
    number = 0
    for number, (offset, line) in enumerate(lines_from(records, 0), start=1):
        record = parse_record(line)
        right = None if record is None else maker.rows(index_fields(record), offset, len(line))
        index.compare(number, right)
        if record is None or right is None:
            report.problems.append(Problem("unreadable", records, number, _what_is_lost(line)))
            continue
        rows += right
        lines.extend([number] * (len(right) // ROW_BYTES))
        report.records += 1
        if record.get("schema_version") != SCHEMA_VERSION:
            message = (
                f"{record['id']}: of schema {record.get('schema_version')}, ours is "
                f"{SCHEMA_VERSION}; use the version of the program that wrote it"
            )
            report.problems.append(Problem("contradiction", records, number, message))
        if [turn.get("turn") for turn in record["turns"]] != [*range(1, len(record["turns"]) + 1)]:
            message = f"{record['id']}: its turns are not numbered 1, 2, 3 …; turns are missing"
            report.problems.append(Problem("contradiction", records, number, message))
    report.problems += _check_tail(records, number)
    index.end(number)
    report.problems += index.problems
    found = Index(bytes(rows))
    for first, second in found.repeated():
        before = found.entry(first)
        if before.status == "failed" and before.attempt < found.entry(second).attempt:
            continue  # it was tried again
        message = (
            f"a second record of {_id_of(records, before)}, the first is in line {lines[first]}; "
            "the later one counts"
        )
        report.problems.append(Problem("contradiction", records, lines[second], message))
        report.duplicates.append(before.offset)
    return found


def _what_is_lost(line: bytes) -> str:
    """What to say of a line that holds no record."""
    words = [f"id {named!r}"] if (named := id_in(line)) else []
    try:
        read_object(line)
    except DamagedLine as error:
        words.append(str(error))
    why = f" ({'; '.join(words)})" if words else ""
    return f"not a whole record{why}: what it held is lost and its task will run again"


def _id_of(records: Path, entry: IndexEntry) -> str:
    with records.open("rb") as file:
        file.seek(entry.offset)
        return str(exact_json.loads(file.read(entry.length))["id"])


def _check_tail(file: Path, lines: int) -> Iterator[Problem]:
    """What stands after the last newline was cut off while it was written."""
    if tail := tail_of(file):
        message = "a line that was cut off while it was written; nothing was done with it"
        if is_whole(tail):
            message = "a whole line without its newline; the next start adds it, and it counts"
        yield Problem("unreadable", file, lines + 1, message)


def _check_lines(
    file: Path, is_readable: Callable[[bytes], bool], message: str
) -> Iterator[Problem]:
    number = 0
    for number, (_, line) in enumerate(lines_from(file, 0), start=1):
        if not is_readable(line):
            yield Problem("unreadable", file, number, message)
    yield from _check_tail(file, number)


class _Index:
    """The index beside the records: it must say of each record what the record says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = path.read_bytes() if path.exists() else b""
        self._compared = len(MARK)
        self.problems: list[Problem] = []
        """At most one: what is wrong in one row is wrong in all that follow."""
        if self._rows and not is_index(self._rows):
            self._wrong(None, "not an index of this version; it will be made anew")
        elif self._rows and not checked_bytes(self._rows):
            self._wrong(None, "its checksum does not fit; it will be made anew")

    def compare(self, number: int, right: bytes | None) -> None:
        """Look at record `number`; `right` is what it gives, None if it is unreadable."""
        if self.problems:
            return
        start, self._compared = self._compared, self._compared + len(right or b"")
        if start >= len(self._rows):
            self._wrong(number, f"it ends before record {number}; the next start completes it")
        elif self._rows[start : self._compared] != right:
            self._wrong(number, f"not what line {number} of records.jsonl says; to be made anew")

    def end(self, records: int) -> None:
        """Look at what stands after the row of the last of `records` records."""
        if not self.problems and len(self._rows) > self._compared:
            self._wrong(records + 1, "it goes on after the last record; the next start cuts it")

    def _wrong(self, number: int | None, message: str) -> None:
        self.problems.append(Problem("derived", self._path, number, message))


def _check_logs(path: Path) -> Iterator[Problem]:
    """The files of lines that are not checked elsewhere."""
    for name, is_readable, message in (
        ("failures.jsonl", is_failure, "not a failure; it counts as no attempt"),
        ("budget.jsonl", is_loan, "not a line of the budget; what it told does not count"),
        ("verdicts.jsonl", is_whole, "not a verdict; its question is asked again"),
    ):
        yield from _check_lines(path / name, is_readable, message)


def _check_journals(path: Path, settled: Settled) -> Iterator[Problem]:
    for segment in sorted(segments(path / "inflight")):
        number = 0
        open_tasks = set()
        for number, (_, line) in enumerate(lines_from(segment, 0), start=1):
            key, _, _ = key_and_order(line)
            if key is None:
                message = "not an event; the conversation that it belongs to goes on before it"
                yield Problem("unreadable", segment, number, message)
            elif key not in settled:
                open_tasks.add(key)
        yield from _check_tail(segment, number)
        if not open_tasks:
            message = "no unfinished conversation is in it; the next start removes it"
            yield Problem("leftover", segment, None, message)


def _check_leftovers(path: Path, settled: Settled) -> Iterator[Problem]:
    for file in stale_files_of(path):
        message = "a file that a crash left half written; the next start removes it"
        yield Problem("leftover", file, None, message)
    workspaces = path / "workspaces"
    for workspace in listed(workspaces):
        try:
            key = bytes.fromhex(workspace.name)
        except ValueError:
            continue  # not ours
        if key in settled:
            message = "the files of a finished conversation; the next start removes them"
            yield Problem("leftover", workspace, None, message)


def _check_kept_scan(kept: Path, scan: Scan) -> Iterator[Problem]:
    """What is kept for the next start, where that would use it, must be what the dataset gives."""
    found = load_scan(
        kept,
        scan.path,
        max_samples=scan.max_samples,
        rules=scan.rules,
        num_samples=scan.num_samples,
        shard=scan.shard,
    )
    if found not in (None, scan):
        yield Problem("derived", kept, None, "not what the dataset gives; it will be made anew")


def _check_sums(path: Path, totals: RunTotals) -> Iterator[Problem]:
    summary = path / "summary.json"
    try:
        said = orjson.loads(summary.read_bytes())
        wrong = [
            f"{key} {said.get(key)!r}, the records give {value!r}"
            for key, value in orjson.loads(orjson.dumps(totals.to_json())).items()
            if said.get(key, value) != value  # an older version wrote fewer
        ]
    except FileNotFoundError:
        if totals.done or totals.failed:
            yield Problem("derived", summary, None, "missing; it will be made from the records")
        return
    except (orjson.JSONDecodeError, AttributeError):
        yield Problem("derived", summary, None, "unreadable; it will be made from the records")
        return
    if wrong:
        yield Problem("derived", summary, None, f"it says {'; '.join(wrong)}")
