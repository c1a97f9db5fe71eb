"""How requests reach an endpoint, beyond its URL and its key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

KEY_REFRESH_S = 600.0

DIRECT = "none"
"""What `proxy` says of an endpoint to which no proxy leads."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What an endpoint of a config says of its requests. Names secrets, and holds none."""

    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    headers_env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Headers, each with the environment variable that holds its value."""
    query: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Added to the URL of each request."""
    key_command: tuple[str, ...] = ()
    """A program that prints the key."""
    key_refresh_s: float = KEY_REFRESH_S
    """Age at which a key of `key_command` is replaced."""
    proxy: str | None = None
    """URL of an HTTP proxy in place of the environment's; "none" for a direct connection."""
    client: str | None = None
    """Whose client of an SDK prepares the requests: azure, bedrock, vertex, foundry, or
    MODULE:FUNCTION, which returns a client of either SDK."""
    client_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for that client."""

    def secret_headers(self) -> dict[str, str]:
        """The headers of `headers_env`, with their values."""
        return {
            header: os.environ.get(variable, "").strip()
            for header, variable in self.headers_env.items()
        }

    @property
    def command_id(self) -> str:
        """Names the key command between parent and workers; "" where there is none."""
        if not self.key_command:
            return ""
        return _digest((self.key_command, self.key_refresh_s))

    @property
    def account(self) -> str:
        """Distinguishes endpoints of one URL with different credentials; "" where the key's
        variable does that."""
        said = (self.headers_env, self.key_command, self.client, self.client_options)
        return f" {_digest(said)}" if any(said) else ""


def _digest(said: object) -> str:
    import json

    text = json.dumps(said, sort_keys=True).encode()
    return blake2b(text, digest_size=6).hexdigest()


DIRECT_CONNECTION = Connection()
"""That of an endpoint of which a config says nothing of the kind."""
