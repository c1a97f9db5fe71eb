"""Whether this user has written the recipe in the manifest of a dataset.

A recipe can name functions to call, and files and tokenizers to open. The recipe in a manifest that
came with somebody else's files is used by commands that the user gives no recipe. So a manifest
whose recipe has such parts also has a MAC of the recipe, by the same key as run.json; see
`engine.origin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batch_trajectories.engine.origin import is_own, mac_of

RECIPE_MAC = "recipe_mac"
"""The key of a manifest with the MAC of its recipe."""

ACTIVE_KEYS = (
    ("filters", "answer", "function"),
    ("filters", "evaluation_files"),
    ("filters", "tokenizer"),
    ("fit", "template"),
    ("mask", "function"),
)
"""Keys of the parts of a recipe that name a function, a file or a directory."""


def active_parts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a recipe that have code called or files opened, by dotted keys."""
    parts = {}
    for keys in ACTIVE_KEYS:
        value: Any = recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value:
            parts[".".join(keys)] = value
    return parts


def recipe_mac(recipe: Mapping[str, Any]) -> dict[str, str]:
    """What a manifest says of who wrote its recipe: nothing if the recipe has no active parts."""
    mac = mac_of(_content(recipe)) if active_parts(recipe) else None
    return {} if mac is None else {RECIPE_MAC: mac}


def strange_parts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The active parts of a manifest's recipe if this user has not written it; else none."""
    recipe = manifest.get("recipe")
    parts = active_parts(recipe) if isinstance(recipe, Mapping) else {}
    if parts and not is_own(_content(recipe), manifest.get(RECIPE_MAC)):
        return parts
    return {}


def _content(recipe: Any) -> bytes:
    return b"recipe " + orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
