"""HTTP to one endpoint: sends a request and returns the body of its reply, or raises `ModelError`.

This uses aiohttp directly. The providers' own clients can use aiohttp too, but through two more
layers that cost several times as much. What these would add is here and in `retrying`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from agent.models.client.direct_requests import DirectRequests, Response
from agent.models.client.key_command import RenewableKey
from agent.models.client.live_connector import LiveConnector
from agent.models.client.prepared import (
    Prepared,
    Preparer,
    add_query,
    fixed_headers,
    make_preparer,
    relayed_headers,
    session_headers,
)
from agent.models.client.relayed import OnEvent, RelayRequest
from agent.models.client.reply_bodies import (
    StreamReader,
    begins_as_events,
    begins_as_json,
    convert_to_json,
    is_object,
    read_document,
    read_error_body,
    read_first,
    read_whole,
)
from agent.models.client.tls_context import make_tls_context
from agent.models.connection import find_proxy
from agent.models.dialects.dialect import Assembly, get_dialect, read_paid
from agent.models.error_bodies import read_refusal
from agent.models.errors import ModelError
from agent.models.keys import Key
from agent.models.model import ModelSettings, ignore_event
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.call_timeouts import CallTimeouts
from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno

# Why a TLS connection could not be made, and what to do.

_PROBE_S = 2.0
"""Seconds for a server that did not speak TLS to answer without it."""

_NAME = "use a name that it was issued for as the host of the URL"
_REMEDIES = {
    9: "correct the clock of this machine, or have another certificate issued",
    10: "have it renewed, or correct the clock of this machine",
    62: _NAME,
    64: _NAME,
}
"""Remedies by OpenSSL's number of the reason: X509_V_ERR_* in openssl/x509_vfy.h."""
_TRUST = (
    "if you trust it, install its authority's certificate on this machine "
    "(update-ca-certificates), or set SSL_CERT_FILE to a file that has it"
)


def is_tls_failure(error: BaseException) -> bool:
    """Whether a connection could not be made because of TLS."""
    # asyncio gives no number if the server closed the connection at the beginning of TLS.
    is_closed = isinstance(error, ConnectionResetError) and error.errno is None
    return is_closed or isinstance(error, ssl.SSLError)


async def describe_tls_failure(error: BaseException, host: str, port: int | None) -> str:
    """Describe why TLS failed between this machine and `host`, with the remedy.

    If `port` does not speak TLS, it is asked once by plain HTTP, without any key; None: it is not.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        remedy = _REMEDIES.get(error.verify_code, _TRUST)
        return f"the TLS certificate of {host} is not accepted ({reason}): {remedy}"
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
"""Maximum seconds to connect."""

MAX_RENEWALS = 4
"""The maximum number of times that one attempt renews its credentials.

A renewed token can itself be replaced before the request arrives.
"""

_GATEWAY_STATUSES = frozenset({502, 503, 504})
"""Statuses with which a proxy reports that it does not reach the endpoint."""

_MAX_HEADER_BYTES = 64 * 2**10
"""Maximum bytes of one line of a reply's head; policies and traces of gateways are over 8 KiB."""

_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which the request certainly never reached the endpoint."""

_PROXY_UNREACHED = (aiohttp.ClientProxyConnectionError, aiohttp.ClientConnectorDNSError)
"""Errors that mean, if there is a proxy, that the proxy itself was not reached."""


class Transport:
    """The connections of one model to its endpoint, in the running event loop."""

    def __init__(self, settings: ModelSettings, api_key: str | RenewableKey) -> None:
        """Open no connection yet: the first request does."""
        connection = settings.connection
        self._base_url = (settings.base_url or "").rstrip("/")
        self._query = connection.query
        self._was_echoed = False
        self._proxy = find_proxy(self._base_url, connection.proxy)
        self._preparer = make_preparer(settings, api_key)
        known = api_key if isinstance(api_key, str) else ""
        # Removed from every reply before it is read or shortened.
        self._key = Key(known, *connection.secret_headers().values())
        self._url_of = lru_cache(maxsize=8)(self._make_url)
        # Passed per request, not to ClientSession: aiohttp also sends session headers, and with
        # them the key, to the proxy in the clear.
        self._headers: Mapping[str, str] = {} if self._preparer else fixed_headers(settings, known)
        dialect = get_dialect(settings.api)
        self._unasked = lambda: dialect.assembly(ignore_event)
        self._timeouts = CallTimeouts(settings.attempt_timeout_s)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            # The limiter decides how many calls are in flight.
            connector=LiveConnector(limit=0, ssl=make_tls_context()),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=timeout,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            # Not `trust_env`, which reads the environment and a file for each call.
            proxy=self._proxy and self._proxy.url,
        )
        self._direct: DirectRequests | None = None
        if self._proxy is None:
            self._direct = DirectRequests(
                self._session, timeout=timeout, max_header_bytes=_MAX_HEADER_BYTES
            )

    async def post(
        self,
        path: str,
        request: Mapping[str, Any],
        settings: ModelSettings,
        assembly: Assembly | None = None,
        conversation: str = "",
    ) -> bytes:
        """Send one request to `path` and return the body of the reply.

        With an `assembly`, which puts the parts of a stream together, the request must ask for a
        stream. `conversation` is the id for the headers, or "". Raises `ModelError`, and
        `HostError` if this machine ran out of a resource that a call needs.
        """
        if self._preparer is not None:
            return await self._post_prepared(
                self._preparer,
                path,
                request,
                settings,
                assembly=assembly,
                conversation=conversation,
            )
        content = exact_json.dumps(request)
        prepared = Prepared(self._url_of(path), self._headers, content, self._key)
        return await self._post(
            prepared, settings, assembly, unasked=self._unasked, conversation=conversation
        )

    def _make_url(self, path: str) -> URL:
        url = self._base_url + path
        return add_query(url, self._query) if self._query else URL(url)

    async def _post_prepared(
        self,
        preparer: Preparer,
        path: str,
        request: Mapping[str, Any] | RelayRequest,
        settings: ModelSettings,
        *,
        assembly: Assembly | None,
        conversation: str,
    ) -> bytes:
        """Send a request whose credentials can expire; again with new ones if they have."""
        renewals = 0
        while True:
            async with _limit_preparation(settings.attempt_timeout_s):
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
                if not is_expired(error) or renewals == MAX_RENEWALS:
                    raise
                async with _limit_preparation(settings.attempt_timeout_s):
                    if not await preparer.renew(prepared):
                        raise
                renewals += 1
                log.info(
                    "The credentials were refused, so the call is sent again with others: %s", error
                )

    async def relay(self, request: RelayRequest, settings: ModelSettings) -> bytes:
        """Send another program's request unchanged, but with the endpoint's credentials.

        The events of a stream go to `request.on_event` unchanged. Returns and raises as `post`
        does.
        """
        if self._preparer is not None:
            return await self._post_prepared(
                self._preparer,
                request.path,
                request,
                settings,
                assembly=None,
                conversation=request.conversation,
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

        def relay_event(raw: bytes, data: str | None) -> bool:
            nonlocal has_begun, was_passed_on
            if has_begun or data is not None:  # after a comment alone the call can be repeated
                has_begun = True
                was_passed_on |= on_event(raw, data)
            return was_passed_on

        try:
            return await self._post(
                prepared,
                settings,
                assembly,
                relay_event,
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
        """Send a request and return the body of its reply.

        `unasked` makes the assembly of a stream that was not asked for; see `convert_to_json`.
        """
        body, key = prepared.body, prepared.key
        added: Mapping[str, str] = {}
        if conversation and settings.session_headers:
            added = session_headers(prepared.headers, settings.session_headers, conversation)
        timeout = self._timeouts.begin()
        arrived: list[bytes] = []
        try:
            async with timeout, self._send(method, prepared, added) as response:
                if not 200 <= response.status < 300:
                    raise await self._refusal(response, key, body)
                if assembly is None and response.content.is_eof():  # nearly always
                    whole = await read_whole(response)
                    return self.clean(convert_to_json(whole, unasked, settings.api), key)
                # Some servers know no streams, or not for this model, and answer in one piece;
                # others stream without being asked.
                arrived.append(await read_first(response))
                assembly = _find_assembly(response, arrived[0], assembly, unasked)
                if assembly is not None:
                    reader = StreamReader(
                        response,
                        assembly,
                        idle_timeout_s=settings.idle_timeout_s,
                        key=key,
                        clean=self.clean,
                        request=body,
                    )
                    whole = await reader.read_reply(arrived[0], on_event, settings.api)
                    return self.clean(whole, key)
                whole = await read_document(response, arrived, settings.api)
                return self.clean(convert_to_json(whole, unasked, settings.api), key)
        except (aiohttp.ClientError, OSError) as error:
            if is_object(whole := b"".join(arrived)):
                log.debug("A connection failed after a reply, which is complete: %s", error)
                return self.clean(convert_to_json(whole, unasked, settings.api), key)
            failure: ModelError | HostError
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                failure = ModelError(
                    "timeout", f"no complete reply within {settings.attempt_timeout_s:g} s"
                )
            else:
                failure = await self._connection_failure(error, key)
            if assembly is not None and isinstance(failure, ModelError):
                # The parts that arrived may tell their cost.
                failure.paid = read_paid(settings.api, assembly.finish())
            raise failure from error
        finally:
            self._timeouts.end(timeout)

    def _send(
        self, method: str, prepared: Prepared, added: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Response]:
        """Prepare to send a request, with the headers `added`, when the result is entered."""
        url, headers, body, _ = prepared
        if method == "POST" and self._direct is not None:
            direct = self._direct.post(url, headers, added, body)
            if direct is not None:
                return direct
        # Following a redirect would send the key to its target.
        return self._session.request(
            method, url, data=body, headers={**headers, **added}, allow_redirects=False
        )

    def clean(self, body: bytes, key: Key | None = None) -> bytes:
        """Remove the key of the request from the endpoint's bytes, which may repeat it anywhere."""
        cleaned = (key or self._key).remove_from(body)
        if cleaned is not body and not self._was_echoed:
            self._was_echoed = True
            log.warning(
                "%s sent the API key back; the key is removed from its replies.", self._base_url
            )
        return cleaned

    async def fetch_status(self, url: str, timeout_s: float) -> int | None:
        """Ask a URL of the endpoint for its status, without a key.

        0 if nothing listens there; None if no answer comes in time. Raises `HostError`.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                return response.status
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            failure = await self._connection_failure(error, self._key)
            if isinstance(failure, HostError):
                raise failure from error
            return 0 if failure.is_by_load else None

    async def prepare(self, path: str, timeout_s: float) -> Prepared:
        """Prepare a request to `path`, which may have a query: URL, headers and secrets."""
        if self._preparer is None:
            return Prepared(self._make_url(path), self._headers, b"", self._key)
        async with _limit_preparation(timeout_s):
            return await self._preparer.prepare(path, None)

    async def renew(self, rejected: Prepared) -> bool:
        """Renew the credentials after a 401; returns whether a retry would send different ones."""
        return self._preparer is not None and await self._preparer.renew(rejected)

    async def forward(
        self,
        method: str,
        prepared: Prepared,
        body: AsyncIterator[bytes] | None,
        *,
        silence_s: float,
    ) -> aiohttp.ClientResponse:
        """Send any other request; `read` or `parts` read its response. Raises as `post` does.

        There is no total time limit; it fails after `silence_s` seconds without data.
        """
        url, headers, _, key = prepared
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        async with self._failures(key):
            return await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            )

    async def read(self, response: aiohttp.ClientResponse, key: Key) -> bytes:
        """Read the whole body of a response. Raises the `ModelError` that its status reports."""
        async with self._failures(key), response:
            if not 200 <= response.status < 300:
                raise await self._refusal(response, key)
            return self.clean(await read_whole(response), key)

    async def parts(
        self, response: aiohttp.ClientResponse, key: Key
    ) -> AsyncGenerator[bytes, None]:
        """Read the body of a response, of any length, in parts."""
        async with self._failures(key):
            async for part in response.content.iter_any():
                yield part

    @contextlib.asynccontextmanager
    async def _failures(self, key: Key) -> AsyncIterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            raise await self._connection_failure(error, key) from error

    async def close(self) -> None:
        """Release all connections."""
        self._timeouts.close()
        try:
            await self._session.close()
        finally:
            if self._preparer is not None:
                await self._preparer.close()

    async def _refusal(self, response: Response, key: Key, request: bytes = b"") -> ModelError:
        """The error that a response reports by its status; `request` is the body that was sent."""
        body = await read_error_body(response)
        headers = {
            name.lower(): key.remove_from_text(value) for name, value in response.headers.items()
        }
        body = self.clean(body, key)
        error = read_refusal(response.status, headers, body, request)
        error.reply = response.status, body
        if response.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            return self._proxy_refusal(response.status, response.reason or "")
        if self._proxy and response.status in _GATEWAY_STATUSES:
            error.args = (f"{error} (by way of {self._proxy.description})",)
        return error

    def _proxy_refusal(self, status: int, reason: str) -> ModelError:
        proxy = self._proxy.description if self._proxy else "a proxy"
        message = f"{proxy}: HTTP {status} {reason}".strip()
        if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            message += "; it wants a user and a password, as in http://USER:PASSWORD@HOST:PORT"
        return ModelError("connection", message, was_sent=False, is_lasting=True)

    async def _connection_failure(
        self, error: aiohttp.ClientError | OSError, key: Key
    ) -> ModelError | HostError:
        """The failure of a connection, or of a response that is no HTTP or too large."""
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return self._proxy_refusal(error.status, error.message)
        cause, is_unresolved = _find_cause(error)
        if isinstance(error, aiohttp.ClientConnectorError) and is_tls_failure(cause):
            port = None if self._proxy else error.port
            message = await describe_tls_failure(cause, error.host, port)
        elif isinstance(cause, OSError) and cause.errno in HOST_ERRNOS:
            return HostError(f"model call: {describe_errno(cause.errno)}")
        elif isinstance(cause, aiohttp.ClientResponseError):
            message = (
                f"the framing of the reply is wrong ({cause.message}); a proxy between is the "
                "likely cause, or a server that does not speak HTTP"
            )
        else:
            message = _describe_cause(cause)
        if is_unresolved:
            message = f"its name cannot be resolved ({message})"
        if self._proxy and isinstance(error, _PROXY_UNREACHED):
            message = f"{self._proxy.description}: {message}. Correct it, {self._proxy.alternative}"
        elif self._proxy:
            message += f" (by way of {self._proxy.description})"
        return ModelError(
            "connection",
            key.remove_from_text(message),
            was_sent=not isinstance(error, _UNSENT),
            is_lasting=is_unresolved or isinstance(cause, ssl.SSLError),
        )


def _find_assembly(
    response: Response,
    first: bytes,
    asked: Assembly | None,
    unasked: Callable[[], Assembly] | None,
) -> Assembly | None:
    """The assembly of a reply that begins with the bytes `first`; None if it is no stream."""
    if begins_as_events(first):
        return asked or (unasked and unasked())
    return None if _is_json(response) or begins_as_json(first) else asked


def _is_json(response: Response) -> bool:
    content_type = response.headers.get("Content-Type", "").partition(";")[0]
    return content_type.strip().lower() == "application/json"


class _Cause(NamedTuple):
    """The error of the system or of TLS behind a failed connection."""

    error: BaseException
    is_unresolved: bool
    """The name of the host could not be resolved."""


def _find_cause(error: BaseException) -> _Cause:
    is_unresolved = False
    while isinstance(error, aiohttp.ClientConnectorError):
        is_unresolved = is_unresolved or isinstance(error, aiohttp.ClientConnectorDNSError)
        error = error.os_error
    return _Cause(error, is_unresolved)


def _describe_cause(cause: BaseException) -> str:
    text: str | None = ""
    if isinstance(cause, OSError):
        # asyncio replaces the system's text by the address, so it is looked up by its number.
        # Look-ups of names have no such number and keep their own text.
        number = cause.errno or 0
        text = os.strerror(number) if number > 0 else cause.strerror
    return text or ": ".join(filter(None, (type(cause).__name__, str(cause))))


@contextlib.asynccontextmanager
async def _limit_preparation(timeout_s: float) -> AsyncIterator[None]:
    """Limit the time to get credentials. Raises `ModelError("timeout")`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ModelError(
            "timeout", f"no credentials within {timeout_s:g} s", was_sent=False
        ) from error


def is_expired(error: ModelError) -> bool:
    """Whether the endpoint rejected the credentials, perhaps because they have expired."""
    # AWS answers expired credentials with a 403.
    is_aws = error.kind == "forbidden" and "expired" in str(error).lower()
    return error.kind == "auth" or is_aws
