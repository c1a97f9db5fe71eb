"""The worker's side of batches: a model whose calls go to the parent, who gathers them into waves.

A call has an id by which it is known again after a crash: its task, what is asked, and how often
the task has asked just that. The journal holds the id beside the reply, so a call whose reply was
never journaled is asked under the same id, and its batch is waited for, or read, once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import orjson

from agent.messages import Event
from agent.models.batches.calls import body_of, read_reply
from agent.models.client.retrying import RetryingModel
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.prices import estimate_cost, priced
from runs.amounts import Cost
from runs.errors import Stopped
from runs.protocol.batch_calls import item_id, name_of
from runs.worker.budget_share import WorkerBudget
from runs.worker.call_limiter import CallLimiter
from toolsets import exact_json


class BatchAnswer(NamedTuple):
    """What the parent says to a call."""

    how: str
    """"reply"; "live": ask the endpoint itself; "again": send the call once more."""
    reply: bytes


class BatchApiClient:
    """Where the conversations of a worker leave their calls, and wait for the answers."""

    def __init__(self, send: Callable[..., None]) -> None:
        """`send(type, payload, **fields)` reaches the parent."""
        self._send = send
        self._waiting: dict[str, asyncio.Future[BatchAnswer]] = {}
        self._is_stopping = False

    async def ask(
        self, id: str, settings: ModelSettings, body: bytes, most: Cost | None = None
    ) -> BatchAnswer:
        """Have a call made by a batch, for which `most` is set aside; raises `Stopped`."""
        if self._is_stopping:
            raise Stopped
        answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        told = None if most is None else most.to_json()
        self._send("ask", body, id=id, model=name_of(settings), most=told)
        try:
            return await answer
        finally:
            self._waiting.pop(id, None)

    def on_answer(self, id: str, how: str, reply: bytes) -> None:
        """The parent answers."""
        answer = self._waiting.get(id)
        if answer is not None and not answer.done():
            answer.set_result(BatchAnswer(how, reply))

    def stop(self) -> None:
        """Turn all away that wait and come: their batches are found again by the next start."""
        self._is_stopping = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Stopped())


class BatchApiModel:
    """A model of one conversation, asked by batches, or live where the parent says so."""

    def __init__(
        self,
        live: RetryingModel,
        *,
        desk: BatchApiClient,
        gate: CallLimiter,
        budget: WorkerBudget,
        task: bytes,
        used: set[str],
        held: dict[str, Cost],
    ) -> None:
        """`gate` is that of the live calls, told when the endpoint answers.

        `used` are the ids of the task's calls that have their replies, `held` what earlier starts
        have set aside for others; both are kept up to date.
        """
        self._live = live
        self._settings = live.asked
        self._desk = desk
        self._gate = gate
        self._budget = budget
        self._task = task
        self._used = used
        self._held = held

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `Stopped`."""
        # What is asked, rather than its body: options of the transport may change between starts.
        asked = exact_json.dumps(
            [name_of(self._settings), request.messages, request.tools, request.tool_choice],
            option=orjson.OPT_SORT_KEYS,
        )
        time = 0
        while (id := item_id(self._task, asked, time)) in self._used:
            time += 1
        self._used.add(id)
        try:
            with request.deadline.waiting() if request.deadline is not None else nullcontext():
                completion = await self._by_batch(id, request)
            if completion is None:
                completion = await self._live.complete(request)
        except BaseException:
            self._used.discard(id)
            raise
        return replace(completion, batch_item=id)

    async def close(self) -> None:
        """See `Model.close`: the live model is the pool's."""

    async def _by_batch(self, id: str, request: Request) -> Completion | None:
        """The reply that a batch brings, with its price; None where it brings none."""
        most = Cost()
        if self._budget.is_kept:
            most = self._budget.worst_case_of(estimate_cost(request, self._settings, by_batch=True))
            held = self._held.pop(id, None)
            if held is not None and held.covers(most):
                self._budget.take_over(most)
            else:
                await self._budget.reserve(most)
        may_cost, completion = True, None  # who stops waiting leaves a batch behind
        try:
            answer = await self._ask(id, request, most if self._budget.is_kept else None)
            may_cost = answer.how == "reply"
            completion = self._read(answer.reply, request) if may_cost else None
        finally:
            if self._budget.is_kept:
                if may_cost:
                    self._budget.settle(most, completion)
                else:
                    self._budget.release(most)
        return completion

    async def _ask(self, id: str, request: Request, most: Cost | None) -> BatchAnswer:
        while True:
            body = body_of(request, self._live.settings)
            answer = await self._desk.ask(id, self._settings, body, most)
            if answer.how != "again":
                return answer

    def _read(self, reply: bytes, request: Request) -> Completion | None:
        """None for a reply that nobody can use: it is asked for live."""
        try:
            completion = read_reply(reply, self._settings)
        except ModelError as error:
            if error.paid is not None and request.on_unreadable is not None:
                request.on_unreadable(priced(error.paid, self._settings, by_batch=True))
            return None
        self._gate.has_answered = True
        return priced(completion, self._settings, by_batch=True)


def items_in(events: Iterable[Event]) -> set[str]:
    """The ids of the calls whose replies are journaled."""
    found = set()
    for event in events:
        while event["kind"] == "sub":
            event = event["event"]
        if event["kind"] == "reply" and "batch_item" in event:
            found.add(event["batch_item"])
    return found
