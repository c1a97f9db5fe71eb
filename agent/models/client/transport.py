"""HTTP to one endpoint: sends a request and returns the body of its reply, or raises `ModelError`.

This uses aiohttp directly. The providers' own clients can use it too, through two more layers that
cost several times as much; what they would add is in `retrying` and here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import aiohttp
import truststore
from yarl import URL

from agent.models.client.key_command import RenewableKey
from agent.models.client.prepared import (
    Prepared,
    Preparer,
    fixed_headers,
    preparer_of,
    relayed_headers,
    with_query,
    with_session,
)
from agent.models.client.relayed import OnEvent, RelayRequest
from agent.models.client.reply_bodies import (
    StreamReader,
    begins_as_json,
    finish_broken,
    read_first,
    read_parts,
    read_whole,
    to_json,
)
from agent.models.connection import proxy_for
from agent.models.dialects.dialect import Assembly, dialect_of, paid_in
from agent.models.error_bodies import refusal_of
from agent.models.errors import ModelError
from agent.models.keys import Key
from agent.models.model import ModelSettings, ignored
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe

# Time limits of calls that share one timer: nearly all calls end long before it fires.


class CallTimeouts:
    """Gives each call a timeout of the same length. Belongs to one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends: dict[asyncio.Timeout, float] = {}
        """When each call is cut off; the first that was added is the first to be cut off."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> asyncio.Timeout:
        """A timeout to enter at once; give it to `end` when it was left."""
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        self._ends[timeout] = end = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(end, self._cut_off)
        return timeout

    def end(self, timeout: asyncio.Timeout) -> None:
        """The call is over."""
        self._ends.pop(timeout, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut_off(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for timeout, end in list(self._ends.items()):
            if end > loop.time():
                self._timer = loop.call_at(end, self._cut_off)
                return
            del self._ends[timeout]
            timeout.reschedule(end)


# Why a TLS connection could not be made, and what to do.

_PROBE_S = 2.0
"""Seconds for a server that did not speak TLS to answer without it."""

_NAME = "use a name that it was issued for as the host of the URL"
_TO_DO = {
    9: "correct the clock of this machine, or have another certificate issued",
    10: "have it renewed, or correct the clock of this machine",
    62: _NAME,
    64: _NAME,
}
"""By OpenSSL's number of the reason: X509_V_ERR_* in openssl/x509_vfy.h."""
_TRUST = (
    "if you trust it, install its authority's certificate on this machine "
    "(update-ca-certificates), or set SSL_CERT_FILE to a file that has it"
)


def is_of_tls(error: BaseException) -> bool:
    """Whether TLS is why a connection could not be made; asyncio gives a closed one no number."""
    is_closed = isinstance(error, ConnectionResetError) and error.errno is None
    return is_closed or isinstance(error, ssl.SSLError)


async def describe_failure(error: BaseException, host: str, port: int | None) -> str:
    """What failed between this machine and `host`, and the remedy.

    If `port` did not answer by TLS, it is asked once by HTTP without TLS, and without any key; None
    asks nothing.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _of_the_certificate(error, host)
    if port is not None and await _speaks_http(host, port):
        return f"{host}:{port} speaks HTTP without TLS: begin its URL with http://, not https://"
    if not isinstance(error, ssl.SSLError):
        return (
            "the server closed the connection at the beginning of TLS: check host and port of the "
            "URL; it may not speak TLS, or only versions older than 1.2, which this machine refuses"
        )
    if "ALERT" in (error.reason or ""):
        return f"the server refused TLS ({error.reason}): it may want another version of it"
    return (
        f"what answered does not speak TLS ({error.reason or error}): check host and port of the "
        "URL, and any proxy between"
    )


def _of_the_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    said, todo = error.verify_message.rstrip("."), _TO_DO.get(error.verify_code, _TRUST)
    return f"the TLS certificate of {host} is not accepted ({said}): {todo}"


async def _speaks_http(host: str, port: int) -> bool:
    """Whether a server answers a request that is not encrypted."""
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                probe = f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                writer.write(probe.encode())
                return (await reader.read(5)).startswith(b"HTTP/")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


log = logging.getLogger(__name__)

_CONNECT_S = 60.0
"""Seconds to connect; a connection that takes longer will not come."""

MOST_RENEWALS = 4
"""Of the credentials of one attempt: new ones may be replaced before it arrives with them."""

_OF_GATEWAYS = frozenset({502, 503, 504})
"""Statuses with which a proxy reports that it does not reach the endpoint."""

_MAX_HEADER_BYTES = 64 * 2**10
"""Maximum bytes of one line of a reply's head; policies and traces of gateways are over 8 KiB."""


class Transport:
    """The connections of one model to its endpoint, in the running event loop."""

    def __init__(self, settings: ModelSettings, api_key: str | RenewableKey) -> None:
        """Secrets are removed from everything that comes back, before it is read or shortened."""
        connection = settings.connection
        self._base_url = (settings.base_url or "").rstrip("/")
        self._query = connection.query
        self._was_echoed = False
        self._proxy = proxy_for(self._base_url, connection.proxy)
        self._preparer = preparer_of(settings, api_key)
        known = api_key if isinstance(api_key, str) else ""
        self._key = Key(known, *connection.secret_headers().values())
        # Not the session's own: aiohttp sends those to a proxy too, in the clear, with the key.
        self._url_of = lru_cache(maxsize=8)(self._make_url)
        self._headers: Mapping[str, str] = {} if self._preparer else fixed_headers(settings, known)
        dialect = dialect_of(settings.api)
        self._unasked = lambda: dialect.assembly(ignored)
        self._timeouts = CallTimeouts(settings.attempt_timeout_s)
        self._session = aiohttp.ClientSession(
            # The limiter decides how many calls are in flight.
            connector=aiohttp.TCPConnector(
                limit=0, ssl=truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            # Not `trust_env`, which reads the environment and a file for each call.
            proxy=self._proxy and self._proxy.url,
        )

    async def post(
        self,
        path: str,
        request: Mapping[str, Any],
        settings: ModelSettings,
        assembly: Assembly | None = None,
        conversation: str = "",
    ) -> bytes:
        """Send one request to `path`; return the body of the reply, which must come in time.

        With an `assembly` the request must ask for a stream, whose parts it puts together.
        `conversation` is the id for its headers. Raises `ModelError`, and `HostError` where this
        machine ran out of what a call needs.
        """
        if self._preparer is not None:
            return await self._post_prepared(
                self._preparer, path, request, settings, assembly, conversation
            )
        content = exact_json.dumps(request)
        prepared = Prepared(self._url_of(path), self._headers, content, self._key)
        return await self._post(
            prepared, settings, assembly, unasked=self._unasked, conversation=conversation
        )

    def _make_url(self, path: str) -> URL:
        url = self._base_url + path
        return with_query(url, self._query) if self._query else URL(url)

    async def _post_prepared(
        self,
        preparer: Preparer,
        path: str,
        request: Mapping[str, Any] | RelayRequest,
        settings: ModelSettings,
        assembly: Assembly | None,
        conversation: str,
    ) -> bytes:
        """Send a request whose credentials can expire; once more where they have."""
        renewals = 0
        while True:
            async with _ready_within(settings.attempt_timeout_s):
                body = request.body if isinstance(request, RelayRequest) else request
                prepared = await preparer.prepare(path, body)
            try:
                if isinstance(request, RelayRequest):
                    return await self._post_relayed(prepared, request, settings)
                return await self._post(
                    prepared,
                    settings,
                    assembly,
                    unasked=self._unasked,
                    conversation=conversation,
                )
            except ModelError as error:
                if not is_expired(error) or renewals == MOST_RENEWALS:
                    raise
                async with _ready_within(settings.attempt_timeout_s):
                    if not await preparer.renew(prepared):
                        raise
                renewals += 1
                log.info("%s: the credentials were rejected; sent again with others", error)

    async def relay(self, request: RelayRequest, settings: ModelSettings) -> bytes:
        """Send someone else's request as it is, but with the endpoint's credentials.

        A stream's events go to `request.on_event` as they came. Raises and returns as `post` does.
        """
        if self._preparer is not None:
            return await self._post_prepared(
                self._preparer, request.path, request, settings, None, request.conversation
            )
        prepared = Prepared(self._url_of(request.path), self._headers, request.body, self._key)
        return await self._post_relayed(prepared, request, settings)

    async def _post_relayed(
        self, prepared: Prepared, request: RelayRequest, settings: ModelSettings
    ) -> bytes:
        headers = relayed_headers(prepared.headers, request.headers, settings)
        assembly = None if request.assembly is None else request.assembly()
        prepared = prepared._replace(headers=headers)
        if (on_event := request.on_event) is None:
            return await self._post(
                prepared,
                settings,
                assembly,
                unasked=request.unasked,
                conversation=request.conversation,
                method=request.method,
            )
        has_begun = was_passed_on = False

        def pass_on(raw: bytes, data: str | None) -> bool:
            nonlocal has_begun, was_passed_on
            if has_begun or data is not None:  # a comment is no reason not to try again
                has_begun = True
                was_passed_on |= on_event(raw, data)
            return was_passed_on

        try:
            return await self._post(
                prepared,
                settings,
                assembly,
                pass_on,
                unasked=request.unasked,
                conversation=request.conversation,
            )
        except ModelError as error:
            error.was_passed_on = was_passed_on
            raise

    async def _post(
        self,
        prepared: Prepared,
        settings: ModelSettings,
        assembly: Assembly | None,
        on_event: OnEvent | None = None,
        *,
        unasked: Callable[[], Assembly] | None,
        conversation: str,
        method: str = "POST",
    ) -> bytes:
        """Send a request, and read the body of its reply in whatever form it comes.

        `unasked` makes the assembly of a stream that was not asked for; see `to_json`.
        """
        url, headers, body, key = prepared
        if conversation and settings.session_headers:
            headers = with_session(headers, settings.session_headers, conversation)
        timeout = self._timeouts.begin()
        # Following a redirect would send the key to its target.
        sending = self._session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        )
        try:
            async with timeout, sending as response:
                if not 200 <= response.status < 300:
                    raise await self._refusal(response, key, body)
                first = b""
                # Some servers know no streams, or not for this model, and answer in one piece.
                if assembly is not None and response.content_type != "application/json":
                    first = await read_first(response)
                    if not begins_as_json(first):
                        reader = StreamReader(
                            response,
                            assembly,
                            idle_timeout_s=settings.idle_timeout_s,
                            key=key,
                            clean=self.clean,
                            request=body,
                        )
                        try:
                            await reader.read(first, on_event)
                        except ModelError as error:
                            return self.clean(finish_broken(assembly, error, settings.api), key)
                        return self.clean(assembly.finish(), key)
                whole = first + await read_whole(response)
                return self.clean(to_json(whole, unasked, settings.api), key)
        except (aiohttp.ClientError, OSError) as error:
            failure: ModelError | HostError
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                failure = ModelError(
                    "timeout", f"no complete reply within {settings.attempt_timeout_s:g} s"
                )
            else:
                failure = await self._of_the_connection(error, key)
            if assembly is not None and isinstance(failure, ModelError):
                # The parts that came may say what they cost.
                failure.paid = paid_in(settings.api, assembly.finish())
            raise failure from error
        finally:
            self._timeouts.end(timeout)

    def clean(self, body: bytes, key: Key | None = None) -> bytes:
        """The endpoint's bytes without the key of the request, which it may repeat anywhere."""
        cleaned = (key or self._key).out_of(body)
        if cleaned is not body and not self._was_echoed:
            self._was_echoed = True
            log.warning("%s sent the API key back; it is taken out of replies", self._base_url)
        return cleaned

    async def status_of(self, url: str, timeout_s: float) -> int | None:
        """The status with which a URL of the endpoint answers, without a key: 0 where nothing
        listens, None where no answer comes in time. Raises `HostError`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                return response.status
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            failure = await self._of_the_connection(error, self._key)
            if isinstance(failure, HostError):
                raise failure from error
            return 0 if failure.is_by_load else None

    async def prepare(self, path: str, timeout_s: float) -> Prepared:
        """URL, headers and secrets of a request to `path`, which may have a query."""
        if self._preparer is None:
            return Prepared(self._make_url(path), self._headers, b"", self._key)
        async with _ready_within(timeout_s):
            return await self._preparer.prepare(path, None)

    async def renew(self, rejected: Prepared) -> bool:
        """Whether a request that was rejected (401) would now be prepared otherwise."""
        return self._preparer is not None and await self._preparer.renew(rejected)

    async def forward(
        self,
        method: str,
        prepared: Prepared,
        body: AsyncIterator[bytes] | None,
        *,
        silence_s: float,
    ) -> aiohttp.ClientResponse:
        """Send any other request; its response is for `read` or `parts`. Raises as `post` does.

        It may take any time, but for a silence of more than `silence_s`.
        """
        url, headers, _, key = prepared
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        async with self._failures(key):
            return await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            )

    async def read(self, response: aiohttp.ClientResponse, key: Key) -> bytes:
        """The whole body of a response; raises what it says if its status is an error."""
        async with self._failures(key), response:
            if not 200 <= response.status < 300:
                raise await self._refusal(response, key)
            return self.clean(await read_whole(response), key)

    async def parts(
        self, response: aiohttp.ClientResponse, key: Key
    ) -> AsyncGenerator[bytes, None]:
        """The body of a response, of any length."""
        async with self._failures(key):
            async for part in response.content.iter_any():
                yield part

    @contextlib.asynccontextmanager
    async def _failures(self, key: Key) -> AsyncIterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            raise await self._of_the_connection(error, key) from error

    async def close(self) -> None:
        """Release all connections."""
        self._timeouts.close()
        try:
            await self._session.close()
        finally:
            if self._preparer is not None:
                await self._preparer.close()

    async def _refusal(
        self, response: aiohttp.ClientResponse, key: Key, request: bytes = b""
    ) -> ModelError:
        """The error of a response whose status is one; `request` is the body that was sent."""
        body = b"".join([part async for part in read_parts(response)])
        headers = {name.lower(): key.out_of_text(value) for name, value in response.headers.items()}
        body = self.clean(body, key)
        error = refusal_of(response.status, headers, body, request)
        error.reply = response.status, body
        if response.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            return self._refusal_of_the_proxy(response.status, response.reason or "")
        if self._proxy and response.status in _OF_GATEWAYS:
            error.args = (f"{error} (by way of {self._proxy.description})",)
        return error

    def _refusal_of_the_proxy(self, status: int, reason: str) -> ModelError:
        proxy = self._proxy.description if self._proxy else "a proxy"
        message = f"{proxy}: HTTP {status} {reason}".strip()
        if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            message += "; it wants a user and a password, as in http://USER:PASSWORD@HOST:PORT"
        return ModelError("connection", message, was_sent=False, is_lasting=True)

    async def _of_the_connection(
        self, error: aiohttp.ClientError | OSError, key: Key
    ) -> ModelError | HostError:
        """The error for a connection that failed or was cut, or a response that is no HTTP or too
        large."""
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return self._refusal_of_the_proxy(error.status, error.message)
        cause: BaseException = error
        is_unresolved = False
        while isinstance(cause, aiohttp.ClientConnectorError):
            is_unresolved = is_unresolved or isinstance(cause, aiohttp.ClientConnectorDNSError)
            cause = cause.os_error
        unsent = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
        was_sent = not isinstance(error, unsent)
        message = ""
        if isinstance(error, aiohttp.ClientConnectorError) and is_of_tls(cause):
            port = None if self._proxy else error.port
            message = await describe_failure(cause, error.host, port)
        elif isinstance(cause, OSError):
            if cause.errno in HOST_ERRNOS:
                return HostError(f"model call: {describe(cause.errno)}")
            # asyncio puts an address where the system's words belong; look-ups of names have none.
            number = cause.errno or 0
            message = (os.strerror(number) if number > 0 else cause.strerror) or ""
        message = message or ": ".join(filter(None, (type(cause).__name__, str(cause))))
        if is_unresolved:
            message = f"its name cannot be resolved ({message})"
        of_the_way = (aiohttp.ClientProxyConnectionError, aiohttp.ClientConnectorDNSError)
        if self._proxy and isinstance(error, of_the_way):
            message = f"{self._proxy.description}: {message}. Correct it, {self._proxy.instead}"
        elif self._proxy:
            message += f" (by way of {self._proxy.description})"
        message = key.out_of_text(message)
        is_lasting = is_unresolved or isinstance(cause, ssl.SSLError)
        return ModelError("connection", message, was_sent=was_sent, is_lasting=is_lasting)


@contextlib.asynccontextmanager
async def _ready_within(timeout_s: float) -> AsyncIterator[None]:
    """Limits the time for credentials. Raises `ModelError("timeout")`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ModelError(
            "timeout", f"no credentials within {timeout_s:g} s", was_sent=False
        ) from error


def is_expired(error: ModelError) -> bool:
    """Whether credentials were rejected; AWS says 403 of those that have expired."""
    is_of_aws = error.kind == "forbidden" and "expired" in str(error).lower()
    return error.kind == "auth" or is_of_aws
