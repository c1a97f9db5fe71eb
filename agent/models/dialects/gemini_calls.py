"""Joins the parts of calls whose arguments Vertex AI streams.

With `streamFunctionCallArguments` a call begins with its name and `willContinue`. Each further part
has `partialArgs`, values with their JSON paths, and the last part has no `willContinue`.

Source: the types FunctionCall and PartialArg of Vertex AI's API, v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from agent.models.errors import ModelError

_STEP = re.compile(
    r"""\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\["(?P<double>(?:[^"\\]|\\.)*)"\]"""
    r"""|\['(?P<single>(?:[^'\\]|\\.)*)'\]"""
)
"""One step of a path: `.name`, `[0]`, `["name"]` or `['name']` (RFC 9535)."""

_VALUES = ("stringValue", "numberValue", "boolValue", "nullValue")

_MAX_DEPTH = 100


def join_calls(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of a content that belong to one call; other parts stay as they are.

    A call that does not end keeps `willContinue`. Raises `ModelError("malformed")`.
    """
    joined: list[dict[str, Any]] = []
    open_part: dict[str, Any] | None = None
    for part in parts:
        piece = part.get("functionCall")
        if not isinstance(piece, dict):
            joined.append(dict(part))
            continue
        if open_part is not None and not piece.get("name"):
            open_part |= {key: value for key, value in part.items() if key != "functionCall"}
        elif piece.get("willContinue") or "partialArgs" in piece:
            named = {key: piece[key] for key in ("id", "name") if piece.get(key)}
            open_part = {**part, "functionCall": named}
            joined.append(open_part)
        else:
            open_part = None
            joined.append(dict(part))
            continue
        _extend(open_part["functionCall"], piece)
        if not piece.get("willContinue"):
            open_part = None
    return joined


def is_open(part: Mapping[str, Any]) -> bool:
    """Whether a joined part is a call whose end is missing."""
    call = part.get("functionCall")
    return isinstance(call, dict) and bool(call.get("willContinue"))


def _extend(call: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add the arguments of a further part to a call."""
    arguments = call.setdefault("args", {})
    if isinstance(whole := piece.get("args"), dict):
        arguments.update(whole)
    partial = piece.get("partialArgs") or []
    if not isinstance(partial, list) or not all(isinstance(one, dict) for one in partial):
        raise ModelError("malformed", "`partialArgs` of a call is not a list of objects")
    for one in partial:
        _set_value(arguments, _read_path(one.get("jsonPath")), one)
    call.pop("willContinue", None)
    if piece.get("willContinue"):
        call["willContinue"] = True


def _read_path(path: Any) -> list[str | int]:
    steps: list[str | int] = []
    at = 1
    while isinstance(path, str) and path.startswith("$") and (step := _STEP.match(path, at)):
        if step["index"] is not None:
            steps.append(int(step["index"]))
        else:
            name = next(text for text in (step["name"], step["double"], step["single"]) if text)
            steps.append(name if step["name"] else re.sub(r"\\(.)", r"\1", name))
        at = step.end()
    if not steps or at != len(path) or isinstance(steps[0], int) or len(steps) > _MAX_DEPTH:
        raise ModelError("malformed", f"{path!r}, of a streamed argument, is no path to a value")
    return steps


def _set_value(arguments: dict[str, Any], path: list[str | int], given: Mapping[str, Any]) -> None:
    """Set the value at a path, or append to the text there."""
    place: Any = arguments
    for step, following in pairwise(path):
        place = _enter(place, step, [] if isinstance(following, int) else {}, path)
    last = path[-1]
    kind = next((kind for kind in _VALUES if kind in given), None)
    if kind in (None, "stringValue"):
        before = _enter(place, last, "", path)
        if not isinstance(before, str):
            raise _contradiction(path)
        place[last] = before + str(given.get("stringValue", ""))
        return
    _enter(place, last, None, path)
    place[last] = None if kind == "nullValue" else given[str(kind)]


def _enter(place: Any, step: str | int, empty: Any, path: list[str | int]) -> Any:
    """Return the value at one step, `empty` if there was none yet."""
    if isinstance(step, str) and isinstance(place, dict):
        return place.setdefault(step, empty)
    if isinstance(step, int) and isinstance(place, list) and step <= len(place):
        if step == len(place):
            place.append(empty)
        return place[step]
    raise _contradiction(path)


def _contradiction(path: list[str | int]) -> ModelError:
    return ModelError("malformed", f"the streamed arguments contradict each other at {path}")
