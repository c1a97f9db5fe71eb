"""Requests whose URL or credentials change: by a key command, or by the client of a cloud."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from yarl import URL

from agent.models.client.key_command import RenewableKey, configured_key
from agent.models.connection import Connection
from agent.models.dialects.dialect import get_dialect
from agent.models.errors import ModelError
from agent.models.keys import Key
from agent.models.model import ModelSettings
from agent.models.providers import NO_KEY, PLACEHOLDER
from agent.models.sdk_clients import UnusableClient, client_sdk, connect, is_async, open_client
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip

_REUSE_S = 60.0
"""Seconds for which headers prepared by a client are reused."""

_CREDENTIALS = ("authorization", "api-key", "x-api-key", "x-amz-security-token")
"""Headers that hold secrets; a signature is no secret, since it is valid for one body only."""

_AIOHTTP_HEADERS = frozenset({"host", "connection", "content-length", "user-agent"})
"""Headers that aiohttp itself sends."""

_SIGNED = "AWS4-"
"""The beginning of the `authorization` of a signed request."""


class Prepared(NamedTuple):
    """A request ready to be sent."""

    url: URL
    headers: Mapping[str, str]
    body: bytes
    key: Key
    """The secrets in the request, to be removed from the reply."""


class Preparer(Protocol):
    """Prepares the requests of one model."""

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """Prepare a request to `path`, which may have a query.

        `body` is None only for batch requests, whose bodies are sent apart. Raises `ModelError`.
        """
        ...

    async def renew(self, rejected: Prepared) -> bool:
        """Renew the credentials after a 401; returns whether a retry would send different ones."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


def fixed_headers(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The headers of every request of a model with this key."""
    connection = settings.connection
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    headers |= get_dialect(settings.api).headers(settings, api_key)
    if connection.headers_env and api_key == PLACEHOLDER:
        headers = {name: headers[name] for name in headers if name.lower() not in _CREDENTIALS}
    for name, value in {**connection.headers, **connection.secret_headers()}.items():
        headers = {one: headers[one] for one in headers if one.lower() != name.lower()}
        headers[name] = value
    return headers


def relayed_headers(
    fixed: Mapping[str, str], agents: Mapping[str, str], settings: ModelSettings
) -> dict[str, str]:
    """The headers of a relayed request: `fixed`, and the headers `agents` of the agent's request.

    Credentials and configured headers win over `agents`, which win over the rest of `fixed`. The
    names in `agents` are in lower case.
    """
    configured = {name.lower() for name in settings.connection.headers}
    reserved = configured.union(_CREDENTIALS, map(str.lower, settings.connection.headers_env))
    taken = {name: value for name, value in agents.items() if name not in reserved}
    headers = {name: value for name, value in fixed.items() if name.lower() not in taken}
    if "anthropic-version" in taken and "Authorization" in headers:
        # Only later versions of the API than agents name take the key as a bearer token.
        headers["x-api-key"] = headers.pop("Authorization").removeprefix("Bearer ")
    return headers | taken


def session_headers(
    headers: Mapping[str, str], names: Sequence[str], conversation: str
) -> dict[str, str]:
    """The headers with the id of the conversation, as each of `names`, to be added to `headers`.

    Headers that are there already stay: the user has configured them, or an agent has sent them.
    """
    # A signed request accepts further headers, since its signature lists the ones that it covers.
    return dict.fromkeys(_missing_names(tuple(headers), tuple(names)), conversation)


@lru_cache(maxsize=64)
def _missing_names(headers: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that no header has, in upper or lower case."""
    present = {name.lower() for name in headers}
    return tuple(name for name in names if name.lower() not in present)


def make_preparer(settings: ModelSettings, api_key: str | RenewableKey) -> Preparer | None:
    """Make the preparer of a model's requests; None if their URL and headers never change."""
    connection = settings.connection
    if connection.client is not None:
        return ClientPreparer(settings)
    if not isinstance(api_key, str):
        return KeyPreparer(settings, api_key)
    if connection.key_command:
        return KeyPreparer(settings, configured_key(connection))
    return None


def add_query(url: str, query: Mapping[str, str]) -> URL:
    """Add the query parameters of an endpoint to a URL."""
    return URL(url).extend_query(query) if query else URL(url)


class KeyPreparer:
    """Prepares requests with the current key of a key command."""

    def __init__(self, settings: ModelSettings, key: RenewableKey) -> None:
        self._settings = settings
        self._key = key
        self._last_key = ""
        self._headers: Mapping[str, str] = {}
        self._secrets = Key()
        self._base_url = (settings.base_url or "").rstrip("/")

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """See `Preparer`."""
        key = await self._key.get()
        if key != self._last_key:
            # The last key may still come back, in replies that are under way.
            self._secrets = Key(
                key, self._last_key, *self._settings.connection.secret_headers().values()
            )
            self._headers, self._last_key = fixed_headers(self._settings, key), key
        url = add_query(self._base_url + path, self._settings.connection.query)
        if not isinstance(body, bytes):
            body = b"" if body is None else exact_json.dumps(body)
        return Prepared(url, self._headers, body, self._secrets)

    async def renew(self, rejected: Prepared) -> bool:
        """See `Preparer`."""
        if rejected.headers is not self._headers:
            return True  # another call was quicker
        return await self._key.renew(self._last_key)

    async def close(self) -> None:
        """See `Preparer`."""


class _Template(NamedTuple):
    """A client's changes to the requests for one path and model."""

    url: URL
    headers: Mapping[str, str]
    key: Key
    dropped: frozenset[str]
    """Fields that the client removes from the body."""
    added: Mapping[str, Any]
    """Fields that the client adds to the body."""
    until: float
    """The time when the template expires (monotonic clock)."""


class ClientPreparer:
    """Has the client of a cloud prepare requests, and takes over their URL and headers.

    Signed requests are prepared one by one, and their bytes are sent unchanged.
    """

    def __init__(self, settings: ModelSettings) -> None:
        connection = settings.connection
        client = open_client(connection, settings.name, settings.key_env or NO_KEY)
        self._description = f"client {connection.client}"
        self._is_async = is_async(client)
        self._capture = _Capture()
        # After a 401 some clients ask for another token.
        client = connect(client, connection, self._capture)
        self._client = client.with_options(max_retries=1)
        self._errors: type[Exception] = import_module(client_sdk(client)).APIStatusError
        self._header_secrets = tuple(connection.secret_headers().values())
        self._templates: dict[tuple[str, str, bool], _Template] = {}
        self._lock = asyncio.Lock()
        """Allows one preparation at a time, so that it is known whose request was captured."""
        self._is_signing = False
        self._has_prepared = False

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """See `Preparer`."""
        # `take_client_request` prepares requests for batches, the only ones without a body.
        assert body is not None
        if isinstance(body, bytes):
            # Clients know no paths with a query, which an agent may add. They write the body again,
            # and refuse half an emoji.
            given = exact_json.loads_with_valid_text(body)
            return await self._prepare(path.partition("?")[0], given)
        return await self._prepare(path, body)

    async def _prepare(self, path: str, body: Mapping[str, Any]) -> Prepared:
        if self._is_signing:
            async with self._lock:
                return _take_signed(await self._capture_request(path, body), self._header_secrets)
        place = path, str(body.get("model")), bool(body.get("stream"))
        template = self._templates.get(place)
        if template is None or template.until < time.monotonic():
            async with self._lock:
                template = self._templates.get(place)
                if template is None or template.until < time.monotonic():
                    request = await self._capture_request(path, _outline(body))
                    if _is_signed(request):
                        self._is_signing = True
                        return _take_signed(
                            await self._capture_request(path, body), self._header_secrets
                        )
                    template = self._templates[place] = self._make_template(request, _outline(body))
        if template.dropped or template.added:
            fields = {name: body[name] for name in body if name not in template.dropped}
            body = {**fields, **template.added}
        return Prepared(template.url, template.headers, exact_json.dumps(body), template.key)

    async def renew(self, rejected: Prepared) -> bool:
        """See `Preparer`."""
        if self._is_signing:
            return False  # each request has the current credentials
        async with self._lock:
            for place, template in [*self._templates.items()]:
                if template.headers is rejected.headers:
                    path, model, is_streamed = place
                    outline = _outline({"model": model, "stream": is_streamed})
                    request = await self._capture_request(path, outline, is_rejected=True)
                    renewed = self._templates[place] = self._make_template(request, outline)
                    return renewed.headers != rejected.headers
        return True  # another call was quicker

    async def close(self) -> None:
        """See `Preparer`."""
        if self._is_async:
            await self._client.close()
        else:
            self._client.close()

    async def _capture_request(
        self, path: str, body: Mapping[str, Any], *, is_rejected: bool = False
    ) -> Any:
        """Have the client send a request; returns the request. Raises `ModelError`.

        `is_rejected`: the client first gets a 401, after which some clients drop their cached
        credentials and try again.
        """
        self._capture.rejects = is_rejected
        try:
            await self._post(path, body)
        except self._errors as error:
            if not is_rejected:
                raise self._failure(error) from error
            try:
                await self._post(path, body)
            except Exception as again:
                raise self._failure(again) from again
        except Exception as error:  # clients and credential providers may raise anything
            raise self._failure(error) from error
        self._has_prepared = True
        return self._capture.request

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        if self._is_async:
            await self._client.post(path, body=dict(body), cast_to=object)
        else:
            await asyncio.to_thread(self._client.post, path, body=dict(body), cast_to=object)

    def _failure(self, error: Exception) -> ModelError:
        # Until the client has had credentials once, they are missing; later they may come back.
        message = clip(f"{self._description}: {type(error).__name__}: {error}", max_chars=500)
        return ModelError("connection" if self._has_prepared else "auth", message, was_sent=False)

    def _make_template(self, request: Any, outline: Mapping[str, Any]) -> _Template:
        sent = exact_json.loads(request.content)
        headers = _client_headers(request)
        dropped = frozenset(outline.keys() - sent.keys())
        added = {name: sent[name] for name in sent if sent[name] != outline.get(name, ...)}
        secrets = Key(*_header_secrets_in(headers), *self._header_secrets)
        until = time.monotonic() + _REUSE_S
        url = URL(str(request.url), encoded=True)
        return _Template(
            url=url, headers=headers, key=secrets, dropped=dropped, added=added, until=until
        )


def take_client_request(request: Any, url: str, connection: Connection) -> Prepared:
    """Take over a request that the client of an endpoint sends to `url`, without its body."""
    headers = _client_headers(request)
    secrets = Key(*_header_secrets_in(headers), *connection.secret_headers().values())
    return Prepared(URL(url, encoded=True), headers, b"", secrets)


def _outline(body: Mapping[str, Any]) -> dict[str, Any]:
    """A short body for which a client sends the same URL and headers as for the whole one."""
    outline: dict[str, Any] = {"model": body["model"], "messages": [], "max_tokens": 1}
    return outline | {"stream": True} if body.get("stream") else outline


def _is_signed(request: Any) -> bool:
    return bool(request.headers.get("authorization", "").startswith(_SIGNED))


def _take_signed(request: Any, fixed: tuple[str, ...]) -> Prepared:
    """Take over a signed request with all headers, since the signature may cover each."""
    headers = {
        name: value for name, value in request.headers.items() if name not in _AIOHTTP_HEADERS
    }
    secrets = [*fixed, *filter(None, [headers.get("x-amz-security-token")])]
    return Prepared(URL(str(request.url), encoded=True), headers, request.content, Key(*secrets))


def _client_headers(request: Any) -> dict[str, str]:
    """The headers of a request, without headers about the SDK and its HTTP library."""
    return {
        name: value
        for name, value in request.headers.items()
        if name not in _AIOHTTP_HEADERS | {"accept-encoding"}
        and not name.startswith("x-stainless-")
    }


def _header_secrets_in(headers: Mapping[str, str]) -> list[str]:
    values = (headers.get(name, "") for name in _CREDENTIALS)
    return [value.removeprefix("Bearer ") for value in values if value]


class _Capture:
    """A transport for the clients of both SDKs that stores the request and sends nothing."""

    def __init__(self) -> None:
        self.request: Any = None
        self.rejects = False
        """Answer the next request with a 401."""

    async def handle_async_request(self, request: Any) -> Any:
        """Take an asynchronous client's request."""
        await request.aread()
        return self._take(request)

    def handle_request(self, request: Any) -> Any:
        """Take a request."""
        request.read()
        return self._take(request)

    def _take(self, request: Any) -> Any:
        # Older packages use httpx, newer ones httpx2, and each needs responses of its own.
        response = import_module(type(request).__module__.partition(".")[0]).Response
        status, self.rejects = (401 if self.rejects else 200), False
        self.request = request
        return response(status, headers={"retry-after-ms": "1"}, request=request)

    def close(self) -> None:
        """Do nothing: transports need this method."""

    async def aclose(self) -> None:
        """Do nothing: transports need this method."""

    def __enter__(self) -> _Capture:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: transports need this method."""

    async def __aenter__(self) -> _Capture:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: transports need this method."""


__all__ = [
    "Prepared",
    "Preparer",
    "UnusableClient",
    "add_query",
    "fixed_headers",
    "make_preparer",
    "session_headers",
    "take_client_request",
]
