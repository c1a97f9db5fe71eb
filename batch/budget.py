"""What a run may spend, lent to its workers as shares that never sum to more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.messages import Event
from batch.journal import Inflight
from batch.purse import Amount
from batch.records import Entry
from batch.wire import pack
from batch.worker_process import WorkerProcess

_PART = 2
"""A loan leaves each worker about so many times its share of what is left to ask for."""


@dataclass(slots=True)
class _Borrower:
    """What the parent knows of one worker's purse."""

    loans: int = 0
    """Loans that were sent to it."""
    loans_seen: int = 0
    calls: int = 0
    """Its calls for which money is set aside."""
    is_recalled: bool = False
    is_short: bool = False
    """It holds nothing beyond that."""
    wanted: Amount = field(default_factory=Amount)
    need: Amount | None = None
    """The least that lets one of its calls go; None where none waits."""

    @property
    def is_quiet(self) -> bool:
        """It has nothing to give back, and nothing is on its way to it."""
        return self.is_short and not self.calls and self.loans == self.loans_seen


class RunBudget:
    """Lends what is left of the run's budget to the workers that ask for it."""

    def __init__(self, bounds: Amount | None, *, spent: Amount) -> None:
        """`spent` is what the run had used up before this start; see `spent_before`."""
        self.bounds = bounds
        self._left = (bounds or Amount()) - _bounded(spent, bounds)
        self._borrowers: dict[WorkerProcess, _Borrower] = {}
        self._is_short = False

    def on_purse(self, worker: WorkerProcess, told: dict[str, Any]) -> None:
        """A worker says what it holds and wants; see `Purse`."""
        borrower = self._borrowers.setdefault(worker, _Borrower())
        borrower.loans_seen = told["loans"]
        borrower.calls = told["calls"]
        borrower.is_short = told["is_short"]
        borrower.wanted = Amount(*told["wanted"])
        borrower.need = None if told["need"] is None else Amount(*told["need"])
        self._left += Amount(*told["returned"])

    def lend(self, workers: Sequence[WorkerProcess]) -> None:
        """Lend what can be lent. What a worker held when it died stays spent: it may have been."""
        if self.bounds is None:
            return
        for gone in self._borrowers.keys() - set(workers):
            del self._borrowers[gone]
        for worker in workers:
            borrower = self._borrowers.setdefault(worker, _Borrower())
            if borrower.need is None or borrower.loans != borrower.loans_seen:
                continue
            if self._left.covers(borrower.need):
                self._lend_to(worker, borrower, borrower.need, len(workers))
            else:
                self._is_short = True
        if self._is_short:
            for worker, borrower in self._borrowers.items():
                if worker.ready and not borrower.is_recalled:
                    borrower.is_recalled = True
                    worker.send(pack("recall"))

    def used_up(self, workers: Sequence[WorkerProcess]) -> str | None:
        """In words, that the budget is used up; None while some call can still be paid for."""
        ready = [self._borrowers[worker] for worker in workers if worker in self._borrowers]
        needs = [borrower.need for borrower in ready if borrower.need is not None]
        if not needs or not all(borrower.is_quiet for borrower in ready):
            return None
        if any(self._left.covers(need) for need in needs):
            return None
        assert self.bounds is not None
        least = min(needs, key=lambda need: (need.usd, need.tokens))
        spent = self.bounds - self._left
        parts = []
        if self.bounds.usd:
            parts.append(
                f"${spent.usd:.4f} of ${self.bounds.usd:g} (max_run_cost_usd) are spent, and the "
                f"next call may cost up to ${least.usd:.4f}"
            )
        if self.bounds.tokens:
            parts.append(
                f"{spent.tokens:,} of {self.bounds.tokens:,} tokens (max_run_tokens) are used, and "
                f"the next call may take up to {least.tokens:,}"
            )
        return "the budget of the run is used up: " + "; ".join(parts)

    def in_words(self) -> str:
        """For the progress line; "" while there is enough."""
        return "limited by the budget" if self._is_short else ""

    def _lend_to(
        self, worker: WorkerProcess, borrower: _Borrower, need: Amount, workers: int
    ) -> None:
        most = Amount(self._left.usd / _PART / workers, self._left.tokens // _PART // workers)
        loan = Amount(
            max(need.usd, min(borrower.wanted.usd, most.usd)),
            max(need.tokens, min(borrower.wanted.tokens, most.tokens)),
        )
        if self._is_short:
            loan = need
        self._left -= loan
        borrower.loans += 1
        borrower.need = None
        worker.send(pack("loan", amount=loan.to_json()))


def spent_before(entries: Iterable[Entry], inflight: Inflight) -> Amount:
    """What the starts before have used up: by the records, and by the journals of the rest.

    Where an endpoint did not tell what a call cost or how many tokens it took, nothing counts.
    """
    spent = Amount()
    for entry in entries:
        tokens = (entry.input_tokens or 0) + (entry.output_tokens or 0)
        spent += Amount(entry.cost_usd or 0.0, tokens)
    for key in inflight.tasks():
        for event in inflight.events(key):
            spent += _spent_by(event)
    return spent


def _spent_by(event: Event) -> Amount:
    if event["kind"] == "sub":
        return _spent_by(event["event"])
    if event["kind"] != "reply":
        return Amount()
    usage = event["usage"] or {"input_tokens": None, "output_tokens": None}
    tokens = (usage["input_tokens"] or 0) + (usage["output_tokens"] or 0)
    return Amount(event["cost_usd"] or 0.0, tokens)


def _bounded(spent: Amount, bounds: Amount | None) -> Amount:
    """What counts against the bounds that there are."""
    if bounds is None:
        return Amount()
    return Amount(spent.usd if bounds.usd else 0.0, spent.tokens if bounds.tokens else 0)
