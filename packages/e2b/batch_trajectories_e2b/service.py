"""Where the service is and how to reach it, from the variables that E2B's own clients read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

ENVD_PORT = 49983
"""The port on which a machine's own server listens."""
DEFAULT_TEMPLATE = "base"
_DEFAULT_DOMAIN = "e2b.app"
_DEFAULT_USER = "user"
_DEFAULT_LIFETIME_S = 300
_LEAST_LIFETIME_S = 6


class SettingsError(ValueError):
    """A variable of the environment is missing or wrong; the message says what to set."""


@dataclass(frozen=True, slots=True)
class Service:
    """The service, its key, and how machines are made there."""

    api_url: str
    """The URL of the API that makes and kills machines, without a slash at its end."""
    api_key: str = field(repr=False)
    domain: str = _DEFAULT_DOMAIN
    """The domain under which machines are reached, unless the service names another one."""
    sandbox_url: str | None = None
    """The URL under which all machines are reached; None: each has a host name of its own."""
    user: str = _DEFAULT_USER
    """The user of the machine that commands run as."""
    lifetime_s: int = _DEFAULT_LIFETIME_S
    """Seconds after which the service ends a machine that nobody has asked to keep."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Service:
        """Return the service that the environment names. Raises `SettingsError`."""
        key = environment.get("E2B_API_KEY", "").strip()
        if not key:
            raise SettingsError("set E2B_API_KEY to the key of E2B or of your own server")
        domain = environment.get("E2B_DOMAIN") or _DEFAULT_DOMAIN
        return cls(
            api_url=_url(environment, "E2B_API_URL") or f"https://api.{domain}",
            api_key=key,
            domain=domain,
            sandbox_url=_url(environment, "E2B_SANDBOX_URL"),
            user=environment.get("E2B_USER") or _DEFAULT_USER,
            lifetime_s=_lifetime(environment),
        )

    def machine_url(self, machine_id: str, domain: str | None) -> str:
        """Return the URL of a machine's own server; `domain` is what the service said of it."""
        return self.sandbox_url or f"https://{ENVD_PORT}-{machine_id}.{domain or self.domain}"

    def without_secrets(self, text: str) -> str:
        """Return the text with the key replaced, for messages that repeat what a server said."""
        return text.replace(self.api_key, "[E2B_API_KEY]")

    def to_json(self) -> dict[str, Any]:
        """Return all fields, also the key."""
        return asdict(self)


def _url(environment: Mapping[str, str], name: str) -> str | None:
    if not (value := environment.get(name, "").strip()):
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"{name} is {value!r}; set it to a URL with http:// or https://")
    return value.rstrip("/")


def _lifetime(environment: Mapping[str, str]) -> int:
    name = "E2B_LIFETIME_S"
    if not (value := environment.get(name, "").strip()):
        return _DEFAULT_LIFETIME_S
    if not value.isdecimal() or int(value) < _LEAST_LIFETIME_S:
        raise SettingsError(
            f"{name} is {value!r}; set it to a number of seconds from {_LEAST_LIFETIME_S}"
        )
    return int(value)
