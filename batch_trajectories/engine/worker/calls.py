"""The model calls of a worker: its models, their limiters, and its share of the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from agent.models.client.pool import ModelPool
from agent.models.connection import Connection, Share
from agent.models.errors import ENDPOINT_FAILURES, RULES, ModelError
from agent.models.model import Completion, Model, ModelSettings, Request, endpoint_url
from agent.models.resolve import read_key
from agent.state.trajectory import WaitUntilPersisted
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.messages import (
    AnswerCall,
    AskIfAnswered,
    Assignment,
    CallRefused,
    EndpointAnswered,
    FromWorker,
    GrantBudget,
    KeyRejected,
    Load,
    ReclaimBudget,
    ReportLoad,
    SetKey,
    SetLimits,
)
from batch_trajectories.engine.worker.budget_share import WorkerBudget

if TYPE_CHECKING:
    from agent.models.client.key_command import RenewableKey
    from agent.models.client.pool import OnRetry
    from batch_trajectories.engine.worker.call_limiter import CallLimiter

_LOAD_EVERY_S = 0.1

AboutCalls = SetLimits | GrantBudget | ReclaimBudget | AnswerCall | EndpointAnswered | SetKey
"""Messages of the parent about model calls."""


class CollectedCalls(Protocol):
    """The worker's half of a feature that collects calls in the parent; made with `send`."""

    def make_wrapper(
        self,
        task: bytes,
        assignment: Assignment,
        *,
        limiters: Mapping[str, CallLimiter],
        budget: WorkerBudget,
    ) -> Callable[[Model], Model]:
        """Return a function that wraps the models of one task.

        `limiters` are those of live calls, by endpoint.
        """
        ...

    def on_answer(self, id: str, how: str, reply: bytes) -> None:
        """The parent has answered the call with this id."""
        ...

    def stop(self) -> None:
        """Stop all calls that wait or come: they raise `Stopped`."""
        ...


class Calls:
    """The models and limiters that all conversations of a worker share. Needs a running event
    loop."""

    def __init__(
        self,
        limits: Mapping[str, EndpointLimits],
        budget: Cost | None,
        *,
        number: int,
        workers: int,
        proven: Collection[str],
        by_batch: bool,
        keys: ParentKeys | None,
        clock_offset_s: float,
        send: Callable[[FromWorker], None],
        on_retry: OnRetry,
        say: Callable[[str], None],
        conversations: int,
    ) -> None:
        """`limits` are those of the run, by endpoint; this is worker `number` of some `workers`.
        `proven` are base URLs that have answered before. With `by_batch`, calls are made in
        batches first. `keys` are those of key commands, None to run these here. See
        `WorkerSetup.clock_offset_s`.

        `send` sends to the parent. `on_retry` gets each failure that is retried.
        `say` shows a message to the user, if no worker has shown it before. `conversations` is how
        many this worker holds at once, 0 where that is unknown.
        """
        self._send = send
        self._keys = keys
        self._clock_offset_s = clock_offset_s
        self._workers = workers
        self._asked: dict[str, asyncio.Future[bool]] = {}
        """Questions to the parent whether an endpoint has answered other workers, by base URL."""
        self._part, self._initial = 1 / workers, 1 - number % workers / workers
        self._budget = WorkerBudget(budget=budget, report=send)
        self._proven_before = frozenset(proven)
        self._limiters = {
            endpoint: self._limiter(endpoint, of_endpoint)
            for endpoint, of_endpoint in limits.items()
        }
        self._collected: CollectedCalls | None = None
        if by_batch:
            self._collected = find_feature("batch_api_calls")(send)
        self._loads = dict.fromkeys(limits, Load())
        self.pool = ModelPool(
            key_of=self._find_key,
            on_retry=on_retry,
            admission_of=lambda settings: self._limiters[settings.endpoint],
            say=say,
            share=Share(workers, conversations),
        )
        self._report_messages()

    @property
    def proven(self) -> frozenset[str]:
        """The base URLs that have answered."""
        now = {
            endpoint_url(endpoint)
            for endpoint, limiter in self._limiters.items()
            if limiter.has_answered
        }
        return self._proven_before | now

    def concerns_endpoint(self, error: ModelError) -> bool:
        """Whether a failure stops the run rather than the task alone."""
        if error.action == "stop_run":
            return True
        # Each of many attempts was refused, and so was everything else: the limit of a day, say.
        if error.kind == "rate_limited":
            return not error.has_answered_others
        if error.kind == "malformed" and error.reply is not None:
            return False  # the endpoint works, and refused what the model wrote
        return error.endpoint not in self.proven and error.kind in ENDPOINT_FAILURES

    async def must_stop_run(self, error: ModelError) -> bool:
        """Whether a failure stops the run; asks the parent if the endpoint has answered another
        worker."""
        if not self.concerns_endpoint(error):
            return False
        url = error.endpoint
        if error.action != "stop_run" and url is not None and self._workers > 1:
            if url not in self._asked:
                self._asked[url] = asyncio.get_running_loop().create_future()
                self._send(AskIfAnswered(url))
            if await asyncio.shield(self._asked[url]):
                self._proven_before |= {url}
        return self.concerns_endpoint(error)

    @staticmethod
    def describe(error: ModelError) -> str:
        """The reason why an endpoint stops the run, and what to check."""
        rule = RULES[error.kind]
        message = f"{error.endpoint}: {rule.meaning}: {str(error).rstrip('.')}."
        if error.kind in ("auth", "forbidden", "no_credit", "blocked"):
            message += f" {error.key_source}"
        return f"{message} {rule.remedy}"

    def receive(self, message: AboutCalls) -> None:
        """Act on a message of the parent."""
        match message:
            case SetLimits():
                self._limiters[message.endpoint].allow(
                    message.permits,
                    number=message.number,
                    cool_down_s=message.cool_down_s,
                    rpm=message.rpm,
                    tpm=message.tpm,
                    rates_s=message.rates_s,
                )
            case GrantBudget(amount):
                self._budget.take_grant(amount)
            case ReclaimBudget():
                self._budget.reclaim()
            case EndpointAnswered(url, is_answered):
                self._asked.pop(url).set_result(is_answered)
            case AnswerCall():
                assert self._collected is not None
                self._collected.on_answer(message.id, message.how, message.payload)
            case SetKey() if self._keys is not None:
                self._keys.on_key(message)

    def batch_wrapper(self, task: bytes, assignment: Assignment) -> Callable[[Model], Model]:
        """Return what wraps the models of a task whose calls are collected; else a no-op."""
        if self._collected is None:
            return lambda model: model
        return self._collected.make_wrapper(
            task, assignment, limiters=self._limiters, budget=self._budget
        )

    def stop(self) -> None:
        """Stop all attempts that wait or come: they raise `Stopped`."""
        if self._collected is not None:
            self._collected.stop()
        for limiter in self._limiters.values():
            limiter.stop()
        self._budget.stop()

    def _find_key(self, settings: ModelSettings) -> str | RenewableKey:
        if settings.connection.key_command and self._keys is not None:
            return self._keys.find_key(settings.connection)
        return read_key(settings)

    def _limiter(self, endpoint: str, limits: EndpointLimits) -> CallLimiter:
        from batch_trajectories.engine.worker.call_limiter import CallLimiter

        return CallLimiter(
            permits=0,  # until the parent sends some
            rpm=limits.rpm and limits.rpm * self._part,
            tpm=limits.tpm and limits.tpm * self._part,
            initial=self._initial,
            budget=self._budget,
            has_answered=endpoint_url(endpoint) in self._proven_before,
            on_refusal=lambda retry_after_s, sent_at: self._send(
                CallRefused(
                    endpoint=endpoint,
                    retry_after_s=retry_after_s,
                    sent_at=sent_at + self._clock_offset_s,
                )
            ),
        )

    async def close(self) -> None:
        """Report the last results, return the rest of the budget, and close all connections."""
        try:
            self.report()
            if self._budget.is_kept:
                self._budget.close()
        finally:
            await self.pool.close()

    def _report_messages(self) -> None:
        self.report()
        asyncio.get_running_loop().call_later(_LOAD_EVERY_S, self._report_messages)

    def report(self) -> None:
        """Report the load of each endpoint to the parent, if it has changed."""
        for endpoint, limiter in self._limiters.items():
            load = limiter.take_load()
            if load != self._loads[endpoint] or load.replies or load.failures:
                self._loads[endpoint] = load
                self._send(ReportLoad(endpoint=endpoint, load=load))


class StopSignal(Protocol):
    """Tells whether the worker is stopping, and stops it for a task."""

    is_stopping: bool

    def halt(self, message: str) -> None:
        """Stop the whole run with this message."""
        ...

    def say(self, message: str) -> None:
        """Show a message to the user, if no worker has shown the same message before."""
        ...


class StoppableModel:
    """Makes no call before earlier replies are on disk, or once the worker is stopping."""

    def __init__(
        self, stops: StopSignal, model: Model, wait_until_persisted: WaitUntilPersisted
    ) -> None:
        self._stops = stops
        self._model = model
        self._wait_until_persisted = wait_until_persisted

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `Stopped`."""
        if self._wait_until_persisted is not None:
            await self._wait_until_persisted()
        if self._stops.is_stopping:
            raise Stopped
        return await self._model.complete(request)


class ParentKeys:
    """The keys of one worker, by command. Needs a running event loop."""

    def __init__(self, send: Callable[[KeyRejected], None]) -> None:
        """`send` sends to the parent."""
        self._send = send
        self._keys: dict[str, ParentKey] = {}

    def find_key(self, connection: Connection) -> ParentKey:
        """The key of an endpoint with a `key_command`."""
        return self._find_key(connection.command_id)

    def on_key(self, message: SetKey) -> None:
        """Take the key that the parent has, or the reason why it has none."""
        self._find_key(message.command).set(message.number, message.problem, message.key)

    def _find_key(self, command: str) -> ParentKey:
        if (key := self._keys.get(command)) is None:
            key = self._keys[command] = ParentKey(command, self._send)
        return key


class ParentKey:
    """See `RenewableKey`."""

    def __init__(self, command: str, send: Callable[[KeyRejected], None]) -> None:
        self._command = command
        self._send = send
        self._key, self._number, self._problem = "", 0, ""
        self._is_asked_for = False
        self._heard = asyncio.Event()

    def set(self, number: int, problem: str, key: str) -> None:
        """Take a message of the parent, and wake those who wait for it."""
        self._key, self._number, self._problem = key or self._key, number, problem
        self._is_asked_for = False
        self._heard.set()
        self._heard = asyncio.Event()

    async def get(self) -> str:
        """See `RenewableKey`."""
        while not self._key:
            await self._heard.wait()
        return self._key

    async def renew(self, rejected: str) -> bool:
        """See `RenewableKey`; all calls that were rejected together share one question."""
        if self._key != rejected:
            return True
        heard = self._heard
        if not self._is_asked_for:
            self._is_asked_for = True
            self._send(KeyRejected(command=self._command, number=self._number))
        await heard.wait()
        if self._problem and self._key == rejected:
            raise ModelError("auth", self._problem, was_sent=False)
        return self._key != rejected
