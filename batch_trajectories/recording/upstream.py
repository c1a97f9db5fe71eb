"""The models that recorded programs may call, with limits and budget as in any run.

In a run, the parent divides limits and budget among workers. Here one process is both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec

from agent.gateway.answers import Answer, guess_api, models_path
from agent.gateway.relay import RefusedModel, Route, make_free_request, send_free_request
from agent.gateway.server import NO_NAMES
from agent.models.client.retrying import Retry
from agent.models.dialects.dialect import api_base_url
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.prices import has_known_price
from agent.models.providers import ONLY_RELAYED, Api, find_provider
from agent.setup import Setup, set_up
from agent.wires.wires import WIRES
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.config.models import (
    check_token_ids,
    endpoint_limits,
    resolve_settings,
    run_budget,
)
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import Inbox, WorkerHandle
from batch_trajectories.engine.messages import (
    CallRefused,
    FromWorker,
    ReportBudget,
    ReportLoad,
    ToWorker,
)
from batch_trajectories.engine.supervisor.budget import BudgetLog, RunBudget
from batch_trajectories.engine.supervisor.limits import RunLimits
from batch_trajectories.engine.worker.calls import AboutCalls, Calls

log = logging.getLogger(__name__)

ANY = "any"
"""The name that stands for all models in the config of a recording."""

_OPENAI = frozenset({"openai_chat", "openai_responses"})
_TICK_S = 0.1
_LIST_S = 10.0


class Models:
    """Finds the model for a dialect and the name that a program sends."""

    def __init__(self, config: RunConfig, upstream: str) -> None:
        """`upstream` is a prefix as in `--model=PREFIX:NAME`. Raises `ConfigError`."""
        self._config = config
        self._upstream = upstream
        self._known: dict[tuple[str, str], ModelSettings] = {}
        try:
            self.settings = resolve_settings(config, f"{upstream}:{ANY}")
            self.setup: Setup = set_up(
                config.agent_options,
                self.settings,
                enabled_toolsets=("none",),
                disabled_toolsets=(),
            )
            check_token_ids(config, self.setups)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def setups(self) -> dict[str, Setup]:
        """The setups of the endpoints, by a name for each."""
        setups = {}
        for api in get_args(Api):
            try:
                setups[api] = msgspec.structs.replace(
                    self.setup, settings=self._adapt_dialect(api, self.settings)
                )
            except RefusedModel:
                continue
        return setups

    def find(self, api: str, name: str) -> ModelSettings:
        """Return the settings of a model. Raises `RefusedModel`."""
        if (known := self._known.get((api, name))) is not None:
            return known
        try:
            settings = resolve_settings(self._config, f"{self._upstream}:{name}")
        except ValueError as error:
            raise RefusedModel(str(error)) from error
        settings = self._adapt_dialect(api, settings)
        if self._config.max_run_cost_usd is not None and not has_known_price(settings):
            raise RefusedModel(
                f"the price of model {name!r} is unknown, so the budget of the recording cannot be "
                f"kept; give it under prices, by the name {settings.reference!r}"
            )
        self._known[api, name] = settings
        return settings

    def _adapt_dialect(self, api: str, settings: ModelSettings) -> ModelSettings:
        """Return the settings for a dialect of the same server. Raises `RefusedModel`."""
        if settings.api == api:
            return settings
        base_url = settings.base_url or ""
        is_own = find_provider(base_url) is None and settings.connection.client is None
        if is_own and not ONLY_RELAYED & {api, settings.api}:
            base_url = _dialect_root(api, base_url)
        elif not {api, settings.api} <= _OPENAI:
            raise RefusedModel(
                f"{self._upstream!r} is asked by {settings.api}, and this request is of {api}"
            )
        connection = settings.connection
        if is_own and (several := connection.replication) is not None:
            urls = tuple(_dialect_root(api, url) for url in several.urls)
            connection = replace(
                connection, replication=msgspec.structs.replace(several, urls=urls)
            )
        return replace(settings, api=api, base_url=base_url, connection=connection)


def _dialect_root(api: str, base_url: str) -> str:
    """Return the base URL at which a server of the user's own speaks a dialect."""
    return api_base_url(api, base_url.rstrip("/").removesuffix("/v1"))


@dataclass(eq=False)
class _OwnWorker(WorkerHandle):
    """This process as a worker, for code that is written for the parent and its workers."""

    take: Callable[[ToWorker], None] = field(default=lambda message: None)

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        """Never called."""

    def reap(self) -> None:
        """Never called."""

    def send(self, message: ToWorker) -> None:
        self.take(message)


class Upstream:
    """Makes the calls of a recording, within its limits and budget. Needs a running event loop."""

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        *,
        spent: Cost,
        budget_log: BudgetLog,
        on_used_up: Callable[[str], None],
        say: Callable[[str], object],
    ) -> None:
        """`spent` is the spending of earlier starts. `on_used_up` gets the reason that no call
        can be paid, `say` gets messages for the user.
        """
        limits = endpoint_limits(config, models.setups)
        self._models = models
        self._on_used_up = on_used_up
        self._say = say
        self._said: set[str] = set()
        self._limits = RunLimits(limits)
        self._budget = RunBudget(run_budget(config), spent=spent, budget_log=budget_log)
        inbox: Inbox = Inbox()
        self._own_worker = _OwnWorker(
            0, "recorder", inbox, ready=True, take=self._take_parent_message
        )
        self.calls = Calls(
            limits,
            run_budget(config),
            number=0,
            workers=1,
            proven=(),
            by_batch=False,
            keys=None,
            clock_offset_s=0.0,
            send=self._take_worker_message,
            on_retry=_log_retry,
            say=self._say_once,
            conversations=0,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._tick()

    def route(self, api: str, name: str) -> Route:
        """Find the model that answers a call. Raises `RefusedModel`."""
        settings = self._models.find(api, name)
        return Route(self.calls.pool.get(settings))

    async def list_models(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Return the endpoint's own list of models; see `agent.gateway.answers`."""
        own, setups = self._models.settings, self._models.setups
        api = guess_api(path, headers, own.api)
        settings = setups[api].settings if api in setups else own
        if settings.connection.client is not None:  # such clients cannot send this request
            return await NO_NAMES(path, headers)
        sent = {name: headers[name] for name in WIRES[settings.api].headers if name in headers}
        request = make_free_request(models_path(settings.api, path), sent)
        # The program can ask again; it does not wait for an endpoint that has no list.
        once = replace(settings, call_attempts=1, call_timeout_s=_LIST_S, attempt_timeout_s=_LIST_S)
        return await send_free_request(self.calls.pool.get(once), request)

    def has_failed(self, error: ModelError) -> bool:
        """Whether a failed call stops the recording."""
        # An API that the server lacks fails only the sessions of programs that speak it.
        has_answered = error.action != "stop_run" and bool(self.calls.proven)
        return self.calls.concerns_endpoint(error) and not has_answered

    def report(self) -> list[dict[str, Any]]:
        """Return the limits that held calls back; see `RunLimits.report`."""
        return self._limits.report()

    def stop(self) -> None:
        """Refuse waiting and new calls."""
        self.calls.stop()

    async def close(self) -> None:
        """Return the rest of the budget, and close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        await self.calls.close()

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._say(message)

    def _tick(self) -> None:
        self._share()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _share(self) -> None:
        self._limits.share([self._own_worker])
        self._budget.grant_shares([self._own_worker])
        if reason := self._budget.used_up([self._own_worker]):
            self._on_used_up(reason)

    def _take_worker_message(self, message: FromWorker) -> None:
        match message:
            case ReportLoad(endpoint, load):
                self._limits.on_load(self._own_worker, endpoint, load)
            case CallRefused(endpoint, retry_after_s, sent_at):
                self._limits.on_refusal(endpoint, retry_after_s, sent_at)
            case ReportBudget():
                self._budget.on_worker_budget(self._own_worker, message)
                asyncio.get_running_loop().call_soon(self._share)

    def _take_parent_message(self, message: ToWorker) -> None:
        assert isinstance(message, AboutCalls)
        self.calls.receive(message)


def _log_retry(settings: ModelSettings, retry: Retry) -> None:
    log.info("At %s: %s", settings.base_url, retry)
