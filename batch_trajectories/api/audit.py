"""Audits the tasks of a dataset: `check_tasks`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from batch_trajectories.api.start import explain_exit, open_planned_run
from batch_trajectories.audit.verdicts import SOUND, TASKS_FILE, WHAT_TO_DO, write_verdicts
from batch_trajectories.basics.console import say
from batch_trajectories.basics.text import plural
from batch_trajectories.engine.plan import Plan, refuse_bad_rows, warn
from batch_trajectories.engine.run_totals import compute_totals
from batch_trajectories.engine.supervisor.run import run_batch
from toolsets.sandbox.factory import find_sandbox_class


@dataclass(frozen=True, slots=True)
class AuditEnd:
    """The result of a start of an audit."""

    path: Path
    """The directory of the audit, with tasks.jsonl."""
    verdicts: Counter[str]
    """Number of rows by verdict."""
    bad_rows: int
    """Number of rows that no run can use."""
    unfinished: int
    """Number of rows whose steps have not all ended."""
    exit_code: int
    """0: all tasks are sound; 1: some are not; else the exit code of a run."""
    reason: str | None
    """The reason why `exit_code` is neither 0 nor 1, and what to do next."""

    def as_table(self) -> str:
        """The verdicts with the number of rows and advice, as lines."""
        counted = {name: self.verdicts[name] for name in WHAT_TO_DO if self.verdicts[name]}
        lines = [f"{name:<18}{count:>9,}  {WHAT_TO_DO[name]}" for name, count in counted.items()]
        for count, name, meaning in (
            (self.bad_rows, "bad rows", "repair them: no run can use them (failures.jsonl)"),
            (self.unfinished, "unfinished", "run the same command again: it checks only the rest"),
        ):
            if count:
                lines.append(f"{name:<18}{count:>9,}  {meaning}")
        done = plural(self.verdicts.total(), "verdict")
        lines.append(f"{done} with evidence in {self.path / TASKS_FILE}; `report` makes a page")
        return "\n".join(lines)


def audit(
    plan: Plan, *, fresh: bool = False, accept_config_change: Collection[str] = ()
) -> AuditEnd:
    """Carry out the steps of an audit that have no record yet, and write tasks.jsonl.

    `plan` is made from a config by `audited`. Raises what `start` raises.
    """
    warn(plan, say)
    if plan.sandbox is not None and not find_sandbox_class(plan.sandbox).is_isolated:
        say(f"--sandbox={plan.sandbox} does not isolate: forged results are not tried")
    refuse_bad_rows(plan, say)
    with open_planned_run(plan, fresh=fresh, accept_config_change=accept_config_change) as run_dir:
        outcome = run_batch(plan, run_dir)
        verdicts = write_verdicts(run_dir.path, plan.scan)
        totals = compute_totals(run_dir.path, plan.scan, plan.config)
    exit_code, reason = explain_exit(outcome, totals)
    bad = len(plan.scan.bad_rows)
    if exit_code in (0, 1):
        exit_code = int(bad > 0 or verdicts.total() != verdicts[SOUND])
    unfinished = plan.scan.rows - verdicts.total()
    return AuditEnd(
        path=run_dir.path,
        verdicts=verdicts,
        bad_rows=bad,
        unfinished=unfinished,
        exit_code=exit_code,
        reason=reason,
    )
