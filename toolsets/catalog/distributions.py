"""Distributions: how often each toolset is offered. Every task draws its own toolsets.

A distribution maps toolsets to percentages, each drawn independently: {"file": 100, "terminal": 60}
offers `file` always and `terminal` in 60 of 100 tasks. If none is drawn, the likeliest is offered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from toolsets.catalog.registry import TOOLSETS, Toolset, UnknownToolset

Distribution = Mapping[str, float]
"""Percentages in (0, 100] by toolset."""

DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        "all": {"file": 100, "python": 100, "terminal": 100},
        "even": {"file": 50, "python": 50, "terminal": 50},
        "coding": {"file": 100, "terminal": 80, "python": 50},
        "shell": {"terminal": 100, "file": 40, "python": 20},
        "files": {"file": 100, "terminal": 10},
        # The distributions of hermes-agent, reduced to the toolsets that exist here.
        "balanced": {"file": 50, "terminal": 50, "web": 50},
        "development": {"file": 80, "terminal": 80, "web": 30},
        "minimal": {"web": 100},
        "research": {"terminal": 10, "web": 90},
        "science": {"file": 94, "terminal": 94, "web": 94},
        "terminal_only": {"file": 100, "terminal": 100},
        "terminal_tasks": {"file": 97, "terminal": 97, "web": 97},
        "terminal_web": {"file": 100, "terminal": 100, "web": 100},
    }
)
"""The built-in distributions by name."""


class UnknownDistribution(ValueError):
    """The name of a distribution is neither known nor a readable file."""


def load_distribution(name: str, *, known: Mapping[str, Toolset] = TOOLSETS) -> Distribution:
    """Return the distribution with this name, or in the YAML file at this path.

    Raises `UnknownDistribution`, `UnknownToolset`, and `ValueError` for an invalid percentage.
    """
    if name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]
    if not name.endswith((".yaml", ".yml")):
        names = ", ".join(sorted(DISTRIBUTIONS))
        raise UnknownDistribution(
            f"Unknown distribution {name!r}; known: {names}, or the path of a YAML file"
        )
    from batch_trajectories.basics.yaml_file import YamlFileError, read_yaml  # only for a file

    try:
        loaded = read_yaml(Path(name), "distribution")
    except YamlFileError as error:
        raise UnknownDistribution(str(error)) from error
    return _check(loaded, name, known)


def draw_toolsets(distribution: Distribution, key: str) -> list[str]:
    """Return the toolsets for the task with this key, sorted; always the same for a key."""
    drawn = [name for name, percent in distribution.items() if _draw(f"{key}/{name}") < percent]
    return sorted(drawn) or [max(sorted(distribution), key=lambda name: distribution[name])]


def _check(loaded: Any, name: str, known: Mapping[str, Toolset]) -> Distribution:
    if not isinstance(loaded, dict) or not loaded:
        raise UnknownDistribution(f"{name}: a distribution maps toolsets to percentages")
    for toolset, percent in loaded.items():
        if toolset not in known:
            names = ", ".join(sorted(known))
            raise UnknownToolset(f"{name}: unknown toolset {toolset!r}; known: {names}")
        is_number = isinstance(percent, int | float) and not isinstance(percent, bool)
        if not is_number or not 0 < percent <= 100:
            raise ValueError(f"{name}: {toolset}: {percent!r} is not a percentage in (0, 100]")
    return loaded


def _draw(key: str) -> float:
    """Return a number in [0, 100) that depends on `key` alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 * 100
