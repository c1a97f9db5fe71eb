"""Reads a Google-style docstring: the description of a tool and of its parameters."""

from __future__ import annotations

import re

_ARGUMENTS = frozenset({"args", "arguments", "params", "parameters"})

_SECTION = re.compile(
    r"^(args|arguments|params|parameters|returns|raises|yields|examples?):[ \t]*\n(?=\s*^[ \t]+\S)",
    re.MULTILINE | re.IGNORECASE,
)
"""A heading with indented lines below it."""


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the descriptions of the parameters by name.

    Each paragraph becomes one line.
    """
    arguments: dict[str, str] = {}
    sections = list(_SECTION.finditer(docstring))
    for section in sections:
        if section[1].lower() in _ARGUMENTS:
            arguments |= _items(docstring[section.end() :])
    text = docstring[: sections[0].start()] if sections else docstring
    return _unwrapped(text), arguments


def _items(block: str) -> dict[str, str]:
    """The items `name: text` or `name (type): text` at the beginning of a block.

    What is indented further continues an item; what is not indented ends the block.
    """
    lines: dict[str, list[str]] = {}
    item: list[str] = []
    first = None
    for line in block.split("\n"):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text and not indent:
            break
        first = indent if first is None and text else first
        if text and indent == first:
            head, colon, text = text.partition(":")
            item = [text]
            if colon:
                lines[head.partition("(")[0].strip()] = item
        else:
            item.append(text)
    return {name: _unwrapped("\n".join(texts)) for name, texts in lines.items()}


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
