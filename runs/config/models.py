"""Which models a run asks, and within which bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.models.batches.calls import has_batches
from agent.models.model import ModelSettings
from agent.models.resolve import SCRIPTED, read_key, resolve_model
from agent.setup import Setup, set_up
from runs.amounts import Cost, EndpointLimits
from runs.config.endpoints import to_prices
from runs.config.run_config import RunConfig
from runs.errors import ConfigError
from toolsets.catalog.registry import TOOLSETS, Toolset

Setups = Mapping[str, Setup]
"""What conversations work with, by the model that they ask, as the user wrote it."""


def set_up_models(config: RunConfig, known: Mapping[str, Toolset] = TOOLSETS) -> dict[str, Setup]:
    """Check and resolve everything that conversations can be given.

    `known` are all toolsets that can be named. Raises `ConfigError`.
    """
    try:
        setups = {name: _set_up(config, name, known) for name in config.model_weights()}
        _check_budget(config, setups)
        _check_batches(config, setups)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return setups


def asked(setups: Setups) -> list[ModelSettings]:
    """All models that may be asked at an endpoint, each once."""
    every = [settings for setup in setups.values() for settings in setup.models()]
    return list(dict.fromkeys(settings for settings in every if settings.api != SCRIPTED))


def unpriced(setups: Setups) -> str | None:
    """The name of a model that may be asked and whose price is unknown, or None."""
    return next((name for setup in setups.values() if (name := setup.unpriced())), None)


def bounds_of(config: RunConfig, setups: Setups) -> dict[str, EndpointLimits]:
    """The bounds on calls, by endpoint.

    Of several names for one endpoint the tightest bounds count; where the user says nothing, the
    number of conversations is the bound.
    """
    bounds = {}
    for endpoint in {settings.endpoint: None for settings in asked(setups)}:
        said = [one for one in config.endpoints.values() if one.key == endpoint]
        most = _least((one.max_in_flight for one in said), config.max_in_flight)
        ceiling = config.conversations if most is None else min(config.conversations, int(most))
        bounds[endpoint] = EndpointLimits(
            start=min(config.start_in_flight, ceiling),
            ceiling=ceiling,
            rpm=_least((one.rpm for one in said), config.rpm),
            tpm=_least((one.tpm for one in said), config.tpm),
        )
    return bounds


def budget_of(config: RunConfig) -> Cost | None:
    """What the run may spend, None where it is not bounded."""
    if config.max_run_cost_usd is None and config.max_run_tokens is None:
        return None
    return Cost(config.max_run_cost_usd or 0.0, config.max_run_tokens or 0)


def _set_up(config: RunConfig, name: str, known: Mapping[str, Toolset]) -> Setup:
    endpoints = {prefix: one.to_endpoint() for prefix, one in config.endpoints.items()}
    settings = resolve_model(
        name,
        base_url=config.base_url,
        api=config.api,
        key_env=config.key_env,
        endpoints=endpoints,
        prices=to_prices(config.prices),
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        extra_body=config.extra_body,
        attempt_timeout_s=config.attempt_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        stream_replies=config.stream_replies,
        needs_bound=budget_of(config) is not None,
        call_attempts=config.call_attempts,
        call_timeout_s=config.call_timeout_s,
        reasoning_effort="none" if config.reasoning_disabled else config.reasoning_effort,
        blank_reasoning=config.blank_reasoning,
        prompt_caching=config.prompt_caching,
    )
    read_key(settings)
    return set_up(
        config.agent_options,
        settings,
        enabled_toolsets=config.selected_toolsets(),
        disabled_toolsets=config.disabled_toolsets,
        endpoints=endpoints,
        known=known,
    )


def _check_budget(config: RunConfig, setups: Setups) -> None:
    """A budget is kept by what a call can use up at most, so that must be known."""
    if config.max_run_cost_usd is not None and (name := unpriced(setups)):
        msg = (
            f"max_run_cost_usd: the price of model {name!r} is unknown, so a budget in dollars "
            f"cannot be kept; give its price as prices: {{{name}: {{input: ..., output: ...}}}} "
            "(dollars per million tokens), or max_run_tokens instead"
        )
        raise ValueError(msg)
    unbounded = [settings.name for settings in asked(setups) if settings.reply_bound is None]
    if budget_of(config) is not None and unbounded:
        msg = (
            f"max_tokens is missing: without a bound on the replies of {unbounded[0]!r} nobody "
            "knows what its next call may cost, and a budget of the run cannot be kept"
        )
        raise ValueError(msg)


def _check_batches(config: RunConfig, setups: Setups) -> None:
    if not config.batch_api:
        return
    models = asked(setups)
    if none := [one.reference for one in models if not has_batches(one)]:
        msg = f"batch_api: the endpoint of {none[0]!r} has no batches; leave --batch_api out"
        raise ValueError(msg)
    if not models:
        msg = "batch_api: no model is asked at an endpoint; leave --batch_api out"
        raise ValueError(msg)
    streamed = [one.name for one in models if (one.extra_body or {}).get("stream")]
    if streamed:
        msg = f"extra_body: the replies of {streamed[0]!r} cannot be streamed with --batch_api"
        raise ValueError(msg)


def _least(own: Iterable[float | None], of_run: float | None) -> float | None:
    """The least of what is said of an endpoint; what the run says, where nothing is."""
    return min((value for value in own if value is not None), default=of_run)
