"""Resolves the name of a model, as a user writes it, to its endpoint, API and key.

scripted                 offline, plays the row's script
PREFIX:NAME              a row of the table in `providers`; without --base_url at OPENAI_BASE_URL or
                         ANTHROPIC_BASE_URL, as by the SDKs
ENDPOINT:NAME            at an endpoint that the config names under `endpoints`
PREFIX/NAME              the same as with a colon, unless there is a --base_url: it may be the
                         server's own name of the model
NAME or VENDOR/NAME      at --base_url, by the OpenAI chat API unless --api is given

A base URL at the host of a provider in the table means that provider, even if the name has another
prefix: its key, its prices, its API. So the key of one is never sent to another, unless --key_env
asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agent.models.connection import DIRECT_CONNECTION, Connection
from agent.models.model import ModelSettings
from agent.models.providers import (
    NO_KEY,
    PLACEHOLDER,
    PROVIDERS,
    Api,
    Provider,
    find_provider,
    is_known_prefix,
)


class Endpoint(NamedTuple):
    """An endpoint that a config names."""

    api: Api | None
    """The API; None if a `client` decides it."""
    base_url: str
    """The base URL; "" if a `client` knows it."""
    key_env: str
    """The variable that holds the key; `NO_KEY` if none is needed."""
    provider: str | None
    """The provider's id in the price table; None: the table guesses from the model's name."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Fields of `ModelSettings` for its models, which replace the fields of the run."""
    connection: Connection = DIRECT_CONNECTION


SCRIPTED = "scripted"
"""The name, and the API, of the scripted model."""

FORMS = (
    "give PROVIDER:NAME, such as openai:NAME, anthropic:NAME or openrouter:VENDOR/NAME (`python "
    "batch_runner.py endpoints` lists the providers), or NAME and --base_url for a server"
)
"""The forms in which a model can be named."""

_SERVER = Provider("", NO_KEY)
"""A server of the user's own."""


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
    """Resolve a model's name as the user wrote it. `options` are further fields of `ModelSettings`.

    `endpoints` are the user's own, by prefix; `base_url`, `api` and `key_env` do not apply to them.
    For other models `base_url` replaces the default URL. If it is the URL of a known provider, that
    provider's key and prices apply, and its API if the name has no prefix. If it is not, a name
    without a prefix has no provider in the price table.

    Raises `UnknownModel`, `UnusableProxy` if no call could be sent, and `UnusableClient`.
    """
    if base_url is None:
        name = normalize_prefix(name, endpoints)
    prefix, colon, rest = _parts(name)
    if name == SCRIPTED:
        return ModelSettings(
            name=name, api=SCRIPTED, base_url=None, key_env=None, reference=name, **options
        )
    if colon and (own := endpoints.get(prefix)):
        return _configured_settings(own, name, rest, options)
    is_known = is_known_prefix(prefix, base_url)
    if colon and "/" not in prefix and not is_known and base_url is None:
        raise UnknownModel(_unknown_prefix(name, prefix, [*PROVIDERS, *endpoints]))
    provider = PROVIDERS[prefix] if colon and is_known else None
    if provider is None and base_url is None:
        raise UnknownModel(f"model {name!r} has no provider and no --base_url: {FORMS}")
    base_url = base_url or (provider and _url_in_environment(provider))
    if provider is not None and provider.client is not None:
        cloud = _cloud_endpoint(provider, base_url, api, key_env)
        return _configured_settings(cloud, name, rest, options)
    at_url = None if base_url is None else find_provider(base_url)
    named = provider or at_url or _SERVER
    # A server at an unknown URL bills nobody, unless the name says whose models it serves.
    payee = at_url or (None if base_url is not None and provider is None else named)
    # Names of fields follow the server behind the base URL, not the provider that bills.
    if base_url is None or (provider is not None and provider.is_own_server):
        options = {**provider_fields(named), **options}
    elif at_url is not None:
        options = {**provider_fields(at_url), **options}
    dialect = api or named.api
    _check_proxy(base_url or named.base_url, None)
    return ModelSettings(
        name=rest if provider else name,
        api=dialect,
        base_url=complete_base_url(base_url or named.base_url, dialect),
        key_env=key_env or (payee and payee.key_env),
        provider=payee and payee.prices,
        reference=name,
        **options,
    )


def _cloud_endpoint(
    provider: Provider, base_url: str | None, api: Api | None, key_env: str | None
) -> Endpoint:
    """The endpoint of a provider that is reached by a client of a cloud."""
    arguments = {"base_url": base_url} if base_url else {}
    return Endpoint(
        api=api,
        base_url="",
        key_env=key_env or NO_KEY,
        provider=provider.prices,
        options=provider_fields(provider),
        connection=Connection(client=provider.client, client_options=arguments),
    )


def normalize_prefix(name: str, endpoints: Collection[str] = ()) -> str:
    """Change PREFIX/NAME to PREFIX:NAME, if the prefix is in the table or in `endpoints`."""
    prefix, _, rest = name.partition("/")
    return f"{prefix}:{rest}" if rest and (prefix in PROVIDERS or prefix in endpoints) else name


def _url_in_environment(provider: Provider) -> str | None:
    """The base URL in the variable of a provider's SDK; None if it is not set.

    Raises `UnknownModel` if the variable holds no URL.
    """
    value = os.environ.get(provider.url_env or "", "").strip().rstrip("/")
    if not value:
        return None
    url = urlsplit(value)
    is_plain = url.username is None and not url.query and not any(c.isspace() for c in value)
    if url.scheme in ("http", "https") and url.hostname and is_plain:
        return value
    raise UnknownModel(
        f"the environment variable {provider.url_env} must hold an http or https URL without "
        "password and query; set it again, or unset it"
    )


def provider_fields(provider: Provider) -> dict[str, Any]:
    """A provider's names for fields and headers, as fields of `ModelSettings`."""
    return {
        "usual_max_tokens_name": provider.max_tokens_name,
        "reasoning_field": provider.reasoning_field,
        "session_headers": provider.session_headers,
        "cache_key_apis": provider.cache_key_apis,
    }


def _configured_settings(
    endpoint: Endpoint, name: str, rest: str, options: Mapping[str, Any]
) -> ModelSettings:
    """The settings of a model at a configured endpoint or behind a cloud client.

    `name` is the model as the user wrote it, `rest` the name without its prefix.
    """
    api, base_url = endpoint.api, endpoint.base_url
    if endpoint.connection.client is not None:
        from agent.models.sdk_clients import client_api, client_base_url, open_client

        client = open_client(endpoint.connection, rest, endpoint.key_env)
        api, base_url = client_api(client, endpoint.api), client_base_url(client)
    assert api is not None
    replication = endpoint.connection.replication
    for url in (base_url,) if replication is None else replication.urls:
        _check_proxy(url, endpoint.connection.proxy)
    return ModelSettings(
        name=rest,
        api=api,
        base_url=base_url,
        key_env=endpoint.key_env,
        provider=endpoint.provider,
        connection=endpoint.connection,
        reference=name,
        **{**options, **endpoint.options},
    )


def _unknown_prefix(name: str, prefix: str, known: list[str]) -> str:
    from batch_trajectories.basics.validation import did_you_mean

    nearest = did_you_mean(prefix, known)
    return (
        f"model {name!r}: unknown prefix {prefix!r}{f'; {nearest}' if nearest else '.'} Known: "
        f"{', '.join(sorted(known))} (as PREFIX:NAME; `python batch_runner.py endpoints` says "
        f"more), {SCRIPTED!r}, or a bare name with --base_url"
    )


def _check_proxy(base_url: str, proxy: str | None) -> None:
    from agent.models.connection import find_proxy

    find_proxy(base_url, proxy)


def complete_base_url(base_url: str, api: str) -> str:
    """Complete the path of a base URL for a dialect, if the provider at the URL is known."""
    if (known := find_provider(base_url)) is None:
        return base_url
    url = urlsplit(base_url)
    given = path = url.path.rstrip("/")
    full = urlsplit(known.base_url).path or "/v1"
    if full.startswith(path):
        path = full
    if not api.startswith("openai_"):  # requests of other dialects name the version themselves
        path = re.sub(r"/v\d\w*(/.*)?$", "", path)
    return base_url if path == given else f"{url.scheme}://{url.netloc}{path}"


def resolve_sibling(
    name: str, settings: ModelSettings, endpoints: Mapping[str, Endpoint] = MappingProxyType({})
) -> ModelSettings:
    """Resolve the name of a model that is used beside the model of `settings`.

    It is at the same endpoint, unless its prefix names another one. Raises `UnknownModel`.
    """
    prefix, colon, rest = _parts(name)
    is_own = colon and prefix in endpoints
    # Beside a server of the user's own, `mistral:7b` is the name of a model there.
    is_providers_url = bool(settings.connection.client or find_provider(settings.base_url or ""))
    if (billed := PROVIDERS.get(settings.reference.partition(":")[0])) is not None:
        is_providers_url |= settings.base_url == _url_in_environment(billed)
    is_known = is_known_prefix(prefix, None if is_providers_url else settings.base_url)
    provider = PROVIDERS[prefix] if colon and not is_own and is_known else None
    if name != SCRIPTED and provider is None and settings.api != SCRIPTED and not is_own:
        return replace(settings, name=name, reference=name)
    if provider is not None and _belongs_to_provider(provider, prefix, settings):
        return replace(settings, name=rest, reference=name)
    same = (
        "temperature",
        "top_p",
        "max_tokens",
        "reasoning_effort",
        "prompt_caching",
        "stream_replies",
        "token_ids",
        "needs_bound",
        "prices",
    )
    timing = ("attempt_timeout_s", "idle_timeout_s", "call_attempts", "call_timeout_s")
    options = {key: getattr(settings, key) for key in same + timing}
    return resolve_model(
        name, base_url=None, api=None, key_env=None, endpoints=endpoints, **options
    )


def _belongs_to_provider(provider: Provider, prefix: str, settings: ModelSettings) -> bool:
    """Whether the endpoint of `settings` belongs to a provider, perhaps at another URL."""
    if provider.client is not None or settings.connection.client is not None:
        return False  # the client depends on the model
    is_same = prefix == settings.reference.partition(":")[0]
    is_payee = provider.prices is not None and provider.prices == settings.provider
    return is_same or (is_payee and provider.api == settings.api)


def _parts(name: str) -> tuple[str, str, str]:
    """Split a name into the prefix, the colon and the rest. Raises `UnknownModel`."""
    parts = name.partition(":")
    if not name.strip() or (parts[1] and not parts[2].strip()):
        named = f"model {name!r}: " if name else ""
        raise UnknownModel(f"{named}the name of a model is missing; {FORMS}")
    return parts


def read_key(settings: ModelSettings) -> str:
    """Read the key from the environment; a placeholder if the endpoint needs none.

    Raises `MissingKey`.
    """
    for header, variable in settings.connection.headers_env.items():
        check_secret(os.environ.get(variable, ""), f"headers_env.{header}", variable, settings)
    if settings.api == SCRIPTED or settings.key_env == NO_KEY:
        return PLACEHOLDER
    key = os.environ.get(settings.key_variable, "").strip()
    if not key and settings.key_env is None:
        return PLACEHOLDER
    if not key:
        raise MissingKey(
            f"no API key for {settings.base_url}: set the environment variable {settings.key_env}"
            f" (or name another with --key_env, or --key_env none for an endpoint without keys)"
        )
    check_secret(key, "key_env", settings.key_variable, settings)
    return key


def check_secret(value: str, what: str, variable: str, settings: ModelSettings) -> None:
    """Raise `MissingKey` if a variable holds no value that can be sent."""
    if not value.strip():
        raise MissingKey(
            f"{what}: the environment variable {variable} for {settings.base_url} is not set"
        )
    if not (value.isascii() and value.isprintable()):
        raise MissingKey(
            f"the environment variable {variable} holds characters that no key for"
            f" {settings.base_url} can have; set it again"
        )
