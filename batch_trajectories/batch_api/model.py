"""A model whose calls go to the parent, which gathers them into batches.

The id of a call is the same after a crash: it is made from the task, the question, and how often
the task has asked that question. The journal has the id beside the reply. So a call whose reply was
not journaled is requested again with the same id, and gets the result of its batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import orjson

from agent.messages.message import Event
from agent.models.batches.calls import live_body, read_reply
from agent.models.client.retrying import RetryingModel
from agent.models.errors import ModelError
from agent.models.model import Completion, Model, ModelSettings, Request
from agent.models.prices import add_cost
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import Stopped
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import Assignment, CollectCall, make_call_id, model_label
from batch_trajectories.engine.worker.budget_share import WorkerBudget
from batch_trajectories.engine.worker.call_limiter import CallLimiter


class BatchAnswer(NamedTuple):
    """The parent's answer to a call."""

    how: str
    """"reply": `reply` has it; "live": call the endpoint directly; "again": request the call
    again."""
    reply: bytes


class BatchApiClient:
    """Requests the calls of a worker from the parent and waits for the answers."""

    def __init__(self, send: Callable[[CollectCall], None]) -> None:
        """`send` sends to the parent."""
        self._send = send
        self._waiting: dict[str, asyncio.Future[BatchAnswer]] = {}
        self._is_stopping = False

    async def ask(
        self, id: str, settings: ModelSettings, body: bytes, reserve: Cost | None = None
    ) -> BatchAnswer:
        """Request a call in a batch, with `reserve` set aside for it; raises `Stopped`."""
        if self._is_stopping:
            raise Stopped
        answer: asyncio.Future[BatchAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        self._send(CollectCall(id=id, model=model_label(settings), most=reserve, payload=body))
        try:
            return await answer
        finally:
            self._waiting.pop(id, None)

    def make_wrapper(
        self,
        task: bytes,
        assignment: Assignment,
        *,
        limiters: Mapping[str, CallLimiter],
        budget: WorkerBudget,
    ) -> Callable[[Model], Model]:
        """Return a function that wraps a task's models in a `BatchApiModel`.

        It returns scripted models as they are.
        """
        used = items_in(assignment.events)
        held = dict(assignment.reserved)

        def wrap(model: Model) -> Model:
            if not isinstance(model, RetryingModel):
                return model
            return BatchApiModel(
                model,
                client=self,
                limiter=limiters[model.asked.endpoint],
                budget=budget,
                task=task,
                used=used,
                held=held,
            )

        return wrap

    def on_answer(self, id: str, how: str, reply: bytes) -> None:
        """Pass the parent's answer to the call that waits for it."""
        answer = self._waiting.get(id)
        if answer is not None and not answer.done():
            answer.set_result(BatchAnswer(how, reply))

    def stop(self) -> None:
        """Stop all waiting and future calls; the next start finds their batches again."""
        self._is_stopping = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Stopped())


class BatchApiModel:
    """A model of one conversation, called in batches, or live if the parent says so."""

    def __init__(
        self,
        live: RetryingModel,
        *,
        client: BatchApiClient,
        limiter: CallLimiter,
        budget: WorkerBudget,
        task: bytes,
        used: set[str],
        held: dict[str, Cost],
    ) -> None:
        """`limiter` limits live calls, and is notified when the endpoint answers.

        `used` are the ids of the task's calls with replies; `held` are the amounts that earlier
        starts have reserved for other calls. This class updates both.
        """
        self._live = live
        self._settings = live.asked
        self._client = client
        self._limiter = limiter
        self._budget = budget
        self._task = task
        self._used = used
        self._held = held

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `Stopped`."""
        # Without the rest of the request: options of the transport may change between starts.
        question = exact_json.dumps(
            [model_label(self._settings), request.messages, request.tools, request.tool_choice],
            option=orjson.OPT_SORT_KEYS,
        )
        time = 0
        while (id := make_call_id(self._task, question, time)) in self._used:
            time += 1
        self._used.add(id)
        try:
            with request.deadline.waiting() if request.deadline is not None else nullcontext():
                completion = await self._complete_in_batch(id, request)
            if completion is None:
                completion = await self._live.complete(request)
        except BaseException:
            self._used.discard(id)
            raise
        return replace(completion, batch_item=id)

    async def _complete_in_batch(self, id: str, request: Request) -> Completion | None:
        """Return the reply from a batch, with its price; None if the call must be made live."""
        reserve, estimate = Cost(), None
        if self._budget.is_kept:
            estimate = self._live.reserves.estimate(request, by_batch=True)
            reserve = self._budget.bound_cost(self._live.reserves.worst_case(estimate))
            held = self._held.pop(id, None)
            if held is not None and held.covers(reserve):
                self._budget.take_over(reserve)
            else:
                await self._budget.reserve(reserve)
        may_cost, completion = True, None  # after a stop, the call may still be in a batch
        try:
            answer = await self._ask(id, request, reserve if self._budget.is_kept else None)
            may_cost = answer.how == "reply"
            completion = self._read_completion(answer.reply, request) if may_cost else None
            if estimate is not None and completion is not None:
                self._live.reserves.learn(estimate, completion)
        finally:
            if self._budget.is_kept:
                if may_cost:
                    self._budget.settle(reserve, completion)
                else:
                    self._budget.release(reserve)
        return completion

    async def _ask(self, id: str, request: Request, reserve: Cost | None) -> BatchAnswer:
        while True:
            body = live_body(request, self._live.settings)
            answer = await self._client.ask(id, self._settings, body, reserve)
            if answer.how != "again":
                return answer

    def _read_completion(self, reply: bytes, request: Request) -> Completion | None:
        """Return the completion; None if the reply is unusable, so that the call is made live."""
        try:
            completion = read_reply(reply, self._settings)
        except ModelError as error:
            if error.paid is not None and request.on_unreadable is not None:
                request.on_unreadable(add_cost(error.paid, self._settings, by_batch=True))
            return None
        self._limiter.has_answered = True
        return add_cost(completion, self._settings, by_batch=True)


def items_in(events: Iterable[Event]) -> set[str]:
    """Return the ids of batch calls whose replies are in the journal."""
    ids = set()
    for event in events:
        while event["kind"] == "sub":
            event = event["event"]
        if event["kind"] == "reply" and "batch_item" in event:
            ids.add(event["batch_item"])
    return ids
