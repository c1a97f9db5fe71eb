"""The toolsets by name, and which tools a selection of them means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from toolsets.file import list_files, patch_file, read_file, search_files, write_file
from toolsets.python import python
from toolsets.terminal import terminal
from toolsets.tool import Tool

ALL = ("all", "*")
NONE = "none"
"""What stands for toolsets in a selection and is the name of none."""


class UnknownToolset(ValueError):
    """A toolset was named that does not exist."""


def _no_problem() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Toolset:
    """Tools that are enabled together."""

    name: str
    description: str
    tools: tuple[Tool, ...]
    needs_sandbox: bool = False
    """Its tools run commands."""
    includes: tuple[str, ...] = ()
    """Names of toolsets that come along with it."""
    problem: Callable[[], str | None] = _no_problem
    """Says in one sentence why it does not work here and what to do; None where it works."""


def _by_name(*toolsets: Toolset) -> Mapping[str, Toolset]:
    return MappingProxyType({toolset.name: toolset for toolset in toolsets})


TOOLSETS: Mapping[str, Toolset] = _by_name(
    Toolset(
        name="file",
        description="Read, write, patch, list and search files of the workspace.",
        tools=(list_files, patch_file, read_file, search_files, write_file),
        needs_sandbox=False,
    ),
    Toolset(
        name="python",
        description="Run Python code in the workspace.",
        tools=(python,),
        needs_sandbox=True,
    ),
    Toolset(
        name="terminal",
        description="Run shell commands in the workspace.",
        tools=(terminal,),
        needs_sandbox=True,
    ),
)


def resolve_toolsets(
    enabled: Sequence[str] | None,
    disabled: Sequence[str] = (),
    *,
    known: Mapping[str, Toolset] = TOOLSETS,
) -> tuple[Toolset, ...]:
    """Return the toolsets that a selection means, sorted by name, without disabled tools.

    None, "all" and "*" mean every toolset, "none" and an empty selection mean no toolset. What
    is disabled goes with all it includes, and its tools go from other toolsets as well; a
    toolset left without any tool is dropped. Raises `UnknownToolset`.
    """
    wanted = _expand(ALL[:1] if enabled is None else enabled, known)
    unwanted = _expand(disabled, known)
    gone = {tool.name for name in unwanted for tool in known[name].tools}
    kept = []
    for name in sorted(wanted - unwanted):
        tools = tuple(tool for tool in known[name].tools if tool.name not in gone)
        if tools:
            kept.append(dataclasses.replace(known[name], tools=tools))
    return tuple(kept)


def tools_of(toolsets: Sequence[Toolset]) -> tuple[Tool, ...]:
    """Return the tools of some toolsets, each once, sorted by name.

    Raises `ValueError` when two different tools have the same name.
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


def _expand(names: Sequence[str], known: Mapping[str, Toolset]) -> set[str]:
    """Return the named toolsets and all they include; a circle of includes is fine."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in ALL:
            pending.extend(known.keys() - found)
        elif name != NONE and name not in found:
            if name not in known:
                raise UnknownToolset(f"unknown toolset {name!r}; known: {', '.join(sorted(known))}")
            found.add(name)
            pending.extend(known[name].includes)
    return found
