"""Answers registries that ask who calls (`WWW-Authenticate`).

A registry names an address that gives short-lived tokens. Tokens and passwords are sent only there
and to the registry itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from yarl import URL

from toolsets.images.registry.credentials import Credentials, find_credentials
from toolsets.images.registry.transport import RegistryTransport, RequestRefused, read_body

_MAX_ANSWER_BYTES = 1 << 20
_DEFAULT_LIFE_S = 60.0
_MARGIN_S = 10.0
_CLIENT = "batch-trajectories"

_SCHEME = re.compile(r"\s*(?:,\s*)?([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(r'\s*(?:,\s*)?([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


class Challenge(NamedTuple):
    """One way by which a server lets itself be asked."""

    scheme: str
    """The name of the scheme in lower case, such as `bearer`."""
    parameters: dict[str, str]


def parse_challenges(headers: list[str]) -> list[Challenge]:
    """Read the values of `WWW-Authenticate`; whatever cannot be read ends a value."""
    found = []
    for text in headers:
        position = 0
        while match := _SCHEME.match(text, position):
            challenge = Challenge(match[1].lower(), {})
            position = match.end()
            while parameter := _PARAMETER.match(text, position):
                value = parameter[3] if parameter[2] is None else parameter[2]
                challenge.parameters[parameter[1].lower()] = re.sub(r"\\(.)", r"\1", value)
                position = parameter.end()
            found.append(challenge)
    return found


class _Known(NamedTuple):
    header: str
    expires_at: float


class RegistryTokens:
    """The headers by which repositories can be read, as long as they are valid."""

    def __init__(self, transport: RegistryTransport) -> None:
        self._transport = transport
        self._known: dict[tuple[URL, str], _Known] = {}
        self._asking: dict[tuple[URL, str], asyncio.Lock] = {}

    def header(self, origin: URL, repository: str) -> str | None:
        """Return the header for a repository; None if none is known or needed."""
        known = self._known.get((origin, repository))
        return None if known is None or known.expires_at < time.monotonic() else known.header

    async def renew(
        self,
        origin: URL,
        registry: str,
        repository: str,
        challenges: list[Challenge],
        used: str | None,
    ) -> str:
        """Get the header that a server asks for; `used` is the one that it refused.

        Requests for the same repository share one. Raises `RequestRefused`.
        """
        key = (origin, repository)
        async with self._asking.setdefault(key, asyncio.Lock()):
            known = self.header(origin, repository)
            if known is not None and known != used:
                return known
            credentials = await asyncio.to_thread(find_credentials, registry)
            for challenge in challenges:
                if challenge.scheme == "bearer" and "realm" in challenge.parameters:
                    made = await self._ask(
                        origin, registry, repository, challenge.parameters, credentials
                    )
                    break
                if challenge.scheme == "basic" and credentials is not None:
                    made = _Known(credentials.basic, float("inf"))
                    break
            else:
                raise RequestRefused(401, f"needs a login (docker login {registry})")
            self._known[key] = made
            return made.header

    async def _ask(
        self,
        origin: URL,
        registry: str,
        repository: str,
        asked: Mapping[str, str],
        credentials: Credentials | None,
    ) -> _Known:
        scope = asked.get("scope") or f"repository:{repository}:pull"
        fields = {"scope": scope}
        if service := asked.get("service"):
            fields["service"] = service
        try:
            realm = URL(asked["realm"])
            realm.origin()  # fails without a host
            asking = realm.update_query(fields)
        except ValueError:
            raise RequestRefused(
                401, f"{registry}: it names no valid address that gives tokens"
            ) from None
        if realm.user or realm.password:
            raise RequestRefused(
                401, f"{registry}: the address that gives its tokens has a user or a password"
            )
        if realm.scheme not in ("http", "https") or (
            origin.scheme == "https" and realm.scheme != "https"
        ):
            raise RequestRefused(401, f"wants tokens from {realm.origin()}, which is not encrypted")
        if credentials is not None and credentials.identity_token is not None:
            fields |= {
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity_token,
                "client_id": _CLIENT,
            }
            sent = self._transport.request("POST", realm, {}, data=fields)
        else:
            headers = {} if credentials is None else {"Authorization": credentials.basic}
            sent = self._transport.request("GET", asking, headers)
        async with sent as response:
            if response.status != 200:
                login = "the login is refused" if credentials else "it needs a login"
                raise RequestRefused(
                    response.status,
                    f"{registry}: {realm.host} gives no token (HTTP {response.status}): {login} "
                    f"(docker login {registry})",
                )
            return _read_token(await read_body(response, _MAX_ANSWER_BYTES))


def _read_token(body: bytes) -> _Known:
    try:
        answer: dict[str, Any] = orjson.loads(body)
        token = answer.get("token") or answer.get("access_token")
        life = float(answer.get("expires_in") or _DEFAULT_LIFE_S)
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        raise RequestRefused(401, "an answer with a token cannot be read") from None
    if not isinstance(token, str) or not token or not token.isprintable():
        raise RequestRefused(401, "an answer with a token has none")
    return _Known(f"Bearer {token}", time.monotonic() + max(life - _MARGIN_S, life / 2))
