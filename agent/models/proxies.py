"""The proxy of an endpoint: its own, or the one that the environment names."""

from __future__ import annotations

import os
import re
import urllib.request
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from agent.models.connection import DIRECT


class UnusableProxy(ValueError):
    """A proxy that cannot be used; the message says who names it and what to do."""


class EndpointProxy(NamedTuple):
    """An HTTP proxy."""

    url: str
    words: str
    """How messages name it: without its password, and with the variable that names it."""
    instead: str
    """What to do where it cannot be used, after "Correct it, "."""


def proxy_for(base_url: str, own: str | None = None) -> EndpointProxy | None:
    """The proxy for an endpoint: `own` where the config gives one, else by the usual variables.

    Raises `UnusableProxy`.
    """
    to = urlsplit(base_url)
    if own is not None:
        return None if own == DIRECT else _usable(own, "proxy", "or leave it out", base_url)
    if not to.hostname or urllib.request.proxy_bypass(f"{to.hostname}:{to.port}"):
        return None
    proxies = urllib.request.getproxies()
    kind = to.scheme if to.scheme in proxies else "all"
    if not (given := proxies.get(kind)):
        return None
    names = (f"{kind}_proxy", f"{kind.upper()}_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "the system's settings")
    instead = f"unset {variable}, or add {to.hostname} to NO_PROXY"
    return _usable(given, variable, instead, base_url)


_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")


def _is_address(proxy: SplitResult) -> bool:
    """Whether there can be such a host and port at all."""
    try:
        port = proxy.port
        host = (proxy.hostname or "").encode("idna").decode()
    except ValueError:  # a port beyond 65535; a label that is empty or too long
        return False
    return port != 0 and (":" in host or _HOST.fullmatch(host) is not None)


def _usable(given: str, source: str, instead: str, base_url: str) -> EndpointProxy:
    proxy = urlsplit(given if "://" in given else f"http://{given}")
    place = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
    words = f"the proxy {place} ({source})"
    if not _is_address(proxy):
        raise UnusableProxy(
            f"{words} cannot be used for {base_url}: {proxy.netloc.rpartition('@')[2]!r} is not "
            f"the name of a host with a port. Correct it, {instead}"
        )
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        raise UnusableProxy(
            f"{words} cannot be used for {base_url}: it must be an HTTP proxy (http:// or "
            f"https://), and SOCKS is not supported. Name another one, {instead}"
        )
    return EndpointProxy(proxy.geturl(), words, instead)
