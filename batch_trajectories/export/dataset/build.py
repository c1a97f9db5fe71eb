"""Makes a dataset from a run: one pass over its records, by a recipe, into several formats.

Every task is discarded, failed, pending, rejected by a filter, or selected; in each format every
selected record is used or rejected. The same records and recipe give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.rewards import reward_of
from batch_trajectories.export.conversation.tolerance import Tolerance, refuse_everywhere
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.export.filters.duplicates import NearDuplicates, said_in
from batch_trajectories.export.filters.filters import RecordFilters
from batch_trajectories.export.record_order import RecordOrder, RecordReader, Seen
from batch_trajectories.export.rows.files import Export, Loaded, Why, open_format
from batch_trajectories.export.rows.format import Format
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import FileTarget, Hashing, Written
from batch_trajectories.export.statistics import Statistics
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.dataset.row import opening_messages
from batch_trajectories.runs.dataset.scan import Scan
from batch_trajectories.runs.directory.owed import owed
from batch_trajectories.runs.directory.run_dir import read_run_json, versions_of
from batch_trajectories.runs.store.record_types import Record
from batch_trajectories.runs.store.scores import Scores

SCHEMA_VERSION = 1

_UNKNOWN = "unknown"
"""The model of an imported conversation that does not name it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The run that a dataset is made from."""

    run_dir: Path
    scan: Scan
    num_samples: int
    config: RunConfig | None = None
    """Tells which samples are tasks; None: all."""


def write_rows(source: Source, recipe: Recipe, place: FileTarget) -> dict[str, Any]:
    """Write the rows and rejects of a dataset; returns its manifest.

    Raises `ConfigError` for a recipe that does not fit the run, `EnvironmentStop` if a record has
    become unreadable.
    """
    scan = source.scan
    order = RecordOrder(source.run_dir, scan, num_samples=source.num_samples)
    with order.reading(Scores(source.run_dir)) as read:
        making = _Making(recipe, place, Seen(len(order)), read, source.run_dir.name)
        with LongWork("export", total=order.with_record) as work:
            for groups in order.groups(by_prompt=recipe.compares):
                making.add(groups)
                work.advance(sum(map(len, groups)))
    left = owed(source.run_dir, scan, source.config, order.without_record())
    discarded = len(source.scan.bad_rows) * source.num_samples
    run = read_run_json(source.run_dir)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "dataset",
        "run": {
            "name": run["config"]["run_name"],
            "config_digest": run["digest"],
            "dataset_sha256": source.scan.sha256,
            "prompts": source.scan.rows + len(source.scan.bad_rows),
            "samples": source.num_samples,
            **_audit_of(run),
        },
        "tasks": len(order) - left.not_needed + discarded,
        "discarded": discarded,
        "failed": left.failed,
        "pending": left.pending,
        **making.finish(),
        "gone": order.gone,
        "recipe": recipe.model_dump(mode="json"),
        "versions": _versions(recipe),
    }


def _audit_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The audit whose sound rows the run took, and the rows by verdict."""
    audit = (run["dataset"].get("source") or {}).get("only_sound")
    return {} if audit is None else {"audit": audit}


def worth_scoring(recipe: Recipe) -> Callable[[Record], bool]:
    """Whether an export can keep a record, once it has the rewards that its filters compare.

    Filters that compare samples or conversations with each other are not applied. Raises
    `ConfigError`.
    """
    filters = _filters_of(recipe, with_unscored=True)

    def is_worth(record: Record) -> bool:
        if filters.rejection(record) is not None:
            return False
        try:
            return not recipe.needs_conversations or bool(
                _with_conversation(record, recipe.tolerances)
            )
        except Rejected:
            return False

    return is_worth


def _with_conversation(record: Record, tolerances: Sequence[Tolerance]) -> Loaded:
    """Parse a record; raises Rejected, also if no format accepts it."""
    conversation = read_conversation(record)
    if conversation.flaws:
        refuse_everywhere(conversation.flaws, tolerances)
    return Loaded(record, conversation)


def _filters_of(recipe: Recipe, *, with_unscored: bool = False) -> RecordFilters:
    return RecordFilters(
        recipe.record_filters,
        threshold=recipe.preference.threshold,
        reward_name=recipe.reward_name,
        with_comparisons=recipe.makes_comparisons,
        with_unscored=with_unscored,
    )


class _Making:
    """A dataset that is being written."""

    def __init__(
        self,
        recipe: Recipe,
        place: FileTarget,
        seen: Seen,
        read: RecordReader,
        run: str,
    ) -> None:
        self._recipe = recipe
        self._seen = seen
        self._read = read
        filters = recipe.filters
        self._compares = recipe.compares
        self._chooses = self._compares or filters.max_per_toolsets is not None
        self._filters = _filters_of(recipe)
        self._near = (
            None if filters.near_duplicates is None else NearDuplicates(filters.near_duplicates)
        )
        self._splits = Splits(recipe.splits, seed=recipe.split_seed)
        self._row_formats = recipe.row_formats
        self._formats = [open_format(Export(one, recipe, place, run)) for one in self._row_formats]
        self._tolerances = recipe.tolerances
        self._needs_conversations = recipe.needs_conversations
        self._rejects = Hashing(place.open("rejects.jsonl"))
        self._reject_lines = 0
        self._rejected: Counter[str] = Counter()
        self._selected = 0
        self._by_toolsets: Counter[tuple[str, ...]] = Counter()
        self._models: Counter[str] = Counter()
        self._statistics = Statistics()

    def add(self, groups: Sequence[Sequence[int]]) -> None:
        """Add a few groups of tasks: those of one prompt, or single tasks if none are compared."""
        # A prompt can have any number of samples: rejected ones are not held in memory.
        loading = map(self._read, chain.from_iterable(groups))
        loaded = loading if self._compares else iter([*loading])
        passed = [self._candidates(numbers, loaded) for numbers in groups]
        for candidates, _ in passed:
            for candidate in candidates:
                self._selected += 1
                self._statistics.add(candidate.record, candidate.own)
                record = candidate.record
                self._models[record.model_returned or record.model or _UNKNOWN] += 1
        for candidates, rejected in passed:
            for named, why in rejected:
                self._rejected[why[0]] += 1
                self._reject(named, *why, None)
            if not candidates:
                continue
            chosen = self._chosen(candidates)
            split = self._splits.of(candidates[0].record)
            for files in self._formats:
                for candidate, why in files.add(split, candidates, chosen):
                    self._reject(_named(candidate.record), *why, files.export.format)

    def finish(self) -> dict[str, Any]:
        """Close all files; returns their part of the manifest."""
        formats = [files.finish() for files in self._formats]
        digest = self._rejects.finish()
        statistics = self._statistics.to_json()
        del statistics["duration_s"]
        evaluation = self._filters.evaluation
        return {
            "rejected": self._rejected.total(),
            "rejected_by_reason": dict(sorted(self._rejected.items())),
            **({} if evaluation is None else {"evaluation": evaluation.counts()}),
            "selected": self._selected,
            "models": [
                {"model": name, "records": count} for name, count in sorted(self._models.items())
            ],
            "formats": formats,
            "rejects": Written(
                "rejects.jsonl", self._reject_lines, self._rejects.size, digest
            ).to_json(),
            "statistics": statistics,
        }

    def _candidates(
        self, numbers: Sequence[int], loaded: Iterator[Record]
    ) -> tuple[list[Loaded], list[tuple[_Named, Why]]]:
        """The next records that pass the filters, and id and status of those that do not."""
        candidates: list[Loaded] = []
        rejected: list[tuple[_Named, Why]] = []
        for number, record in zip(numbers, loaded, strict=False):
            try:
                candidates.append(self._candidate(number, record))
            except _LeftOut as left_out:
                rejected.append((_named(record), (left_out.reason, left_out.detail)))
        return candidates, rejected

    def _candidate(self, number: int, record: Record) -> Loaded:
        """The record with its conversation, if some format needs it; raises _LeftOut."""
        if (rejection := self._filters.rejection(record)) is not None:
            raise _LeftOut(*rejection)
        loaded = Loaded(record)
        if self._needs_conversations:
            try:
                loaded = _with_conversation(record, self._tolerances)
            except Rejected as rejected:
                raise _LeftOut(rejected.reason.value, rejected.detail) from rejected
        if self._recipe.filters.exact_duplicates and not self._is_new(number, record):
            raise _LeftOut("exact_duplicates", "says the same as an earlier conversation")
        if self._near is None or self._filters.only_compared(record) is not None:
            # A record without a row of its own must not exclude others.
            return loaded
        if earlier := self._near.earlier(record):
            raise _LeftOut("near_duplicates", f"says nearly the same as {earlier}")
        return loaded

    def _is_new(self, number: int, record: Record) -> bool:
        said = said_in(record)
        return self._seen.is_new(
            number, hash(said), lambda earlier: said_in(self._read(earlier)) == said
        )

    def _chosen(self, candidates: list[Loaded]) -> dict[str, tuple[str, str]]:
        """The candidates that make no rows of their own, by id, with the reason."""
        left_out: dict[str, tuple[str, str]] = {}
        if not self._chooses:
            return left_out
        filters = self._recipe.filters
        ranked = []
        for candidate in candidates:
            if (why := self._filters.only_compared(candidate.record)) is None:
                ranked.append(candidate)
            else:
                left_out[candidate.record.id] = why
        if filters.best_n is not None:
            ranked.sort(key=partial(_by_reward, self._recipe.reward_name))
        count = filters.first_n or filters.best_n or len(candidates)
        name = "first_n" if filters.first_n else "best_n"
        for candidate in ranked[count:]:
            left_out[candidate.record.id] = (name, f"{count} others of its prompt are kept")
        if filters.max_per_toolsets is not None:
            for candidate in candidates:
                if candidate.record.id in left_out:
                    continue
                toolsets = tuple(candidate.record.toolsets)
                self._by_toolsets[toolsets] += 1
                if self._by_toolsets[toolsets] > filters.max_per_toolsets:
                    detail = (
                        f"{filters.max_per_toolsets} with {', '.join(toolsets) or 'no toolsets'}"
                    )
                    left_out[candidate.record.id] = ("max_per_toolsets", f"{detail} are kept")
        return left_out

    def _reject(self, named: _Named, reason: str, detail: str, format: Format | None) -> None:
        # What no format accepts is reported for the first format.
        if hint := (format or self._row_formats[0]).how_to_keep(reason):
            detail = f"{detail}; {hint}"
        line = {
            **named,
            "format": None if format is None else format.name,
            "reason": reason,
            # It may quote a model's text with halves of surrogate pairs.
            "detail": detail.encode(errors="replace").decode(),
        }
        self._rejects.write(orjson.dumps(line) + b"\n")
        self._reject_lines += 1


_Named = Mapping[str, str]
"""Id and status of a record."""


def _named(record: Record) -> _Named:
    return {"id": record.id, "status": record.status}


class _LeftOut(Exception):
    """A record is left out of all formats."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _by_reward(name: str | None, candidate: Loaded) -> float:
    """A sort key: best first, without a reward last."""
    reward = reward_of(candidate.record, name)
    return float("inf") if reward is None else -reward


def _versions(recipe: Recipe) -> dict[str, str]:
    names = ["batch-trajectories"]
    names += dict.fromkeys(package for one in recipe.copies for package in one.packages)
    if recipe.filters.near_duplicates is not None:
        names.append("rensa")
    if recipe.filters.secrets == "all":
        names.append("detect-secrets")
    return versions_of(names)


class Splits:
    """Draws the split of each prompt.

    All samples of a prompt, and rows with the same text, are in one split, which depends only on
    prompt, seed and shares: added rows do not move others.
    """

    def __init__(self, shares: Mapping[str, float], *, seed: int) -> None:
        """`shares` sum to 1."""
        self._seed = seed
        self._ends: list[tuple[str, float]] = []
        end = 0.0
        for name, share in shares.items():
            end += share
            self._ends.append((name, end))

    def of(self, record: Record) -> str:
        """The name of the split that a record belongs to."""
        if len(self._ends) == 1:
            return self._ends[0][0]
        content = f"{self._seed}\n".encode() + _prompt(record)
        drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
        return next((name for name, end in self._ends if drawn < end), self._ends[-1][0])


def _prompt(record: Record) -> bytes:
    """The user's text in the row; the id of the prompt if the row has none."""
    try:
        opening = opening_messages(record.row, None)
    except ValueError:
        return record.prompt_id.encode()
    return orjson.dumps([m["content"] for m in opening if m["role"] == "user"])
