"""Reads manifests and blobs of repositories: mirrors, logins, retries."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self, TypeVar

import aiohttp
import orjson
from yarl import URL

from batch_trajectories.basics.text import clip
from toolsets.images.names import ImageError
from toolsets.images.registry.names import RegistryName, registry_address
from toolsets.images.registry.settings import RegistrySettings
from toolsets.images.registry.tokens import RegistryTokens, parse_challenges
from toolsets.images.registry.transport import (
    MAX_WAIT_S,
    Busy,
    FailedForNow,
    RegistryTransport,
    RequestRefused,
    read_body,
)

_log = logging.getLogger(__name__)

_ATTEMPTS = 8
_ATTEMPTS_AT_MIRROR = 3
_DOWN_S = 60.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 30.0
_MAX_ERROR_BYTES = 64 << 10
_MAX_ERROR_CHARS = 200

T = TypeVar("T")


class Place(NamedTuple):
    """A server that has the images of a registry: the registry itself, or a mirror."""

    address: URL
    """Scheme, host and port."""
    prefix: str
    """The path before names of repositories at the server; "", or it ends with a slash."""
    registry: str
    """The host by which the files of `docker login` know it."""

    def url(self, name: RegistryName, kind: str, target: str) -> URL:
        """The address of a manifest or a blob."""
        return self.address / f"v2/{self.prefix}{name.repository}/{kind}/{target}"


class RegistryClient:
    """Reads from registries; use it as `async with`. Credentials are looked up when asked for."""

    def __init__(self, settings: RegistrySettings) -> None:
        """Never raises."""
        self._settings = settings
        self._transport: RegistryTransport | None = None
        self._tokens: RegistryTokens | None = None
        self._down_until: dict[URL, float] = {}
        """The time at which a mirror that failed is tried again, by its address."""

    async def __aenter__(self) -> Self:
        self._transport = RegistryTransport()
        self._tokens = RegistryTokens(self._transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        await self._transport.close()

    async def read(
        self, name: RegistryName, kind: str, target: str, *, accept: str, max_bytes: int
    ) -> tuple[bytes, str]:
        """Return a document and its media type, "" if unknown. Raises `ImageError`, `HostError`."""

        async def once(place: Place) -> tuple[bytes, str]:
            headers = {"Accept": accept}
            async with self._get(place, name, place.url(name, kind, target), headers) as response:
                body = await read_body(response, max_bytes)
                return body, response.headers.get("Content-Type", "").partition(";")[0].strip()

        return await self.retry(name, once)

    @asynccontextmanager
    async def open_blob(
        self, place: Place, name: RegistryName, digest: str, offset: int
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield an answer with a blob, from `offset` on if its status is 206.

        Makes one attempt; call it inside `retry`.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with self._get(place, name, place.url(name, "blobs", digest), headers) as response:
            yield response

    async def retry(self, name: RegistryName, attempt: Callable[[Place], Awaitable[T]]) -> T:
        """Call `attempt` with a server until it succeeds; the mirrors come first.

        Attempts that fail for now are repeated with growing pauses, or as the server asks. Raises
        `ImageError` with the reason of each server.
        """
        reasons = []
        places = self._places(name.registry)
        for place in places:
            is_last = place is places[-1]
            if not is_last and self._down_until.get(place.address, 0) > time.monotonic():
                continue
            try:
                return await _retry_at(
                    place, attempt, attempts=_ATTEMPTS if is_last else _ATTEMPTS_AT_MIRROR
                )
            except FailedForNow as error:
                self._down_until[place.address] = time.monotonic() + _DOWN_S
                reasons.append(str(error))
            except RequestRefused as error:
                reasons.append(str(error))
            _log.info("image %s: %s", name, reasons[-1])
        raise ImageError(f"image '{name}' cannot be fetched: {'; '.join(reasons)}")

    @asynccontextmanager
    async def _get(
        self, place: Place, name: RegistryName, url: URL, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield an answer of status 200, 206 or 416; log in if the server asks for it."""
        assert self._transport is not None
        assert self._tokens is not None
        repository = f"{place.prefix}{name.repository}"
        header = self._tokens.header(place.address, repository)
        for has_logged_in in (False, True):
            sent = headers if header is None else {**headers, "Authorization": header}
            async with self._transport.request("GET", url, sent) as response:
                if response.status in (200, 206, 416):
                    yield response
                    return
                challenges = parse_challenges(response.headers.getall("WWW-Authenticate", []))
                if response.status != 401 or has_logged_in or not challenges:
                    raise await _refusal(place, response)
            header = await self._tokens.renew(
                place.address, place.registry, repository, challenges, header
            )

    def _places(self, registry: str) -> list[Place]:
        addresses = [*self._settings.mirrors.get(registry, ()), registry_address(registry)]
        return [_place(address, registry) for address in addresses]


async def _retry_at(place: Place, attempt: Callable[[Place], Awaitable[T]], *, attempts: int) -> T:
    """Call `attempt` until it succeeds; raise its error after so many failures in a row."""
    failures, refusals, waited_s = 0, 0, 0.0
    while True:
        try:
            return await attempt(place)
        except FailedForNow as error:
            if isinstance(error, Busy):
                # A busy server is waited for; that alone is no failure.
                pause_s = max(error.wait_s or 0.0, _pause_s(refusals))
                refusals += 1
                if waited_s + pause_s > MAX_WAIT_S:
                    raise FailedForNow(f"{error} (waited {waited_s:.0f} s)") from None
                waited_s += pause_s
            else:
                failures = 0 if isinstance(error, Progressed) else failures + 1
                pause_s = _pause_s(failures)
                if failures >= attempts:
                    raise FailedForNow(f"{error} ({failures} attempts)") from None
            # Downloads that fail together must not come back together.
            await asyncio.sleep(pause_s * random.uniform(1.0, 1.25))


def _pause_s(times: int) -> float:
    """The pause after so many failures in a row."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(times, 10), _MAX_PAUSE_S)


class Progressed(FailedForNow):
    """An attempt ended early, but brought something that the next one need not bring again."""


def _place(address: str, registry: str) -> Place:
    url = URL(address)
    is_own = address == registry_address(registry)
    prefix = f"{url.path.strip('/')}/" if url.path.strip("/") else ""
    return Place(url.origin(), prefix, registry if is_own else url.authority)


async def _refusal(place: Place, response: aiohttp.ClientResponse) -> RequestRefused:
    """Return what a server says about a request that it refuses."""
    try:
        errors = orjson.loads(await read_body(response, _MAX_ERROR_BYTES))["errors"]
        said: Any = ", ".join(f"{one['code']}: {one['message']}" for one in errors)
    except (
        FailedForNow,
        RequestRefused,
        orjson.JSONDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ):
        said = response.reason or ""
    advice = ""
    if response.status in (401, 403):
        advice = f"; it is not there, or needs a login (docker login {place.registry})"
    text = " ".join(clip(str(said), max_chars=_MAX_ERROR_CHARS).split())
    return RequestRefused(
        response.status, f"{place.registry}: HTTP {response.status} {text}".rstrip() + advice
    )
