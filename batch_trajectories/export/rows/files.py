"""Writes the files of a format: JSON lines and their copies, by split and with counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import refuse_all_masked
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.turns import (
    Conversation,
    Entry,
    Turn,
    UserMessage,
    has_null_arguments,
    tool_names,
)
from batch_trajectories.export.conversation.validity import Reason, Rejected, Rejection
from batch_trajectories.export.masking import NOT_PASSED
from batch_trajectories.export.rows.format import Format, RowFormat
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import FileTarget, MakeWriter, RowLines, SplitFiles
from batch_trajectories.records.record_types import Record

# Splits that `datasets` refuses as JSON lines, because their messages get further keys late.
#
# `datasets` derives the columns from the beginning of a file. If all messages there have the same
# keys, they become structs, which cannot hold further keys; else they become JSON.

_READ_FIRST = 10 << 20
"""Bytes that `datasets` reads to derive the columns (`chunksize` of its JSON reader, 5.2)."""


@dataclass
class _Split:
    size: int = 0
    """Bytes of the rows so far."""
    keys: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    """The set of keys of messages by column, for columns whose messages all have the same keys."""
    is_late: bool = False


class LateKeys:
    """Finds the splits of one format that `datasets` refuses."""

    def __init__(self, columns: Mapping[str, str], *, shard_bytes: int | None) -> None:
        """`columns` are names and kinds; columns of the kind `messages` are watched."""
        self._columns = [name for name, kind in columns.items() if kind == "messages"]
        self._first = min(_READ_FIRST, shard_bytes or _READ_FIRST)
        self._splits: dict[str, _Split] = {}

    def add(self, split: str, line: bytes) -> None:
        """Count the next row of a split."""
        if (seen := self._splits.get(split)) is None:
            seen = self._splits[split] = _Split(keys={name: set() for name in self._columns})
        if seen.keys:
            row = orjson.loads(line)
            for name, keys in list(seen.keys.items()):
                keys.update(map(frozenset, row[name]))
                if len(keys) > 1:
                    seen.is_late |= seen.size >= self._first
                    del seen.keys[name]
        seen.size += len(line)

    def splits(self) -> list[str]:
        """The splits that are refused."""
        return sorted(split for split, seen in self._splits.items() if seen.is_late)


# Conversations cut into one per turn of the model, for templates that strip old reasoning.
#
# Such templates (Qwen3 and others) show only the reasoning since the last user message. In a row of
# the whole conversation, earlier turns would be learnt without their reasoning.


def cut_by_turn(conversation: Conversation, style: Style) -> Iterator[Conversation]:
    """Cut a conversation: for each turn with loss, yield the conversation up to this turn.

    The results of this last turn are left out. Turns before the last user message lose their
    reasoning. With the style `field` they keep it, and the template decides; with `last` all turns
    of the context lose it, with `none` all turns. The record's id gets the number of the turn:
    `#t3`, and `#t3.2` for the second part of a turn whose calls are split. In the context, replies
    have no newlines around their text if the model saw them so.
    """
    whole = apply_style(conversation, style.with_reasoning(None))
    seen = _trim_newlines if conversation.record.view_trimmed else _keep_entry
    replies = conversation.replies_by_turn
    entries = list(whole.entries)
    last_user = 0
    before, part = 0, 1
    for index, entry in enumerate(entries):
        if isinstance(entry, UserMessage):
            if style.reasoning != "field":
                entries[last_user:index] = map(_remove_reasoning, entries[last_user:index])
            last_user = index
            continue
        part = part + 1 if entry.number == before else 1
        before = entry.number
        if not entry.has_loss:
            continue
        name = f"{entry.number}.{part}" if part > 1 else f"{entry.number}"
        metadata: dict[str, Any] = {**whole.metadata, "turn": entry.number}
        if made := replies.get(entry.number):
            metadata["finish_reason"] = made[-1].finish_reason
        cut = msgspec.structs.replace(
            whole,
            entries=[*map(seen, entries[:index]), msgspec.structs.replace(entry, results=())],
            record=msgspec.structs.replace(whole.record, id=f"{whole.record.id}#t{name}"),
            metadata=metadata,
            num_tool_calls=len(entry.calls),
            is_for_turn=True,
        )
        yield apply_style(cut, style)


def row_content(conversation: Conversation) -> Hashable:
    """The content that a row teaches; equal for rows that differ only in ids and metadata."""
    entries = tuple(map(_content, conversation.entries))
    return conversation.system, tool_names(conversation.tools), entries


def _content(entry: Entry) -> Hashable:
    if isinstance(entry, UserMessage):
        return entry.text
    calls = tuple((call.name, call.arguments) for call in entry.calls)
    results = tuple(result.content for result in entry.results)
    return entry.reasoning, entry.text, calls, results


def _keep_entry(entry: Entry) -> Entry:
    return entry


def _trim_newlines(entry: Entry) -> Entry:
    if isinstance(entry, Turn):
        return msgspec.structs.replace(entry, text=entry.text.strip("\n"))
    return entry


def _remove_reasoning(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, reasoning="") if isinstance(entry, Turn) else entry


_TURN_REASONS = frozenset((Reason.TOO_LONG, Reason.ALL_MASKED))
"""Reasons for which one row of a turn is left out, and not the whole conversation."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A record that passed the filters, with its conversation if some format needs it."""

    record: Record
    conversation: Conversation | None = None
    number: int = 0
    """The number of the task."""
    run: str = ""
    """The name of the run."""

    @property
    def authored(self) -> AuthoredWork:
        """The work of this run's model in the conversation."""
        return (
            AuthoredWork(self.record) if self.conversation is None else self.conversation.authored
        )

    @property
    def parsed(self) -> Conversation:
        """The conversation, which must have been parsed."""
        assert self.conversation is not None
        return self.conversation


class _LengthHistogram:
    """A histogram of lengths in steps of 5%, whose memory does not grow with their number."""

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self._most = 0

    def add(self, length: int) -> None:
        self._classes[math.ceil(math.log(length, 1.05))] += 1
        self._most = max(self._most, length)

    def to_json(self) -> dict[str, int | None]:
        return {
            "p50": self._percentile(0.5),
            "p90": self._percentile(0.9),
            "p99": self._percentile(0.99),
            "max": self._most or None,
        }

    def _percentile(self, share: float) -> int | None:
        left = math.ceil(self._classes.total() * share)
        for length_class, count in sorted(self._classes.items()):
            left -= count
            if left <= 0:
                return min(round(1.05**length_class), self._most)
        return None


class Export(NamedTuple):
    """The format, recipe and target of the files of one format."""

    format: Format
    recipe: Recipe
    target: FileTarget
    run_dirs: Sequence[Path] = ()
    """The directories of the runs, for what a format reads beside the records."""


class FormatFiles(ABC):
    """Writes one format of a dataset: JSON lines and the copies asked for, by split."""

    def __init__(self, export: Export) -> None:
        """Raises `ConfigError` if a package is missing."""
        self.export = export
        format, recipe, target = export.format, export.recipe, export.target
        name = format.name
        shard_bytes = None if recipe.shard_mb is None else int(recipe.shard_mb * 1_000_000)

        def files(
            folder: str, suffix: str, make: MakeWriter, name: str | None = None
        ) -> SplitFiles:
            return SplitFiles(target, folder, suffix, make, shard_bytes=shard_bytes, name=name)

        self._outputs = []
        self._late: LateKeys | None = None
        copies = recipe.copies if format.columns else ()
        if format.parquet is not None:
            self._outputs.append(files(name, "parquet", format.parquet()))
        elif recipe.writes_lines or not copies:
            self._outputs.append(files(name, "jsonl", RowLines))
            self._late = LateKeys(format.columns, shard_bytes=shard_bytes)
        for one in copies:
            make = one.writer(format, recipe.copies_list_tools)
            folder = f"{name}_{one.name}"
            self._outputs.append(files(folder, one.suffix, make, name=one.file_name))
        self._splits = list(recipe.splits)
        self._rows = 0
        self._used = 0
        self._reasons: Counter[str] = Counter()
        self._lengths = _LengthHistogram()

    def write(self, split: str, line: bytes, *, uses: int = 1) -> None:
        """Write one row; `uses` is the number of candidates that it uses."""
        for output in self._outputs:
            output.write(split, line)
        if self._late is not None:
            self._late.add(split, line)
        self._rows += 1
        self._used += uses
        self._lengths.add(len(line))

    def reject(self, candidate: Candidate, rejection: Rejection) -> tuple[Candidate, Rejection]:
        """Count a candidate that is not used; returns both arguments for the caller to pass on."""
        self._reasons[rejection.reason] += 1
        return candidate, rejection

    @abstractmethod
    def add(
        self, split: str, candidates: Sequence[Candidate], left_out: Mapping[str, Rejection]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        """Write the rows of the candidates of one prompt; yields the candidates that are not used.

        `left_out` are candidates, by id of the record, that only preferences may use.
        """

    def finish(self) -> dict[str, Any]:
        """Close the files; returns the part of the manifest for this format."""
        files = []
        for output in self._outputs:
            written = output.finish()
            for split in filter(written.__contains__, self._splits):
                files += [{"split": split, **file.to_json()} for file in written[split]]
        late = [] if self._late is None else self._late.splits()
        return {
            "format": self.export.format.name,
            "rows": self._rows,
            "used": self._used,
            "rejected": self._reasons.total(),
            "rejected_by_reason": dict(sorted(self._reasons.items())),
            "row_bytes": self._lengths.to_json(),
            "files": files,
            **({"splits_with_late_keys": late} if late else {}),
        }


class CandidateFiles(FormatFiles):
    """A format that uses the candidates of a prompt one by one."""

    def add(
        self, split: str, candidates: Sequence[Candidate], left_out: Mapping[str, Rejection]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        seen: set[Hashable] = set()
        for candidate in candidates:
            rejection = left_out.get(candidate.record.id)
            if rejection is None:
                try:
                    rejection = self.add_one(split, candidate, seen)
                except Rejected as rejected:
                    rejection = rejected.as_rejection()
            if rejection is not None:
                yield self.reject(candidate, rejection)

    @abstractmethod
    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        """Write the rows of a candidate; returns why it is not used, or raises `Rejected`.

        `seen` is a set for the candidates of one prompt, empty at the first of them.
        """


class _RowFiles(CandidateFiles):
    """Writes one row per record, per turn of the model or per segment."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        format, recipe = export.format, export.recipe
        assert isinstance(format, RowFormat)
        self._format = format
        self._others: Counter[str] = Counter()
        self._per_turn = recipe.per_turn
        self._without_copies = recipe.filters.exact_duplicates
        self._duplicate_turns = 0
        self._with_nulls = 0
        style = format.limit(recipe.style)
        self._style = style if format.splits_calls else style.with_calls("keep")
        self._shows_objects = format.has_messages and style.arguments == "objects"
        self._masks = recipe.open_masks()
        self._fit = recipe.open_fit(format.name)
        self._not_passed = 0
        self._segments = None
        if recipe.segments:
            from batch_trajectories.export.segments import SegmentRows

            self._per_turn = recipe.per_turn or not format.marks_loss
            self._segments = SegmentRows(
                self._render,
                masks=self._masks,
                since_user=style.reasoning == "since_user",
                by_turn=self._per_turn,
            )

    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        masks, conversation = self._masks, candidate.parsed
        refuse_all_masked(conversation)
        if masks is None:
            return self._add(split, candidate.record, conversation, seen)
        conversation = masks.apply(conversation)
        if not any(isinstance(entry, Turn) and entry.has_loss for entry in conversation.entries):
            return Rejection(Reason.ALL_MASKED.value, "none of its turns carries loss")
        is_included = bool(self.export.recipe.include) and masks.did_not_pass(candidate.record)
        if is_included:
            metadata = {**conversation.metadata, "included": NOT_PASSED}
            conversation = msgspec.structs.replace(conversation, metadata=metadata)
        rejection = self._add(split, candidate.record, conversation, seen)
        if rejection is None:
            if self._segments is None:
                masks.count(turn.masked for turn in conversation.own_turns)
            self._not_passed += is_included
        return rejection

    def _render(self, conversation: Conversation) -> tuple[Conversation, dict[str, Any]]:
        shown = apply_style(conversation, self._style)
        return shown, self._make_row(shown)

    def _make_row(self, shown: Conversation) -> dict[str, Any]:
        row = self._format.row_of(shown, self._style)
        return row if self._fit is None else self._fit.fit_row(row)

    def _add(
        self, split: str, record: Record, conversation: Conversation, seen: set[Hashable]
    ) -> Rejection | None:
        if self._segments is not None:
            for n, (shown, row) in enumerate(self._segments.render(conversation, record)):
                self.write(split, dumps_row(row), uses=n == 0)
                if not self._per_turn:
                    self._others += shown.others
                self._with_nulls += self._has_nulls(shown)
            return None
        if self._per_turn:
            return self._add_turns(split, conversation, seen)
        conversation, row = self._render(conversation)
        self.write(split, dumps_row(row))
        if conversation.has_other_authors:
            self._others += conversation.others
        self._with_nulls += self._has_nulls(conversation)
        return None

    def _add_turns(
        self, split: str, conversation: Conversation, seen: set[Hashable]
    ) -> Rejection | None:
        """Write a row per turn, except turns that another sample of the prompt has as well."""
        new: list[Conversation] = []
        copies = 0
        for cut in cut_by_turn(conversation, self._style):
            content = row_content(cut)
            if self._without_copies and content in seen:
                copies += 1
            else:
                seen.add(content)
                new.append(cut)
        rows: list[dict[str, Any]] = []
        error: Rejected | None = None
        for cut in new:
            try:
                rows.append(self._make_row(cut))
            except Rejected as rejected:
                error = rejected
                if self._fit is None or rejected.reason not in _TURN_REASONS:
                    # All turns or none: a flaw anywhere rejects the conversation.
                    seen.difference_update(map(row_content, new))
                    raise
        if error is not None and not rows:
            raise error
        if not rows:
            return Rejection("exact_duplicates", "other samples of the prompt have all its turns")
        self._duplicate_turns += copies
        for number, row in enumerate(rows):
            self.write(split, dumps_row(row), uses=number == 0)
        self._with_nulls += sum(map(self._has_nulls, new))
        return None

    def _has_nulls(self, conversation: Conversation) -> bool:
        """Whether a row has an argument that is null, in a format with arguments as objects."""
        return self._shows_objects and has_null_arguments(conversation)

    def finish(self) -> dict[str, Any]:
        return {
            **super().finish(),
            "marks_loss": self._format.marks_loss,
            "turns_of_others": dict(sorted(self._others.items())),
            **({} if self._segments is None else {"segments": self._segments.to_json()}),
            **(
                {"duplicate_turns": self._duplicate_turns}
                if self._per_turn and not self._segments
                else {}
            ),
            **({} if self._masks is None else {"masked": self._masks.counts()}),
            **({} if self._fit is None else {"fit": self._fit.to_json()}),
            **({NOT_PASSED: self._not_passed} if self.export.recipe.include else {}),
            **({"rows_with_null_arguments": self._with_nulls} if self._with_nulls else {}),
        }


class CustomFormat(Format, frozen=True, kw_only=True, eq=False):
    """A format whose rows are not those of single conversations."""

    files: Callable[[Export], FormatFiles]
    """A subclass of `FormatFiles`."""


def open_format(export: Export) -> FormatFiles:
    """Begin the files of a format. Raises `ConfigError` if a package is missing."""
    format = export.format
    return format.files(export) if isinstance(format, CustomFormat) else _RowFiles(export)
