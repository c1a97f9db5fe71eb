"""Opens clients of the openai and anthropic packages, which know clouds' URLs and credentials.

A package is imported only if an endpoint has a `client`, and for batches. The clients send nothing
themselves: `agent.models.client.prepared` has them prepare requests, and their requests for batches
go through `agent.models.batches.sdk_connection`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from agent.models.connection import Connection
from agent.models.providers import NO_KEY, Api

Sdk = Literal["openai", "anthropic"]

_AZURE_SCOPE = "https://cognitiveservices.azure.com/.default"
_FOUNDRY_SCOPE = "https://ai.azure.com/.default"


class UnusableClient(ValueError):
    """A client cannot be made or used; the message says how to correct it."""


def open_client(connection: Connection, model: str, key_env: str | None) -> Any:
    """Open the client that an endpoint names.

    Its key is in the variable `key_env`; None or `NO_KEY`: in the client's own variables. Raises
    `UnusableClient`.
    """
    if key_env is None or key_env == NO_KEY:
        return _open(connection, model, None)
    if not (key := os.environ.get(key_env, "").strip()):
        raise UnusableClient(
            f"client {connection.client!r}: set the environment variable {key_env} to its key"
        )
    return _open(connection, model, key)


@lru_cache(maxsize=64)
def _open(connection: Connection, model: str, api_key: str | None) -> Any:
    name = connection.client or ""
    options = dict(connection.client_options)
    if api_key is not None:
        options["api_key"] = api_key
    try:
        client = _MAKERS[name](options, model) if name in _MAKERS else _make_own(name, options)
    except UnusableClient:
        raise
    except (Exception, SystemExit) as error:  # a package or a user's function may raise anything
        message = f"client {name!r}: {type(error).__name__}: {error}"
        if name in _MAKERS:
            message += ". Arguments of the client go into client_options, or into its variables"
        raise UnusableClient(message) from error
    if client_sdk(client) == "anthropic" and _streams_in_aws_events(client):
        raise UnusableClient(
            f"client {name!r}: {type(client).__name__} streams replies as AWS events, which are "
            "not supported; use AsyncAnthropicBedrockMantle (client: bedrock)"
        )
    return client


def client_sdk(client: Any) -> Sdk:
    """The package of a client. Raises `UnusableClient` for any other object."""
    packages = {cls.__module__.partition(".")[0] for cls in type(client).__mro__}
    if "openai" in packages:
        return "openai"
    if "anthropic" in packages:
        return "anthropic"
    raise UnusableClient(
        f"client: {type(client).__name__} is not a client of the openai or anthropic package; the "
        "function must return one, such as AsyncOpenAI(...)"
    )


def client_api(client: Any, api: Api | None) -> Api:
    """The API that a client speaks: `api`, or its usual one if that is None.

    Raises `UnusableClient` if it does not speak `api`.
    """
    chosen = api or ("openai_chat" if client_sdk(client) == "openai" else "anthropic_messages")
    if (chosen == "anthropic_messages") != (client_sdk(client) == "anthropic"):
        raise UnusableClient(f"api: {type(client).__name__} does not speak {chosen}; leave api out")
    return chosen


def client_base_url(client: Any) -> str:
    """The URL to which a client sends its requests."""
    return str(client.base_url).rstrip("/")


def is_cloud_client(connection: Connection) -> bool:
    """Whether the client of an endpoint is one for a cloud, and not the user's own."""
    return connection.client in _MAKERS


def is_async(client: Any) -> bool:
    """Whether the methods of a client are coroutines."""
    return asyncio.iscoroutinefunction(client.post)


def connect(client: Any, connection: Connection, transport: Any) -> Any:
    """Give a client the headers and query of an endpoint, and have it send by `transport`."""
    sdk = import_module(client_sdk(client))
    make = sdk.DefaultAsyncHttpxClient if is_async(client) else sdk.DefaultHttpxClient
    return client.with_options(
        # Following a redirect would send the key to its target.
        http_client=make(transport=transport, follow_redirects=False),
        default_headers={**connection.headers, **connection.secret_headers()},
        default_query=dict(connection.query),
    )


def _azure(options: dict[str, Any], model: str) -> Any:
    import openai

    has_key = options.get("api_key") or _is_set("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN")
    if not has_key:
        options["azure_ad_token_provider"] = _make_entra_tokens(
            "AZURE_OPENAI_API_KEY", _AZURE_SCOPE
        )
    return openai.AsyncAzureOpenAI(**options)


def _foundry(options: dict[str, Any], model: str) -> Any:
    import anthropic

    if not (options.get("api_key") or _is_set("ANTHROPIC_FOUNDRY_API_KEY")):
        options["azure_ad_token_provider"] = _make_entra_tokens(
            "ANTHROPIC_FOUNDRY_API_KEY", _FOUNDRY_SCOPE
        )
    return anthropic.AsyncAnthropicFoundry(**options)


def _bedrock(options: dict[str, Any], model: str) -> Any:
    if "anthropic." in model:
        import anthropic

        if not hasattr(anthropic, "AsyncAnthropicBedrockMantle"):
            raise _too_old("anthropic", anthropic.__version__, "AsyncAnthropicBedrockMantle")
        return anthropic.AsyncAnthropicBedrockMantle(**options)
    import openai

    try:
        from openai.providers import bedrock
    except ImportError as error:
        raise _too_old("openai", openai.__version__, "openai.providers.bedrock") from error
    return openai.AsyncOpenAI(provider=bedrock(**options))


def _vertex(options: dict[str, Any], model: str) -> Any:
    if not model.startswith("claude"):
        raise UnusableClient(
            f"client 'vertex': {model!r}: only Claude models are asked through it. For others give "
            "an endpoint with base_url https://LOCATION-aiplatform.googleapis.com/v1/projects/"
            "PROJECT/locations/LOCATION/endpoints/openapi and key_command [gcloud, auth, "
            "print-access-token]"
        )
    import anthropic

    return anthropic.AsyncAnthropicVertex(**options)


_MAKERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "azure": _azure,
    "bedrock": _bedrock,
    "foundry": _foundry,
    "vertex": _vertex,
}


def _make_own(place: str, options: dict[str, Any]) -> Any:
    from toolsets.catalog.custom import import_place

    return import_place(place, "client")(**options)


def _streams_in_aws_events(client: Any) -> bool:
    import anthropic

    return isinstance(client, anthropic.AnthropicBedrock | anthropic.AsyncAnthropicBedrock)


def _make_entra_tokens(key_variable: str, scope: str) -> Callable[[], Awaitable[str]]:
    """Make a source of Microsoft Entra tokens for the identity of this machine."""
    try:
        from azure.identity import DefaultAzureCredential, get_bearer_token_provider
    except ImportError as error:
        raise UnusableClient(
            f"set {key_variable}, or install azure-identity to sign in with Microsoft Entra"
        ) from error
    ask = get_bearer_token_provider(DefaultAzureCredential(), scope)

    async def token() -> str:
        return await asyncio.to_thread(ask)

    return token


def _is_set(*names: str) -> bool:
    return any(os.environ.get(name) for name in names)


def _too_old(package: str, version: str, what: str) -> UnusableClient:
    return UnusableClient(
        f"client 'bedrock': {package} {version} has no {what}; install a newer one"
    )
