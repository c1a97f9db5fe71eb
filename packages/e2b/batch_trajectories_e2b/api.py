"""The HTTP requests: to the service, which makes and kills machines, and to a machine's own server.

The service's API is that of `spec/openapi.yml` of the repository e2b-dev/E2B. A machine's server,
`envd`, has `/files`, and the Connect protocol with JSON for processes (`spec/envd` there).
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import secrets
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from aiohttp import hdrs

from batch_trajectories_e2b.service import ENVD_PORT, Service

MADE_BY = "batch-trajectories"
_REPEATED = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same request may succeed."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 15.0
_MAX_MESSAGE_CHARS = 300
_PING_S = 15
"""Seconds between signs of life of a stream in which nothing happens."""
_HEADER = struct.Struct(">BI")
_COMPRESSED, _LAST = 1, 2
"""Flags of a message in a stream of the Connect protocol."""
_MAX_STREAM_MESSAGE_BYTES = 16 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=90, sock_connect=20)
_STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=3 * _PING_S)
_FILE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=90)


class Refused(Exception):
    """The service or a machine answered that it will not do what was asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No usable answer came, although the request was repeated."""


class Gone(Exception):
    """The machine does not exist any more."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that the service has made."""

    id: str
    url: str
    """The URL of its own server."""
    token: str | None = field(repr=False)
    """What its server wants to see; None: it trusts everyone who reaches it."""


class Api:
    """The requests of one process; used in one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._session = aiohttp.ClientSession(
            trust_env=True, connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def make_machine(
        self, template: str, metadata: Mapping[str, str], *, network: bool, patience_s: float
    ) -> Machine:
        """Make a machine; `metadata` must be of this machine alone.

        Raises `Refused` and `Unreachable`.
        """
        body = {
            "templateID": template,
            "timeout": self._service.lifetime_s,
            "metadata": {"made_by": MADE_BY, **metadata},
            "autoPause": False,
            "allow_internet_access": network,
        }
        # A repeated request with the same key makes no second machine, where that is known.
        key = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            made = await self._ask(
                "POST", "/v2/sandboxes", body, headers=key, patience_s=patience_s
            )
        except (Gone, Refused) as error:
            if isinstance(error, Refused) and error.status != 405:
                raise
            # An older server. One that knows the path, but no such template, says so again.
            body["secure"] = True
            try:
                made = await self._ask("POST", "/sandboxes", body, patience_s=patience_s)
            except Gone as gone:
                raise Refused(str(gone), 404) from gone
        machine_id = str(made["sandboxID"])
        token = made.get("envdAccessToken")
        if made["_repeated"]:
            # The answer to an earlier request may have been lost, and its machine runs.
            for other in await self.list_machines(metadata):
                if other["sandboxID"] != machine_id:
                    await self.kill_machine(other["sandboxID"])
        return Machine(machine_id, self._service.machine_url(machine_id, made.get("domain")), token)

    async def list_machines(
        self, metadata: Mapping[str, str], *, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the machines with this metadata that run or are paused."""
        wanted = urlencode({"made_by": MADE_BY, **metadata}, quote_via=quote)
        found: list[dict[str, Any]] = []
        token = None
        while True:
            query = {"metadata": wanted, "state": "running,paused", "limit": str(limit or 100)}
            if token:
                query["nextToken"] = token
            page = await self._ask("GET", f"/v2/sandboxes?{urlencode(query)}")
            found += page["_list"]
            token = page["_headers"].get("X-Next-Token")
            if not token or limit is not None:
                return found

    async def is_there(self, machine_id: str) -> bool:
        """Whether the service knows the machine."""
        try:
            await self._ask("GET", f"/sandboxes/{machine_id}", patience_s=10)
        except Gone:
            return False
        return True

    async def keep_machine(self, machine_id: str) -> None:
        """Let the machine live on for its lifetime from now. Raises `Gone`."""
        body = {"timeout": self._service.lifetime_s}
        await self._ask("POST", f"/sandboxes/{machine_id}/timeout", body)

    async def kill_machine(self, machine_id: str) -> None:
        """End the machine; it may have ended before."""
        with suppress(Gone):
            await self._ask("DELETE", f"/sandboxes/{machine_id}")

    async def call(self, machine: Machine, method: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method of a machine's process service, once."""
        url = f"{machine.url}/process.Process/{method}"
        headers = {**self._machine_headers(machine), "Connect-Protocol-Version": "1"}
        async with self._request("POST", url, headers=headers, json=body) as answer:
            return _object(await answer.read())

    @asynccontextmanager
    async def stream(
        self, machine: Machine, method: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Open a stream of events of a process. Raises `Refused`, `Unreachable` and `Gone`."""
        url = f"{machine.url}/process.Process/{method}"
        headers = self._machine_headers(machine) | {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": str(_PING_S),
        }
        message = json.dumps(body).encode()
        data = _HEADER.pack(0, len(message)) + message
        async with self._request(
            "POST", url, headers=headers, data=data, timeout=_STREAM_TIMEOUT
        ) as answer:
            yield self._events(answer)

    async def upload(self, machine: Machine, path: str, source: Path) -> None:
        """Write a local file to the machine."""
        with source.open("rb") as file:
            # As a form: machines with an older server know nothing else.
            form = aiohttp.FormData()
            form.add_field("file", file, filename=Path(path).name)
            query = {"path": path, "username": self._service.user}
            async with self._request(
                "POST",
                f"{machine.url}/files",
                headers=self._machine_headers(machine),
                params=query,
                data=form,
                timeout=_FILE_TIMEOUT,
            ):
                pass

    async def download(self, machine: Machine, path: str, target: Path, max_bytes: int) -> None:
        """Write a file of the machine to a local file; raises `Refused` if it is too large."""
        query = {"path": path, "username": self._service.user}
        async with self._request(
            "GET",
            f"{machine.url}/files",
            headers=self._machine_headers(machine),
            params=query,
            timeout=_FILE_TIMEOUT,
        ) as answer:
            with target.open("wb") as file:
                async for piece in answer.content.iter_any():
                    max_bytes -= len(piece)
                    if max_bytes < 0:
                        raise Refused("a file of the machine is larger than it said", 200)
                    file.write(piece)

    def _machine_headers(self, machine: Machine) -> dict[str, str]:
        user = base64.b64encode(f"{self._service.user}:".encode()).decode()
        headers = {
            "Authorization": f"Basic {user}",
            "E2b-Sandbox-Id": machine.id,
            "E2b-Sandbox-Port": str(ENVD_PORT),
        }
        return headers if machine.token is None else headers | {"X-Access-Token": machine.token}

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 60.0,
    ) -> dict[str, Any]:
        """Make a request to the service, again and again for `patience_s` seconds.

        Raises `Refused`, `Unreachable`, and `Gone` if what it names does not exist.
        """
        waits = Waits(patience_s)
        while True:
            try:
                async with self._request(
                    method,
                    f"{self._service.api_url}{path}",
                    headers={"X-API-Key": self._service.api_key, **(headers or {})},
                    json=body,
                ) as answer:
                    raw = await answer.read()
                    loaded = json.loads(raw) if raw else {}
                    if isinstance(loaded, list):
                        loaded = {"_list": loaded}
                    return {
                        **loaded,
                        "_headers": dict(answer.headers),
                        "_repeated": waits.count > 0,
                    }
            except ValueError as error:
                failure: Exception = Unreachable(f"{path}: the answer is no JSON: {error}")
                after_s = None
            except Unreachable as error:
                failure, after_s = error, getattr(error, "after_s", None)
            if not await waits.wait(after_s):
                raise failure

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout = _TIMEOUT,
        **content: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a request once; raises `Refused`, `Unreachable` and `Gone`."""
        place = url.partition("?")[0]
        headers = {hdrs.ACCEPT: "*/*", hdrs.USER_AGENT: MADE_BY, **headers}
        try:
            async with self._session.request(
                method, url, headers=headers, timeout=timeout, allow_redirects=False, **content
            ) as answer:
                if answer.status >= 300:
                    raise self._failure(place, answer, await answer.read())
                yield answer
        except (aiohttp.ClientError, TimeoutError, ConnectionError, OSError) as error:
            text = self._service.without_secrets(str(error) or type(error).__name__)
            raise Unreachable(f"{place}: {text[:_MAX_MESSAGE_CHARS]}") from error

    def _failure(self, place: str, answer: aiohttp.ClientResponse, raw: bytes) -> Exception:
        said = _object(raw)
        text = str(said.get("message") or raw.decode(errors="replace"))
        text = " ".join(self._service.without_secrets(text).split())[:_MAX_MESSAGE_CHARS]
        message = f"{place}: {answer.status}: {text or answer.reason}"
        if answer.status == 404 and said.get("code") in (404, None):
            return Gone(message)
        if answer.status in _REPEATED:
            failure = Unreachable(message)
            failure.after_s = _retry_after(answer.headers)  # type: ignore[attr-defined]
            return failure
        return Refused(message, answer.status)

    async def _events(self, answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream; raises `Unreachable` if it breaks off."""
        place = str(answer.url.with_query(None))
        buffer = bytearray()
        try:
            async for piece in answer.content.iter_any():
                buffer += piece
                while len(buffer) >= _HEADER.size:
                    flags, size = _HEADER.unpack_from(buffer)
                    if flags & _COMPRESSED or size > _MAX_STREAM_MESSAGE_BYTES:
                        raise Unreachable(f"{place}: the stream has a message that was not asked")
                    if len(buffer) < _HEADER.size + size:
                        break
                    message = _object(bytes(buffer[_HEADER.size : _HEADER.size + size]))
                    del buffer[: _HEADER.size + size]
                    if flags & _LAST:
                        if error := message.get("error"):
                            raise self._stream_error(place, error)
                        return
                    yield message.get("event", {})
        except (aiohttp.ClientError, TimeoutError, ConnectionError, OSError) as error:
            text = self._service.without_secrets(str(error) or type(error).__name__)
            raise Unreachable(f"{place}: {text[:_MAX_MESSAGE_CHARS]}") from error
        raise Unreachable(f"{place}: the stream broke off")

    def _stream_error(self, place: str, error: Mapping[str, Any]) -> Exception:
        text = self._service.without_secrets(str(error.get("message", "")))[:_MAX_MESSAGE_CHARS]
        message = f"{place}: {error.get('code')}: {text}"
        if error.get("code") in ("unavailable", "resource_exhausted", "aborted", "unknown"):
            return Unreachable(message)
        return Refused(message, 404 if error.get("code") == "not_found" else 400)


class Waits:
    """Growing waits between the attempts of one request, until patience ends."""

    def __init__(self, patience_s: float) -> None:
        self._until = time.monotonic() + patience_s
        self.count = 0

    async def wait(self, after_s: float | None = None) -> bool:
        """Wait before the next attempt, at least `after_s`; return False if there is none."""
        longest = min(_FIRST_WAIT_S * 2**self.count, _LONGEST_WAIT_S)
        seconds = max(after_s or 0.0, random.uniform(longest / 2, longest))
        if time.monotonic() + seconds > self._until:
            return False
        self.count += 1
        await asyncio.sleep(seconds)
        return True


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None


def _object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`, or an empty one for anything else."""
    try:
        loaded = json.loads(raw)
    except ValueError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
