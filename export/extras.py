"""Packages that only some exports need."""

from __future__ import annotations

from runs.errors import ConfigError
from toolsets.extras import install


def missing(what: str, extra: str) -> ConfigError:
    """The error for a choice whose packages are not installed."""
    return ConfigError(f"{what} needs more packages: {install(extra)}")
