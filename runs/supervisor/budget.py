"""What a run may spend, lent to its workers as shares that never sum to more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agent.messages import Event
from runs.amounts import Cost
from runs.executors.base import WorkerHandle
from runs.protocol.messages import pack
from runs.store.checksum import DamagedLine, read_object, with_checksum
from runs.store.files import AppendFile, repair_tail
from runs.store.index import IndexEntry
from runs.store.journal import Inflight

log = logging.getLogger(__name__)

_PART = 2
"""A loan leaves each worker about so many times its share of what is left to ask for."""


@dataclass(slots=True)
class _WorkerShare:
    """What the parent knows of one worker's purse."""

    grants: int = 0
    """Loans that were sent to it."""
    grants_seen: int = 0
    calls: int = 0
    """Its calls for which money is set aside."""
    is_reclaimed: bool = False
    is_short: bool = False
    """It holds nothing beyond that."""
    wanted: Cost = field(default_factory=Cost)
    needs: list[Cost] = field(default_factory=list)
    """What would let one of its calls go, either of these; empty where none waits."""

    @property
    def is_quiet(self) -> bool:
        """It has nothing to give back, and nothing is on its way to it."""
        return self.is_short and not self.calls and self.grants == self.grants_seen


class RunBudget:
    """Lends what is left of the run's budget to the workers that ask for it."""

    def __init__(self, bounds: Cost | None, *, spent: Cost, budget_log: BudgetLog) -> None:
        """`spent` is what the run had used up before this start; see `spent_before`."""
        self.bounds = bounds
        self._log = budget_log
        self._left = (bounds or Cost()) - _bounded(spent, bounds)
        self._shares: dict[WorkerHandle, _WorkerShare] = {}
        self._is_short = False

    def on_worker_budget(self, worker: WorkerHandle, told: dict[str, Any]) -> None:
        """A worker says what it holds and wants; see `WorkerBudget`."""
        share = self._shares.setdefault(worker, _WorkerShare())
        share.grants_seen = told["loans"]
        share.calls = told["calls"]
        share.is_short = told["is_short"]
        share.wanted = Cost(*told["wanted"])
        share.needs = [Cost(*need) for need in told["needs"]]
        if any(told["returned"]):
            self._left += Cost(*told["returned"])
            self._log.append("returned", Cost(*told["returned"]))

    def grant_shares(self, workers: Sequence[WorkerHandle]) -> None:
        """Lend what can be lent. What a worker held when it died stays spent: it may have been."""
        if self.bounds is None:
            return
        for gone in self._shares.keys() - set(workers):
            del self._shares[gone]
        for worker in workers:
            share = self._shares.setdefault(worker, _WorkerShare())
            if not share.needs or share.grants != share.grants_seen:
                continue
            payable = [need for need in share.needs if self._left.covers(need)]
            if payable:
                self._grant_to(worker, share, payable[0], len(workers))
            else:
                self._is_short = True
        if self._is_short:
            for worker, share in self._shares.items():
                if worker.ready and not share.is_reclaimed:
                    share.is_reclaimed = True
                    worker.send(pack("recall"))

    def used_up(self, workers: Sequence[WorkerHandle]) -> str | None:
        """In words, that the budget is used up; None while some call can still be paid for."""
        ready = [self._shares[worker] for worker in workers if worker in self._shares]
        needs = [need for share in ready for need in share.needs]
        if not needs or not all(share.is_quiet for share in ready):
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

    def describe(self) -> str:
        """For the progress line; "" while there is enough."""
        return "limited by the budget" if self._is_short else ""

    def _grant_to(
        self, worker: WorkerHandle, share: _WorkerShare, need: Cost, workers: int
    ) -> None:
        most = Cost(self._left.usd / _PART / workers, self._left.tokens // _PART // workers)
        grant = Cost(
            max(need.usd, min(share.wanted.usd, most.usd)),
            max(need.tokens, min(share.wanted.tokens, most.tokens)),
        )
        if self._is_short:
            grant = need
        self._left -= grant
        share.grants += 1
        share.needs = []
        # On disk before it can be spent: what a crash leaves unreturned may have been.
        self._log.append("lent", grant)
        worker.send(pack("loan", amount=grant.to_json()))


class BudgetLog:
    """`budget.jsonl`: what was lent to workers and what they gave back, over all starts.

    Lines: {"kind": "lent" or "returned", "usd", "tokens"}. The difference was spent, or may have
    been: a worker that was killed gave nothing back.
    """

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        path = run_dir / "budget.jsonl"
        repair_tail(path, quarantine)
        self.balance = Cost()
        """Lent and not given back."""
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, text in enumerate(lines, 1):
            if (line := _read_loan(text)) is None:
                log.warning("%s:%d: passed over: no line of a ledger", path, number)
            else:
                self._count(**line)
        self._path = path
        self._file: AppendFile | None = None

    def append(self, kind: str, amount: Cost) -> None:
        """Write one line; raises `StorageError`. The file is there from the first one on."""
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.check_is_there()
        line = {"kind": kind, "usd": amount.usd, "tokens": amount.tokens}
        self._file.append(with_checksum(orjson.dumps(line)))
        self._count(kind, amount.usd, amount.tokens)

    def close(self) -> None:
        """Make all lines survive a power loss."""
        if self._file is not None:
            self._file.sync()
            self._file.close()

    def _count(self, kind: str, usd: float, tokens: int) -> None:
        amount = Cost(usd, tokens)
        self.balance = self.balance + amount if kind == "lent" else self.balance - amount


def is_loan(text: bytes) -> bool:
    """Whether a line of `budget.jsonl` can be read."""
    return _read_loan(text) is not None


def _read_loan(text: bytes) -> dict[str, Any] | None:
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    is_told = (
        line.keys() == {"kind", "usd", "tokens"}
        and line["kind"] in ("lent", "returned")
        and isinstance(line["usd"], (int, float))
        and isinstance(line["tokens"], int)
    )
    return line if is_told else None


def spent_before(
    records: Iterable[IndexEntry],
    inflight: Inflight,
    budget_log: BudgetLog,
    *,
    held: Iterable[Cost] = (),
) -> Cost:
    """What the starts before have used up.

    By `records`, those that later attempts have replaced included, and by the journals of the
    rest; or by the ledger, where that is more: it knows what calls may have cost whose replies
    never arrived, or did not tell. `held` is set aside for calls in batches, which go on to use it.
    """
    spent = sum(held, Cost())
    for entry in records:
        tokens = (entry.input_tokens or 0) + (entry.output_tokens or 0)
        spent += Cost(entry.cost_usd or 0.0, tokens)
    for key in inflight.tasks():
        for event in inflight.events(key):
            spent += _spent_by(event)
    lent = budget_log.balance
    return Cost(max(spent.usd, lent.usd), max(spent.tokens, lent.tokens))


def _spent_by(event: Event) -> Cost:
    if event["kind"] == "sub":
        return _spent_by(event["event"])
    if event["kind"] != "reply":
        return Cost()
    usage = event["usage"] or {"input_tokens": None, "output_tokens": None}
    tokens = (usage["input_tokens"] or 0) + (usage["output_tokens"] or 0)
    return Cost(event["cost_usd"] or 0.0, tokens)


def _bounded(spent: Cost, bounds: Cost | None) -> Cost:
    """What counts against the bounds that there are."""
    if bounds is None:
        return Cost()
    return Cost(spent.usd if bounds.usd else 0.0, spent.tokens if bounds.tokens else 0)
