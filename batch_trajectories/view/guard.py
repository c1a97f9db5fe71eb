"""Who may call the server: a token or password, the names of this machine, no other site's page.

The server listens on loopback, where pages of any site can send requests: by its address, by a name
that an attacker's DNS server changes to it (refused by the Host header), and from other ports of
the same host, for which browsers send cookies even with SameSite=Strict (refused by Sec-Fetch-Site
and Origin).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from aiohttp import web

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of all answers."""

_OWN_SITE = ("same-origin", "none")
"""`none`: the user typed the address or followed a bookmark."""


class AccessRefused(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class AccessGuard:
    """The token, host and origin that requests of one server must have."""

    def __init__(self, host: str, password: str | None) -> None:
        """`host` is the address that the server listens on."""
        self.token = secrets.token_urlsafe(24)
        """The secret in the printed address; it gives the same access as the cookie."""
        self._session = secrets.token_urlsafe(24)
        self._password = password
        self._is_loopback = is_loopback(host)
        self._names = {"localhost", host.lower()}
        if not self._is_loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def has_password(self) -> bool:
        """Whether the page asks for a password."""
        return self._password is not None

    def check_origin(self, request: web.Request) -> None:
        """Raise `AccessRefused` for another name of this machine, and pages of other sites."""
        if not self._knows(request.headers.get("Host", "")):
            raise AccessRefused(
                403, "this server does not answer to this name; open the address that it printed"
            )
        if request.path != "/" and request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE:
            raise AccessRefused(403, "a page of another site may not ask this server")
        origin = request.headers.get("Origin")
        if origin is not None and _host_and_port(origin) != request.headers.get("Host"):
            raise AccessRefused(403, "a page of another origin may not ask this server")
        is_json = request.content_type == "application/json"
        if request.method not in ("GET", "HEAD") and not is_json:
            raise AccessRefused(415, "send JSON, with Content-Type: application/json")

    def check_access(self, request: web.Request) -> None:
        """Raise `AccessRefused` unless the request has the cookie or the token."""
        cookie = request.cookies.get(self._read_cookie(request), "")
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        is_token = kind.lower() == "bearer" and not self.has_password and _same(given, self.token)
        if not (_same(cookie, self._session) or is_token):
            raise AccessRefused(
                401,
                "give the password"
                if self.has_password
                else "open the address with the token that this start of `view` printed",
            )

    def is_token(self, given: str) -> bool:
        """Whether this is the token of the printed address."""
        return not self.has_password and _same(given, self.token)

    def is_password(self, given: str) -> bool:
        """Whether this is the password."""
        return self._password is not None and _same(given, self._password)

    def give_access(self, request: web.Request, response: web.Response) -> None:
        """Set the cookie."""
        response.set_cookie(
            self._read_cookie(request), self._session, httponly=True, samesite="Strict", path="/"
        )

    def _read_cookie(self, request: web.Request) -> str:
        # Cookies know no ports, and several servers can run on one machine.
        port = urlsplit(f"//{request.headers.get('Host', '')}").port
        return f"batch_view_{port or 80}"

    def _knows(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if parts.netloc != host or parts.username is not None:
            return False
        # Any port, as it may be forwarded by ssh; a name that rebinds is never an address.
        return name in self._names or (
            _is_address(name) and (is_loopback(name) or not self._is_loopback)
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name is of this machine alone."""
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _host_and_port(origin: str) -> str | None:
    """Host and port of an origin; None if it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
