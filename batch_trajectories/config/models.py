"""The models that a run calls: set-up, the choice for each task, limits and budget of calls."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from agent.models.model import ModelSettings, Price
from agent.models.providers import ONLY_RELAYED, Api, find_provider, is_known_prefix
from agent.models.resolve import SCRIPTED, Endpoint, read_key, resolve_model, resolve_sibling
from agent.setup import Setup, set_up
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.endpoints import Cost, EndpointLimits, to_prices
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import MODEL_COLUMN
from batch_trajectories.records.tasks import Task
from toolsets.catalog.registry import TOOLSETS, Toolset

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent

Setups = Mapping[str, Setup]
"""The setups of conversations by model name, as the user wrote it."""


def set_up_models(config: RunConfig, known: Mapping[str, Toolset] = TOOLSETS) -> dict[str, Setup]:
    """Check and resolve the models and toolsets of all conversations.

    `known` are all toolsets that the config can name. Raises `ConfigError`.
    """
    try:
        setups = {name: _set_up(config, name, known) for name in config.model_weights()}
        _check_budget(config, setups)
        _check_batches(config, setups)
        _check_replicas(config, setups)
        check_token_ids(config, setups)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return setups


def called_models(setups: Setups) -> list[ModelSettings]:
    """All models that may be called at an endpoint, without duplicates."""
    every = [settings for setup in setups.values() for settings in setup.models()]
    return list(dict.fromkeys(settings for settings in every if settings.api != SCRIPTED))


def uses_key_command(setups: Setups) -> bool:
    """Whether a command prints the key of a model."""
    return any(settings.connection.key_command for settings in called_models(setups))


def unpriced_model(setups: Setups) -> str | None:
    """The name of a model that may be called and has no known price, or None."""
    return next((name for setup in setups.values() if (name := setup.unpriced())), None)


def endpoint_limits(config: RunConfig, setups: Setups) -> dict[str, EndpointLimits]:
    """The limits on calls, by endpoint.

    If several names stand for one endpoint, the tightest limits apply. Calls in flight never
    exceed the number of conversations.
    """
    limits = {}
    for endpoint, settings in {one.endpoint: one for one in called_models(setups)}.items():
        entries = [entry for entry in config.endpoints.values() if entry.serves(settings)]
        ceiling = config.conversations
        in_flight = _tightest((entry.max_in_flight for entry in entries), config.max_in_flight)
        if in_flight is not None:
            ceiling = min(ceiling, int(in_flight))
        rpm = _tightest((entry.rpm for entry in entries), config.rpm)
        if (several := settings.connection.replication) is not None:
            count = len(several.urls)
            if several.max_in_flight is not None:
                ceiling = min(ceiling, several.max_in_flight * count)
            if several.rpm is not None:
                rpm = min(rpm or several.rpm * count, several.rpm * count)
        limits[endpoint] = EndpointLimits(
            start=min(config.start_in_flight, ceiling),
            ceiling=ceiling,
            rpm=rpm,
            tpm=_tightest((entry.tpm for entry in entries), config.tpm),
        )
    return limits


def run_budget(config: RunConfig) -> Cost | None:
    """The budget of the run; None if it has none."""
    if config.max_run_cost_usd is None and config.max_run_tokens is None:
        return None
    return Cost(config.max_run_cost_usd or 0.0, config.max_run_tokens or 0)


def resolve_settings(config: RunConfig, name: str) -> ModelSettings:
    """The settings of calls of the model that a user writes as `name`.

    Raises `ValueError`: among others `UnknownModel`, and `MissingKey`.
    """
    settings = resolve_model(
        name,
        base_url=config.base_url,
        api=config.api or _agent_api(config),
        key_env=config.key_env,
        endpoints=_endpoints(config),
        prices=to_prices(config.prices),
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        extra_body=config.extra_body,
        attempt_timeout_s=config.attempt_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        stream_replies=config.stream_replies,
        needs_bound=run_budget(config) is not None,
        call_attempts=config.call_attempts,
        call_timeout_s=config.call_timeout_s,
        reasoning_effort=config.reasoning_effort,
        prompt_caching=config.prompt_caching,
        token_ids=config.token_ids or None,
    )
    read_key(settings)
    return settings


def find_price(config: RunConfig, name: str) -> Price | None:
    """The price of the model that a user writes as `name`; None if it is unknown.

    No key is needed.
    """
    try:
        settings = resolve_model(
            name,
            base_url=config.base_url,
            api=config.api,
            key_env=config.key_env,
            endpoints=_endpoints(config),
            prices=to_prices(config.prices),
        )
    except ValueError:  # it is not named in the config
        return None
    if settings.own_price is not None or settings.api == SCRIPTED:
        return settings.own_price
    from agent.models.prices import table_price

    return table_price(settings)


def sibling_options(config: RunConfig, name: str) -> dict[str, Any]:
    """The options `model`, `base_url`, `api` and `key_env` of a further model, such as a judge.

    A model without a provider, or with that of the run's first model, uses the run's endpoint.
    """
    run_prefix, colon, _ = next(iter(config.model_weights())).partition(":")
    run_prefix = run_prefix if colon and "/" not in run_prefix else ""
    prefix, colon, _ = name.partition(":")
    there = {key: getattr(config, key) for key in ("base_url", "api", "key_env")}
    is_elsewhere = colon and (
        prefix in config.endpoints or is_known_prefix(prefix, config.base_url)
    )
    if name == SCRIPTED or (is_elsewhere and prefix != run_prefix):
        return {"model": name}
    if not is_elsewhere and config.base_url is None and run_prefix:
        name = f"{run_prefix}:{name}"
    return {"model": name, **({} if run_prefix in config.endpoints else there)}


def _endpoints(config: RunConfig) -> dict[str, Endpoint]:
    return {prefix: one.to_endpoint() for prefix, one in config.endpoints.items()}


def _set_up(config: RunConfig, name: str, known: Mapping[str, Toolset]) -> Setup:
    settings = resolve_settings(config, name)
    endpoints = _endpoints(config)
    setup = set_up(
        config.agent_options,
        settings,
        enabled_toolsets=config.selected_toolsets(),
        disabled_toolsets=config.disabled_toolsets,
        endpoints=endpoints,
        known=known,
    )
    if config.agent is None:
        _check_dialects(setup)
        return setup
    return replace(setup, aliases=_aliases(config.agent, settings, endpoints))


def _agent_api(config: RunConfig) -> Api | None:
    """The API of the user's own server, which follows from the agent; None for known providers."""
    if config.agent is None or config.base_url is None or find_provider(config.base_url):
        return None
    return config.agent.speaks[0]


def _check_dialects(setup: Setup) -> None:
    """Raise `ValueError` for a model that only agents can call."""
    for model in setup.models():
        if model.api in ONLY_RELAYED:
            raise ValueError(
                f"api: {model.reference!r}: the API gemini is only for agents that run as commands "
                "(--agent=gemini-cli); without --api, Gemini's models are called by openai_chat"
            )


def _aliases(
    agent: CommandAgent, settings: ModelSettings, endpoints: Mapping[str, Endpoint]
) -> dict[str, ModelSettings]:
    """The models that an agent may ask for by other names. Raises `ValueError`."""
    aliases = {
        alias: settings
        if name in ("{model}", settings.reference)
        else resolve_sibling(name, settings, endpoints)
        for alias, name in agent.aliases.items()
    }
    for model in (settings, *aliases.values()):
        if model.api not in agent.speaks:
            known = ", ".join(agent.speaks)
            raise ValueError(
                f"agent {agent.name!r} speaks {known}, but {model.reference!r} is called by "
                f"{model.api}; choose a model or endpoint with that API (--model, --base_url, "
                "--api)"
            )
        read_key(model)
    return aliases


def _check_budget(config: RunConfig, setups: Setups) -> None:
    """A budget reserves the worst case of each call, so that must be known."""
    if config.max_run_cost_usd is not None and (name := unpriced_model(setups)):
        raise ValueError(
            f"max_run_cost_usd: the price of model {name!r} is unknown, so a budget in dollars "
            f"cannot be enforced; set prices: {{{name}: {{input: ..., output: ...}}}} (dollars "
            "per million tokens), or max_run_tokens instead"
        )
    for reference in config.model_budgets or ():
        if (setup := setups.get(reference)) is not None and (name := setup.unpriced()):
            raise ValueError(
                f"model_budgets: the price of model {name!r} is unknown; set prices: {{{name}: "
                "{input: ..., output: ...}} (dollars per million tokens)"
            )
    unlimited = [model.name for model in called_models(setups) if model.reply_bound is None]
    if run_budget(config) is not None and unlimited:
        raise ValueError(
            f"max_tokens is missing: without a reply limit for {unlimited[0]!r} the cost of a call "
            "has no limit, so the run budget cannot be enforced"
        )


def _check_batches(config: RunConfig, setups: Setups) -> None:
    if not config.batch_api:
        return
    from agent.models.batches.calls import has_batches

    models = called_models(setups)
    if without := [model.reference for model in models if not has_batches(model)]:
        raise ValueError(
            f"batch_api: the endpoint of {without[0]!r} has no Batch API that can be used; leave "
            "--batch_api out (a client must be MODULE:FUNCTION, and return AsyncOpenAI or "
            "AsyncAnthropic)"
        )
    if not models:
        raise ValueError("batch_api: no model is called at an endpoint; leave --batch_api out")
    streamed = [model.name for model in models if (model.extra_body or {}).get("stream")]
    if streamed:
        raise ValueError(
            f"extra_body: the replies of {streamed[0]!r} cannot be streamed with --batch_api"
        )


def _check_replicas(config: RunConfig, setups: Setups) -> None:
    """Raise `ValueError` if a worker's part of a replica's limit would be less than one call."""
    for model in called_models(setups):
        several = model.connection.replication
        most = None if several is None else several.max_in_flight
        if most is not None and most < config.num_workers:
            raise ValueError(
                f"replica_max_in_flight: {most} cannot be divided among {config.num_workers} "
                f"workers; give at most --num_workers={most}"
            )


def check_token_ids(config: RunConfig, setups: Setups) -> None:
    """Raise `ValueError` for `--token_ids` if no model is called by an API that has them."""
    apis = {setup.settings.api for setup in setups.values()}
    if config.token_ids and "openai_chat" not in apis:
        raise ValueError(
            f"token_ids: no reply of the API {', '.join(sorted(apis))} has token ids; use an "
            "endpoint of the API openai_chat, such as vLLM or SGLang, or leave --token_ids out"
        )


def _tightest(limits: Iterable[float | None], run_limit: float | None) -> float | None:
    """The lowest limit of an endpoint's entries; the run's limit if they set none."""
    return min((value for value in limits if value is not None), default=run_limit)


def setup_of_task(setups: Setups, config: RunConfig, task: Task) -> Setup:
    """The model and toolsets of a task; draws depend on the seed and the id of the task."""
    setup = setups[_choose_model(config, task)]
    distribution = config.toolset_percentages()
    if distribution is None:
        return setup
    from toolsets.catalog.distributions import draw_toolsets

    # Disabled toolsets are not in `setup` and cannot be drawn.
    enabled = {name: distribution[name] for name in setup.toolset_names()}
    drawn_as = f"{config.seed}/{_draw_id(config, task)}"
    return setup.select_toolsets(draw_toolsets(enabled, drawn_as) if enabled else ())


def _choose_model(config: RunConfig, task: Task) -> str:
    """Choose the model of a task: the cascade's, else the row's own, else one drawn by weight."""
    if config.escalate_after is not None:
        return task.model or next(iter(config.model_weights()))
    weights = config.model_weights()
    if len(weights) == 1:
        return next(iter(weights))
    row_model = task.columns.get(MODEL_COLUMN)
    if isinstance(row_model, str):
        return row_model
    draw = random.Random(f"{config.seed}/{_draw_id(config, task)}/model")
    names = sorted(weights)
    return draw.choices(names, [weights[name] for name in names])[0]


def _draw_id(config: RunConfig, task: Task) -> str:
    """The id that decides what a task draws; a branch has its parent's, to draw the same."""
    return str(task.columns["fork"]["drawn_as"]) if config.forks else task.id
