"""The fields of a reply that are not read: kept as they came, whole or in parts.

Parts are merged by one rule. Objects are merged field by field. Lists of tokens (`token_ids`, and
all in `logprobs`) are joined; of other lists, one that begins with what is there takes its place,
and any other is added to it. Texts that are known to come in pieces are joined. Of anything else
the last that says something counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

_TOKENS = frozenset({"logprobs", "token_ids", "completion_token_ids", "output_token_ids"})
"""Where each part of a stream brings the tokens of that part."""

_PIECES = frozenset({("audio", "data"), ("audio", "transcript"), ("function_call", "arguments")})
"""Texts that come in pieces, by the object that they belong to."""


def unknown_in(fields: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """The fields that are not `known`, except null and empty ones."""
    if fields.keys() <= known:
        return {}
    return {key: value for key, value in fields.items() if key not in known and _is_set(value)}


def uncounted_in(usage: Any, known: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Counts of usage beyond the `known` ones, except zeros.

    `known` has the names of counts, and for one that is an object those of its own.
    """
    if not isinstance(usage, dict):
        return {}
    uncounted: dict[str, Any] = {}
    for key, value in usage.items():
        if isinstance(value, dict):
            value = uncounted_in(value, dict.fromkeys(known.get(key, ()), ()))
        elif key in known:
            continue
        if value:
            uncounted[key] = value
    return uncounted


def extra_of(**parts: Any) -> dict[str, Any] | None:
    """The parts that are not empty, None if all are; see `Completion.extra`."""
    return {name: part for name, part in parts.items() if part} or None


def merge(kept: dict[str, Any], given: Mapping[str, Any], place: str = "") -> None:
    """Add a part to what came before, by the rule above. `place` is the object that both are."""
    for key, value in given.items():
        before = kept.get(key)
        # All within an object of tokens belongs to them.
        inside = place if place in _TOKENS else key
        if isinstance(value, dict):
            kept[key] = before if isinstance(before, dict) else {}
            merge(kept[key], value, inside)
        elif isinstance(value, list):
            _merge_list(kept, key, value, are_tokens=inside in _TOKENS)
        elif isinstance(before, str) and isinstance(value, str) and (place, key) in _PIECES:
            kept[key] = before + value
        elif _is_set(value) or key not in kept:
            kept[key] = value


def _merge_list(kept: dict[str, Any], key: str, value: list[Any], *, are_tokens: bool) -> None:
    before = kept.get(key)
    if not isinstance(before, list) or (not are_tokens and value[: len(before)] == before):
        if value or not isinstance(before, list):
            kept[key] = list(value)
    else:
        before.extend(value)


def _is_set(value: Any) -> bool:
    return bool(value) or isinstance(value, bool | int | float)
