"""Scores and labels that were given after the run: `scores.jsonl` and `labels.jsonl`.

Scores come from functions, judges and checks. The file only grows, and a crash can leave at most
an incomplete last line, which is ignored. Each line has the keys of a
score (see `records.checks`), and `record` (see `score_key`), `id` and `at`; those of a judge
also `question`, `reply`, `model`, `usage` and `cost_usd`; those of `check` (`CHECK`) also `check`,
its result, `image`, and the keys that `apply_later_checks` reads. If one source has scored a record
several times, the last score counts.

Labels are what people decided. Their file only grows, too. A line has `record`, `id`, `at`, `who`,
and what this reviewer decides or takes back (null) about the record:

    verdict  "keep", "reject" or "fix"
    no_loss  numbers of turns that carry no loss
    note     a text
    over     the samples of its prompt that it is preferred to: their records by id

For each of these the last line of a reviewer that has it counts, so that an undo is a later line.

Records themselves never change: readers add scores and labels to the records that they read.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.records.checks import CHECK_FAILED, judge_record
from batch_trajectories.records.files import append_line, read_object, repair_command
from batch_trajectories.records.index import ROW_BYTES, Index, IndexEntry, IndexFields, RowMaker
from batch_trajectories.records.names import LABELS_FILE, RECORDS_FILE, SCORES_FILE
from batch_trajectories.records.record_types import CheckResult, Label, Record, Score
from batch_trajectories.records.records import read_lines

LABELS = LABELS_FILE

CHECK = "check"
"""The source of the verdicts that the command `check` gives."""

_MARK = b'"source":"%s"' % CHECK.encode()
_FINISHED = re.compile(rb'"finished_at":([0-9.e+-]+),"schema_version"')
_TAIL_BYTES = 256
_KEY_BYTES = 16

DISPUTED = "disputed"
"""The verdict of reviewers who disagree."""
_NOTE_CHARS = 10_000


def score_key(record: Record) -> str:
    """Identifies a record by its task and the time it finished, as a task can be run again."""
    text = f"{record.input_digest} {record.id} {record.finished_at}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Scores:
    """The scores and labels on disk. Of scores, only the offsets are in memory."""

    def __init__(self, run_dir: Path, *, only: str | None = None) -> None:
        """Find all scores and read the labels; with `only`, find only the scores of this source.

        Ignores an incomplete last line. Raises `RunDirError`.
        """
        self._path = run_dir / SCORES_FILE
        self._by_source: dict[str, dict[bytes, int]] = {}
        for offset, line in read_scores(self._path):
            if only not in (None, line["source"]):
                continue
            places = self._by_source.setdefault(line["source"], {})
            places[bytes.fromhex(line["record"])] = offset
        has_labels = only is None and (run_dir / LABELS).exists()
        self._labels = Labels(run_dir) if has_labels else None

    def extend_record(self, record: Record) -> Record:
        """The record with these scores after its own, and with its labels.

        The same object if nothing was given for it.
        """
        if not self._by_source and self._labels is None:
            return record
        if self._labels is not None and (labels := self._labels.get(score_key(record))):
            record = msgspec.structs.replace(record, labels=labels)
        return add_stored_scores(self._path, record, self.find_offsets(record))

    def find_offsets(self, record: Record) -> list[int]:
        """The offsets in scores.jsonl of the scores that count for a record."""
        if not self._by_source:
            return []
        key = bytes.fromhex(score_key(record))
        return [offsets[key] for offsets in self._by_source.values() if key in offsets]


def add_stored_scores(path: Path, record: Record, places: Sequence[int]) -> Record:
    """The record with the scores at these offsets of a scores.jsonl after its own."""
    if not places:
        return record
    with path.open("rb") as file:
        added = [_read_score(file, place) for place in places]
    sources = {score.source for score in added}
    kept_scores = [score for score in record.scores or () if score.source not in sources]
    check = record.check
    for score in added:
        if score.check is not None:
            check = msgspec.convert(score.check, CheckResult)
    return msgspec.structs.replace(record, scores=[*kept_scores, *added], check=check)


def read_scores(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each whole line with its offset. Raises `RunDirError` for a line that is no score."""
    for number, (offset, content) in enumerate(read_lines(path, 0), start=1):
        try:
            line = read_object(content)
            msgspec.convert(line, Score)
            bytes.fromhex(line["record"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(
                f"{path}:{number}: not a score ({error}); {repair_command(path)} sets it aside, "
                "and its record can be scored again"
            ) from error
        yield offset, line


def _read_score(file: BinaryIO, offset: int) -> Score:
    file.seek(offset)
    return msgspec.convert(read_object(file.readline()), Score)


def later_check_keys(record: Record, result: CheckResult) -> dict[str, Any]:
    """The keys of a score by `check` that `apply_later_checks` reads; `result` is the check's.

    The record must be as it was stored, without scores that were given later.
    """
    judgement = judge_record(msgspec.structs.replace(record, check=result))
    failed = judgement.error is not None
    return {
        "finished_at": record.finished_at,
        "judged": [judgement.verdict, judgement.reward, CHECK_FAILED if failed else None],
    }


def apply_later_checks(run_dir: Path, index: Index) -> Index:
    """The index with the last result of `check` for each record that has one."""
    checks = {}
    for _, line in read_lines(run_dir / SCORES_FILE, 0):
        if _MARK in line:
            try:
                score = read_object(line)
                verdict, reward, error_class = score["judged"]
                checks[bytes.fromhex(score["task"])] = _LaterCheck(
                    finished_at=float(score["finished_at"]),
                    verdict=verdict,
                    reward=reward,
                    error_class=error_class,
                )
            except (ValueError, KeyError, TypeError):
                continue  # damaged; readers of the scores themselves say so
    return _apply_checks(run_dir, index, checks) if checks else index


class _LaterCheck(NamedTuple):
    """The result of `check` for a task whose record was finished at `finished_at`."""

    finished_at: float
    verdict: bool | None
    reward: float | None
    error_class: str | None


def _apply_checks(run_dir: Path, index: Index, checks: Mapping[bytes, _LaterCheck]) -> Index:
    """The index with the results of these checks, by task key."""
    rows, added = bytearray(index.rows), bytearray()
    maker = RowMaker(index.rows)
    numbers, _ = index.match(b"".join(checks))
    with (run_dir / RECORDS_FILE).open("rb") as records:
        for check, number in zip(checks.values(), numbers, strict=True):
            if not number:
                continue
            entry = index.entry(number)
            if entry.status == "failed" or _finished_at(records, entry) != check.finished_at:
                continue  # the task was run again since
            made = maker.rows(_rechecked_fields(entry, check), entry.offset, entry.length)
            # All of the new row but the task key, which the fields lack.
            end = ROW_BYTES * (number + 1)
            rows[end - ROW_BYTES + _KEY_BYTES : end] = made[_KEY_BYTES - ROW_BYTES :]
            added += made[:-ROW_BYTES]
    return Index(bytes(rows + added))


def _finished_at(records: BinaryIO, entry: IndexEntry) -> float | None:
    """The time at which a record was finished, from its last bytes; None if they lack it."""
    size = min(_TAIL_BYTES, entry.length)
    tail = os.pread(records.fileno(), size, entry.offset + entry.length - size)
    finished = _FINISHED.search(tail)
    return None if finished is None else float(finished[1])


def _rechecked_fields(entry: IndexEntry, check: _LaterCheck) -> IndexFields:
    """The facts of a record after a later check; id and digest are not known here."""
    return IndexFields(
        id="",
        input_digest="",
        status=entry.status,
        attempt=entry.attempt,
        turns=entry.turns,
        tool_calls=entry.tool_calls,
        input_tokens=entry.input_tokens,
        output_tokens=entry.output_tokens,
        cost_usd=entry.cost_usd,
        error_class=check.error_class,
        verdict=check.verdict,
        reward=check.reward,
    )


class LabelChange(msgspec.Struct, forbid_unknown_fields=True):
    """One line's decisions about a record; unset fields keep their value."""

    verdict: Literal["keep", "reject", "fix"] | msgspec.UnsetType | None = msgspec.UNSET
    no_loss: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    note: str | msgspec.UnsetType | None = msgspec.UNSET
    over: dict[str, str] | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        if isinstance(self.no_loss, list) and min(self.no_loss, default=1) < 1:
            raise ValueError("`no_loss`: turns are numbered from 1")
        if isinstance(self.note, str) and len(self.note) > _NOTE_CHARS:
            raise ValueError(f"`note`: has more than {_NOTE_CHARS:,} characters")


def label_change(value: Any) -> LabelChange:
    """Check what a person decided. Raises `ValueError`, which names the field."""
    change = msgspec.convert(value, LabelChange)
    if isinstance(change.no_loss, list):
        change.no_loss = sorted(set(change.no_loss))
    if not msgspec.to_builtins(change):
        raise ValueError("decides nothing; give verdict, no_loss, note or over")
    return change


def append_label(
    run_dir: Path, record: str, id: str, who: str, change: LabelChange
) -> dict[str, Any]:
    """Append a decision about the record with this `score_key`; returns the line.

    Raises `OSError` and `StorageError`.
    """
    about = {"record": record, "id": id, "who": who, "at": time.time()}
    line = {**about, **msgspec.to_builtins(change)}
    append_line(run_dir / LABELS, line)
    return line


class Labels:
    """The labels on disk, merged. All are in memory: people decide about thousands of records."""

    def __init__(self, run_dir: Path) -> None:
        """Read them. Raises `RunDirError`."""
        self._path = run_dir / LABELS
        self._read = 0
        self._number = 0
        self._by_record: dict[str, dict[str, Label]] = {}
        self._ids: dict[str, str] = {}
        self.read_new_lines()

    def read_new_lines(self) -> None:
        """Read the lines that were added since the last call. Raises `RunDirError`."""
        for offset, content in read_lines(self._path, self._read):
            self._number += 1
            line = _parse_label(content, f"{self._path}:{self._number}")
            by_reviewer = self._by_record.setdefault(line["record"], {})
            decisions = {key: line[key] for key in LabelChange.__struct_fields__ if key in line}
            who = line["who"]
            before = by_reviewer.get(who, Label(who=who))
            by_reviewer[who] = msgspec.structs.replace(before, at=line["at"], **decisions)
            self._ids[line["id"]] = line["record"]
            self._read = offset + len(content)

    def get(self, record: str) -> list[Label]:
        """The labels of the record with this `score_key`, one per reviewer."""
        return list(self._by_record.get(record, {}).values())

    def by_record(self) -> Iterator[tuple[str, list[Label]]]:
        """Yield the `score_key` of each record that has labels, with these labels.

        Other threads may call `read_new_lines` meanwhile.
        """
        for record, labels in list(self._by_record.items()):
            yield record, list(labels.values())

    def verdicts(self) -> Iterator[tuple[str, str]]:
        """Yield the id of each record that has a verdict, and the verdict; see `agreed_verdict`."""
        for id, record in list(self._ids.items()):
            if (verdict := agreed_verdict(self.get(record))) is not None:
                yield id, verdict


def agreed_verdict(labels: Sequence[Label]) -> str | None:
    """The verdict on which the reviewers agree, else `disputed`; None if nobody gave one."""
    verdicts = {label.verdict for label in labels if label.verdict is not None}
    return DISPUTED if len(verdicts) > 1 else next(iter(verdicts), None)


def marked_turns(record: Record) -> list[int]:
    """The turns that a reviewer marked to carry no loss."""
    return sorted({turn for label in record.labels for turn in label.no_loss or ()})


def _parse_label(content: bytes, place: str) -> dict[str, Any]:
    try:
        line = read_object(content)
        decisions = {key: line[key] for key in LabelChange.__struct_fields__ if key in line}
        msgspec.convert(decisions, LabelChange)
        if not all(isinstance(line[key], str) for key in ("record", "id", "who")):
            raise TypeError("`record`, `id` and `who` must be texts")
        float(line["at"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError(
            f"{place}: not a label ({error}); {repair_command(place)} sets it aside"
        ) from error
    return line
