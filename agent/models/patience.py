"""One model call with its retries and its price."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential_jitter

from agent.models.errors import ModelError
from agent.models.gate import Gate
from agent.models.model import Adapter, Completion, ModelSettings, Request
from agent.models.prices import claim, priced
from agent.stream import StreamEvent

MAX_WAIT_S = 60.0
"""Longest pause between two attempts, also where the endpoint asks for more."""

_backoff = wait_exponential_jitter(initial=1, max=MAX_WAIT_S, jitter=1)


class PatientModel:
    """A model whose passing failures are waited out, and whose replies carry their price."""

    def __init__(
        self,
        adapter: Adapter,
        settings: ModelSettings,
        *,
        on_retry: Callable[[str], None],
        gate: Gate | None = None,
    ) -> None:
        """`on_retry` is told, in words, about every failure that is waited out.

        Each attempt passes `gate`, if there is one.
        """
        self._adapter = adapter
        self._on_retry = on_retry
        self._settings = settings
        self._gate = gate
        self._retrying = AsyncRetrying(
            retry=retry_if_exception(_is_passing),
            wait=_wait,
            before_sleep=self._tell,
            reraise=True,
        )

    @property
    def asked(self) -> ModelSettings:
        """What the user said that it is to be asked with."""
        return self._settings

    @property
    def settings(self) -> ModelSettings:
        """See `Adapter`."""
        return self._adapter.settings

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`; raises the last `ModelError` once patience is at its end."""
        if self._settings.stream_replies and request.on_delta is None:
            request = replace(request, on_delta=_to_nobody)
        patience = _Patience(self._settings)
        try:
            return await self._ask(request, patience)
        except ModelError as error:
            if error.action != "retry":
                raise
            return await self._ask_again(request, patience, error)

    async def close(self) -> None:
        """See `Model.close`."""
        await self._adapter.close()

    async def _ask_again(
        self, request: Request, patience: _Patience, error: ModelError
    ) -> Completion:
        """Go on after the first failure. Most calls have none, and tenacity costs 0.1 ms a call."""
        failed: list[ModelError] = [error]

        async def attempt() -> Completion:
            if failed:
                raise failed.pop()
            return await self._ask(request, patience)

        retrying = self._retrying.copy(stop=patience.is_at_its_end)
        completion: Completion = await retrying(attempt)
        return completion

    async def _ask(self, request: Request, patience: _Patience) -> Completion:
        if self._gate is None:
            return await self._attempt(request)
        came = time.monotonic()
        with request.deadline.waiting() if request.deadline is not None else nullcontext():
            permit = await self._gate.enter(lambda: claim(request, self._settings))
        patience.waited_s += permit.sent_at - came
        outcome: Completion | ModelError | None = None
        try:
            outcome = await self._attempt(request)
            return outcome
        except ModelError as error:
            outcome = error
            raise
        finally:  # called off or broken: the permit must come back whatever it was
            permit.leave(outcome)

    async def _attempt(self, request: Request) -> Completion:
        try:
            completion = await self._adapter.complete(request)
        except ModelError as error:
            error.endpoint = self._settings.base_url
            error.key_env = self._settings.key_variable
            raise
        return priced(completion, self._settings)

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_s = state.next_action.sleep if state.next_action else 0.0
        kind = error.kind if isinstance(error, ModelError) else "?"
        self._on_retry(f"{kind}: {error}; attempt {state.attempt_number}, next in {wait_s:.1f} s")


def _to_nobody(event: StreamEvent) -> None:
    """The handler of a reply that is streamed for the connection's sake."""


class _Patience:
    """How long one call is tried."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._began_at = time.monotonic()
        self.waited_s = 0.0
        """Time at the gate: others were served meanwhile, which says nothing of this call."""

    def is_at_its_end(self, state: RetryCallState) -> bool:
        """A rate limit says nothing about the task either, so it only counts against the clock."""
        tried_s = time.monotonic() - self._began_at - self.waited_s
        if tried_s >= self._settings.call_timeout_s:
            return True
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, ModelError) and error.kind == "rate_limited":
            return False
        self._failures += 1
        return self._failures >= self._settings.call_attempts


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, ModelError) and error.action == "retry"


def _wait(state: RetryCallState) -> float:
    """What the endpoint asked for, or a growing pause; never the same for two callers."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, ModelError) and error.retry_after_s is not None:
        return min(error.retry_after_s, MAX_WAIT_S) + random.uniform(0, 1)
    return _backoff(state)
