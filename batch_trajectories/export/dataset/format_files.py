"""The files of each format: JSON lines and their copies, by split and with counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import styled
from batch_trajectories.export.conversation.turns import Conversation, has_null_arguments
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.dataset.per_turn import content_of, cut_by_turn
from batch_trajectories.export.formats.arrow import datasets_writer, parquet_writer
from batch_trajectories.export.formats.predictions import prediction_of
from batch_trajectories.export.formats.preference import (
    Sample,
    dpo_row,
    kto_row,
    pair_of,
    sample_of,
)
from batch_trajectories.export.formats.prompts import prompts_writer
from batch_trajectories.export.formats.prompts import row_of as row_of_prompt
from batch_trajectories.export.formats.registry import COPIED, GROUP_FORMATS, ROW_FORMATS, Format
from batch_trajectories.export.formats.rl import discarded_replies, rows_of, threads_of
from batch_trajectories.export.formats.row_files import FileTarget, MakeWriter, SplitFiles
from batch_trajectories.export.recipe import Recipe
from batch_trajectories.export.record_order import Loaded
from batch_trajectories.runs.store.checksum import without_checksum

_SPLIT_TEXTS = 5
"""How many of the most frequent texts at splits are named."""

Why = tuple[str, str]
"""Reason and detail."""


class _Lengths:
    """A histogram of lengths in steps of 5%, so memory does not grow with their number."""

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


class FormatFiles(ABC):
    """Writes one format of a dataset: JSON lines and the copies asked for, by split."""

    def __init__(
        self, name: str, place: FileTarget, recipe: Recipe, own: MakeWriter | None = None
    ) -> None:
        """`own` writes Parquet files, the only ones of the format.

        Raises `ConfigError` where a package is missing.
        """
        self.name = name
        shard_bytes = None if recipe.shard_mb is None else int(recipe.shard_mb * 1_000_000)

        def files(folder: str, suffix: str, make: MakeWriter | None, **named: str) -> SplitFiles:
            return SplitFiles(place, folder, suffix, make, shard_bytes=shard_bytes, **named)

        self._outputs = []
        copies = recipe.formats if name in COPIED else ()
        if own is not None:
            self._outputs.append(files(name, "parquet", own))
        elif recipe.writes_lines or not copies:
            self._outputs.append(files(name, "jsonl", None))
        if "parquet" in copies:
            self._outputs.append(files(f"{name}_parquet", "parquet", parquet_writer(name)))
        if "hf" in copies:
            make = datasets_writer(name, lists_tools=recipe.copies_list_tools)
            self._outputs.append(files(f"{name}_hf", "arrow", make, name="data"))
        self._splits = list(recipe.splits)
        self._rows = 0
        self._used = 0
        self._reasons: Counter[str] = Counter()
        self._lengths = _Lengths()

    def write(self, split: str, line: bytes, *, uses: int = 1) -> None:
        for output in self._outputs:
            output.write(split, line)
        self._rows += 1
        self._used += uses
        self._lengths.add(len(line))

    def unused(self, candidate: Loaded, why: Why) -> tuple[Loaded, Why]:
        self._reasons[why[0]] += 1
        return candidate, why

    def add(
        self, split: str, candidates: Sequence[Loaded], left_out: Mapping[str, Why]
    ) -> Iterator[tuple[Loaded, Why]]:
        """Write the rows of the candidates of one prompt; yields those that are not used, and why.

        `left_out` names candidates, by id, that only preferences may use.
        """
        seen: set[Hashable] = set()
        for candidate in candidates:
            why = left_out.get(candidate.record.id)
            if why is None:
                try:
                    why = self.add_one(split, candidate, seen)
                except Rejected as rejected:
                    why = rejected.reason.value, rejected.detail
            if why is not None:
                yield self.unused(candidate, why)

    @abstractmethod
    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        """Write the rows of a candidate; returns why it is not used, or raises `Rejected`.

        `seen` is for the candidates of one prompt.
        """

    def finish(self) -> dict[str, Any]:
        """Close the files; returns the format's part of the manifest."""
        files = []
        for output in self._outputs:
            written = output.finish()
            for split in filter(written.__contains__, self._splits):
                files += [{"split": split, **file.to_json()} for file in written[split]]
        return {
            "format": self.name,
            "rows": self._rows,
            "used": self._used,
            "rejected": self._reasons.total(),
            "rejected_by_reason": dict(sorted(self._reasons.items())),
            "row_bytes": self._lengths.to_json(),
            "files": files,
        }


class _RowFiles(FormatFiles):
    """A format with one row per record, or per turn of the model."""

    def __init__(self, format: Format, place: FileTarget, recipe: Recipe) -> None:
        super().__init__(format.name, place, recipe)
        self._format = format
        self._others: Counter[str] = Counter()
        self._per_turn = recipe.per_turn
        self._without_copies = recipe.filters.exact_duplicates
        self._copies = 0
        self._with_nulls = 0
        style = recipe.style.of(format.name)
        self._style = style if format.splits_calls else style.with_calls("keep")

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        if self._per_turn:
            return self._add_turns(split, candidate, seen)
        conversation = styled(candidate.parsed, self._style)
        self.write(split, dumps_row(self._format.row_of(conversation, self._style)))
        if conversation.has_others:
            self._others += conversation.others
        self._with_nulls += has_null_arguments(conversation)
        return None

    def _add_turns(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        """Write a row per turn, but for those that other samples of the prompt have as well."""
        new: list[Conversation] = []
        copies = 0
        for cut in cut_by_turn(candidate.parsed, self._style):
            content = content_of(cut)
            if self._without_copies and content in seen:
                copies += 1
            else:
                seen.add(content)
                new.append(cut)
        try:
            # All turns or none: a flaw anywhere rejects the conversation.
            rows = [self._format.row_of(cut, self._style) for cut in new]
        except Rejected:
            seen.difference_update(map(content_of, new))
            raise
        if not rows:
            return "exact_duplicates", "other samples of the prompt have all its turns"
        self._copies += copies
        for number, row in enumerate(rows):
            self.write(split, dumps_row(row), uses=number == 0)
        self._with_nulls += sum(map(has_null_arguments, new))
        return None

    def finish(self) -> dict[str, Any]:
        has_nulls = self._with_nulls and self._format.has_argument_objects
        return {
            **super().finish(),
            "marks_loss": self._format.marks_loss,
            "turns_of_others": dict(sorted(self._others.items())),
            **({"duplicate_turns": self._copies} if self._per_turn else {}),
            **({"rows_with_null_arguments": self._with_nulls} if has_nulls else {}),
        }


class _TokenFiles(FormatFiles):
    """Rows of token ids; a record can have several."""

    def __init__(self, name: str, place: FileTarget, recipe: Recipe) -> None:
        super().__init__(name, place, recipe)
        self._reward_name = recipe.reward_name
        self._subagents = recipe.subagents
        self._discarded = recipe.discarded
        self._rows_after_split = 0
        self._split_texts: Counter[tuple[str, str]] = Counter()
        self._discarded_replies = 0
        self._turns_without_ids = 0
        self._subagents_left_out = 0

    def finish(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "split": self._rows_after_split,
            "split_texts": [
                {"sampled": sampled, "shown": shown, "rows": count}
                for (sampled, shown), count in self._split_texts.most_common(_SPLIT_TEXTS)
            ],
            "turns_without_ids": self._turns_without_ids,
            "discarded_replies": self._discarded_replies,
        }
        if self._subagents:
            counts["subagents_left_out"] = self._subagents_left_out
        return {**super().finish(), **counts}

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        record = candidate.record
        rows = rows_of(
            record, self._reward_name, subagents=self._subagents, discarded=self._discarded
        )
        threads = [record, *(threads_of(record) if self._subagents else ())]
        self._discarded_replies += sum(len(discarded_replies(one)) for one in threads)
        firsts = [row for row in rows if row["segment"] == 0 and not row.get("discarded")]
        for place in filter(None, (row["split"] for row in rows)):
            self._rows_after_split += 1
            if place["sampled"] is not None:
                self._split_texts[place["sampled"], place["shown"]] += 1
        self._turns_without_ids += sum(len(row["turns_without_ids"]) for row in firsts)
        if self._subagents:
            self._subagents_left_out += len(threads) - len(firsts)
        for number, row in enumerate(rows):
            self.write(split, dumps_row(row), uses=int(number == 0))
        return None


class _PredictionFiles(FormatFiles):
    """Diffs for SWE-bench's harness, which takes one for each task."""

    def __init__(self, name: str, place: FileTarget, recipe: Recipe) -> None:
        super().__init__(name, place, recipe)
        self._instances: set[str] = set()

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        line = prediction_of(candidate.record)
        if (name := line["instance_id"]) in self._instances:
            raise Rejected(
                Reason.OTHER_SAMPLE,
                f"the file has a sample of {name}; `best_n: 1` in a recipe takes the best",
            )
        self.write(split, orjson.dumps(line) + b"\n")
        self._instances.add(name)
        return None


class _RawFiles(FormatFiles):
    """The records, unchanged."""

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        self.write(split, without_checksum(candidate.record.line))
        return None


class _PreferenceFiles(FormatFiles):
    """Rows that compare the samples of one prompt."""

    def __init__(self, name: str, place: FileTarget, recipe: Recipe) -> None:
        super().__init__(name, place, recipe)
        self._style = recipe.style.of(name)
        self._preference = recipe.preference
        self._samples: list[tuple[Loaded, Sample]] = []

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        sample = sample_of(styled(candidate.parsed, self._style), self._style)
        self._samples.append((candidate, sample))
        return None

    def add(
        self, split: str, candidates: Sequence[Loaded], left_out: Mapping[str, Why]
    ) -> Iterator[tuple[Loaded, Why]]:
        self._samples.clear()
        yield from super().add(split, candidates, {})
        samples = self._samples
        if self.name == "kto":
            for _, sample in samples:
                row = kto_row(
                    sample,
                    threshold=self._preference.threshold,
                    reward_name=self._style.reward_name,
                )
                self.write(split, dumps_row(row))
            return
        pair = pair_of([s for _, s in samples], min_margin=self._preference.min_margin)
        if pair is not None:
            self.write(split, dumps_row(dpo_row(*pair)), uses=2)
        for candidate, sample in samples:
            if pair is None or sample not in pair:
                detail = "no other sample differs enough" if pair is None else "others are the pair"
                yield self.unused(candidate, (Reason.NO_PAIR.value, detail))


class _PromptFiles(FormatFiles):
    """A Parquet file with one row per prompt."""

    def __init__(self, place: FileTarget, recipe: Recipe, run: str) -> None:
        super().__init__("prompts", place, recipe, prompts_writer())
        self._run = run
        self._reward_name = recipe.reward_name

    def add(
        self, split: str, candidates: Sequence[Loaded], left_out: Mapping[str, Why]
    ) -> Iterator[tuple[Loaded, Why]]:
        records = [candidate.record for candidate in candidates]
        try:
            row = row_of_prompt(
                records, index=self._rows, run=self._run, reward_name=self._reward_name
            )
        except Rejected as rejected:
            for candidate in candidates:
                yield self.unused(candidate, (rejected.reason.value, rejected.detail))
            return
        self.write(split, dumps_row(row), uses=len(candidates))

    def add_one(self, split: str, candidate: Loaded, seen: set[Hashable]) -> Why | None:
        """Never called: samples of a prompt have one row."""
        raise NotImplementedError


def open_formats(recipe: Recipe, place: FileTarget, run: str) -> list[FormatFiles]:
    """Begin the files of all formats of a recipe. Raises `ConfigError` without a package.

    `run` is the name of the run.
    """
    formats: list[FormatFiles] = []
    for name in recipe.row_formats:
        if name in ROW_FORMATS:
            formats.append(_RowFiles(ROW_FORMATS[name], place, recipe))
        elif name in GROUP_FORMATS:
            formats.append(_PreferenceFiles(name, place, recipe))
        elif name == "rl":
            formats.append(_TokenFiles(name, place, recipe))
        elif name == "predictions":
            formats.append(_PredictionFiles(name, place, recipe))
        elif name == "prompts":
            formats.append(_PromptFiles(place, recipe, run))
        else:
            formats.append(_RawFiles(name, place, recipe))
    return formats
