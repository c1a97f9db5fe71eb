"""The totals of a run and all that it has spent.

Each row x sample is exactly one of done, failed, discarded, pending.

Computed from the dataset and the run directory, never accumulated. So they are right after any
crash, and another process can compute them during the run.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batch_trajectories.basics.console import WARNING
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.stop_rules import NEVER
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.hopeless import (
    NO_REASON,
    EndingCounts,
    SignSeen,
    find_signs,
    offers_tools,
)
from batch_trajectories.records.checks import Checks, CheckSums, describe, has_passed
from batch_trajectories.records.failures import (
    WORKER_DIED,
    Settled,
    is_settled,
    load_failed_attempts,
    why_tasks_failed,
)
from batch_trajectories.records.files import list_directory, read_json, training_path
from batch_trajectories.records.index import Ending, Index
from batch_trajectories.records.journal import (
    Journaled,
    JournaledReplies,
    damaged_cost,
    damaged_replies,
    read_journaled_replies,
)
from batch_trajectories.records.names import (
    EXPORTS,
    INFLIGHT,
    MANIFEST_FILE,
    QUARANTINE,
    SCORES_FILE,
    SESSIONS,
    VERDICTS_FILE,
)
from batch_trajectories.records.records import load_index, read_lines
from batch_trajectories.records.scores import apply_later_checks

if TYPE_CHECKING:
    from batch_trajectories.engine.stopping import Samples, StoppingRule


# Tasks that have no record, and samples that are no tasks.


class Owed(NamedTuple):
    """Tasks without a record, and samples that are no tasks."""

    failed: int
    """Tasks whose last attempt failed."""
    pending: int
    not_needed: int
    """See `RunTotals.not_needed`."""


def count_owed(run_dir: Path, scan: Scan, config: RunConfig | None, without: Iterable[int]) -> Owed:
    """Sort the tasks `without` a record, for a manifest; if `config` is None, all of them count."""
    failed_attempts = load_failed_attempts(run_dir)
    numbers = array("I", without)
    samples = None
    if config is not None and config.until_passed is not None:
        begun = read_journaled_replies(run_dir / INFLIGHT).tasks
        index = load_index(run_dir)
        rows, _ = index.match(scan.keys)
        samples = needed_samples(run_dir, config, scan, index, rows, begun=begun)
    tasks = [n for n in numbers if samples is None or samples.is_task(n)]
    failed = sum(scan.key(number) in failed_attempts for number in tasks)
    return Owed(failed, len(tasks) - failed, len(numbers) - len(tasks))


def needed_samples(
    run_dir: Path,
    config: RunConfig,
    scan: Scan,
    index: Index,
    rows: array[int],
    *,
    begun: Container[bytes],
) -> Samples | None:
    """Which samples are needed; None without `--until_passed`: all of them. See `read_samples`."""
    if config.until_passed is None:
        return None
    from batch_trajectories.engine.stopping import read_samples

    return read_samples(run_dir, config, scan, index, rows, begun=begun)


def stopping_rule(config: RunConfig | None) -> StoppingRule | None:
    """The rule of `--until_passed`; None without that, or without a config."""
    if config is None or config.until_passed is None:
        return None
    from batch_trajectories.engine.stopping import stopping_rule  # most runs have none

    return stopping_rule(config)


_MAX_LISTED_REASONS = 5


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """The totals of a run."""

    prompts: int
    """Rows of the dataset, including bad ones, after `--max_samples`."""
    samples: int
    """Samples of a prompt; with `--until_passed` the maximum."""
    not_needed: int | None = None
    """Samples that are no tasks: `--until_passed` does not need them, so far."""
    enough: int | None = None
    """With `--until_passed`: prompts with enough passed (and failed) samples, so that their
    remaining samples are skipped; else None."""
    used_up: int | None = None
    """Other prompts whose samples have all ended."""
    done: int = 0
    """Tasks whose conversation has ended, by an answer or at a limit."""
    failed: int = 0
    """Tasks whose last attempt failed."""
    to_retry: int = 0
    """Failed tasks that the next start tries again."""
    discarded: int
    """Bad rows x samples."""
    pending: int = 0
    """Tasks that are not finished."""
    under_way: int = 0
    """Pending tasks with turns in the journal; the next start continues them."""
    turns_under_way: int = 0
    """Model replies in the journal of these."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """Records by status."""
    completed_passed: int = 0
    """Completed conversations that passed; see `records.checks.has_passed`."""
    completed_not_passed: int = 0
    """Completed conversations that did not; the others were neither checked nor scored."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed tasks by class."""
    reasons: Sequence[Mapping[str, Any]] = ()
    """The reasons why tasks failed, the most frequent first: `class`, `message`, `count`."""
    turns: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tokens_unknown: int = 0
    """Records without token counts from the endpoint; the sums of tokens leave them out."""
    token_ids: Mapping[str, int] | None = None
    """Turns with and without token ids, if the run asked for them: from `statistics.json`, so
    None before the run's end."""
    cost_usd: float | None = 0.0
    """Cost of the tasks that count, as far as it is known; None if none of it is."""
    cost_unknown: int = 0
    """Tasks of unknown cost; the sum leaves them out."""
    spent_usd: float | None
    """All that the run has spent, as far as it is known; None if none of it is. See
    `read_spending`."""
    spent_unknown: int
    """Records and replies of unknown cost; `spent_usd` leaves them out."""
    judges_usd: float | None
    """Dollars paid for judges after the run, which `spent_usd` leaves out; None if unknown."""
    judges_unknown: int
    """Replies of judges of unknown cost; `judges_usd` leaves them out."""
    checks: Checks
    """Results of checks over the records that count; see `records.checks`."""
    prompts_checked: int = 0
    """Prompts with a sample that was checked or scored."""
    prompts_passed: int = 0
    """Prompts with a sample that passed: pass@k, where k is the number of samples."""
    gone: int
    """Records of tasks that the dataset no longer holds; no total includes them."""
    shard: str | None
    """The part of the dataset that the run works on, as i/n; None for all of it."""
    signs: Sequence[SignSeen] = ()
    """Signs that the run gives nothing to train on; see `engine.hopeless`."""
    is_recording: bool
    """The conversations are sessions of `record`, which cannot begin them again."""

    @property
    def total(self) -> int:
        """All tasks: prompts x samples, without those that are not needed."""
        return self.prompts * self.samples - (self.not_needed or 0)

    @property
    def open_prompts(self) -> int | None:
        """Prompts that still need samples; None without `--until_passed`."""
        if self.enough is None or self.used_up is None:
            return None
        return self.prompts - self.discarded // self.samples - self.enough - self.used_up

    def to_json(self) -> dict[str, Any]:
        """The values for summary.json, without the pay of judges, which changes after the run.

        A cost of which nothing is known is 0 there, beside the number of unknown costs.
        """
        totals = {"tasks": self.total, **asdict(self)}
        for name in ("cost_usd", "spent_usd"):
            totals[name] = totals[name] or 0.0
        totals["signs"] = [sign.to_json() for sign in self.signs]
        del totals["judges_usd"], totals["judges_unknown"], totals["is_recording"]
        for name in ("token_ids", "not_needed", "enough", "used_up"):
            if totals[name] is None:
                del totals[name]
        return totals


class _PassCounts:
    """Counts checked and passed conversations, and prompts with one; tasks come in order."""

    def __init__(self, num_samples: int) -> None:
        self.checks = CheckSums()
        self._num_samples = num_samples
        self._completed_passed = 0
        self._completed_not_passed = 0
        self._prompts_checked = 0
        self._prompts_passed = 0
        self._last_checked = -1
        """The number of the last prompt with a check; its samples follow one another."""
        self._last_passed = -1

    def add(self, number: int, ending: Ending, reward: float | None) -> None:
        """Add the record of task `number`; `reward` is None if it has none."""
        if reward is None and ending.error_class is None:
            return
        self.checks.add(ending.verdict, reward, check_failed=ending.check_failed)
        if reward is None:
            return
        passed = has_passed(ending.verdict, reward) is True
        if ending.status == "completed":
            self._completed_passed += passed
            self._completed_not_passed += not passed
        prompt = number // self._num_samples
        self._prompts_checked += prompt != self._last_checked
        self._last_checked = prompt
        if passed:
            self._prompts_passed += prompt != self._last_passed
            self._last_passed = prompt

    def write(self, totals: RunTotals) -> None:
        """Set the counts in `totals`."""
        totals.completed_passed = self._completed_passed
        totals.completed_not_passed = self._completed_not_passed
        totals.prompts_checked = self._prompts_checked
        totals.prompts_passed = self._prompts_passed
        totals.checks = self.checks.sums()


def compute_totals(
    run_dir: Path, scan: Scan, config: RunConfig, *, index: Index | None = None
) -> RunTotals:
    """Compute the totals; reads no row of the dataset and writes nothing.

    `index` holds the records that count, if the caller has it.
    """
    # Before the records: a conversation that ends meanwhile is then in one of the two.
    journaled = read_journaled_replies(run_dir / INFLIGHT)
    index = apply_later_checks(run_dir, load_index(run_dir) if index is None else index)
    spent = sum_up_spending(run_dir, index, journaled, Settled(index, config.max_attempts))
    judges = spent_by_judges(run_dir)
    failed_attempts = load_failed_attempts(run_dir)
    rows, gone = index.match(scan.keys)
    sums = index.sums(filter(None, rows))
    statuses: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for ending, count in sums.endings.items():
        statuses[ending.status] += count
        if ending.status == "failed":
            failures[ending.error_class or "unknown"] += count
    passes = _PassCounts(scan.num_samples)
    totals = RunTotals(
        prompts=scan.rows + len(scan.bad_rows),
        samples=scan.num_samples,
        done=sums.endings.total() - statuses["failed"],
        failed=statuses["failed"],
        discarded=len(scan.bad_rows) * scan.num_samples,
        statuses=dict(sorted(statuses.items())),
        turns=sums.turns,
        tool_calls=sums.tool_calls,
        input_tokens=sums.input_tokens,
        output_tokens=sums.output_tokens,
        tokens_unknown=sums.tokens_unknown,
        cost_usd=sums.cost_usd,
        cost_unknown=sums.cost_unknown,
        spent_usd=spent.known_usd,
        spent_unknown=spent.unknown,
        judges_usd=judges.known_usd,
        judges_unknown=judges.unknown,
        checks=passes.checks.sums(),
        gone=gone,
        shard=None if scan.shard is None else str(scan.shard),
        is_recording=(run_dir / SESSIONS).is_dir(),
    )
    if (
        samples := needed_samples(run_dir, config, scan, index, rows, begun=journaled.tasks)
    ) is not None:
        totals.not_needed = samples.not_needed
        totals.enough, totals.used_up = samples.met, samples.used_up
    failed: set[bytes] = set()
    for number, (row, (ended, reward)) in enumerate(zip(rows, index.judgements(rows), strict=True)):
        if ended is None:
            key = scan.key(number)
            if samples is not None and not samples.is_task(number):
                continue
            if key in failed_attempts:
                failed.add(key)
                totals.failed += 1
                totals.to_retry += 1
                failures[failed_attempts[key]] += 1
                _add_attempts(totals, journaled.tasks.get(key))
            else:
                totals.pending += 1
                if (replies := journaled.tasks.get(key)) is not None:
                    totals.under_way += 1
                    totals.turns_under_way += replies.turns
            continue
        if ended.status == "failed":
            failed.add(scan.key(number))
            is_over = is_settled(index.entry(row), config.max_attempts)
            totals.to_retry += not is_over and (samples is None or samples.must_run(number))
        passes.add(number, ended, reward)
    passes.write(totals)
    totals.cost_usd = known_usd(totals.cost_usd or 0.0, totals.cost_unknown)
    totals.failures = dict(sorted(failures.items()))
    totals.reasons = why_tasks_failed(run_dir, failed)
    totals.signs = _signs(run_dir, totals, config)
    return totals


def _signs(run_dir: Path, totals: RunTotals, config: RunConfig) -> list[SignSeen]:
    """The signs in the totals, and in what the last export of the training file rejected."""
    if config.stop_if == (NEVER,) or config.audit or config.checked_run:
        return []
    reasons = Counter(totals.failures)
    for status, count in totals.statuses.items():
        if status not in (*NO_REASON, "failed"):
            reasons[status] += count
    manifest = read_json(run_dir / EXPORTS / MANIFEST_FILE) or {}
    rejected = Counter[str](manifest.get("rejected_by_reason") or {})
    del rejected["failed"]
    given = sum(int(manifest.get(name) or 0) for name in ("exported", "partial"))
    return find_signs(
        EndingCounts(
            ended=totals.done + totals.failed,
            failed=totals.failed,
            judged=totals.checks.passed + totals.checks.failed,
            passed=totals.checks.passed,
            tool_calls=totals.tool_calls,
            offers_tools=offers_tools(config),
            reasons=reasons,
            looked_at=given + rejected.total(),
            rejected=rejected,
        )
    )


def _add_attempts(totals: RunTotals, replies: JournaledReplies | None) -> None:
    """Add what a task was paid for that has no record yet; journals do not sum up its tokens."""
    if replies is not None:
        totals.turns += replies.turns
        totals.tokens_unknown += 1
        costs = sum(cost or 0.0 for cost in replies.costs)
        totals.cost_usd = (totals.cost_usd or 0.0) + costs
        totals.cost_unknown += None in replies.costs


def as_table(totals: RunTotals) -> str:
    """The totals for a person: sums first, then their parts."""
    unknown = totals.tokens_unknown
    lines = [
        f"{plural(totals.prompts, 'prompt')} x {_describe_samples(totals)} = "
        f"{plural(totals.total, 'task')}"
        + (f"  (shard {totals.shard} of the dataset)" if totals.shard else ""),
        f"  done       {totals.done:>9,}{_list_counts(totals.statuses, leave_out='failed')}",
        f"  failed     {totals.failed:>9,}{_list_counts(totals.failures)}",
        *(
            f"             {reason['count']:>9,}  {reason['class']}: {reason['message']}"
            for reason in totals.reasons[:_MAX_LISTED_REASONS]
        ),
        f"  discarded  {totals.discarded:>9,}{_bad_rows(totals)}",
        f"  pending    {totals.pending:>9,}{_describe_in_flight(totals)}",
        f"turns {totals.turns:,}, tool calls {totals.tool_calls:,}, "
        f"tokens {totals.input_tokens:,} in and {totals.output_tokens:,} out"
        + (f" (unknown for {unknown:,} of the tasks)" if unknown else ""),
        *_token_ids(totals),
        *_describe_stopped(totals),
        _cost(totals),
        *_describe_checks(totals),
        *(f"{WARNING}{sign.text}" for sign in totals.signs),
    ]
    if totals.to_retry:
        lines.append(
            f"run the same command again to retry {plural(totals.to_retry, 'failed task')}"
        )
    elif totals.failed > totals.failures.get(WORKER_DIED, 0) and not totals.is_recording:
        lines.append("all attempts are used up; raise --max_attempts to retry the failed tasks")
    if totals.gone:
        lines.append(f"{plural(totals.gone, 'task')} of rows that are no longer in the dataset")
    return "\n".join(lines)


def as_html(path: Path, totals: RunTotals, more: Mapping[str, str]) -> str:
    """The totals of the run in `path` as an HTML table, for notebooks; `more` are further rows."""
    checks = totals.checks
    judged = checks.passed + checks.failed
    rows = {
        "run": str(path),
        "conversations": describe_counts(totals),
        "passed": f"{checks.passed:,} of {judged:,} judged" if judged else "not judged",
        "cost": _cost_or_none(totals),
        "training file": str(training_path(path)),
        **more,
    }
    cells = (
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _cost_or_none(totals: RunTotals) -> str:
    if totals.spent_usd is None:
        return "None"
    return describe_dollars(totals.spent_usd, totals.spent_unknown, "records and replies")


def describe_counts(totals: RunTotals) -> str:
    """The tasks by how they stand: "12 done, 3 pending"."""
    counts = {"done": totals.done, "failed": totals.failed, "pending": totals.pending}
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def _describe_samples(totals: RunTotals) -> str:
    if totals.not_needed is None:
        return str(totals.samples)
    return f"up to {totals.samples}, {totals.not_needed:,} of them not needed,"


def _bad_rows(totals: RunTotals) -> str:
    if not totals.discarded:
        return ""
    return f"  of {plural(totals.discarded // totals.samples, 'bad row')}"


def _token_ids(totals: RunTotals) -> list[str]:
    if totals.token_ids is None:
        return []
    having, without = totals.token_ids["turns_with"], totals.token_ids["turns_without"]
    return [f"token ids: {plural(having, 'turn')} with, {plural(without, 'turn')} without"]


def _describe_stopped(totals: RunTotals) -> list[str]:
    if totals.open_prompts is None:
        return []
    return [
        f"prompts with enough passed {totals.enough:,}, with all samples used up "
        f"{totals.used_up:,}, open {totals.open_prompts:,}"
    ]


def _describe_in_flight(totals: RunTotals) -> str:
    if not totals.under_way:
        return ""
    return f"  {totals.under_way:,} in flight, {plural(totals.turns_under_way, 'turn')} saved"


def _describe_checks(totals: RunTotals) -> list[str]:
    line = describe(totals.checks)
    if line and totals.samples > 1:
        prompts = plural(totals.prompts_checked, "prompt")
        line += f"; {totals.prompts_passed:,} of {prompts} passed at least once"
    return [line] if line else []


def _cost(totals: RunTotals) -> str:
    rows = describe_dollars(totals.cost_usd, totals.cost_unknown, "tasks")
    spent = describe_dollars(totals.spent_usd, totals.spent_unknown, "records and replies")
    line = f"cost of these tasks {rows}, spent in total {spent}"
    if totals.judges_usd or totals.judges_unknown:
        line += f", judges {describe_dollars(totals.judges_usd, totals.judges_unknown, 'replies')}"
    return line


def known_usd(usd: float, unknown: int) -> float | None:
    """A sum of dollars that leaves `unknown` costs out; None if none of them is known."""
    return None if unknown and not usd else usd


def format_usd(usd: float | None) -> str:
    """A cost in the short text of an object: `cost_usd=0.1234`, or `cost_usd=None`."""
    return "cost_usd=None" if usd is None else f"cost_usd={usd:.4f}"


def describe_dollars(known: float | None, unknown: int, what: str) -> str:
    """Dollars for a person; `unknown` is the number of costs that the sum leaves out."""
    if known is None or known_usd(known, unknown) is None:
        return "unknown"
    return f"${known:,.4f}" + (f" (and unknown for {unknown:,} of the {what})" if unknown else "")


def _list_counts(counts: Mapping[str, int], leave_out: str = "") -> str:
    listed = ", ".join(f"{name} {n:,}" for name, n in counts.items() if name != leave_out)
    return f"  {listed}" if listed else ""


_RECORD_COST = re.compile(rb'"cost_usd":(null|[0-9.eE+-]+),"model_returned"')
"""The cost of a record and of its inner conversations; that of the record is last."""

_JUDGE_COST = re.compile(rb'"cost_usd":(null|[0-9.eE+-]+),"at":')
"""The cost of a judge's reply, in a line of one of its files; failed calls and functions have none.
It is read without parsing, so that damaged lines count, too."""

_JUDGE_FILES = (SCORES_FILE, VERDICTS_FILE)
_JUDGE_FILE = re.compile(r"(scores|verdicts)\.jsonl\..*")

_RECORD = re.compile(r"records\.jsonl\.line\d+(\.\d+)?")
_SEGMENT = re.compile(r"worker-\d+-\d+\.jsonl(\.line\d+)?(\.\d+)?")


class Spent(NamedTuple):
    """Dollars, and the number of records and replies of unknown cost."""

    usd: float
    unknown: int

    @property
    def known_usd(self) -> float | None:
        """The dollars; None if no cost is known."""
        return known_usd(self.usd, self.unknown)


def read_spending(run_dir: Path, max_attempts: int) -> Spent:
    """All that the run in `run_dir` has spent; writes nothing.

    The cost of every reply, even if its row is gone: from all records of the index, including those
    that later attempts replaced; from the journals of conversations that have not ended; and from
    unreadable lines that were set aside, if their cost can still be read. Charges for calls without
    a reply are unknown.
    """
    # In this order: a conversation that ends meanwhile is then in one of the two.
    journaled = read_journaled_replies(run_dir / INFLIGHT)
    index = load_index(run_dir)
    return sum_up_spending(run_dir, index, journaled, Settled(index, max_attempts))


def sum_up_spending(
    run_dir: Path, index: Index, journaled: Journaled, settled: Container[bytes]
) -> Spent:
    """`read_spending`, from an index and journals that the caller has read.

    `settled` are the tasks whose records include their journals.
    """
    usd, unknown = index.costs()
    unended = (replies.costs for key, replies in journaled.tasks.items() if key not in settled)
    set_aside = _costs_set_aside(run_dir / QUARANTINE, journaled.damaged)
    for cost in chain(chain.from_iterable(unended), set_aside):
        usd += cost or 0.0
        unknown += cost is None
    return Spent(usd, unknown)


def spent_by_judges(run_dir: Path) -> Spent:
    """The dollars that the judges of a run were paid; writes nothing.

    By `score` and by exports of earlier versions; computed from their replies.
    """
    set_aside = {
        file.read_bytes()
        for file in list_directory(run_dir / QUARANTINE)
        if _JUDGE_FILE.fullmatch(file.name)
    }
    lines = chain.from_iterable(read_lines(run_dir / name, 0) for name in _JUDGE_FILES)
    usd, unknown = 0.0, 0
    for line in chain((line for _, line in lines), sorted(set_aside)):
        if costs := _JUDGE_COST.findall(line):
            cost = _last(costs)
            usd += cost or 0.0
            unknown += cost is None
    return Spent(usd, unknown)


def _costs_set_aside(quarantine: Path, damaged: set[bytes]) -> Iterator[float | None]:
    """The cost of each record and reply that was set aside, None if unreadable.

    `damaged` are unreadable replies that are still in journals; the quarantine may have copies.
    """
    records, replies = set(), set(damaged)
    for file in list_directory(quarantine):
        if _RECORD.fullmatch(file.name):
            records.add(file.read_bytes())
        elif _SEGMENT.fullmatch(file.name):
            # Readable lines of the file are counted elsewhere: only damage is set aside.
            replies |= damaged_replies(file.read_bytes())
    for record in sorted(records):  # the same order gives the same rounding
        yield _last(_RECORD_COST.findall(record))
    for reply in sorted(replies):
        yield damaged_cost(reply)


def _last(costs: list[bytes]) -> float | None:
    try:
        return float(costs[-1])
    except (IndexError, ValueError):
        return None
