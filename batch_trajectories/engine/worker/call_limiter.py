"""Limits a worker's calls to one endpoint.

The parent decides how many calls this worker may have in flight; each attempt of a call waits here
for its turn. Refusals are reported to the parent at once, other results as sums.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from agent.models.admission import CostEstimate
from agent.models.errors import ModelError
from agent.models.model import Completion
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import Load
from batch_trajectories.engine.worker.budget_share import WorkerBudget

_WEIGHT = 0.1
"""The weight of a reply in the moving average of reply lengths."""
_BURST_S = 1.0
"""A token bucket holds the tokens of this time; unused tokens beyond that are lost."""


class TokenBucket:
    """A rate limit that is known in advance: tokens that refill at a steady rate.

    Taking more than there are leaves a debt, and the next call waits until it is paid off.
    """

    def __init__(self, per_minute: float | None, *, now: float, initial: float = 1.0) -> None:
        """`per_minute` None means no limit. Times are seconds of one monotonic clock.

        It starts with `initial` tokens; calls may go while it has at least one.
        """
        self._per_s = None if per_minute is None else per_minute / 60
        self._tokens = initial
        self._filled_at = now

    def change(self, per_minute: float | None, *, now: float) -> None:
        """Change the rate; what was taken while there was none is no debt."""
        if self._per_s is None:
            self._tokens = max(self._tokens, 0.0)
        self._fill(now)
        self._per_s = None if per_minute is None else per_minute / 60

    def wait_s(self, *, now: float) -> float:
        """Seconds until the next call may go."""
        if self._per_s is None:
            return 0.0
        self._fill(now)
        if self._tokens >= 1.0:
            return 0.0
        return 60.0 if self._per_s == 0 else (1.0 - self._tokens) / self._per_s + 1e-3

    def take(self, amount: float) -> None:
        """Take tokens; a negative amount returns them."""
        self._tokens -= amount

    def _fill(self, now: float) -> None:
        per_s = self._per_s or 0.0
        full = max(1.0, per_s * _BURST_S)
        if self._tokens < full:
            self._tokens = min(full, self._tokens + (now - self._filled_at) * per_s)
        self._filled_at = now


class CallLimiter:
    """Lets attempts through as far as permits, rates and the budget allow."""

    def __init__(
        self,
        *,
        permits: int,
        budget: WorkerBudget,
        on_refusal: Callable[[float | None, float], None],
        rpm: float | None = None,
        tpm: float | None = None,
        initial: float = 1.0,
        has_answered: bool = False,
    ) -> None:
        """`on_refusal` gets each refusal (429) at once: the delay that the endpoint asks for, and
        when the call was sent. `rpm` and `tpm` limit requests and tokens per minute. If `initial`
        is below 1, the first call waits, which spreads the first calls of several workers."""
        now = time.monotonic()
        self._permits = permits
        self._told = 0
        self._budget = budget
        self._on_refusal = on_refusal
        self._calls_pace = TokenBucket(rpm, now=now, initial=initial)
        self._tokens_pace = TokenBucket(tpm, now=now, initial=initial)
        self._has_tpm = tpm is not None
        self._mean_reply_tokens = 0.0
        self.has_answered = has_answered
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        self._in_flight = 0
        self._not_before, self._not_after = 0.0, float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._replies = 0
        self._failures = self._overloads = 0
        self._is_stopping = False

    async def enter(self, claim: Callable[[], CostEstimate]) -> CallPermit:
        """See `CallAdmission`; raises `Stopped` if the worker is stopping."""
        if self._is_stopping:
            raise Stopped
        claimed = claim() if self._has_tpm or self._budget.is_kept else None
        tokens = 0.0
        if claimed is not None and self._has_tpm:
            tokens = claimed.likely_input_tokens + self._mean_reply_tokens
        worst_case = Cost()
        if claimed is not None and self._budget.is_kept:
            worst_case = self._budget.bound_cost(claimed)
        await self._take_turn(tokens)
        if self._budget.is_kept and not self._budget.try_to_reserve(worst_case):
            # Give up the turn while waiting for budget: others can use it, or a pause may begin.
            self._give_up_turn(tokens)
            worst_case = await self._reserve(worst_case, claim)
            try:
                await self._take_turn(tokens)
            except BaseException:
                self._budget.release(worst_case)
                raise
        return CallPermit(self, worst_case, tokens, time.monotonic())

    async def _reserve(self, worst_case: Cost, claim: Callable[[], CostEstimate]) -> Cost:
        """Wait for the worst case of a call, which may rise meanwhile; return it."""
        await self._budget.reserve(worst_case)
        while not worst_case.covers(now := self._budget.bound_cost(claim())):
            self._budget.release(worst_case)
            worst_case = now
            await self._budget.reserve(worst_case)
        return worst_case

    def leave(self, permit: CallPermit, outcome: Completion | ModelError | None) -> None:
        """See `Permit`."""
        if self._budget.is_kept:
            self._budget.settle(permit.worst_case, outcome)
        if isinstance(outcome, Completion):
            self._replies += 1
            self.has_answered = True
            self._count_tokens(permit, outcome)
        elif outcome is not None and outcome.kind == "rate_limited":
            self._on_refusal(outcome.retry_after_s, permit.sent_at)
        elif outcome is not None and outcome.action == "retry":
            self._failures += 1
            self._overloads += outcome.is_by_load
        self._leave()

    def allow(
        self,
        permits: int,
        *,
        cool_down_s: float,
        number: int = 0,
        rpm: float | None = None,
        tpm: float | None = None,
        rates_s: float | None = None,
    ) -> None:
        """Set a new share of the run's limits, from message `number`; send nothing for
        `cool_down_s`, and nothing after `rates_s` if that is given."""
        now = time.monotonic()
        self._told = number
        self._permits = permits
        self._not_before = now + cool_down_s
        self._not_after = float("inf") if rates_s is None else now + rates_s
        self._calls_pace.change(rpm, now=now)
        self._tokens_pace.change(tpm, now=now)
        self._admit_waiting()

    def stop(self) -> None:
        """Stop all calls that wait or come."""
        self._is_stopping = True
        while self._waiting:
            turn, _ = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(Stopped())

    def take_load(self) -> Load:
        """The load, with the results since the last call."""
        waiting = sum(not turn.done() for turn, _ in self._waiting)
        results = (self._replies, self._failures, self._overloads)
        load = Load(self._in_flight, waiting, self._told, *results)
        self._replies = self._failures = self._overloads = 0
        return load

    async def _take_turn(self, tokens: float) -> None:
        if not self._waiting and not self._wait_s():
            self._go(tokens)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, tokens))
        self._admit_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            raise

    def _go(self, tokens: float) -> None:
        self._in_flight += 1
        self._calls_pace.take(1)
        self._tokens_pace.take(tokens)

    def _give_up_turn(self, tokens: float) -> None:
        self._calls_pace.take(-1)
        self._tokens_pace.take(-tokens)
        self._leave()

    def _leave(self) -> None:
        self._in_flight -= 1
        self._admit_waiting()

    def _count_tokens(self, permit: CallPermit, completion: Completion) -> None:
        """Replace the estimate for a call by its real number of tokens."""
        usage = completion.usage
        if not self._has_tpm or usage is None:
            return
        sent, received = usage["input_tokens"], usage["output_tokens"]
        if sent is None or received is None:
            return
        self._tokens_pace.take(sent + received - permit.tokens)
        mean = self._mean_reply_tokens
        self._mean_reply_tokens = mean + _WEIGHT * (received - mean) if mean else float(received)

    def _wait_s(self) -> float:
        """Seconds until the next call may go; infinite until a call in flight ends."""
        if self._in_flight >= self._permits:
            return float("inf")
        now = time.monotonic()
        if now >= self._not_after:
            return float("inf")
        paces = (self._calls_pace.wait_s(now=now), self._tokens_pace.wait_s(now=now))
        return max(self._not_before - now, *paces, 0.0)

    def _admit_waiting(self) -> None:
        while self._waiting and not (wait_s := self._wait_s()):
            turn, tokens = self._waiting.popleft()
            if not turn.done():
                self._go(tokens)
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and wait_s < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._admit_waiting)


class CallPermit(msgspec.Struct, frozen=True):
    """The permission for one attempt; a `Permit`."""

    gate: CallLimiter
    worst_case: Cost
    """The amount reserved for the call."""
    tokens: float
    """Estimated number of tokens of the call."""
    sent_at: float

    def leave(self, outcome: Completion | ModelError | None) -> None:
        """See `Permit`."""
        self.gate.leave(self, outcome)
