"""Reads a Google-style docstring: the description of a tool and of its parameters."""

from __future__ import annotations

import re

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Params|Returns|Raises|Yields|Examples?):", re.M)


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the descriptions of the parameters by name.

    Each paragraph becomes one line.
    """
    if not _SECTION.search(docstring):
        return _unwrapped(docstring), {}
    # Takes 0.1 s to import, and most tools do not need it.
    from griffe import Docstring, DocstringSectionParameters, DocstringSectionText

    texts: list[str] = []
    arguments: dict[str, str] = {}
    for section in Docstring(docstring).parse("google", warnings=False):
        if isinstance(section, DocstringSectionText) and not arguments:
            texts.append(section.value)
        elif isinstance(section, DocstringSectionParameters):
            arguments |= {found.name: _unwrapped(found.description) for found in section.value}
        else:
            break
    return _unwrapped("\n\n".join(texts)), arguments


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
