"""Tells whether this user has written the recipe in the manifest of a dataset.

A recipe can name functions to call, and files and tokenizers to open. Some commands take the recipe
from the manifest, which may have come with somebody else's files. So a manifest whose recipe has
such parts also has a MAC of the recipe, by the same key as run.json; see `engine.origin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batch_trajectories.engine.origin import compute_mac, is_own

RECIPE_MAC = "recipe_mac"
"""The key in a manifest of the MAC of its recipe."""

ACTIVE_KEYS = (
    ("filters", "answer", "function"),
    ("filters", "evaluation_files"),
    ("filters", "tokenizer"),
    ("fit", "template"),
    ("mask", "function"),
)
"""Paths of the keys of a recipe that name a function, a file or a directory."""


def active_parts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a recipe that name functions, files or directories, by dotted keys."""
    parts = {}
    for keys in ACTIVE_KEYS:
        value: Any = recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value:
            parts[".".join(keys)] = value
    return parts


def recipe_mac(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The entry of a manifest that proves who wrote its recipe; {} without active parts."""
    mac = compute_mac(_content(recipe)) if active_parts(recipe) else None
    return {} if mac is None else {RECIPE_MAC: mac}


def untrusted_parts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The active parts of a manifest's recipe if this user has not written it; else {}."""
    recipe = manifest.get("recipe")
    parts = active_parts(recipe) if isinstance(recipe, Mapping) else {}
    if parts and not is_own(_content(recipe), manifest.get(RECIPE_MAC)):
        return parts
    return {}


def _content(recipe: Any) -> bytes:
    return b"recipe " + orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
