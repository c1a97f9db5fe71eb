"""The budget of a run, granted to its workers in shares that never exceed what is left."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agent.messages.message import Event, reply_in
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import RunLocked
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import GrantBudget, ReclaimBudget, ReportBudget
from batch_trajectories.records.failures import is_failure
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    add_checksum,
    read_object,
    repair_tail,
    set_unreadable_aside,
)
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.journal import Inflight, is_event, segments
from batch_trajectories.records.names import BUDGET_FILE, FAILURES_FILE, INFLIGHT, QUARANTINE

if TYPE_CHECKING:
    from batch_trajectories.engine.shared_limits import SharedLimits

log = logging.getLogger(__name__)

_GRANTS_PER_SHARE = 2
"""A grant is about a worker's share of the remaining budget, divided by this."""


@dataclass(slots=True)
class _WorkerShare:
    """One worker's share of the budget, as far as the parent knows."""

    grants: int = 0
    """Grants that were sent to the worker."""
    grants_seen: int = 0
    calls: int = 0
    """The worker's calls with a reserved cost."""
    is_reclaimed: bool = False
    is_short: bool = False
    """The worker has no budget beyond these reservations."""
    wanted: Cost = field(default_factory=Cost)
    needs: list[Cost] = field(default_factory=list)
    """The amount that each waiting call needs; empty if no call waits."""

    @property
    def is_quiet(self) -> bool:
        """Whether the worker has nothing to return and no grant is on its way."""
        return self.is_short and not self.calls and self.grants == self.grants_seen


class RunBudget:
    """Grants what is left of the run's budget to workers that request it."""

    def __init__(
        self,
        budget: Cost | None,
        *,
        spent: Cost,
        budget_log: BudgetLog,
        shared: SharedLimits | None = None,
    ) -> None:
        """`spent` is what earlier starts have spent; see `sum_up_earlier_starts`.

        With `shared`, the budget is that of several runs. Raises what `SharedLimits.join` raises.
        """
        self.budget = budget
        self._log = budget_log
        self._shared = shared
        spent = _limited_part(spent, budget)
        self._left = (budget or Cost()) - spent
        if shared is not None:
            spent = shared.join(spent)
        known = budget_log.balance
        lost = Cost(max(0.0, spent.usd - known.usd), max(0, spent.tokens - known.tokens))
        if lost.usd > 1e-9 or lost.tokens:  # and not by rounding
            # In the log from now on, which alone has what calls of unknown cost may have cost. A
            # start without a budget wrote no log.
            budget_log.append("lent", lost)
        if shared is not None:
            shared.begin()
            self._left = Cost()
        self._shares: dict[WorkerHandle, _WorkerShare] = {}
        self._is_short = False

    def on_worker_budget(self, worker: WorkerHandle, report: ReportBudget) -> None:
        """Handle a worker's report of its budget; see `WorkerBudget`."""
        share = self._shares.setdefault(worker, _WorkerShare())
        share.grants_seen = report.grants
        share.calls = report.calls
        share.is_short = report.is_short
        share.wanted = report.wanted
        share.needs = report.needs
        if report.returned != Cost():
            self._left += report.returned
            self._log.append("returned", report.returned)

    def grant_shares(self, workers: Sequence[WorkerHandle]) -> None:
        """Grant the workers what is left, as far as they need it. A dead worker's share counts
        as spent."""
        if self.budget is None:
            return
        for gone in self._shares.keys() - set(workers):
            del self._shares[gone]
        if self._shared is not None:
            self._left += self._shared.take()
        unpaid: list[Cost] = []
        for worker in workers:
            share = self._shares.setdefault(worker, _WorkerShare())
            if not share.needs or share.grants != share.grants_seen:
                continue
            payable = [need for need in share.needs if self._left.covers(need)]
            if payable:
                self._grant(worker, share, payable[0], len(workers))
            else:
                unpaid += share.needs
        if self._shared is not None:
            self._ask(self._shared, unpaid, workers)
        elif unpaid:
            self._is_short = True
        if self._is_short:
            for worker, share in self._shares.items():
                if worker.ready and not share.is_reclaimed:
                    share.is_reclaimed = True
                    worker.send(ReclaimBudget())

    def used_up(self, workers: Sequence[WorkerHandle]) -> str | None:
        """The reason why the budget is used up; None while any call can still be paid for."""
        if not (needs := self._needs_of_all(workers)):
            return None
        if self._shared is not None and not self._shared.is_used_up:
            return None
        assert self.budget is not None
        least = min(needs, key=_claim_size)
        spent = self.budget - (self._left if self._shared is None else self._shared.left)
        parts = []
        if self.budget.usd:
            parts.append(
                f"${spent.usd:.4f} of ${self.budget.usd:g} (max_run_cost_usd) are spent, and the "
                f"next call may cost up to ${least.usd:.4f}"
            )
        if self.budget.tokens:
            parts.append(
                f"{spent.tokens:,} of {self.budget.tokens:,} tokens (max_run_tokens) are used, and "
                f"the next call may take up to {least.tokens:,}"
            )
        return "the budget of the run is used up: " + "; ".join(parts)

    def problem(self) -> str | None:
        """The reason why failing shared limits must stop the run; None if they work.

        Raises `RunLocked`.
        """
        problem = None if self._shared is None else self._shared.problem
        if isinstance(problem, RunLocked):
            raise problem
        return None if problem is None else str(problem)

    def close(self) -> None:
        """Return the unspent rest to the other runs; tell the user if that fails."""
        if self._shared is not None:
            returned, self._left = self._left, Cost()
            if (problem := self._shared.close(returned)) is not None:
                say(problem)

    def raise_to(self, usd: float) -> None:
        """Raise the budget in dollars. Raises `ValueError` without one, or for a lower amount."""
        if self.budget is None or not self.budget.usd:
            raise ValueError(
                "this start has no max_run_cost_usd, so there is none to raise; to set one, `stop` "
                "the run, then `run --run_name=RUN --max_run_cost_usd=N`"
            )
        if self._shared is not None:
            raise ValueError(
                "max_run_cost_usd is shared with other runs, which would not know of the change"
            )
        if usd < self.budget.usd:
            now = f"${self.budget.usd:g}"
            raise ValueError(f"max_run_cost_usd can only be raised during the run; it is {now}")
        self._left += Cost(usd - self.budget.usd)
        self.budget = Cost(usd, self.budget.tokens)
        self._is_short = False
        for share in self._shares.values():
            share.is_reclaimed = False

    def describe(self) -> str:
        """Text for the progress line; "" while the budget does not limit calls."""
        return "limited by the budget" if self._is_short else ""

    def _ask(
        self, shared: SharedLimits, unpaid: list[Cost], workers: Sequence[WorkerHandle]
    ) -> None:
        """Ask the other runs for the amount that calls need; return to them what pays for no
        call here."""
        returned = Cost()
        if unpaid and shared.is_refused:
            self._is_short = True
            returned, self._left = self._left, Cost()
        need = min(unpaid, key=_claim_size, default=None)
        shared.ask(need, returned=returned, waits=bool(self._needs_of_all(workers)))

    def _needs_of_all(self, workers: Sequence[WorkerHandle]) -> list[Cost]:
        """The amounts that waiting calls need; empty if a call is in flight or one can be
        granted."""
        ready = [self._shares[worker] for worker in workers if worker in self._shares]
        needs = [need for share in ready for need in share.needs]
        if not all(share.is_quiet for share in ready):
            return []
        return [] if any(self._left.covers(need) for need in needs) else needs

    def _grant(self, worker: WorkerHandle, share: _WorkerShare, need: Cost, workers: int) -> None:
        parts = _GRANTS_PER_SHARE * workers
        part = Cost(self._left.usd / parts, self._left.tokens // parts)
        grant = Cost(
            max(need.usd, min(share.wanted.usd, part.usd)),
            max(need.tokens, min(share.wanted.tokens, part.tokens)),
        )
        if self._is_short:
            grant = need
        self._left -= grant
        share.grants += 1
        share.needs = []
        # On disk before it can be spent: after a crash, what was not returned counts as spent.
        self._log.append("lent", grant)
        worker.send(GrantBudget(grant))


class BudgetLog:
    """`budget.jsonl`: grants to workers and what they returned, over all starts.

    Lines: {"kind": "lent" or "returned", "usd", "tokens"}. The difference counts as spent: a
    worker that was killed returned nothing.
    """

    def __init__(self, run_dir: Path, quarantine: Path, *, name: str = BUDGET_FILE) -> None:
        path = run_dir / name
        repair_tail(path, quarantine)
        self.balance = Cost()
        """The amount that was granted and not returned."""
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, text in enumerate(lines, 1):
            if (line := _read_line(text)) is None:
                log.warning("Line %s:%d is no line of the budget log and is skipped.", path, number)
            else:
                self._count(**line)
        self._path = path
        self._file: AppendFile | None = None

    def append(self, kind: str, amount: Cost) -> None:
        """Append a line; the first creates the file. Raises `StorageError`."""
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.check_exists()
        line = {"kind": kind, "usd": amount.usd, "tokens": amount.tokens}
        self._file.append(add_checksum(orjson.dumps(line)))
        self._count(kind, amount.usd, amount.tokens)

    def close(self) -> None:
        """Make all lines survive a power loss."""
        if self._file is not None:
            self._file.sync()
            self._file.close()

    def _count(self, kind: str, usd: float, tokens: int) -> None:
        amount = Cost(usd, tokens)
        self.balance = self.balance + amount if kind == "lent" else self.balance - amount


def is_budget_line(text: bytes) -> bool:
    """Whether a line of `budget.jsonl` can be read."""
    return _read_line(text) is not None


def _read_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    is_complete = (
        line.keys() == {"kind", "usd", "tokens"}
        and line["kind"] in ("lent", "returned")
        and isinstance(line["usd"], (int, float))
        and isinstance(line["tokens"], int)
    )
    return line if is_complete else None


def sum_up_earlier_starts(
    records: Iterable[IndexEntry],
    inflight: Inflight,
    budget_log: BudgetLog,
    *,
    held: Iterable[Cost] = (),
) -> Cost:
    """The amount that earlier starts have spent.

    The sum over `records`, including replaced ones, the journals of other tasks, and `held`, which
    is reserved for calls in batches; or the balance of the budget log if that is more, as it
    includes calls without a reply or a known cost.
    """
    spent = sum(held, Cost())
    for entry in records:
        tokens = (entry.input_tokens or 0) + (entry.output_tokens or 0)
        spent += Cost(entry.cost_usd or 0.0, tokens)
    for key in inflight.tasks():
        for event in inflight.events(key):
            spent += _event_cost(event)
    lent = budget_log.balance
    return Cost(max(spent.usd, lent.usd), max(spent.tokens, lent.tokens))


def _claim_size(need: Cost) -> tuple[float, int]:
    return need.usd, need.tokens


def _event_cost(event: Event) -> Cost:
    if (reply := reply_in(event)) is None:
        return Cost()
    usage = reply["usage"] or {"input_tokens": None, "output_tokens": None}
    tokens = (usage["input_tokens"] or 0) + (usage["output_tokens"] or 0)
    return Cost(reply["cost_usd"] or 0.0, tokens)


def _limited_part(spent: Cost, budget: Cost | None) -> Cost:
    """The part of `spent` that the budget limits: dollars, tokens or both."""
    if budget is None:
        return Cost()
    return Cost(spent.usd if budget.usd else 0.0, spent.tokens if budget.tokens else 0)


def set_aside_damaged(run_dir: Path) -> list[str]:
    """Move the unreadable lines of journals and logs to the quarantine; return their names.

    Call it before these files are read. Raises `StorageError`.
    """
    quarantine = run_dir / QUARANTINE
    names = set_unreadable_aside(run_dir / FAILURES_FILE, quarantine, is_failure)
    names += set_unreadable_aside(run_dir / BUDGET_FILE, quarantine, is_budget_line)
    for segment in sorted(segments(run_dir / INFLIGHT)):
        names += set_unreadable_aside(segment, quarantine, is_event)
    return names
