"""Lets clients of the openai and anthropic packages send over the connections of an endpoint.

The packages write the requests, page through lists and retry. `Transport` sends them. So an
endpoint's headers, query, credentials, proxy and timeouts apply as they do to live calls, errors
are the same, and no reply contains a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from itertools import count
from typing import Any, NoReturn, TypeVar

from agent.models.client.prepared import Prepared, take_client_request
from agent.models.client.reply_bodies import MAX_REPLY_BYTES
from agent.models.client.transport import MAX_RENEWALS, Transport, is_expired
from agent.models.connection import DIRECT_CONNECTION
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import load_object
from agent.models.providers import NO_KEY, PLACEHOLDER
from agent.models.sdk_clients import connect, open_client
from batch_trajectories.basics.errors import HostError
from batch_trajectories.basics.text import clip

_BODY_HEADERS = frozenset({"accept", "content-type", "content-length"})
"""Headers that are taken from the packages' requests."""

_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
"""Headers of refusals that the packages obey."""

_DOWNLOAD = "application/binary"
"""The `accept` header of both packages when they ask for a file of results."""

T = TypeVar("T")


class SdkConnection:
    """The client of one model, and the transport by which it sends."""

    def __init__(self, settings: ModelSettings, api_key: str, make: Callable[..., Any]) -> None:
        """Use the client of the config, or else one that `make`, a class of a package, makes."""
        self._brings_credentials = settings.connection.client is not None
        self._connection = settings.connection
        self._silence_s = settings.attempt_timeout_s
        self._transport = Transport(settings, api_key)
        self._has_sent = False
        if self._brings_credentials:
            client = open_client(self._connection, settings.name, settings.key_env or NO_KEY)
            self.client = connect(client, self._connection, self)
        else:
            # `Transport` adds the key and the configured headers; the client needs any key.
            client = make(base_url=settings.base_url, api_key=PLACEHOLDER)
            self.client = connect(client, DIRECT_CONNECTION, self)
        self._base_url = str(self.client.base_url).rstrip("/")

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`, which makes requests by the client; again if its credentials have expired.

        Raises `ModelError` and `HostError`.
        """
        rejected: Prepared | None = None
        for renewals in count():
            try:
                return await call()
            except Exception as error:
                refused = getattr(getattr(error, "response", None), "extensions", {})
                refusal: ModelError | None = refused.get("error")
                if refusal is None:
                    self._raise_failure(error)
                if renewals == MAX_RENEWALS or not is_expired(refusal):
                    raise refusal from error
                before, rejected = rejected, refused["request"]
                if not await self._renew(rejected, before):
                    raise refusal from error
        raise AssertionError

    async def lines(self, download: Callable[[], Awaitable[Any]]) -> AsyncIterator[bytes]:
        """Read the lines of a file, which need not fit into memory; blank lines are skipped.

        Raises as `ask` does.
        """
        # The client's own readers parse each line into an object, which loses unknown fields.
        response = (await self.ask(download)).http_response
        answer, key = response.extensions["download"]
        try:
            rest = b""
            async for part in response.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > MAX_REPLY_BYTES:
                    raise ModelError(
                        "malformed",
                        f"a line of more than {MAX_REPLY_BYTES // 2**20} MiB in the results",
                    )
                for line in filter(bytes.strip, lines):
                    yield self._transport.clean(line, key)
            if rest.strip():
                yield self._transport.clean(rest, key)
        finally:
            answer.close()

    async def _renew(self, rejected: Prepared, before: Prepared | None) -> bool:
        """Renew the credentials after a 401; returns whether a retry may send different ones.

        `before` is the request that was rejected before this one; None for the first.
        """
        # The client of a config gets credentials for each request, but maybe the same ones again.
        if self._brings_credentials:
            return before is None or before.headers != rejected.headers
        return await self._transport.renew(rejected)

    def _raise_failure(self, error: Exception) -> NoReturn:
        """Raise the failure behind an error that the endpoint did not send."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModelError | HostError):
                raise cause
            cause = cause.__cause__
        message = clip(f"{type(error).__name__}: {error}", max_chars=500)
        if type(error).__module__.startswith(("openai.", "anthropic.")):
            raise ModelError("malformed", message) from error
        if self._brings_credentials:  # the code that gets them may raise anything
            message = f"client {self._connection.client}: {message}"
            raise ModelError("connection" if self._has_sent else "auth", message) from error
        raise error

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request of a client; returns the response in the form of its HTTP library."""
        # Older packages use httpx, newer ones httpx2.
        http = import_module(type(request).__module__.partition(".")[0])
        try:
            return await self._send(request, http.Response)
        except ModelError as error:
            # The packages retry only errors of this class.
            raise http.TransportError(str(error), request=request) from error

    async def _send(self, request: Any, make: Callable[..., Any]) -> Any:
        prepared = await self._prepare(request)
        headers = {k: v for k, v in prepared.headers.items() if k.lower() not in _BODY_HEADERS}
        headers |= {k: v for k, v in request.headers.items() if k in _BODY_HEADERS}
        body = _stream_parts(request) if headers.get("content-length", "0") != "0" else None
        self._has_sent = True
        answer = await self._transport.forward(
            request.method, prepared._replace(headers=headers), body, silence_s=self._silence_s
        )
        status, key = answer.status, prepared.key
        if 200 <= status < 300 and headers.get("accept") == _DOWNLOAD:
            parts = self._transport.parts(answer, key)
            return make(status, content=parts, extensions={"download": (answer, key)})
        try:
            content = await self._transport.read(answer, key)
        except ModelError as error:
            if 200 <= status < 300:
                raise
            obeyed = {k: answer.headers[k] for k in _RETRY_HEADERS if k in answer.headers}
            return make(status, headers=obeyed, extensions={"error": error, "request": prepared})
        load_object(content)
        return make(status, headers={"content-type": "application/json"}, content=content)

    async def _prepare(self, request: Any) -> Prepared:
        # The base URL is always ours, even if the endpoint gives another one for results.
        path = str(request.url).removeprefix(self._base_url)
        if not path.startswith("/"):
            path = request.url.raw_path.decode()
        if self._brings_credentials:
            return take_client_request(request, self._base_url + path, self._connection)
        return await self._transport.prepare(path, self._silence_s)

    async def aclose(self) -> None:
        """Release all connections; closing the client does it."""
        await self._transport.close()


async def _stream_parts(request: Any) -> AsyncIterator[bytes]:
    async for part in request.stream:
        yield part


def read_id(given: Any) -> str:
    """The id of an object; raises `ModelError("malformed")` if it has none."""
    id = getattr(given, "id", None)
    if not isinstance(id, str) or not id:
        raise ModelError("malformed", "the reply has no id")
    return id
