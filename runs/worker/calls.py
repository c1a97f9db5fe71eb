"""The model calls of one worker: its models, the gates before them, its share of the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

from agent.models.client.key_command import RenewableKey
from agent.models.client.pool import ModelPool, OnRetry
from agent.models.client.retrying import RetryingModel
from agent.models.errors import RULES, SAYS_MORE_OF_THE_ENDPOINT, ModelError
from agent.models.model import Model, ModelSettings, url_of
from agent.models.resolve import read_key
from runs.amounts import Cost, EndpointLimits
from runs.protocol.messages import Assignment
from runs.worker.batch_api_model import BatchApiClient, BatchApiModel, items_in
from runs.worker.budget_share import WorkerBudget
from runs.worker.call_limiter import CallLimiter, Load
from runs.worker.parent_keys import ParentKeys

_LOAD_EVERY_S = 0.1


class Calls:
    """What all conversations of a worker share in asking models. Needs a running event loop."""

    def __init__(
        self,
        bounds: Mapping[str, EndpointLimits],
        budget: Cost | None,
        *,
        number: int,
        workers: int,
        proven: Collection[str],
        by_batch: bool,
        keys: ParentKeys | None,
        clock_offset_s: float,
        send: Callable[..., None],
        on_retry: OnRetry,
    ) -> None:
        """`bounds` are those of the run, by endpoint; this is worker `number` of some `workers`.
        `proven` are the base URLs that have answered before. With `by_batch` calls go by batches
        first. `keys` are those of key commands, None to run these here. See
        `WorkerSetup.clock_offset_s`.

        `send(type, **fields)` reaches the parent. `on_retry` is told of every failure that
        is waited out.
        """
        self._send = send
        self._keys = keys
        self._clock_offset_s = clock_offset_s
        self._part, self._stock = 1 / workers, 1 - number % workers / workers
        self._budget = WorkerBudget(bounds=budget, tell=lambda told: send("purse", told=told))
        self._proven_before = frozenset(proven)
        self._gates = {
            endpoint: self._gate(endpoint, of_one) for endpoint, of_one in bounds.items()
        }
        self._desk = BatchApiClient(send) if by_batch else None
        self._loads = dict.fromkeys(bounds, Load())
        self.pool = ModelPool(
            key_of=self._key_of,
            on_retry=on_retry,
            gate_of=lambda settings: self._gates[settings.endpoint],
        )
        self._report_on()

    @property
    def proven(self) -> frozenset[str]:
        """The base URLs that have answered."""
        now = {url_of(endpoint) for endpoint, gate in self._gates.items() if gate.has_answered}
        return self._proven_before | now

    def is_the_endpoints(self, error: ModelError) -> bool:
        """Whether a failure stops the run rather than the task alone."""
        if error.action == "stop_run":
            return True
        return error.endpoint not in self.proven and error.kind in SAYS_MORE_OF_THE_ENDPOINT

    @staticmethod
    def describe(error: ModelError) -> str:
        """Why an endpoint stops the run, with what to look at."""
        words = f"{error.endpoint}: {RULES[error.kind].meaning}: {error}"
        if error.kind in ("auth", "forbidden", "no_credit", "blocked"):
            words += f". {error.key_source}"
        return words

    def on_limits(
        self,
        endpoint: str,
        permits: int,
        number: int,
        cool_down_s: float,
        rpm: float | None,
        tpm: float | None,
    ) -> None:
        """The parent says, in its message `number`, what this worker may do at an endpoint."""
        gate = self._gates[endpoint]
        gate.allow(permits, cool_down_s=cool_down_s, number=number, rpm=rpm, tpm=tpm)

    def on_key(self, command: str, number: int, problem: str, key: bytes) -> None:
        """The parent has a new key of a key command."""
        if self._keys is not None:
            self._keys.on_key(command, number, problem, key.decode())

    def on_answer(self, id: str, how: str, reply: bytes) -> None:
        """The parent answers a call that was to be made by a batch."""
        assert self._desk is not None
        self._desk.on_answer(id, how, reply)

    def by_batch(self, task: bytes, deal: Assignment) -> Callable[[Model], Model]:
        """How a task calls its models; see `BatchApiModel`. Scripts need no Batch API."""
        if (desk := self._desk) is None:
            return lambda model: model
        used = items_in(deal["events"])
        held = {id: Cost(*most) for id, most in deal["held"].items()}

        def wrapped(model: Model) -> Model:
            if not isinstance(model, RetryingModel):
                return model
            gate = self._gates[model.asked.endpoint]
            return BatchApiModel(
                model, desk=desk, gate=gate, budget=self._budget, task=task, used=used, held=held
            )

        return wrapped

    def on_grant(self, amount: list[Any]) -> None:
        """The parent lends money."""
        self._budget.take_grant(Cost(*amount))

    def on_reclaim(self) -> None:
        """The run is short of money."""
        self._budget.reclaim()

    def stop(self) -> None:
        """Let no new attempt through: who waits or comes gets `Stopped`."""
        if self._desk is not None:
            self._desk.stop()
        for gate in self._gates.values():
            gate.stop()
        self._budget.stop()

    def _key_of(self, settings: ModelSettings) -> str | RenewableKey:
        if settings.connection.key_command and self._keys is not None:
            return self._keys.of(settings.connection)
        return read_key(settings)

    def _gate(self, endpoint: str, bounds: EndpointLimits) -> CallLimiter:
        return CallLimiter(
            permits=0,  # until the parent has told what is free
            rpm=bounds.rpm and bounds.rpm * self._part,
            tpm=bounds.tpm and bounds.tpm * self._part,
            initial=self._stock,
            budget=self._budget,
            has_answered=url_of(endpoint) in self._proven_before,
            on_refusal=lambda retry_after_s, sent_at: self._send(
                "refused",
                endpoint=endpoint,
                retry_after_s=retry_after_s,
                sent_at=sent_at + self._clock_offset_s,
            ),
        )

    async def close(self) -> None:
        """Tell the last news, give money back, and release all connections."""
        self._report()
        if self._budget.is_kept:
            self._budget.close()
        await self.pool.close()

    def _report_on(self) -> None:
        self._report()
        asyncio.get_running_loop().call_later(_LOAD_EVERY_S, self._report_on)

    def _report(self) -> None:
        """Tell the parent what the calls did, where there is news."""
        for endpoint, gate in self._gates.items():
            load = gate.take_load()
            if load != self._loads[endpoint] or load.replies or load.failures:
                self._loads[endpoint] = load
                self._send("load", endpoint=endpoint, load=asdict(load))
