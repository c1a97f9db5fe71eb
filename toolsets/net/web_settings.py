"""Settings of the web tools: the search provider, permitted addresses, and the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from toolsets.net.guard import Guard

KEY_VARIABLES: Mapping[str, str | None] = MappingProxyType(
    {"brave": "BRAVE_API_KEY", "ddgs": None, "tavily": "TAVILY_API_KEY"}
)
"""The environment variable of the key for each search provider; None if it needs none."""


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Settings of the web tools, without secrets: keys are read from the environment.

    Raises `ValueError` for invalid settings.
    """

    cache_dir: Path | None = None
    """The directory of cached pages and search results; None: no cache."""
    provider: str = "ddgs"
    """The search provider; one of `KEY_VARIABLES`."""
    search_url: str | None = None
    """An address of the provider other than its usual one; not for ddgs."""
    allow: tuple[str, ...] = ()
    """Addresses that are allowed besides public ones: HOST, HOST:PORT or NETWORK/BITS."""
    timeout_s: float = 30.0
    """Time limit in seconds of a download with all its redirects, and of a search."""
    max_bytes: int = 5 * 1024 * 1024
    """Maximum size of a body after decompression."""
    cache_bytes: int = 1024**3
    """Maximum size of the cache; the oldest entries are removed first."""

    def __post_init__(self) -> None:
        if self.provider not in KEY_VARIABLES:
            known = ", ".join(sorted(KEY_VARIABLES))
            raise ValueError(f"unknown search provider {self.provider!r}; known: {known}")
        if self.search_url is not None:
            parts = urlsplit(self.search_url)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise ValueError(
                    f"search_url {self.search_url!r} must be an http or https URL without password"
                )
            if self.provider == "ddgs":
                raise ValueError("search_url cannot be used with provider ddgs")
        Guard(self.allow)

    def problem(self) -> str | None:
        """Return why searches cannot work with these settings, and what to do; None if they can."""
        variable = KEY_VARIABLES[self.provider]
        if variable is None or os.environ.get(variable):
            return None
        return f"search provider {self.provider} needs its key in the variable {variable}; set it"
