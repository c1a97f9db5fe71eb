"""Check that the files of a run are whole and agree with each other; writes nothing.

Each problem names its file and its consequence; `upkeep` repairs what it can.

Index, summary and exports must match the records. Journals and workspaces must belong to
unfinished tasks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.parts import Advance, run_in_processes
from batch_trajectories.batch_api.verifying import check_batches
from batch_trajectories.config.fingerprint import digest_options
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.dataset.scan_cache import load_scan
from batch_trajectories.engine.run_dir import find_stale_files
from batch_trajectories.engine.run_totals import RunTotals, compute_totals
from batch_trajectories.engine.supervisor.budget import is_budget_line
from batch_trajectories.maintenance.verify_exports import check_exports
from batch_trajectories.records.failures import NO_LIMIT, Settled, is_failure
from batch_trajectories.records.files import DamagedLine, is_whole, list_directory, read_tail
from batch_trajectories.records.index import (
    LENGTHS,
    MARK,
    OFFSETS,
    ROW_BYTES,
    Index,
    IndexEntry,
    IndexFields,
    RowMaker,
    checked_bytes,
    column_view,
    index_fields,
    is_earlier_index,
    is_index,
)
from batch_trajectories.records.journal import key_and_order, segments
from batch_trajectories.records.names import (
    BATCHES_FILE,
    BUDGET_FILE,
    CONTROL_FILE,
    DATASET_INDEX,
    FAILURES_FILE,
    INFLIGHT,
    JUDGE_BUDGET_FILE,
    LABELS_FILE,
    RECORDS_FILE,
    RECORDS_INDEX,
    RUN_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    TEACHER_BUDGET_FILE,
    TEACHER_FILE,
    VERDICTS_FILE,
    WORKSPACES,
)
from batch_trajectories.records.problem import Problem
from batch_trajectories.records.record_types import Record, decode_record
from batch_trajectories.records.records import read_id, read_lines, track_lines
from batch_trajectories.records.tasks import SCHEMA_VERSION

_CHECK_KEYS = ("checks", "completed_passed", "completed_not_passed", "prompts_passed")
"""Keys of summary.json that versions without `checks.scored` counted in another way."""

_ATTEMPT_KEYS = ("turns", "tokens_unknown", "cost_usd", "cost_unknown")
"""Keys that versions without `reasons` counted without failed attempts that have no record."""

_ENOUGH_BYTES = 40 << 20
"""A process with less of the records takes as long to start as it saves."""

_READ_AHEAD = 1 << 20

T = TypeVar("T")


@dataclass(slots=True)
class Report:
    """The result of `verify`."""

    problems: list[Problem] = field(default_factory=list)
    records: int = 0
    """Number of readable records, including those that later ones replace."""
    duplicates: list[int] = field(default_factory=list)
    """Offsets of records that a later record of the same task contradicts."""
    may_owe: bool = True
    """Whether the same command may have tasks to run."""


def verify(
    path: Path, identity: dict[str, Any], scan: Scan | str, config: RunConfig, *, made: Path | None
) -> Report:
    """Check the run in directory `path`.

    `identity` is its run.json. If the dataset cannot be read, `scan` is the reason, and summary and
    exports are not checked. `made` is a run directory with exports that were just made from the
    same records; None skips the comparison of contents.
    """
    report = Report()
    report.problems += _check_identity(path, identity)

    def count(index: Index) -> RunTotals | None:
        return None if isinstance(scan, str) else compute_totals(path, scan, config, index=index)

    entries, totals = _check_records(path, report, count)
    report.problems += _check_logs(path)
    settled = Settled(entries, config.max_attempts)
    report.problems += _check_journals(path, settled)
    report.problems += _check_leftovers(path, settled)
    report.problems += check_batches(path, settled=settled, ended=Settled(entries, NO_LIMIT))
    steps = path / BATCHES_FILE
    report.problems += _check_tail(steps, sum(1 for _ in read_lines(steps, 0)))
    if isinstance(scan, str) or totals is None:
        message = f"its tasks are unknown, so summary and exports cannot be checked: {scan}"
        report.problems.append(Problem("contradiction", path / RUN_FILE, None, message))
        return report
    report.problems += _check_cached_scan(path / DATASET_INDEX, scan)
    report.may_owe = bool(totals.pending or totals.to_retry)
    report.problems += _check_summary(path, totals)
    report.problems += check_exports(path, totals, made)
    return report


def _check_identity(path: Path, identity: dict[str, Any]) -> Iterator[Problem]:
    if identity["digest"] != digest_options(identity["meaning"]):
        message = "`digest` does not match `meaning`: one of the two was edited"
        yield Problem("contradiction", path / RUN_FILE, None, message)


def _check_records(path: Path, report: Report, count: Callable[[Index], T]) -> tuple[Index, T]:
    """The index of the records, and the result of `count` for it.

    Adds problems of records to `report`.
    """
    records = path / RECORDS_FILE
    try:
        rows = (path / RECORDS_INDEX).read_bytes()
    except FileNotFoundError:
        rows = b""
    if _reaches_end(rows, records):
        index = Index(rows)
        # Counted while other processes read the records, or else when it is first needed.
        count_once = cache(lambda: (count(index), [*index.repeated()]))
        if _matches_records(rows, records, meanwhile=count_once):
            report.records = index.written()
            counted, repeated = count_once()
            if repeated:
                _check_repeated(records, index, repeated, lines=_row_lines(rows), report=report)
            return index, counted
    rebuilt = _find_problems(path, rows, report)
    return rebuilt, count(rebuilt)


def _reaches_end(rows: bytes, records: Path) -> bool:
    """Whether these are whole rows of an index that reaches the end of the records."""
    if not is_index(rows) or checked_bytes(rows) != len(rows) or len(rows) % ROW_BYTES:
        return False
    view = memoryview(rows)
    offsets, lengths = column_view(view, OFFSETS), column_view(view, LENGTHS)
    return len(lengths) > 1 and offsets[-1] + lengths[-1] == records.stat().st_size


def _matches_records(rows: bytes, records: Path, *, meanwhile: Callable[[], object]) -> bool:
    """Whether each record is whole, and its row in the index is right.

    The index must reach the end of the records. Large files are read by several processes; this
    one then calls `meanwhile`.
    """
    view = memoryview(rows)
    offsets, lengths = column_view(view, OFFSETS), column_view(view, LENGTHS)

    def first(row: int) -> int:
        """The row of the ending that precedes a row, if there is one."""
        return row - (row > 1 and not lengths[row - 1])

    def are_right(part: Sequence[int], advance: Advance) -> bool:
        begin, end = (ROW_BYTES * first(row) for row in (part[0], part[-1] + 1))
        maker = RowMaker(rows[:begin])
        offset = offsets[begin // ROW_BYTES]
        with records.open("rb", buffering=_READ_AHEAD) as file:
            file.seek(offset)
            while begin < end:
                line = file.readline()
                try:
                    fields, problems = _record_facts(decode_record(line))
                    made = maker.rows(fields, offset, len(line))
                except ValueError:  # damage, or a number that no index can hold
                    return False
                if problems or not rows.startswith(made, begin):
                    return False
                begin += len(made)
                offset += len(line)
                advance(1)
        return True

    numbers = range(1, len(lengths))
    work = f"reading {records.name}"
    size = records.stat().st_size
    parts = run_in_processes(
        numbers, are_right, doing=work, enough=_ENOUGH_BYTES, amount=size, meanwhile=meanwhile
    )
    return all(parts)


def _row_lines(rows: bytes) -> list[int]:
    """The line of the record in each row of an index."""
    lengths = column_view(memoryview(rows), LENGTHS)
    # Row 0 has a length, but no record; rows of endings have no length.
    return [number - 1 for number in accumulate(map(bool, lengths))]


def _find_problems(path: Path, stored: bytes, report: Report) -> Index:
    """Find the problems of records and index line by line; return the right index."""
    records = path / RECORDS_FILE
    index = _IndexComparison(path / RECORDS_INDEX, stored)
    maker = RowMaker()
    rows = bytearray(MARK)
    lines = array("I", [0])
    number = 0
    for number, (offset, line) in enumerate(track_lines(records), start=1):
        facts = own_rows = None
        with suppress(DamagedLine):
            facts = _record_facts(decode_record(line))
        if facts is not None:
            with suppress(ValueError):  # a number that no index can hold
                own_rows = maker.rows(facts.fields, offset, len(line))
        index.compare(number, own_rows)
        if facts is None or own_rows is None:
            report.problems.append(Problem("unreadable", records, number, _describe_loss(line)))
            continue
        rows += own_rows
        lines.extend([number] * (len(own_rows) // ROW_BYTES))
        report.records += 1
        for message in facts.problems:
            report.problems.append(Problem("contradiction", records, number, message))
    report.problems += _check_tail(records, number)
    index.end(number)
    report.problems += index.problems
    rebuilt = Index(bytes(rows))
    _check_repeated(records, rebuilt, rebuilt.repeated(), lines=lines, report=report)
    return rebuilt


def _check_repeated(
    records: Path,
    index: Index,
    repeated: Iterable[tuple[int, int]],
    *,
    lines: Sequence[int],
    report: Report,
) -> None:
    """Report records that a later one of the same task contradicts.

    `lines` has the line of the record in each row.
    """
    for first, second in repeated:
        before = index.entry(first)
        if before.status == "failed" and before.attempt < index.entry(second).attempt:
            continue  # it was tried again
        message = (
            f"a second record of {_read_id(records, before)}, the first is in line {lines[first]}; "
            "the later one counts"
        )
        report.problems.append(Problem("contradiction", records, lines[second], message))
        report.duplicates.append(before.offset)


class _Facts(NamedTuple):
    """The result of checking a whole record."""

    fields: IndexFields
    """The facts for the row of the record in the index."""
    problems: Sequence[str]


def _record_facts(record: Record) -> _Facts:
    problems = []
    if (schema := record.schema_version) != SCHEMA_VERSION:
        problems.append(
            f"{record.id}: it has schema {schema}, not "
            f"{SCHEMA_VERSION}; use the version that wrote it"
        )
    if [turn.turn for turn in record.turns] != [*range(1, len(record.turns) + 1)]:
        problems.append(f"{record.id}: its turns are not numbered 1, 2, 3 …; turns are missing")
    return _Facts(index_fields(record), problems)


def _describe_loss(line: bytes) -> str:
    """The message for a line that is not a record."""
    details = [f"id {named!r}"] if (named := read_id(line)) else []
    try:
        decode_record(line)
    except DamagedLine as error:
        details.append(str(error))
    why = f" ({'; '.join(details)})" if details else ""
    return f"not a complete record{why}: it is lost and its task will run again"


def _read_id(records: Path, entry: IndexEntry) -> str:
    with records.open("rb") as file:
        file.seek(entry.offset)
        return str(exact_json.loads(file.read(entry.length))["id"])


def _check_tail(file: Path, lines: int) -> Iterator[Problem]:
    """Report a last line without a newline, which was cut off while it was written."""
    if tail := read_tail(file):
        message = "an incomplete line, cut off while it was written; it was never used"
        if is_whole(tail):
            message = "a complete line without its newline, which the next start adds; it counts"
        yield Problem("unreadable", file, lines + 1, message)


def _check_lines(
    file: Path, is_readable: Callable[[bytes], bool], message: str
) -> Iterator[Problem]:
    number = 0
    for number, (_, line) in enumerate(read_lines(file, 0), start=1):
        if not is_readable(line):
            yield Problem("unreadable", file, number, message)
    yield from _check_tail(file, number)


class _IndexComparison:
    """Compares the index with the records."""

    def __init__(self, path: Path, rows: bytes) -> None:
        """`rows` are the content of the index."""
        self._path = path
        self._rows = rows
        self._compared = len(MARK)
        self.problems: list[Problem] = []
        """At most one: after a wrong row, all following rows are wrong."""
        self._is_earlier = is_earlier_index(self._rows)
        if self._is_earlier:
            return  # no problem: the next start makes it again
        if self._rows and not is_index(self._rows):
            self._add_problem(None, "not an index; it will be made again")
        elif self._rows and not checked_bytes(self._rows):
            self._add_problem(None, "checksum mismatch; it will be made again")

    def compare(self, number: int, rows: bytes | None) -> None:
        """Compare the index with the `rows` of record `number`, None if it is unreadable."""
        if self.problems or self._is_earlier:
            return
        start, self._compared = self._compared, self._compared + len(rows or b"")
        if start >= len(self._rows):
            self._add_problem(number, f"ends before record {number}; the next start completes it")
        elif self._rows[start : self._compared] != rows:
            message = f"does not match line {number} of records.jsonl; it will be made again"
            self._add_problem(number, message)

    def end(self, records: int) -> None:
        """Check that no row follows that of the last of `records` records."""
        if not (self.problems or self._is_earlier) and len(self._rows) > self._compared:
            self._add_problem(
                records + 1, "continues after the last record; the next start cuts it"
            )

    def _add_problem(self, number: int | None, message: str) -> None:
        self.problems.append(Problem("derived", self._path, number, message))


def _check_logs(path: Path) -> Iterator[Problem]:
    """Check the JSONL files that are not checked elsewhere."""
    for name, is_readable, message in (
        (FAILURES_FILE, is_failure, "not a failure; it does not count as an attempt"),
        (BUDGET_FILE, is_budget_line, "not a line of the budget log; it does not count"),
        (JUDGE_BUDGET_FILE, is_budget_line, "not a line of the budget log; it does not count"),
        (TEACHER_BUDGET_FILE, is_budget_line, "not a line of the budget log; it does not count"),
        (TEACHER_FILE, is_whole, "not a line of figures; `score --teacher` can get them again"),
        (SCORES_FILE, is_whole, "not a score; `score` can give it again"),
        (LABELS_FILE, is_whole, "not a label; its reviewer can give it again"),
        (CONTROL_FILE, is_whole, "not a request; it is not read"),
        (VERDICTS_FILE, is_whole, "not a verdict; its question is asked again"),
    ):
        yield from _check_lines(path / name, is_readable, message)


def _check_journals(path: Path, settled: Settled) -> Iterator[Problem]:
    for segment in sorted(segments(path / INFLIGHT)):
        number = 0
        open_tasks = set()
        for number, (_, line) in enumerate(read_lines(segment, 0), start=1):
            key, _, _ = key_and_order(line)
            if key is None:
                message = "not an event; its conversation continues from before it"
                yield Problem("unreadable", segment, number, message)
            elif key not in settled:
                open_tasks.add(key)
        yield from _check_tail(segment, number)
        if not open_tasks:
            message = "no unfinished conversation in it; the next start removes it"
            yield Problem("leftover", segment, None, message)


def _check_leftovers(path: Path, settled: Settled) -> Iterator[Problem]:
    for file in find_stale_files(path):
        message = "an incomplete file, left by a crash; the next start removes it"
        yield Problem("leftover", file, None, message)
    workspaces = path / WORKSPACES
    for workspace in list_directory(workspaces):
        try:
            key = bytes.fromhex(workspace.name.partition(".")[0])  # also files beside a workspace
        except ValueError:
            continue  # not a workspace
        if key in settled:
            message = "the files of a finished conversation; the next start removes them"
            yield Problem("leftover", workspace, None, message)


def _check_cached_scan(cache: Path, scan: Scan) -> Iterator[Problem]:
    """Report a cached scan that the next start would use though it does not match the dataset."""
    if load_scan(cache, scan.path, **scan.options) not in (None, scan):
        yield Problem("derived", cache, None, "does not match the dataset; it will be made again")


def _check_summary(path: Path, totals: RunTotals) -> Iterator[Problem]:
    summary = path / SUMMARY_FILE
    try:
        content = orjson.loads(summary.read_bytes())
        wrong = [
            f"{key} {content.get(key)!r}, the records give {value!r}"
            for key, value in orjson.loads(orjson.dumps(totals.to_json())).items()
            if content.get(key, value) != value  # older versions wrote fewer keys
            and not (key in _CHECK_KEYS and "scored" not in content.get("checks", {}))
            and not (key in _ATTEMPT_KEYS and totals.to_retry and "reasons" not in content)
        ]
    except FileNotFoundError:
        if totals.done or totals.failed:
            yield Problem("derived", summary, None, "missing; it will be made from the records")
        return
    except (orjson.JSONDecodeError, AttributeError):
        yield Problem("derived", summary, None, "unreadable; it will be made from the records")
        return
    if wrong:
        yield Problem("derived", summary, None, f"it has {'; '.join(wrong)}")
