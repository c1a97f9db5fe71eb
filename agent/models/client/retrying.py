"""One model call with its retries and its price."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from agent.models.admission import CallAdmission, CostEstimate
from agent.models.client.relayed import RelayRequest
from agent.models.dialects.dialect import NO_ENDING
from agent.models.endpoint_words import find_ending
from agent.models.errors import Kind, ModelError
from agent.models.keys import Key
from agent.models.model import Adapter, Completion, ModelSettings, Request, StreamEvent
from agent.models.prices import Reserves, add_cost

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Longest pause between two attempts, in seconds, even if the endpoint asks for more."""

_MAX_WAIT_FOR_REPLY_S = 8.0
"""Longest pause, in seconds, after a cut or malformed reply: waiting longer does not help."""

_SHORT_WAIT_S = 0.5
"""Longest pause, in seconds, after such a reply while the endpoint answers other calls."""

_LONE_WAIT_S = 5.0
"""Longest pause, in seconds, after a call's first refusal that asks for a pause, while the endpoint
answers other calls. If the call is refused again, the whole pause is kept."""

_RECENTLY_S = 1.0
"""Another call's answer counts as simultaneous up to this many seconds before the attempt."""


_LASTING_ATTEMPTS = 4
"""Attempts of a call with a lasting failure at an endpoint that has never answered: about ten
seconds, in which a network may come up."""


class Retry(NamedTuple):
    """A failure after which the call is retried."""

    kind: Kind
    message: str
    attempt: int
    """The number of the failed attempt."""
    wait_s: float
    left_s: float
    """Approximate seconds for which the call will still be retried."""

    def __str__(self) -> str:
        return (
            f"a call failed in attempt {self.attempt}, is repeated in {self.wait_s:.1f} s and "
            f"given up in {self.left_s:.0f} s: {self.kind}: {self.message}"
        )


class RetryingModel:
    """A model whose temporary failures are retried, and whose replies have their price."""

    def __init__(
        self,
        adapter: Adapter,
        settings: ModelSettings,
        *,
        api_key: str,
        on_retry: Callable[[Retry], None],
        gate: CallAdmission | None = None,
    ) -> None:
        """Wrap a model.

        `api_key` is removed from all error messages. `on_retry` gets every failure after which the
        call is repeated. Each attempt waits at `gate`, if there is one.
        """
        self._adapter = adapter
        self._key = Key(api_key)
        self._key_source = settings.describe_key_source(api_key)
        self._answered_at = -math.inf
        self._usual_endings: set[str] = set()
        self._gives_endings = False
        """A reply has ended with a known word."""
        self._on_retry = on_retry
        self.asked = settings
        """The user's settings, with options that the endpoint may have refused."""
        self.reserves = Reserves(settings)
        self._gate = gate
        self._retrying = AsyncRetrying(
            retry=retry_if_exception(_is_passing),
            reraise=True,
        )

    @property
    def settings(self) -> ModelSettings:
        """See `Adapter`."""
        return self._adapter.settings

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`; raises the last `ModelError` once patience is at its end."""
        if self.asked.stream_replies and request.on_delta is None:
            request = replace(request, on_delta=_discard)
        patience = _Patience(self.asked, self._most_attempts)
        try:
            return await self._ask(request, patience)
        except ModelError as error:
            if not error.may_pass:
                raise
            try:
                return await self._ask_again(request, patience, error)
            except ModelError as last:
                last.has_answered_others |= self._answered_at > patience.began_at
                raise

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._adapter.close()

    async def _ask_again(
        self, request: Request, patience: _Patience, error: ModelError
    ) -> Completion:
        """Retry after the first failure."""
        # Most calls have no failure, and tenacity costs 0.1 ms a call.
        failed: list[ModelError] = [error]

        async def attempt() -> Completion:
            if failed:
                raise failed.pop()
            return await self._ask(request, patience)

        def report(state: RetryCallState) -> None:
            self._on_retry(patience.retry(state))

        retrying = self._retrying.copy(
            stop=patience.is_over, wait=patience.pause_s, before_sleep=report
        )
        completion: Completion = await retrying(attempt)
        return completion

    async def _ask(self, request: Request, patience: _Patience) -> Completion:
        if self._gate is None:
            return await self._attempt(request, patience)
        came = time.monotonic()
        estimate: CostEstimate | None = None

        def claim() -> CostEstimate:
            nonlocal estimate
            estimate = estimate or self.reserves.estimate(request)
            return self.reserves.worst_case(estimate)

        entering = self._gate.enter(claim)
        if request.deadline is None:
            permit = await entering
        else:
            with request.deadline.waiting():
                permit = await entering
        patience.waited_s += permit.sent_at - came
        outcome: Completion | ModelError | None = None
        try:
            outcome = await self._attempt(request, patience)
            if estimate is not None:
                self.reserves.learn(estimate, outcome)
            return outcome
        except ModelError as error:
            outcome = error
            raise
        finally:  # also when cancelled or broken: the permit must come back
            permit.leave(outcome)

    async def _attempt(self, request: Request, patience: _Patience) -> Completion:
        began_at = time.monotonic()
        try:
            completion = await self._adapter.complete(request)
            if completion.unknown_ending is None:
                self._gives_endings = True
            else:
                self._check_ending(completion, request, patience)
        except ModelError as error:
            error.has_answered_others = self._answered_at > began_at - _RECENTLY_S
            error.args = (self._key.remove_from_text(str(error)),)
            error.endpoint = self.asked.base_url
            error.key_source = self._key_source
            if error.paid is not None and request.on_unreadable is not None:
                request.on_unreadable(add_cost(error.paid, self.asked))
            raise
        self._answered_at = time.monotonic()
        return add_cost(completion, self.asked)

    def _check_ending(self, completion: Completion, request: Request, patience: _Patience) -> None:
        """Raise `ModelError("malformed")` for a call's first reply that ended with a doubtful word.

        The server may have broken the reply off, or have lost its calls. The second such reply is
        accepted, and so are all later ones with the same word.
        """
        word = completion.unknown_ending
        assert word is not None
        # Where others have one, a reply that lacks it was cut.
        is_usual = word in self._usual_endings and not (word == NO_ENDING and self._gives_endings)
        if isinstance(request, RelayRequest) or is_usual:
            return  # an agent has received the parts of its reply already
        if patience.has_doubted:
            self._usual_endings.add(word)
            log.warning(
                "%s ends replies with %r, %s. They are taken as complete, and the records have the "
                "word.",
                self.asked.reference or self.asked.name,
                word,
                _why_doubted(word),
            )
            return
        patience.has_doubted = True
        error = ModelError("malformed", f"the reply ended with {word!r}, {_why_doubted(word)}")
        error.paid = completion
        raise error

    def _most_attempts(self, error: ModelError) -> int:
        """The maximum number of attempts if they fail like this."""
        limit = self.asked.call_attempts
        has_answered = self._answered_at > -math.inf
        answered = has_answered or (self._gate is not None and self._gate.has_answered)
        return min(limit, _LASTING_ATTEMPTS) if error.is_lasting and not answered else limit


def _why_doubted(word: str) -> str:
    if find_ending(word) == "tool_calls":
        return "although it holds no tool call (does the server's parser for calls fit the model?)"
    return "which is not known here"


def _discard(event: StreamEvent) -> None:
    """Ignore an event of a reply that is streamed only to keep the connection alive."""


class _Patience:
    """Decides how long one call is retried."""

    def __init__(self, settings: ModelSettings, max_attempts: Callable[[ModelError], int]) -> None:
        """Start the clock; `max_attempts` gives the maximum number of attempts for a failure."""
        self._settings = settings
        self._max_attempts = max_attempts
        self._failures = 0
        self._pauses = {True: 1.0, False: 1.0}
        """The next pause after a failure that load may have caused, and after any other."""
        self._was_told = False
        """The endpoint has asked this call for a pause before."""
        self.began_at = time.monotonic()
        self.has_doubted = False
        """A reply of this call was asked for again because of the word with which it ended."""
        self.waited_s = 0.0
        """Seconds at the gate, which do not count: other calls were served meanwhile."""

    def is_over(self, state: RetryCallState) -> bool:
        """Whether no further attempt is made."""
        if self._left_s() <= 0:
            return True
        error = _error(state)
        # A rate limit is no fault of the task, so only the time counts.
        if error.kind == "rate_limited":
            return False
        self._failures += 1
        return self._failures >= self._max_attempts(error)

    def pause_s(self, state: RetryCallState) -> float:
        """Choose the pause before the next attempt, in seconds; call it once per failure.

        The endpoint may ask for a pause; otherwise the pause doubles with each failure. A random
        part keeps callers from returning together.
        """
        error = _error(state)
        if error.retry_after_s is not None:
            pause_s = self._requested_pause_s(error)
            self._was_told = True
            return pause_s + random.uniform(0, 1)
        # A broken reply of an endpoint that answers others is soon asked for again.
        if error.has_answered_others and not error.is_by_load:
            return random.uniform(0, _SHORT_WAIT_S)
        pause_s = self._pauses[error.is_by_load]
        self._pauses[error.is_by_load] = min(2 * pause_s, _max_wait_s(error))
        # A failure by load (5xx) that others do not meet: half as long as in an outage, from 0.25
        # to 0.5 s, then doubling. A rate limit (429) is for all calls, whoever else was answered.
        if error.has_answered_others and error.kind != "rate_limited":
            return pause_s * random.uniform(0.25, 0.5)
        return pause_s + random.uniform(0, 1)

    def _requested_pause_s(self, error: ModelError) -> float:
        """The pause that the endpoint asked for, up to a maximum."""
        assert error.retry_after_s is not None
        # While it answers others, a long pause is kept only if it refuses the call again.
        is_lone = error.has_answered_others and not self._was_told
        return min(error.retry_after_s, _LONE_WAIT_S if is_lone else MAX_WAIT_S)

    def retry(self, state: RetryCallState) -> Retry:
        """The report of a failure that will be retried."""
        error = _error(state)
        wait_s = state.next_action.sleep if state.next_action else 0.0
        left_s = self._left_s()
        if error.kind != "rate_limited":
            later = self._max_attempts(error) - self._failures - 1
            left_s = min(left_s, wait_s + sum(self._later_pauses_s(error, later)))
        return Retry(
            kind=error.kind,
            message=str(error),
            attempt=state.attempt_number,
            wait_s=wait_s,
            left_s=left_s,
        )

    def _later_pauses_s(self, error: ModelError, count: int) -> Iterator[float]:
        """The mean lengths of the next `count` pauses if the attempts fail in the same way."""
        if error.retry_after_s is not None:
            yield from [min(error.retry_after_s, MAX_WAIT_S) + 0.5] * count
        elif error.has_answered_others and not error.is_by_load:
            yield from [_SHORT_WAIT_S / 2] * count
        else:
            pause_s = self._pauses[error.is_by_load]
            for _ in range(count):
                yield pause_s * 0.375 if error.has_answered_others else pause_s + 0.5
                pause_s = min(2 * pause_s, _max_wait_s(error))

    def _left_s(self) -> float:
        tried_s = time.monotonic() - self.began_at - self.waited_s
        return self._settings.call_timeout_s - tried_s


def _max_wait_s(error: ModelError) -> float:
    return MAX_WAIT_S if error.is_by_load else _MAX_WAIT_FOR_REPLY_S


def _error(state: RetryCallState) -> ModelError:
    """The failure of the last attempt."""
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, ModelError)
    return error


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, ModelError) and error.may_pass
