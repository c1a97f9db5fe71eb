"""From the model name that a user writes to the endpoint, dialect and key that it means.

scripted                 offline, plays the row's script
openai:NAME              api.openai.com           OPENAI_API_KEY
responses:NAME           the same, in the Responses dialect
anthropic:NAME           api.anthropic.com        ANTHROPIC_API_KEY
openrouter:NAME          openrouter.ai            OPENROUTER_API_KEY
ENDPOINT:NAME            at an endpoint that the config names under `endpoints`
NAME or VENDOR/NAME      the OpenAI dialect at --base_url, by default OpenRouter

A base URL at the host of one of these providers means that provider, whatever the name says: its
key, its prices, its dialect. So the key of one is never sent to another, unless --key_env asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from agent.models.model import ModelSettings

Api = Literal["openai_chat", "openai_responses", "anthropic_messages"]


class Endpoint(NamedTuple):
    """Where a prefix leads."""

    api: str
    base_url: str
    key_env: str
    provider: str | None
    options: Mapping[str, Any] = MappingProxyType({})
    """Fields of `ModelSettings` that its models are asked with, instead of those of the run."""


ENDPOINTS: Mapping[str, Endpoint] = {
    "openai": Endpoint("openai_chat", "https://api.openai.com/v1", "OPENAI_API_KEY", "openai"),
    "responses": Endpoint(
        "openai_responses", "https://api.openai.com/v1", "OPENAI_API_KEY", "openai"
    ),
    "anthropic": Endpoint(
        "anthropic_messages", "https://api.anthropic.com", "ANTHROPIC_API_KEY", "anthropic"
    ),
    "openrouter": Endpoint(
        "openai_chat", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", "openrouter"
    ),
}

_HOSTS: Mapping[str, Endpoint] = {
    urlsplit(ENDPOINTS[prefix].base_url).hostname or "": ENDPOINTS[prefix]
    for prefix in ("openai", "anthropic", "openrouter")
}

SCRIPTED = "scripted"
_NO_KEY = "none"
"""What `key_env` may say for an endpoint that wants no key."""


class UnknownModel(ValueError):
    """The model's name cannot be resolved; the message says which forms are known."""


class MissingKey(ValueError):
    """The environment holds no usable key for the endpoint; the message names the variable."""


def resolve_model(
    name: str,
    *,
    base_url: str | None,
    api: Api | None,
    key_env: str | None,
    endpoints: Mapping[str, Endpoint] = MappingProxyType({}),
    **options: Any,
) -> ModelSettings:
    """Resolve what the user wrote. `options` are further fields of `ModelSettings`.

    `endpoints` are the user's own, by the prefixes that lead to them; `base_url`, `api` and
    `key_env` are not for them. Elsewhere a base URL of the user's own replaces the default one
    and, unless the name has a prefix, takes the price table's provider with it. One that is a
    known provider's brings that provider's key and prices, and its dialect to a bare name.

    Raises `UnknownModel`, and `UnusableProxy` where no call could leave.
    """
    prefix, colon, rest = _parts(name)
    if name == SCRIPTED:
        return ModelSettings(
            name=name, api=SCRIPTED, base_url=None, key_env=None, reference=name, **options
        )
    if colon and (own := endpoints.get(prefix)):
        _check_proxy(own.base_url)
        return ModelSettings(
            name=rest,
            api=own.api,
            base_url=own.base_url,
            key_env=own.key_env,
            provider=own.provider,
            reference=name,
            **{**options, **own.options},
        )
    if colon and "/" not in prefix and prefix not in ENDPOINTS:
        if base_url is None:
            known_prefixes = ", ".join(sorted({*ENDPOINTS, *endpoints}))
            msg = (
                f"model {name!r}: unknown prefix {prefix!r}. Known: {known_prefixes}"
                f" (as PREFIX:NAME), {SCRIPTED!r}, or a bare name with --base_url"
            )
            raise UnknownModel(msg)
        prefix = ""
    known = ENDPOINTS.get(prefix) if colon else None
    own_endpoint = base_url is not None
    there = known_at(base_url) if base_url is not None else None
    endpoint = known or there or ENDPOINTS["openrouter"]
    payee = there or (None if own_endpoint and not known else endpoint)
    dialect = api or endpoint.api
    _check_proxy(base_url or endpoint.base_url)
    return ModelSettings(
        name=rest if known else name,
        api=dialect,
        base_url=root_of(base_url or endpoint.base_url, dialect),
        key_env=key_env or (payee and payee.key_env),
        provider=payee and payee.provider,
        reference=name,
        **options,
    )


def _check_proxy(base_url: str) -> None:
    from agent.models.proxies import proxy_for

    proxy_for(base_url)


def known_at(base_url: str) -> Endpoint | None:
    """The provider whose host a base URL names, of those known here."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    return next((one for known, one in _HOSTS.items() if f".{host}".endswith(f".{known}")), None)


def root_of(base_url: str, api: str) -> str:
    """A base URL with the path that requests of a dialect begin at, where the provider is known.

    Those of the Anthropic dialect name the version themselves.
    """
    if (known := known_at(base_url)) is None:
        return base_url
    url = urlsplit(base_url)
    given = path = url.path.rstrip("/")
    full = urlsplit(known.base_url).path or "/v1"
    if full.startswith(path):
        path = full
    if api == "anthropic_messages":
        path = path.removesuffix("/v1")
    return base_url if path == given else f"{url.scheme}://{url.netloc}{path}"


def resolve_sibling(
    name: str, settings: ModelSettings, endpoints: Mapping[str, Endpoint] = MappingProxyType({})
) -> ModelSettings:
    """Resolve the name of a model that is asked beside the one of `settings`.

    It is asked at the same endpoint, unless its prefix names another one. Raises `UnknownModel`.
    """
    prefix, colon, rest = _parts(name)
    is_own = colon and prefix in endpoints
    known = ENDPOINTS.get(prefix) if colon and not is_own else None
    if name != SCRIPTED and known is None and settings.api != SCRIPTED and not is_own:
        return replace(settings, name=name, reference=name)
    if known and known.provider == settings.provider and known.api == settings.api:
        return replace(settings, name=rest, reference=name)
    same = (
        "temperature",
        "top_p",
        "max_tokens",
        "reasoning_effort",
        "prompt_caching",
        "stream_replies",
        "needs_bound",
        "prices",
    )
    timing = ("attempt_timeout_s", "idle_timeout_s", "call_attempts", "call_timeout_s")
    options = {key: getattr(settings, key) for key in same + timing}
    return resolve_model(
        name, base_url=None, api=None, key_env=None, endpoints=endpoints, **options
    )


def _parts(name: str) -> tuple[str, str, str]:
    """What stands before the first colon, the colon, and what stands after it."""
    parts = name.partition(":")
    if not name.strip() or (parts[1] and not parts[2].strip()):
        msg = f"model {name!r}: the name of a model is missing"
        raise UnknownModel(msg)
    return parts


def read_key(settings: ModelSettings) -> str:
    """The key from the environment, or a placeholder where the endpoint needs none.

    Raises `MissingKey`.
    """
    if settings.api == SCRIPTED or settings.key_env == _NO_KEY:
        return "no-key"
    key = os.environ.get(settings.key_variable, "").strip()
    if not key and settings.key_env is None:
        return "no-key"
    if not key:
        msg = (
            f"no API key for {settings.base_url}: set the environment variable {settings.key_env}"
            f" (or name another with --key_env, or --key_env none for an endpoint without keys)"
        )
        raise MissingKey(msg)
    if not (key.isascii() and key.isprintable()):
        msg = (
            f"the environment variable {settings.key_variable} holds characters that no key for"
            f" {settings.base_url} can have; set it again"
        )
        raise MissingKey(msg)
    return key
