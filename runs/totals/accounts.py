"""The accounts of a run: every row x sample is exactly one of done, failed, discarded, pending.

Computed from the dataset and what lies in the run directory, never accumulated, so that they
are right after any crash and can be computed from another process while the run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan
from runs.store.checks import Checks, CheckSums, describe
from runs.store.failures import load_failed_attempts
from runs.store.index import Index, IndexEntry
from runs.store.journal import under_way
from runs.store.records import load_index
from runs.store.settled import WORKER_DIED, Settled, is_settled
from runs.totals.spending import sum_up_spending


@dataclass(frozen=True, slots=True)
class Accounts:
    """The sums of a run."""

    prompts: int
    """Rows of the dataset, bad ones included, after `--max_samples`."""
    samples: int
    done: int
    """Tasks whose conversation came to an ending, at a bound or by an answer."""
    failed: int
    """Tasks whose last attempt failed."""
    to_retry: int
    """Those of them that the next start tries again."""
    discarded: int
    """Tasks that never were: bad rows x samples."""
    pending: int
    """Tasks not finished yet."""
    under_way: int
    """Those of them that have turns in the journal, which the next start goes on from."""
    turns_under_way: int
    """The model replies that are journaled for them."""
    statuses: Mapping[str, int]
    """Records by status."""
    failures: Mapping[str, int]
    """Failed tasks by class."""
    turns: int
    tool_calls: int
    input_tokens: int
    output_tokens: int
    tokens_unknown: int
    """Records whose token counts the endpoint did not tell; they count in no sum."""
    cost_usd: float
    """What the records that count cost."""
    cost_unknown: int
    """Records whose cost is unknown; they count in no sum."""
    spent_usd: float
    """What the run has spent in all, whatever became of it; see `runs.totals.spending`."""
    spent_unknown: int
    """Records and replies, of all of these, whose cost is unknown."""
    checks: Checks
    """What judged the records that count, see `runs.store.checks`."""
    prompts_checked: int
    """Prompts with a sample that was checked."""
    prompts_passed: int
    """Those of them with a sample that passed: pass@k, where k is the number of samples."""
    gone: int
    """Records of tasks that the dataset no longer holds; they count in no sum."""
    shard: str | None = None
    """The part of the dataset that the run is about, as i/n; None for all of it."""

    @property
    def total(self) -> int:
        """All tasks: prompts x samples."""
        return self.prompts * self.samples

    def to_json(self) -> dict[str, Any]:
        """For summary.json and `--json`."""
        return {"tasks": self.total, **asdict(self)}


def account(
    run_dir: Path, scan: Scan, config: RunConfig, *, index: Index | None = None
) -> Accounts:
    """Compute the accounts; reads no row of the dataset and writes nothing.

    `index` are the records that count, for a caller that knows them already.
    """
    # Before the records: what ends meanwhile has its record by then.
    journaled = under_way(run_dir / "inflight")
    if index is None:
        index = load_index(run_dir)
    spent = sum_up_spending(run_dir, index, journaled, Settled(index, config.max_attempts))
    turns_in_journal = {key: len(one.replies) for key, one in journaled.tasks.items()}
    failed_attempts = load_failed_attempts(run_dir)
    counts: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    checks = CheckSums()
    checked_prompt = passed_prompt = -1
    cost = 0.0
    rows, gone = index.match(scan.keys)
    for number, row in enumerate(rows):
        if not row:
            key = scan.key(number)
            if key in failed_attempts:
                counts["failed"] += 1
                counts["to_retry"] += 1
                failures[failed_attempts[key]] += 1
            else:
                counts["pending"] += 1
                counts["under_way"] += key in turns_in_journal
                counts["turns_under_way"] += turns_in_journal.get(key, 0)
            continue
        entry = index.entry(row)
        statuses[entry.status] += 1
        if entry.status == "failed":
            counts["failed"] += 1
            counts["to_retry"] += not is_settled(entry, config.max_attempts)
            failures[entry.error_class or "unknown"] += 1
        else:
            counts["done"] += 1
        cost += entry.cost_usd or 0.0
        _count_work(counts, entry)
        if entry.reward is None:
            continue
        checks.add(entry.passed, entry.reward)
        prompt = number // scan.num_samples
        counts["prompts_checked"] += prompt != checked_prompt
        checked_prompt = prompt
        if entry.passed:
            counts["prompts_passed"] += prompt != passed_prompt
            passed_prompt = prompt
    return Accounts(
        prompts=scan.rows + len(scan.bad_rows),
        samples=scan.num_samples,
        done=counts["done"],
        failed=counts["failed"],
        to_retry=counts["to_retry"],
        discarded=len(scan.bad_rows) * scan.num_samples,
        pending=counts["pending"],
        under_way=counts["under_way"],
        turns_under_way=counts["turns_under_way"],
        statuses=dict(sorted(statuses.items())),
        failures=dict(sorted(failures.items())),
        turns=counts["turns"],
        tool_calls=counts["tool_calls"],
        input_tokens=counts["input_tokens"],
        output_tokens=counts["output_tokens"],
        tokens_unknown=counts["tokens_unknown"],
        cost_usd=cost,
        cost_unknown=counts["cost_unknown"],
        spent_usd=spent.usd,
        spent_unknown=spent.unknown,
        checks=checks.sums(),
        prompts_checked=counts["prompts_checked"],
        prompts_passed=counts["prompts_passed"],
        gone=gone,
        shard=None if scan.shard is None else str(scan.shard),
    )


def _count_work(counts: Counter[str], entry: IndexEntry) -> None:
    counts["turns"] += entry.turns
    counts["tool_calls"] += entry.tool_calls
    counts["input_tokens"] += entry.input_tokens or 0
    counts["output_tokens"] += entry.output_tokens or 0
    if entry.turns:
        counts["tokens_unknown"] += entry.input_tokens is None or entry.output_tokens is None
        counts["cost_unknown"] += entry.cost_usd is None


def as_table(accounts: Accounts) -> str:
    """The accounts for a person: the sums first, then what they are made of."""
    lines = [
        f"{accounts.prompts} prompts x {accounts.samples} = {accounts.total} tasks"
        + (f"  (shard {accounts.shard} of the dataset)" if accounts.shard else ""),
        f"  done       {accounts.done:>9,}{_listed(accounts.statuses, leave_out='failed')}",
        f"  failed     {accounts.failed:>9,}{_listed(accounts.failures)}",
        f"  discarded  {accounts.discarded:>9,}{'  bad rows' if accounts.discarded else ''}",
        f"  pending    {accounts.pending:>9,}{_under_way(accounts)}",
        f"turns {accounts.turns:,}, tool calls {accounts.tool_calls:,}, "
        f"tokens {accounts.input_tokens:,} in and {accounts.output_tokens:,} out"
        + (f" (unknown for {accounts.tokens_unknown:,} tasks)" if accounts.tokens_unknown else ""),
        _cost(accounts),
        *_checked(accounts),
    ]
    if accounts.to_retry:
        lines.append(f"run the same command again to retry {accounts.to_retry:,} failed tasks")
    elif accounts.failed > accounts.failures.get(WORKER_DIED, 0):
        lines.append("all attempts are used up; raise --max_attempts to retry the failed tasks")
    if accounts.gone:
        lines.append(f"{accounts.gone:,} records belong to rows that are no longer in the dataset")
    return "\n".join(lines)


def _under_way(accounts: Accounts) -> str:
    if not accounts.under_way:
        return ""
    return f"  {accounts.under_way:,} in flight, {accounts.turns_under_way:,} turns saved"


def _checked(accounts: Accounts) -> list[str]:
    told = describe(accounts.checks)
    if told and accounts.samples > 1:
        told += (
            f"; {accounts.prompts_passed:,} of {accounts.prompts_checked:,} prompts passed at "
            "least once"
        )
    return [told] if told else []


def _cost(accounts: Accounts) -> str:
    rows = _dollars(accounts.cost_usd, accounts.cost_unknown, "tasks")
    spent = _dollars(accounts.spent_usd, accounts.spent_unknown, "records and replies")
    return f"cost {rows} for these tasks, {spent} spent by the run in total"


def _dollars(known: float, unknown: int, what: str) -> str:
    if unknown and not known:
        return "unknown"
    return f"${known:,.4f}" + (f" (and unknown for {unknown:,} {what})" if unknown else "")


def _listed(counts: Mapping[str, int], leave_out: str = "") -> str:
    listed = ", ".join(f"{name} {n:,}" for name, n in counts.items() if name != leave_out)
    return f"  {listed}" if listed else ""
