"""The toolsets by name, and the selection of toolsets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import overload

import msgspec

from toolsets.tool import Tool

_log = logging.getLogger(__name__)

ALL = ("all", "*")
NONE = "none"
"""Words in a selection that are not names of toolsets."""


class UnknownToolset(ValueError):
    """A selection names a toolset that does not exist."""


class UnavailableToolset(ValueError):
    """A selection names a toolset that cannot work here."""


class Toolset(msgspec.Struct, frozen=True):
    """Tools that are enabled together."""

    name: str
    description: str
    tools: Sequence[Tool]
    needs_sandbox: bool = False
    """Whether tools of the toolset run commands."""
    includes: tuple[str, ...] = ()
    """Names of toolsets that are enabled with it."""
    in_all: bool = True
    """Whether "all" includes it; otherwise it must be named."""
    problem: Callable[[], str | None] = lambda: None
    """A function that returns why the toolset cannot work here and what to install, else None."""


class _BuiltIn(Sequence[Tool]):
    """Tools that are imported at their first use, as most runs offer few of them."""

    def __init__(self, load: Callable[[], Sequence[Tool]]) -> None:
        self._load = cache(load)

    @overload
    def __getitem__(self, index: int) -> Tool: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tool]: ...
    def __getitem__(self, index: int | slice) -> Tool | Sequence[Tool]:
        return self._load()[index]

    def __len__(self) -> int:
        return len(self._load())


def _browser_tools() -> Sequence[Tool]:
    from toolsets.browser.browser_tools import BROWSER_TOOLS

    return BROWSER_TOOLS


def _browser_problem() -> str | None:
    from toolsets.browser.process import browser_problem

    return browser_problem()


def _file_tools() -> Sequence[Tool]:
    from toolsets.builtin.file import list_files, patch_file, read_file, search_files, write_file

    return list_files, patch_file, read_file, search_files, write_file


def _python_tools() -> Sequence[Tool]:
    from toolsets.builtin.terminal import python

    return (python,)


def _terminal_tools() -> Sequence[Tool]:
    from toolsets.builtin.terminal import terminal

    return (terminal,)


def _web_tools() -> Sequence[Tool]:
    from toolsets.web.web_tools import web_fetch, web_search

    return web_fetch, web_search


def _web_problem() -> str | None:
    from toolsets.web.web_tools import web_problem

    return web_problem()


def _index_names(*toolsets: Toolset) -> Mapping[str, Toolset]:
    return MappingProxyType({toolset.name: toolset for toolset in toolsets})


TOOLSETS: Mapping[str, Toolset] = _index_names(
    Toolset(
        name="browser",
        description="Open web pages in a browser, read them and act on them.",
        tools=_BuiltIn(_browser_tools),
        in_all=False,
        problem=_browser_problem,
    ),
    Toolset(
        name="file",
        description="Read, write, patch, list and search files of the workspace.",
        tools=_BuiltIn(_file_tools),
    ),
    Toolset(
        name="python",
        description="Run Python code in the workspace.",
        tools=_BuiltIn(_python_tools),
        needs_sandbox=True,
    ),
    Toolset(
        name="terminal",
        description="Run shell commands in the workspace.",
        tools=_BuiltIn(_terminal_tools),
        needs_sandbox=True,
    ),
    Toolset(
        name="web",
        description="Search the web and read its pages.",
        tools=_BuiltIn(_web_tools),
        in_all=False,  # The user decides what leaves this machine.
        problem=_web_problem,
    ),
)


def catalog(added: Iterable[Toolset]) -> Mapping[str, Toolset]:
    """Return the built-in toolsets and `added` ones by name.

    Raises `ValueError` if a name is taken or cannot be given in an option.
    """
    known = dict(TOOLSETS)
    for toolset in added:
        if toolset.name in known:
            kind = "a built-in toolset" if toolset.name in TOOLSETS else "two toolsets"
            raise ValueError(f"the toolset name {toolset.name!r} is that of {kind}; choose another")
        if not toolset.name or toolset.name in (*ALL, NONE) or set(toolset.name) & set(", \n"):
            raise ValueError(
                f"{toolset.name!r} cannot be the name of a toolset: 'all', '*' and 'none' are "
                "reserved, and names have no commas or blanks"
            )
        known[toolset.name] = toolset
    return known


def resolve_toolsets(
    enabled: Sequence[str] | None,
    disabled: Sequence[str] = (),
    *,
    known: Mapping[str, Toolset] = TOOLSETS,
) -> tuple[Toolset, ...]:
    """Return the enabled toolsets, sorted by name, without disabled tools.

    None, "all" and "*" enable every toolset that is `in_all` and can work here (the log names
    those left out); "none" and an empty selection enable none. Disabling a toolset disables those
    it includes, and removes its tools from other toolsets too; a toolset without tools is dropped.
    Raises `UnknownToolset`, and `UnavailableToolset` for a toolset that was named.
    """
    enabled = ALL[:1] if enabled is None else enabled
    general = _list_all(known) if set(enabled) & set(ALL) else ()
    wanted = _expand(enabled, known, everything=general)
    unwanted = _expand(disabled, known, everything=known)
    disabled_tools = {tool.name for name in unwanted for tool in known[name].tools}
    chosen = []
    for name in sorted(wanted - unwanted):
        tools = tuple(tool for tool in known[name].tools if tool.name not in disabled_tools)
        if tools:
            if (problem := known[name].problem()) is not None:
                raise UnavailableToolset(f"toolset {name!r} cannot be offered: {problem}")
            chosen.append(msgspec.structs.replace(known[name], tools=tools))
    return tuple(chosen)


def collect_tools(toolsets: Sequence[Toolset]) -> tuple[Tool, ...]:
    """Return the tools of some toolsets, each once, sorted by name.

    Raises `ValueError` if two different tools have the same name.
    """
    by_name: dict[str, tuple[Tool, str]] = {}
    for toolset in toolsets:
        for tool in toolset.tools:
            other, owner = by_name.setdefault(tool.name, (tool, toolset.name))
            if other is not tool:
                raise ValueError(
                    f"toolsets {owner} and {toolset.name} both have a tool {tool.name!r}; "
                    "disable or rename one"
                )
    return tuple(by_name[name][0] for name in sorted(by_name))


def _list_all(known: Mapping[str, Toolset]) -> list[str]:
    """Return the toolsets that "all" enables here."""
    names = []
    for name, toolset in known.items():
        if not toolset.in_all:
            continue
        if (problem := toolset.problem()) is None:
            names.append(name)
        else:
            _log.warning("The toolset %s is not offered: %s", name, problem)
    return names


def _expand(
    names: Sequence[str], known: Mapping[str, Toolset], *, everything: Collection[str]
) -> set[str]:
    """Return the named toolsets and all that they include; includes may form a circle."""
    members: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in ALL:
            pending.extend(set(everything) - members)
        elif name != NONE and name not in members:
            if name not in known:
                raise UnknownToolset(f"unknown toolset {name!r}; known: {', '.join(sorted(known))}")
            members.add(name)
            pending.extend(known[name].includes)
    return members
