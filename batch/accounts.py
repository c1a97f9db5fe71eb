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

from batch.failures import load_failed_attempts
from batch.prompts import Scan, tasks
from batch.records import Entry, load_index


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
    cost_unknown: int
    """Records whose cost is unknown; they count in no sum."""
    gone: int
    """Records of tasks that the dataset no longer holds; they count in no sum."""

    @property
    def total(self) -> int:
        """All tasks: prompts x samples."""
        return self.prompts * self.samples

    def to_json(self) -> dict[str, Any]:
        """For summary.json and `--json`."""
        return {"tasks": self.total, **asdict(self)}


def account(run_dir: Path, scan: Scan, *, num_samples: int) -> Accounts:
    """Compute the accounts; reads the dataset once and writes nothing."""
    entries = load_index(run_dir)
    failed_attempts = load_failed_attempts(run_dir)
    counts: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    cost = 0.0
    for task in tasks(scan, num_samples=num_samples):
        entry = entries.pop(task.key, None)
        if entry is None:
            if task.key in failed_attempts:
                counts["failed"] += 1
                counts["to_retry"] += 1
                failures[failed_attempts[task.key]] += 1
            else:
                counts["pending"] += 1
            continue
        statuses[entry.status] += 1
        if entry.status == "failed":
            counts["failed"] += 1
            failures[entry.error_class or "unknown"] += 1
        else:
            counts["done"] += 1
        cost += entry.cost_usd or 0.0
        _count_work(counts, entry)
    return Accounts(
        prompts=scan.rows + len(scan.bad_rows),
        samples=num_samples,
        done=counts["done"],
        failed=counts["failed"],
        to_retry=counts["to_retry"],
        discarded=len(scan.bad_rows) * num_samples,
        pending=counts["pending"],
        statuses=dict(sorted(statuses.items())),
        failures=dict(sorted(failures.items())),
        turns=counts["turns"],
        tool_calls=counts["tool_calls"],
        input_tokens=counts["input_tokens"],
        output_tokens=counts["output_tokens"],
        tokens_unknown=counts["tokens_unknown"],
        cost_usd=cost,
        cost_unknown=counts["cost_unknown"],
        gone=len(entries),
    )


def _count_work(counts: Counter[str], entry: Entry) -> None:
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
        f"{accounts.prompts} prompts x {accounts.samples} = {accounts.total} tasks",
        f"  done       {accounts.done:>9,}{_listed(accounts.statuses, leave_out='failed')}",
        f"  failed     {accounts.failed:>9,}{_listed(accounts.failures)}",
        f"  discarded  {accounts.discarded:>9,}{'  bad rows' if accounts.discarded else ''}",
        f"  pending    {accounts.pending:>9,}",
        f"turns {accounts.turns:,}, tool calls {accounts.tool_calls:,}, "
        f"tokens {accounts.input_tokens:,} in and {accounts.output_tokens:,} out"
        + (f" (unknown for {accounts.tokens_unknown:,} tasks)" if accounts.tokens_unknown else ""),
        f"cost ${accounts.cost_usd:,.4f}"
        + (f" (unknown for {accounts.cost_unknown:,} tasks)" if accounts.cost_unknown else ""),
    ]
    if accounts.to_retry:
        lines.append(f"the same command tries {accounts.to_retry:,} failed tasks again")
    if accounts.gone:
        lines.append(f"{accounts.gone:,} records belong to rows that the dataset no longer holds")
    return "\n".join(lines)


def _listed(counts: Mapping[str, int], leave_out: str = "") -> str:
    listed = ", ".join(f"{name} {n:,}" for name, n in counts.items() if name != leave_out)
    return f"  {listed}" if listed else ""
