"""Decides which URLs the web tools accept, and to which addresses they may connect.

A page or a model can name any URL, and any name can resolve to any address. So the address itself
is checked when a socket connects to it; see `toolsets.web.http`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from yarl import URL

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip

_MAX_URL_CHARS = 8192

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in ("168.63.129.16/32", "192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10")
)
"""Services of clouds and private networks that not every Python version classifies as such."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Guard:
    """Permits public addresses, and others that the user allows."""

    def __init__(self, allow: Iterable[str]) -> None:
        """`allow` holds HOST, HOST:PORT or NETWORK/BITS; IPv6 with a port is `[ADDRESS]:PORT`.

        Raises `ValueError` for an invalid entry.
        """
        self._hosts: set[tuple[str, int | None]] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allow:
            if "/" in entry:
                self._networks.append(_parse_network(entry))
            else:
                self._hosts.add(_parse_host(entry))

    def permits(self, host: str, port: int, address: str) -> bool:
        """Whether a socket may connect to `address` for a URL with this `host` and `port`."""
        name = _canonical_host(host)
        if (name, None) in self._hosts or (name, port) in self._hosts:
            return True
        ip = ipaddress.ip_address(address.partition("%")[0])
        return any(ip in network for network in self._networks) or _is_public(ip)


def _is_public(ip: IPAddress) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and (inner := _ipv4_inside(ip)) is not None:
        return _is_public(inner)
    is_special = ip.is_multicast or ip.is_reserved or any(ip in network for network in _SPECIAL)
    return ip.is_global and not is_special


def _ipv4_inside(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that `ip` contains; None if it contains none."""
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


def _parse_network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise ValueError(f"web_allow: {entry!r} is not a network: {error}") from None


def _parse_host(entry: str) -> tuple[str, int | None]:
    host, port = entry, ""
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
        is_valid = bool(bracket) and (not rest or (rest.startswith(":") and bool(port)))
    else:
        if entry.count(":") == 1:
            host, _, port = entry.partition(":")
        is_valid = entry.count(":") != 1 or bool(port)
    is_valid &= bool(host) and not set(host) & set(" @/[]\\") and host.isprintable()
    is_valid &= not port or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    if not is_valid:
        raise ValueError(f"web_allow: {entry!r} must be HOST, HOST:PORT or NETWORK/BITS")
    return _canonical_host(host), int(port) if port else None


def _canonical_host(host: str) -> str:
    """Return a host in its canonical form: lower case, no dot at the end, short IPv6."""
    host = host.lower().rstrip(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def check_url(url: str) -> URL:
    """Return `url` in canonical form, without its fragment. Raises `ToolError` if it is refused."""
    shown = clip(url, max_chars=200)
    try:
        parsed = URL(url.strip())
        host, port = parsed.host, parsed.port
    except ValueError as error:
        raise ToolError(f"not a URL: {shown!r} ({error})") from None
    if parsed.scheme not in ("http", "https"):
        raise ToolError(f"only http and https URLs can be fetched, not {shown!r}")
    if not host or not port:
        raise ToolError(f"the URL has no host: {shown!r}")
    if parsed.user is not None or parsed.password is not None:
        raise ToolError("URLs with a user name or password are not fetched")
    if len(url) > _MAX_URL_CHARS:
        raise ToolError(f"the URL is longer than {_MAX_URL_CHARS} characters")
    return parsed.with_fragment(None)
