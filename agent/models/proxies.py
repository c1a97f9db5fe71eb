"""The proxy that the environment names for an endpoint."""

from __future__ import annotations

import os
import urllib.request
from typing import NamedTuple
from urllib.parse import urlsplit


class UnusableProxy(ValueError):
    """The environment names a proxy that cannot be spoken to; the message says what to do."""


class EndpointProxy(NamedTuple):
    """An HTTP proxy."""

    url: str
    words: str
    """How messages name it: without its password, and with the variable that names it."""


def proxy_for(base_url: str) -> EndpointProxy | None:
    """The proxy for an endpoint, by the usual variables; raises `UnusableProxy`."""
    to = urlsplit(base_url)
    if not to.hostname or urllib.request.proxy_bypass(f"{to.hostname}:{to.port}"):
        return None
    proxies = urllib.request.getproxies()
    kind = to.scheme if to.scheme in proxies else "all"
    if not (given := proxies.get(kind)):
        return None
    proxy = urlsplit(given if "://" in given else f"http://{given}")
    place = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
    names = (f"{kind}_proxy", f"{kind.upper()}_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "the system's settings")
    words = f"the proxy {place} ({variable})"
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        msg = (
            f"{words} cannot be used for {base_url}: it must be an HTTP proxy (http:// or "
            f"https://), and SOCKS is not spoken. Name another one, unset {variable}, or add "
            f"{to.hostname} to NO_PROXY"
        )
        raise UnusableProxy(msg)
    return EndpointProxy(proxy.geturl(), words)
