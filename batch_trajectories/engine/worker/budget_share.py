"""A worker's share of the run's budget.

The worst case of a call is reserved before it is made, and settled with its cost at the end. The
parent grants shares of the budget (see `engine.supervisor.budget`) that never sum to more than is
left, so the budget cannot be exceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.models.errors import ModelError
from agent.models.model import Completion
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import ReportBudget

if TYPE_CHECKING:
    from agent.models.admission import CostEstimate

_NOTHING = Cost()


class WorkerBudget:
    """Reserves amounts for calls; if too little is left, waits for a grant of the parent."""

    def __init__(self, *, budget: Cost | None, report: Callable[[ReportBudget], None]) -> None:
        """`budget` is the run's, None without one. `report` sends to the parent."""
        self._budget = budget or Cost()
        self.is_kept = budget is not None
        self._send_report = report
        self._idle = Cost()
        self._reserved = Cost()
        self._calls = 0
        self._waiting: list[tuple[asyncio.Future[None], Cost]] = []
        self._is_short = self._is_stopping = self._will_report = False
        self._grants = 0

    def bound_cost(self, claim: CostEstimate) -> Cost:
        """The most that a call can use of the budget."""
        usd = claim.usd if self._budget.usd else 0.0
        tokens = claim.tokens if self._budget.tokens else 0
        if usd is None or tokens is None:
            raise ValueError("a budget needs models with a known price and a reply limit")
        return Cost(usd, tokens)

    def try_to_reserve(self, worst_case: Cost) -> bool:
        """Reserve `worst_case` for a call if it is available and no other call waits."""
        if self._waiting or self._is_stopping or not self._idle.covers(worst_case):
            return False
        self._reserve(worst_case)
        return True

    async def reserve(self, worst_case: Cost) -> None:
        """Wait until `worst_case` is available, and reserve it for a call; raises `Stopped`."""
        if self._is_stopping:
            raise Stopped
        if not self.try_to_reserve(worst_case):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, worst_case))
            self._serve()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self.release(worst_case)
                raise

    def take_over(self, worst_case: Cost) -> None:
        """Reserve for a call what an earlier start has reserved for it and never settled."""
        self._reserved += worst_case
        self._calls += 1

    def settle(self, worst_case: Cost, outcome: Completion | ModelError | None) -> None:
        """The call with this reservation is over; see `Permit.leave`."""
        self.release(worst_case, spent=self._spent(worst_case, outcome))

    def take_grant(self, grant: Cost) -> None:
        """A grant of the parent."""
        self._grants += 1
        self._idle += grant
        self._serve()

    def reclaim(self) -> None:
        """The budget is nearly used up: from now on, return everything that is not reserved."""
        self._is_short = True
        self._report_soon()

    def stop(self) -> None:
        """Stop all calls that wait or come."""
        self._is_stopping = True
        for turn, _ in self._waiting:
            if not turn.done():
                turn.set_exception(Stopped())
        self._waiting.clear()

    def _spent(self, worst_case: Cost, outcome: Completion | ModelError | None) -> Cost:
        """The cost of a call; its worst case if that is unknown."""
        if isinstance(outcome, ModelError):
            return worst_case if outcome.may_have_cost else Cost()
        if outcome is None:
            return worst_case
        usage = outcome.usage or {"input_tokens": None, "output_tokens": None}
        counts = (usage["input_tokens"], usage["output_tokens"])
        tokens = worst_case.tokens if None in counts else sum(n or 0 for n in counts)
        usd = worst_case.usd if outcome.cost_usd is None else outcome.cost_usd
        if counts[0] == 0 and counts[1]:
            # No reply has no input: such a server counts a part, and the cost may be that of it.
            usd, tokens = max(usd, worst_case.usd), max(tokens, worst_case.tokens)
        return Cost(usd if self._budget.usd else 0.0, tokens if self._budget.tokens else 0)

    def _reserve(self, worst_case: Cost) -> None:
        self._idle -= worst_case
        self._reserved += worst_case
        self._calls += 1

    def release(self, worst_case: Cost, *, spent: Cost = _NOTHING) -> None:
        """Release a reservation, of which `spent` was used."""
        self._idle += worst_case - spent
        self._reserved -= worst_case
        self._calls -= 1
        self._serve()

    def _serve(self) -> None:
        """Let waiting calls go, in their order, as far as the budget allows."""
        left = []
        for turn, worst_case in self._waiting:
            if turn.done():
                continue
            if self._idle.covers(worst_case):
                self._reserve(worst_case)
                turn.set_result(None)
            else:
                left.append((turn, worst_case))
        self._waiting = left
        if self._is_short or self._waiting:
            self._report_soon()

    def _report_soon(self) -> None:
        """Send one report for all changes in one round of the event loop."""
        if not self._will_report:
            self._will_report = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._will_report = False
        waiting = [worst_case for turn, worst_case in self._waiting if not turn.done()]
        returned = Cost()
        if self._is_short:
            returned, self._idle = self._idle, Cost()
        # Calls in flight indicate how much will be needed soon.
        wanted = sum(waiting, self._reserved) - self._idle
        self._send_report(
            ReportBudget(
                grants=self._grants,
                calls=self._calls,
                is_short=self._is_short,
                returned=returned,
                wanted=wanted,
                needs=self._needs(waiting),
            )
        )

    def close(self) -> None:
        """Return what is not reserved: no more calls will come."""
        self._is_short = True
        self._report()

    def _needs(self, waiting: list[Cost]) -> list[Cost]:
        """The least amounts that let one of the waiting calls go: by dollars, and by tokens."""
        if not waiting:
            return []
        least = {
            min(waiting, key=lambda worst_case: (worst_case.usd, worst_case.tokens)),
            min(waiting, key=lambda worst_case: (worst_case.tokens, worst_case.usd)),
        }
        missing = (worst_case - self._idle for worst_case in least)
        return [Cost(max(0.0, amount.usd), max(0, amount.tokens)) for amount in missing]
