"""The way of requests to an endpoint, beside its URL and key: headers, proxies and replicas."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

KEY_REFRESH_S = 600.0
"""Default age, in seconds, at which a key of `key_command` is replaced."""

DIRECT = "none"
"""The value of `proxy` for a direct connection."""


HEALTH_PATH = "/health"
"""The health path of vLLM, SGLang, llama.cpp and TGI, from the root of the server."""

NO_HEALTH_PATH = "none"
"""The value of `health_path` for servers that have no such path."""


def strip_call_path(url: str) -> str:
    """Return the base URL in the URL of a call, such as `http://host/v1/chat/completions`.

    Other URLs do not change. The base URL of Anthropic's API ends before /v1.
    """
    return re.sub(r"/(?:(?:chat/)?completions|responses|(?:v1/)?messages)/?$", "", url)


class Replication(msgspec.Struct, frozen=True):
    """An endpoint of several replicas, without a router in front of them."""

    urls: tuple[str, ...]
    """The base URLs of the replicas."""
    health_path: str = HEALTH_PATH
    """The path at which each replica reports its health; "none": only calls show it."""
    max_in_flight: int | None = None
    """Maximum calls at one replica at once; None: no limit."""
    rpm: float | None = None
    """Maximum requests per minute to one replica; None: no limit."""


class Share(NamedTuple):
    """The share of one process in the limits that all processes of a run keep together."""

    processes: int = 1
    """The number of processes that share a limit."""
    conversations: int = 0
    """The number of conversations that the process holds at once; 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The way to send a configured endpoint's requests; it names secrets, but holds none."""

    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Headers with their values."""
    headers_env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Headers, each with the environment variable that holds its value."""
    query: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Query parameters of each request."""
    key_command: tuple[str, ...] = ()
    """The command line of a program that prints the key; empty: no such program."""
    key_refresh_s: float = KEY_REFRESH_S
    """Age, in seconds, at which a key of `key_command` is replaced."""
    proxy: str | None = None
    """URL of an HTTP proxy; "none": a direct connection; None: as the environment says."""
    client: str | None = None
    """The SDK client that prepares the requests: azure, bedrock, vertex, foundry, or
    MODULE:FUNCTION, which returns a client of either SDK; None: no client does."""
    client_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for the client."""
    replication: Replication | None = None
    """The replicas of the endpoint; None if it has one URL."""

    def secret_headers(self) -> dict[str, str]:
        """The headers of `headers_env`, with their values."""
        return {
            header: os.environ.get(variable, "").strip()
            for header, variable in self.headers_env.items()
        }

    @property
    def command_id(self) -> str:
        """The id of the key command in messages between parent and workers; "" without one."""
        if not self.key_command:
            return ""
        return _digest((self.key_command, self.key_refresh_s))

    @property
    def account(self) -> str:
        """A suffix that distinguishes endpoints of one URL with different credentials.

        "" if the variable of the key distinguishes them.
        """
        credentials = (self.headers_env, self.key_command, self.client, self.client_options)
        return f" {_digest(credentials)}" if any(credentials) else ""


def _digest(value: object) -> str:
    import json

    text = json.dumps(value, sort_keys=True).encode()
    return blake2b(text, digest_size=6).hexdigest()


DIRECT_CONNECTION = Connection()
"""The default: nothing configured."""


class UnusableProxy(ValueError):
    """A proxy cannot be used; the message names the setting that gives it, and the remedy."""


class EndpointProxy(NamedTuple):
    """The HTTP proxy between this program and an endpoint."""

    url: str
    description: str
    """The name of the proxy in messages: without password, with the variable that sets it."""
    alternative: str
    """The remedy besides correcting the proxy, for messages; it follows "Correct it, "."""


def find_proxy(base_url: str, configured: str | None = None) -> EndpointProxy | None:
    """The proxy for an endpoint: the `configured` one, else that of the usual variables.

    None: a direct connection. Raises `UnusableProxy`.
    """
    url = urlsplit(base_url)
    if configured is not None:
        if configured == DIRECT:
            return None
        return _check_proxy(configured, "proxy", "or leave it out", base_url)
    import urllib.request  # --help does without it

    if not url.hostname or urllib.request.proxy_bypass(f"{url.hostname}:{url.port}"):
        return None
    proxies = urllib.request.getproxies()
    scheme = url.scheme if url.scheme in proxies else "all"
    if not (proxy := proxies.get(scheme)):
        return None
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "the system's settings")
    alternative = f"unset {variable}, or add {url.hostname} to NO_PROXY"
    return _check_proxy(proxy, variable, alternative, base_url)


_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")


def _is_address(proxy: SplitResult) -> bool:
    """Whether the proxy's host and port are well-formed."""
    try:
        port = proxy.port
        host = (proxy.hostname or "").encode("idna").decode()
    except ValueError:  # a port beyond 65535; a label that is empty or too long
        return False
    return port != 0 and (":" in host or _HOST.fullmatch(host) is not None)


def _check_proxy(text: str, source: str, alternative: str, base_url: str) -> EndpointProxy:
    """Parse the URL of a proxy, which `source` names. Raises `UnusableProxy`."""
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    address = proxy.netloc.rpartition("@")[2]  # without name and password
    message = f"the proxy {proxy.scheme}://{address} ({source})"
    if not _is_address(proxy):
        raise UnusableProxy(
            f"{message} cannot be used for {base_url}: {address!r} is not "
            f"the name of a host with a port. Correct it, {alternative}"
        )
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        raise UnusableProxy(
            f"{message} cannot be used for {base_url}: it must be an HTTP proxy (http:// or "
            f"https://), and SOCKS is not supported. Name another one, {alternative}"
        )
    return EndpointProxy(proxy.geturl(), description=message, alternative=alternative)
