"""All toolsets that can be named in a run: the built-in ones and what the user adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from toolsets.catalog.registry import ALL, NONE, TOOLSETS, Toolset


def catalog(added: Iterable[Toolset]) -> Mapping[str, Toolset]:
    """Return the built-in toolsets and `added` ones by name.

    Raises `ValueError` where a name is taken or cannot be given in an option.
    """
    known = dict(TOOLSETS)
    for toolset in added:
        if toolset.name in known:
            kind = "a built-in toolset" if toolset.name in TOOLSETS else "two toolsets"
            msg = f"the toolset name {toolset.name!r} is that of {kind}; choose another"
            raise ValueError(msg)
        if not toolset.name or toolset.name in (*ALL, NONE) or set(toolset.name) & set(", \n"):
            msg = (
                f"{toolset.name!r} cannot be the name of a toolset: 'all', '*' and 'none' are "
                "taken, and there are no commas or blanks in it"
            )
            raise ValueError(msg)
        known[toolset.name] = toolset
    return known
