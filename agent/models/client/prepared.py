"""Requests whose URL or credentials change: by a key command, or by the client of a cloud."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from yarl import URL

from agent.models.client.key_command import RenewableKey, key_of_command
from agent.models.connection import Connection
from agent.models.dialects.dialect import dialect_of
from agent.models.errors import ModelError
from agent.models.keys import Key
from agent.models.model import ModelSettings
from agent.models.providers import NO_KEY
from agent.models.resolve import PLACEHOLDER
from agent.models.sdk_clients import UnusableClient, connect, is_async, open_client, sdk_of
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import clip

_KEPT_S = 60.0
"""Seconds for which headers prepared by a client are reused."""

_CREDENTIALS = ("authorization", "api-key", "x-api-key", "x-amz-security-token")
"""Headers that hold secrets. Signatures are none: each is good for one body."""

_NOT_KEPT = frozenset({"host", "connection", "content-length", "user-agent"})
"""Headers that aiohttp itself sends."""

_SIGNED = "AWS4-"


class Prepared(NamedTuple):
    """A request ready to be sent."""

    url: URL
    headers: Mapping[str, str]
    body: bytes
    key: Key
    """Its secrets, to be removed from the reply."""


class Preparer(Protocol):
    """Prepares the requests of one model."""

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """A request to `path`, which may have a query. Raises `ModelError`."""
        ...

    async def renew(self, rejected: Prepared) -> bool:
        """Whether a request that was rejected (401) would now be prepared otherwise."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


def fixed_headers(settings: ModelSettings, api_key: str) -> dict[str, str]:
    """The headers of every request of a model that is asked with this key."""
    connection = settings.connection
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    headers |= dialect_of(settings.api).headers(settings, api_key)
    if connection.headers_env and api_key == PLACEHOLDER:
        headers = {name: headers[name] for name in headers if name.lower() not in _CREDENTIALS}
    for name, value in {**connection.headers, **connection.secret_headers()}.items():
        headers = {one: headers[one] for one in headers if one.lower() != name.lower()}
        headers[name] = value
    return headers


def relayed_headers(
    fixed: Mapping[str, str], agents: Mapping[str, str], settings: ModelSettings
) -> dict[str, str]:
    """The headers of a relayed request: `agents`, names in lower case, in addition to our own.

    Credentials and what the user has configured win over `agents`, which wins over the rest.
    """
    configured = {name.lower() for name in settings.connection.headers}
    own = configured.union(_CREDENTIALS, map(str.lower, settings.connection.headers_env))
    taken = {name: value for name, value in agents.items() if name not in own}
    headers = {name: value for name, value in fixed.items() if name.lower() not in taken}
    if "anthropic-version" in taken and "Authorization" in headers:
        # Versions that take the key as a bearer token are later than those that agents name.
        headers["x-api-key"] = headers.pop("Authorization").removeprefix("Bearer ")
    return headers | taken


def with_session(
    headers: Mapping[str, str], names: Sequence[str], conversation: str
) -> dict[str, str]:
    """The headers of a request with the id of its conversation as each of `names`.

    What the user has configured, and what an agent sends itself, stays. A signature covers the
    headers that it names alone, so signed requests take more.
    """
    with_id = dict(headers)
    for name in _not_in(tuple(headers), tuple(names)):
        with_id[name] = conversation
    return with_id


@lru_cache(maxsize=64)
def _not_in(headers: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` that no header has, in any case of letters."""
    has = {name.lower() for name in headers}
    return tuple(name for name in names if name.lower() not in has)


def preparer_of(settings: ModelSettings, api_key: str | RenewableKey) -> Preparer | None:
    """The preparer of a model's requests; None where all of them have the same URL and headers."""
    connection = settings.connection
    if connection.client is not None:
        return ClientPreparer(settings)
    if not isinstance(api_key, str):
        return KeyPreparer(settings, api_key)
    if connection.key_command:
        return KeyPreparer(settings, key_of_command(connection))
    return None


def with_query(url: str, query: Mapping[str, str]) -> URL:
    """A URL with the parameters that an endpoint's requests have."""
    return URL(url).extend_query(query) if query else URL(url)


class KeyPreparer:
    """Sends the key as it is at the time."""

    def __init__(self, settings: ModelSettings, key: RenewableKey) -> None:
        self._settings = settings
        self._key = key
        self._now = ""
        self._headers: Mapping[str, str] = {}
        self._secrets = Key()
        self._base_url = (settings.base_url or "").rstrip("/")

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """See `Preparer`."""
        key = await self._key.get()
        if key != self._now:
            # The last one may still come back, in replies that are under way.
            self._secrets = Key(
                key, self._now, *self._settings.connection.secret_headers().values()
            )
            self._headers, self._now = fixed_headers(self._settings, key), key
        url = with_query(self._base_url + path, self._settings.connection.query)
        if not isinstance(body, bytes):
            body = b"" if body is None else exact_json.dumps(body)
        return Prepared(url, self._headers, body, self._secrets)

    async def renew(self, rejected: Prepared) -> bool:
        """See `Preparer`."""
        if rejected.headers is not self._headers:
            return True  # another call was quicker
        return await self._key.renew(self._now)

    async def close(self) -> None:
        """See `Preparer`."""


class _Template(NamedTuple):
    """A client's changes to the requests for one path and model."""

    url: URL
    headers: Mapping[str, str]
    key: Key
    dropped: frozenset[str]
    """Fields that it removes from the body."""
    added: Mapping[str, Any]
    """Fields that it adds."""
    until: float


class ClientPreparer:
    """Has the client of a cloud prepare requests, and takes over their URL and headers.

    Those that are signed are prepared one by one, and sent in the very bytes that were signed.
    """

    def __init__(self, settings: ModelSettings) -> None:
        connection = settings.connection
        client = open_client(connection, settings.name, settings.key_env or NO_KEY)
        self._what = f"client {connection.client}"
        self._is_async = is_async(client)
        self._capture = _Capture()
        # After a 401 some clients ask for another token.
        client = connect(client, connection, self._capture)
        self._client = client.with_options(max_retries=1)
        self._errors: type[Exception] = import_module(sdk_of(client)).APIStatusError
        self._fixed = tuple(connection.secret_headers().values())
        self._templates: dict[tuple[str, str, bool], _Template] = {}
        self._lock = asyncio.Lock()
        """One preparation at a time: it makes clear whose request was captured."""
        self._signs = False
        self._has_prepared = False

    async def prepare(self, path: str, body: Mapping[str, Any] | bytes | None) -> Prepared:
        """See `Preparer`."""
        # For batches `prepared_by_client` does it.
        assert body is not None
        if isinstance(body, bytes):  # they know paths without the query that an agent may add
            # The clients of clouds write the body again, and refuse half an emoji.
            given = exact_json.loads_with_valid_text(body)
            return await self._prepare(path.partition("?")[0], given)
        return await self._prepare(path, body)

    async def _prepare(self, path: str, body: Mapping[str, Any]) -> Prepared:
        if self._signs:
            async with self._lock:
                return _signed(await self._send(path, body), self._fixed)
        place = path, str(body.get("model")), bool(body.get("stream"))
        template = self._templates.get(place)
        if template is None or template.until < time.monotonic():
            async with self._lock:
                template = self._templates.get(place)
                if template is None or template.until < time.monotonic():
                    request = await self._send(path, _outline(body))
                    if _is_signed(request):
                        self._signs = True
                        return _signed(await self._send(path, body), self._fixed)
                    template = self._templates[place] = self._template(request, _outline(body))
        if template.dropped or template.added:
            fields = {name: body[name] for name in body if name not in template.dropped}
            body = {**fields, **template.added}
        return Prepared(template.url, template.headers, exact_json.dumps(body), template.key)

    async def renew(self, rejected: Prepared) -> bool:
        """See `Preparer`."""
        if self._signs:
            return False  # each request asks for the credentials as they are
        async with self._lock:
            for place, template in [*self._templates.items()]:
                if template.headers is rejected.headers:
                    path, model, is_streamed = place
                    outline = _outline({"model": model, "stream": is_streamed})
                    request = await self._send(path, outline, is_rejected=True)
                    renewed = self._templates[place] = self._template(request, outline)
                    return renewed.headers != rejected.headers
        return True  # another call was quicker

    async def close(self) -> None:
        """See `Preparer`."""
        if self._is_async:
            await self._client.close()
        else:
            self._client.close()

    async def _send(self, path: str, body: Mapping[str, Any], *, is_rejected: bool = False) -> Any:
        """What the client would send. Raises `ModelError` where it has no credentials.

        With `is_rejected` it first gets a 401, after which some clients drop what they have
        cached and try again.
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
        except Exception as error:  # what a client, or its way to credentials, may raise
            raise self._failure(error) from error
        self._has_prepared = True
        return self._capture.request

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        if self._is_async:
            await self._client.post(path, body=dict(body), cast_to=object)
        else:
            await asyncio.to_thread(self._client.post, path, body=dict(body), cast_to=object)

    def _failure(self, error: Exception) -> ModelError:
        """Until it has had credentials once they are missing; later they may come back."""
        message = clip(f"{self._what}: {type(error).__name__}: {error}", max_chars=500)
        return ModelError("connection" if self._has_prepared else "auth", message, was_sent=False)

    def _template(self, request: Any, outline: Mapping[str, Any]) -> _Template:
        sent = exact_json.loads(request.content)
        headers = _headers_of(request)
        dropped = frozenset(outline.keys() - sent.keys())
        added = {name: sent[name] for name in sent if sent[name] != outline.get(name, ...)}
        secrets = Key(*_secrets_in(headers), *self._fixed)
        until = time.monotonic() + _KEPT_S
        url = URL(str(request.url), encoded=True)
        return _Template(
            url=url, headers=headers, key=secrets, dropped=dropped, added=added, until=until
        )


def prepared_by_client(request: Any, url: str, connection: Connection) -> Prepared:
    """A request that the client of an endpoint sends, to `url`, without its body."""
    headers = _headers_of(request)
    secrets = Key(*_secrets_in(headers), *connection.secret_headers().values())
    return Prepared(URL(url, encoded=True), headers, b"", secrets)


def _outline(body: Mapping[str, Any]) -> dict[str, Any]:
    """A short body that a client prepares as it would the whole."""
    outline: dict[str, Any] = {"model": body["model"], "messages": [], "max_tokens": 1}
    return outline | {"stream": True} if body.get("stream") else outline


def _is_signed(request: Any) -> bool:
    return bool(request.headers.get("authorization", "").startswith(_SIGNED))


def _signed(request: Any, fixed: tuple[str, ...]) -> Prepared:
    """A signed request: every header that it has may be part of the signature."""
    headers = {name: value for name, value in request.headers.items() if name not in _NOT_KEPT}
    secrets = [*fixed, *filter(None, [headers.get("x-amz-security-token")])]
    return Prepared(URL(str(request.url), encoded=True), headers, request.content, Key(*secrets))


def _headers_of(request: Any) -> dict[str, str]:
    """The headers that say what is asked for and by whom, without those about the package."""
    return {
        name: value
        for name, value in request.headers.items()
        if name not in _NOT_KEPT | {"accept-encoding"} and not name.startswith("x-stainless-")
    }


def _secrets_in(headers: Mapping[str, str]) -> list[str]:
    values = (headers.get(name, "") for name in _CREDENTIALS)
    return [value.removeprefix("Bearer ") for value in values if value]


class _Capture:
    """A transport for the clients of both packages that keeps the request and sends nothing."""

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
        """Transports have this; nothing to do."""

    async def aclose(self) -> None:
        """Transports have this; nothing to do."""

    def __enter__(self) -> _Capture:
        return self

    def __exit__(self, *_: object) -> None:
        """Transports have this; nothing to do."""

    async def __aenter__(self) -> _Capture:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Transports have this; nothing to do."""


__all__ = [
    "Prepared",
    "Preparer",
    "UnusableClient",
    "fixed_headers",
    "prepared_by_client",
    "preparer_of",
    "with_query",
    "with_session",
]
