"""Makes a dataset from one or more runs: one pass over the records, by a recipe.

Every task is discarded, failed, pending, rejected by a filter, or selected. In each format, every
selected record is used or rejected. The same records and recipe give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.process import rare_garbage_collection
from batch_trajectories.engine.run_dir import package_versions, read_run_json
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.rewards import training_reward
from batch_trajectories.export.conversation.tolerance import Tolerance, refuse_everywhere
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Rejected, Rejection
from batch_trajectories.export.dataset.recipe_origin import recipe_mac
from batch_trajectories.export.dataset.runs import Read, RunCounts, Source, SourceRecords
from batch_trajectories.export.dataset.splits import JoinedSplits, Splits
from batch_trajectories.export.filters.contamination import NearDuplicates, content_key
from batch_trajectories.export.filters.filters import RecordFilters
from batch_trajectories.export.record_order import DuplicateTable
from batch_trajectories.export.rows.files import Candidate, Export, open_format
from batch_trajectories.export.rows.format import Format
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import FileTarget, HashingFile, Written
from batch_trajectories.export.statistics.counts import KeyCounts, Statistics
from batch_trajectories.records.record_types import Record

if TYPE_CHECKING:
    from batch_trajectories.export.dataset.choice import Selection, TokenLengths

SCHEMA_VERSION = 1

_Identity = Mapping[str, str]
"""Keys of a line of rejects.jsonl: `id` and `status` of a record, in a mix also its `run`."""

_UNKNOWN = "unknown"
"""The name of the model in the manifest if an imported conversation names none."""


def write_rows(source: Source, recipe: Recipe, target: FileTarget) -> dict[str, Any]:
    """Write the rows and rejects of a dataset; returns its manifest.

    Raises `ConfigError` for a recipe that does not fit the run, `EnvironmentStop` if a record has
    become unreadable.
    """
    records = SourceRecords(source)
    with records.reading() as read, rare_garbage_collection():
        writer = _DatasetWriter(recipe, target, records, read)
        with LongWork("export", total=records.record_count) as work:
            for groups in records.groups(by_prompt=recipe.needs_groups):
                writer.add(groups)
                work.advance(sum(map(len, groups)))
            writer.write_chosen()
    counts = [*records.counts()]
    written = writer.finish()
    stored = recipe.model_dump(mode="json")
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "dataset",
        **_describe_runs(records.sources, counts, writer.selected),
        "tasks": sum(run.tasks for run in counts),
        "discarded": sum(run.discarded for run in counts),
        "failed": sum(run.failed for run in counts),
        "pending": sum(run.pending for run in counts),
        **written,
        "gone": sum(run.gone for run in counts),
        "recipe": stored,
        **recipe_mac(stored),
        "versions": _versions(recipe),
    }


def _describe_runs(
    sources: Sequence[Source], counts: Sequence[RunCounts], selected: Mapping[str, int]
) -> dict[str, Any]:
    """The runs of a dataset for its manifest: `run` if there is one, else `runs` with counts.

    `selected` are the selected records by the name of the run.
    """
    described = [_describe_run(source) for source in sources]
    if len(described) == 1:
        return {"run": described[0]}
    return {
        "runs": [
            {**run, **asdict(count), "name": source.name, "selected": selected[source.name]}
            for source, run, count in zip(sources, described, counts, strict=True)
        ]
    }


def _describe_run(source: Source) -> dict[str, Any]:
    """The name, config, dataset and audit of a run, for a manifest."""
    run = read_run_json(source.run_dir)
    return {
        "name": run["config"]["run_name"],
        "config_digest": run["digest"],
        "dataset_sha256": source.scan.sha256,
        "prompts": source.scan.rows + len(source.scan.bad_rows),
        "samples": source.num_samples,
        **_describe_audit(run),
    }


def _describe_audit(run: Mapping[str, Any]) -> dict[str, Any]:
    """`audit`: the audit whose sound rows the run took, and its rows by verdict; {} without one."""
    audit = (run["dataset"].get("source") or {}).get("only_sound")
    return {} if audit is None else {"audit": audit}


def make_scoring_filter(recipe: Recipe) -> Callable[[Record], bool]:
    """A function that says whether an export may keep a record after it is scored.

    Filters that compare samples or conversations with each other are not applied, and a missing
    reward fails no filter. Raises `ConfigError`.
    """
    filters = _make_filters(recipe, with_unscored=True)

    def is_worth(record: Record) -> bool:
        if filters.rejection(record) is not None:
            return False
        try:
            return not recipe.needs_conversations or bool(_read_accepted(record, recipe.tolerances))
        except Rejected:
            return False

    return is_worth


def _read_accepted(record: Record, tolerances: Sequence[Tolerance]) -> Conversation:
    """Parse a record. Raises Rejected, also if no format accepts the flaws of the record."""
    conversation = read_conversation(record)
    if conversation.flaws:
        refuse_everywhere(conversation.flaws, tolerances)
    return conversation


def _make_filters(recipe: Recipe, *, with_unscored: bool = False) -> RecordFilters:
    return RecordFilters(
        recipe.record_filters,
        threshold=recipe.preference.threshold,
        reward_name=recipe.reward_name,
        with_comparisons=recipe.makes_comparisons,
        with_unscored=with_unscored,
    )


class _FilteredGroup(NamedTuple):
    """The samples of one prompt, or a single conversation, after the filters."""

    candidates: list[Candidate]
    pass_rate: float | None
    """Share of the judged samples that passed; None if unknown, or if nothing needs it."""
    rejected: list[tuple[_Identity, Rejection]]


class _DatasetWriter:
    """Filters records and writes their rows into all formats of a recipe."""

    def __init__(
        self, recipe: Recipe, target: FileTarget, records: SourceRecords, read: Read
    ) -> None:
        self._recipe = recipe
        self._seen = DuplicateTable(len(records))
        self._records = records
        self._is_mix = len(records.sources) > 1
        self._read = read
        filters = recipe.filters
        self._has_groups = recipe.needs_groups
        # Looked up for each record: a recipe computes some of them.
        self._needs_rates, self._rate_bounds = recipe.needs_rates, filters.pass_rate
        self._without_equal = filters.exact_duplicates
        self._filters = _make_filters(recipe)
        self._near = (
            None if filters.near_duplicates is None else NearDuplicates(filters.near_duplicates)
        )
        self._lengths: TokenLengths | None = None
        if filters.tokenizer is not None:
            from batch_trajectories.export.dataset.choice import TokenLengths

            self._lengths = TokenLengths(Path(filters.tokenizer), recipe.style)
        elif filters.max_length or filters.min_length:
            name = "max_length" if filters.max_length else "min_length"
            raise ConfigError(f"filters.{name}: counts tokens; add tokenizer, its directory")
        self._splits = Splits(recipe.splits, seed=recipe.split_seed)
        joined: JoinedSplits | None = None
        if recipe.split_by:
            joined = JoinedSplits(recipe.splits, recipe.split_by, seed=recipe.split_seed)
            self._splits = joined
        self._selection: Selection | None = None
        if recipe.chooses_among_all:
            from batch_trajectories.export.dataset.choice import Selection

            self._selection = Selection(recipe, joined, self._lengths)
        self._row_formats = recipe.row_formats
        run_dirs = [source.run_dir for source in records.sources]
        self._formats = [
            open_format(Export(one, recipe, target, run_dirs)) for one in self._row_formats
        ]
        self._tolerances = recipe.tolerances
        self._needs_conversations = recipe.needs_conversations or self._lengths is not None
        self._rejects = HashingFile(target.open("rejects.jsonl"))
        self._reject_lines = 0
        self._rejected: KeyCounts[str] = KeyCounts()
        self.selected: KeyCounts[str] = KeyCounts()
        """Selected records by the name of their run."""
        self._models: KeyCounts[str] = KeyCounts()
        self._statistics = Statistics()

    def add(self, groups: Sequence[Sequence[int]]) -> None:
        """Add groups of tasks: each has the samples of one prompt, or a single task."""
        # A prompt can have any number of samples: rejected ones are not held in memory.
        loading = map(self._read, chain.from_iterable(groups))
        loaded = loading if self._has_groups else iter([*loading])
        filtered = [self._filter_group(numbers, loaded) for numbers in groups]
        if self._selection is None:
            for group in filtered:
                self._count(group.candidates)
        for group in filtered:
            for identity, rejection in group.rejected:
                self._leave_out(identity, rejection)
            if not group.candidates:
                continue
            not_used = self._reject_unused(group.candidates)
            if self._selection is None:
                self._write(group.candidates, not_used)
            else:
                self._selection.add(group.candidates, group.pass_rate, not_used)

    def write_chosen(self) -> None:
        """Choose among all added candidates and write them. Raises `ConfigError`."""
        if (selection := self._selection) is None:
            return
        for number, rejection in selection.choose().items():
            self._leave_out(self._identity(self._read(number), number), rejection)
        for groups in selection.groups():
            for numbers in groups:
                candidates = [self._load(number, self._read(number)) for number in numbers]
                self._count(candidates)
                not_used = {
                    one.record.id: selection.not_used[one.number]
                    for one in candidates
                    if one.number in selection.not_used
                }
                self._write(candidates, not_used)

    def _count(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            record = candidate.record
            self.selected[candidate.run] += 1
            self._statistics.add(record, candidate.authored)
            self._models[record.model_returned or record.model or _UNKNOWN] += 1

    def _write(self, candidates: Sequence[Candidate], not_used: Mapping[str, Rejection]) -> None:
        split = self._splits.choose(candidates[0])
        for files in self._formats:
            for candidate, rejection in files.add(split, candidates, not_used):
                identity = self._identity(candidate.record, candidate.number)
                self._write_reject(identity, rejection, files.export.format)

    def _leave_out(self, identity: _Identity, rejection: Rejection) -> None:
        self._rejected[rejection.reason] += 1
        self._write_reject(identity, rejection, None)

    def finish(self) -> dict[str, Any]:
        """Close all files; returns the part of the manifest that describes them."""
        formats = [files.finish() for files in self._formats]
        digest = self._rejects.finish()
        statistics = self._statistics.to_json()
        del statistics["duration_s"]
        evaluation = self._filters.evaluation
        return {
            "rejected": self._rejected.total(),
            "rejected_by_reason": dict(sorted(self._rejected.items())),
            **({} if evaluation is None else {"evaluation": evaluation.counts()}),
            "selected": self.selected.total(),
            "models": [
                {"model": name, "records": count} for name, count in sorted(self._models.items())
            ],
            "formats": formats,
            "rejects": Written(
                path="rejects.jsonl",
                rows=self._reject_lines,
                size=self._rejects.size,
                sha256=digest,
            ).to_json(),
            "statistics": statistics,
        }

    def _filter_group(self, numbers: Sequence[int], loaded: Iterator[Record]) -> _FilteredGroup:
        """Filter the next records of `loaded`, which are those of the tasks `numbers`."""
        candidates: list[Candidate] = []
        rejected: list[tuple[_Identity, Rejection]] = []
        outcomes: list[bool | None] = []
        bounds = self._rate_bounds
        for number, record in zip(numbers, loaded, strict=False):
            if self._needs_rates:
                outcomes.append(self._filters.passed(record))
            result = self._filter_record(number, record)
            # The pass rate is known after the last sample. A sample that its bounds leave out must
            # not make a later one a duplicate, so duplicates are looked for after that.
            if isinstance(result, Candidate) and bounds is None:
                result = self._find_duplicate(result) or result
            if isinstance(result, Candidate):
                candidates.append(result)
            else:
                rejected.append((self._identity(record, number), result))
        if not self._needs_rates:
            return _FilteredGroup(candidates, None, rejected)
        passed = outcomes.count(True)
        judged = passed + outcomes.count(False)
        rate = self._records.pass_rate(numbers[0], judged, passed)
        if bounds is not None:
            out_of_bounds: Rejection | None = None
            if rate is None or not bounds[0] <= rate <= bounds[1]:
                detail = f"{passed} of {judged} samples passed" if judged else "none was judged"
                out_of_bounds = Rejection("pass_rate", detail)
            filtered, candidates = candidates, []
            for candidate in filtered:
                rejection = out_of_bounds or self._find_duplicate(candidate)
                if rejection is None:
                    candidates.append(candidate)
                else:
                    identity = self._identity(candidate.record, candidate.number)
                    rejected.append((identity, rejection))
        return _FilteredGroup(candidates, rate, rejected)

    def _filter_record(self, number: int, record: Record) -> Candidate | Rejection:
        """Apply the filters that look at one record, except those for duplicates."""
        if (rejection := self._filters.rejection(record)) is not None:
            return rejection
        try:
            candidate = self._load(number, record)
            if self._lengths is None:
                return candidate
            length = self._lengths.count(candidate.parsed)
        except Rejected as rejected:
            return rejected.as_rejection()
        return self._check_length(length) or candidate

    def _load(self, number: int, record: Record) -> Candidate:
        """Parse the conversation of a record, if something needs it. Raises Rejected."""
        run = self._records.find_run_name(number)
        if not self._needs_conversations:
            return Candidate(record, conversation=None, number=number, run=run)
        conversation = _read_accepted(record, self._tolerances)
        if self._is_mix:
            metadata = {**conversation.metadata, "run": run}
            conversation = msgspec.structs.replace(conversation, metadata=metadata)
        return Candidate(record, conversation=conversation, number=number, run=run)

    def _check_length(self, length: int) -> Rejection | None:
        filters = self._recipe.filters
        if filters.min_length is not None and length < filters.min_length:
            return Rejection("min_length", f"{length:,} tokens")
        if filters.max_length is not None and length > filters.max_length:
            return Rejection("max_length", f"{length:,} tokens")
        return None

    def _find_duplicate(self, candidate: Candidate) -> Rejection | None:
        """The reason why a candidate is left out as a copy of an earlier one; None if it is new."""
        record = candidate.record
        if self._without_equal and not self._is_new(candidate.number, record):
            return Rejection("exact_duplicates", "says the same as an earlier conversation")
        if self._near is None or self._filters.row_rejection(record) is not None:
            # A record without a row of its own must not exclude others.
            return None
        if earlier := self._near.find_or_add(record):
            return Rejection("near_duplicates", f"says nearly the same as {earlier}")
        return None

    def _is_new(self, number: int, record: Record) -> bool:
        content = content_key(record)
        return self._seen.is_new(
            number, hash(content), lambda earlier: content_key(self._read(earlier)) == content
        )

    def _reject_unused(self, candidates: list[Candidate]) -> dict[str, Rejection]:
        """The candidates of one prompt that have no row of their own, by id."""
        left_out: dict[str, Rejection] = {}
        if not self._has_groups:
            return left_out
        filters = self._recipe.filters
        ranked = []
        for candidate in candidates:
            if (why := self._filters.row_rejection(candidate.record)) is None:
                ranked.append(candidate)
            else:
                left_out[candidate.record.id] = why
        if filters.best_n is not None:
            ranked.sort(key=partial(_reward_key, self._recipe.reward_name))
        count = filters.first_n or filters.best_n or len(candidates)
        name = "first_n" if filters.first_n else "best_n"
        for candidate in ranked[count:]:
            detail = f"{count} others of its prompt are kept"
            left_out[candidate.record.id] = Rejection(name, detail)
        return left_out

    def _write_reject(
        self, identity: _Identity, rejection: Rejection, format: Format | None
    ) -> None:
        """Write a line of rejects.jsonl; `format` is None if the record has a row in no format."""
        reason, detail = rejection
        # What no format accepts is reported for the first format.
        if hint := (format or self._row_formats[0]).how_to_keep(reason):
            detail = f"{detail}; {hint}"
        line = {
            **identity,
            "format": None if format is None else format.name,
            "reason": reason,
            # It may quote a model's text with halves of surrogate pairs.
            "detail": detail.encode(errors="replace").decode(),
        }
        self._rejects.write(orjson.dumps(line) + b"\n")
        self._reject_lines += 1

    def _identity(self, record: Record, number: int) -> _Identity:
        identity = {"id": record.id, "status": record.status}
        if self._is_mix:
            identity["run"] = self._records.find_run_name(number)
        return identity


def _reward_key(name: str | None, candidate: Candidate) -> float:
    """A sort key: highest reward first, candidates without a reward last."""
    reward = training_reward(candidate.record, name)
    return float("inf") if reward is None else -reward


def _versions(recipe: Recipe) -> dict[str, str]:
    names = ["batch-trajectories"]
    names += dict.fromkeys(package for one in recipe.copies for package in one.packages)
    if recipe.filters.near_duplicates is not None:
        names.append("rensa")
    if recipe.filters.secrets == "all":
        names.append("detect-secrets")
    return package_versions(names)
