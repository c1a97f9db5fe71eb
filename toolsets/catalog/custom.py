"""A user's own tools: imported from places that options name, checked, and put into toolsets."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import orjson

from batch_trajectories.basics import exact_json
from toolsets.catalog.registry import Toolset
from toolsets.tool import Tool, tool

# Imports what an option names by MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE.


class CustomToolError(ValueError):
    """A user's own tools cannot be used; the message says where and why."""


def import_place(place: str, option: str) -> Any:
    """Import MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE, also from the current directory.

    Raises `CustomToolError` naming the `option` that holds the place.
    """
    if place.endswith(".py"):
        raise CustomToolError(f"{option}: {place!r} names no function or list; give {place}:NAME")
    file, _, attribute = place.rpartition(":")
    if file.endswith(".py") and not Path(file).exists():
        raise CustomToolError(
            f"{option}: there is no file {file}, seen from {Path.cwd()}; give its whole path, or "
            "start in the directory that has it"
        )
    try:
        if file.endswith(".py"):
            return getattr(_import_file(Path(file)), attribute)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        return pkgutil.resolve_name(place)
    except (Exception, SystemExit) as error:  # a user's module may do anything when imported
        raise CustomToolError(
            f"{option}: cannot import {place!r}: {type(error).__name__}: {error}"
        ) from error


def import_function(place: str, option: str) -> Callable[..., Any]:
    """Import a function from a place. Raises `CustomToolError` naming the `option`."""
    function: Callable[..., Any] = import_place(place, option)
    if not callable(function):
        raise CustomToolError(f"{option}: {place!r} is not callable; give MODULE:FUNCTION")
    return function


def _import_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


ENTRY_POINTS = "batch_trajectories.tools"
"""The group of entry points in which installed packages offer tools; a place can be their name."""


@lru_cache(maxsize=8)
def load_custom_toolsets(places: tuple[str, ...]) -> tuple[Toolset, ...]:
    """Return the toolsets that `places` name.

    A place is MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE, or the name of an entry point. The attribute is
    a function, a `Tool`, a list of functions and tools, or a `Toolset`. Tools outside a `Toolset`
    go into a toolset named after their module or entry point. Raises `CustomToolError`.
    """
    entry_points: dict[str, str] = {}
    if any(":" not in place for place in places):
        from importlib import metadata

        entries = metadata.entry_points(group=ENTRY_POINTS)  # reads a file of each package
        entry_points = {entry.name: entry.value for entry in entries}
    named: list[tuple[str, Any]] = []
    for place in places:
        module = place.rpartition(":")[0]
        module = Path(module).stem if module.endswith(".py") else module
        if ":" in place:
            named.append((module, import_place(place, "tools")))
        elif place in entry_points:
            named.append((place, import_place(entry_points[place], f"tools: {place}")))
        else:
            known = ", ".join(sorted(entry_points)) or "none"
            raise CustomToolError(
                f"tools: {place!r} is neither MODULE:ATTRIBUTE, nor FILE.py:ATTRIBUTE, nor an "
                f"entry point of an installed package (group {ENTRY_POINTS}: {known})"
            )
    return make_toolsets(named)


def make_toolsets(named: Iterable[tuple[str, Any]]) -> tuple[Toolset, ...]:
    """Make toolsets from the objects under each name; see `load_custom_toolsets`."""
    toolsets: dict[str, Toolset] = {}
    for name, value in named:
        toolset = _toolset(name, value)
        if (same_name := toolsets.get(toolset.name)) is not None:
            toolset = msgspec.structs.replace(toolset, tools=(*same_name.tools, *toolset.tools))
        _check_names(toolset)
        toolsets[toolset.name] = toolset
    return tuple(toolsets.values())


def schemas_digest(tools: Sequence[Tool]) -> str:
    """Return a digest of the schemas of tools, which are all that a model sees of them."""
    schemas = [tool.schema for tool in sorted(tools, key=lambda tool: tool.name)]
    return hashlib.sha256(exact_json.dumps(schemas, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _toolset(name: str, value: Any) -> Toolset:
    if isinstance(value, Toolset):
        return msgspec.structs.replace(
            value, tools=tuple(_tool(item, name) for item in value.tools)
        )
    items = value if isinstance(value, list | tuple) else [value]
    tools = tuple(_tool(item, name) for item in items)
    if not tools:
        raise CustomToolError(f"tools: {name}: the list has no tools")
    return Toolset(name, f"Tools of {name}.", tools)


def _tool(value: Any, name: str) -> Tool:
    if isinstance(value, Tool):
        return value
    if not (inspect.isfunction(value) or inspect.ismethod(value)):
        raise CustomToolError(
            f"tools: {name}: {value!r} is not a tool; give a function, a Tool, a list of them, or "
            "a Toolset"
        )
    try:
        return tool()(value)
    except TypeError as error:
        raise CustomToolError(f"{_place(value)}: {error}") from error


def _check_names(toolset: Toolset) -> None:
    by_name: dict[str, Tool] = {}
    for own in toolset.tools:
        other = by_name.setdefault(own.name, own)
        if other is not own:
            raise CustomToolError(
                f"{_place(own.function)}: toolset {toolset.name!r} has two tools called "
                f"{own.name!r}; the other is at {_place(other.function)}"
            )


def _place(function: Any) -> str:
    """Return FILE:LINE of a function, with the line of its first decorator or its `def`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
