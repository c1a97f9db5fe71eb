"""A worker's share of what a run may spend.

What a call can cost at most is set aside before it is made, and what it did cost is booked when
it has ended. The parent lends money from the run's budget (see `budget`): shares of all workers
never sum to more than is left of it, so the budget cannot be overshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agent.models.admission import CostEstimate
from agent.models.errors import ModelError
from agent.models.model import Completion
from runs.amounts import Cost
from runs.errors import Stopped

_NOTHING = Cost()


class WorkerBudget:
    """Sets money aside for calls; waits for the parent to lend more where there is too little."""

    def __init__(self, *, bounds: Cost | None, tell: Callable[[dict[str, Any]], None]) -> None:
        """`bounds` is the run's budget, None where there is none. `tell` reaches the parent."""
        self._bounds = bounds or Cost()
        self.is_kept = bounds is not None
        self._tell_parent = tell
        self._idle = Cost()
        self._reserved = Cost()
        self._calls = 0
        self._waiting: list[tuple[asyncio.Future[None], Cost]] = []
        self._is_short = self._is_stopping = self._is_telling = False
        self._grants = 0

    def worst_case_of(self, claim: CostEstimate) -> Cost:
        """What a call can use up of the budget at most."""
        usd = claim.usd if self._bounds.usd else 0.0
        tokens = claim.tokens if self._bounds.tokens else 0
        if usd is None or tokens is None:
            msg = "a budget needs models whose price is known and a bound on their replies"
            raise ValueError(msg)
        return Cost(usd, tokens)

    def try_to_reserve(self, worst_case: Cost) -> bool:
        """Keep `worst_case` for one call, if it is there and nobody waits for it."""
        if self._waiting or self._is_stopping or not self._idle.covers(worst_case):
            return False
        self._keep(worst_case)
        return True

    async def reserve(self, worst_case: Cost) -> None:
        """Wait until `worst_case` is there, and keep it for one call; raises `Stopped`."""
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
        """Keep for one call what an earlier start has set aside for it and never booked."""
        self._reserved += worst_case
        self._calls += 1

    def settle(self, worst_case: Cost, outcome: Completion | ModelError | None) -> None:
        """A call for which `worst_case` was set aside is over; see `Permit.leave`."""
        self.release(worst_case, spent=self._spent(worst_case, outcome))

    def take_grant(self, grant: Cost) -> None:
        """More money from the parent."""
        self._grants += 1
        self._idle += grant
        self._serve()

    def reclaim(self) -> None:
        """The run is short of money: from now on nothing is held that is not set aside."""
        self._is_short = True
        self._tell_soon()

    def stop(self) -> None:
        """Turn all away that wait and come."""
        self._is_stopping = True
        for turn, _ in self._waiting:
            if not turn.done():
                turn.set_exception(Stopped())
        self._waiting.clear()

    def _spent(self, worst_case: Cost, outcome: Completion | ModelError | None) -> Cost:
        """What a call did use up; the most it could where nobody knows."""
        if isinstance(outcome, ModelError):
            return worst_case if outcome.may_have_cost else Cost()
        if outcome is None:
            return worst_case
        usage = outcome.usage or {"input_tokens": None, "output_tokens": None}
        usd = worst_case.usd if outcome.cost_usd is None else outcome.cost_usd
        counts = (usage["input_tokens"], usage["output_tokens"])
        tokens = worst_case.tokens if None in counts else sum(n or 0 for n in counts)
        return Cost(usd if self._bounds.usd else 0.0, tokens if self._bounds.tokens else 0)

    def _keep(self, worst_case: Cost) -> None:
        self._idle -= worst_case
        self._reserved += worst_case
        self._calls += 1

    def release(self, worst_case: Cost, *, spent: Cost = _NOTHING) -> None:
        """Set `worst_case` aside no longer; `spent` of it is gone."""
        self._idle += worst_case - spent
        self._reserved -= worst_case
        self._calls -= 1
        self._serve()

    def _serve(self) -> None:
        """Let all go that can be paid for, in their order."""
        left = []
        for turn, worst_case in self._waiting:
            if turn.done():
                continue
            if self._idle.covers(worst_case):
                self._keep(worst_case)
                turn.set_result(None)
            else:
                left.append((turn, worst_case))
        self._waiting = left
        if self._is_short or self._waiting:
            self._tell_soon()

    def _tell_soon(self) -> None:
        """One message for all that happens in one round of the event loop."""
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        waiting = [worst_case for turn, worst_case in self._waiting if not turn.done()]
        returned = Cost()
        if self._is_short:
            returned, self._idle = self._idle, Cost()
        # What is on its way now tells how much will be needed soon.
        wanted = sum(waiting, self._reserved) - self._idle
        self._tell_parent(
            {
                "loans": self._grants,
                "calls": self._calls,
                "is_short": self._is_short,
                "returned": returned.to_json(),
                "wanted": wanted.to_json(),
                "needs": self._needs(waiting),
            }
        )

    def close(self) -> None:
        """Give back what is not set aside: no call comes any more."""
        self._is_short = True
        self._tell()

    def _needs(self, waiting: list[Cost]) -> list[list[float]]:
        """The least that lets one of the waiting calls go: by dollars, and by tokens."""
        if not waiting:
            return []
        least = {
            min(waiting, key=lambda worst_case: (worst_case.usd, worst_case.tokens)),
            min(waiting, key=lambda worst_case: (worst_case.tokens, worst_case.usd)),
        }
        short = (worst_case - self._idle for worst_case in least)
        return [[max(0.0, one.usd), max(0, one.tokens)] for one in short]
