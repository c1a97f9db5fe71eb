"""The toolsets that can be named in a run."""

from __future__ import annotations

from collections.abc import Mapping

from batch.config import RunConfig
from toolsets.catalog import catalog
from toolsets.own import load_own
from toolsets.registry import Toolset


def catalog_of(config: RunConfig) -> Mapping[str, Toolset]:
    """The built-in toolsets and those that `config` adds; raises `ValueError` for the user."""
    return catalog(load_own(config.tools or ()))
