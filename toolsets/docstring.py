"""What a Google-style docstring says to a model: what a tool does, and what its arguments mean."""

from __future__ import annotations

import re

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Params|Returns|Raises|Yields|Examples?):", re.M)


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the descriptions of the parameters by name.

    Each paragraph is put on one line: its wraps mean nothing to a model.
    """
    if not _SECTION.search(docstring):
        return _unwrapped(docstring), {}
    # A tenth of a second to import, which most tools do not need.
    from griffe import Docstring, DocstringSectionParameters, DocstringSectionText

    texts: list[str] = []
    arguments: dict[str, str] = {}
    for section in Docstring(docstring).parse("google", warnings=False):
        if isinstance(section, DocstringSectionText) and not arguments:
            texts.append(section.value)
        elif isinstance(section, DocstringSectionParameters):
            arguments |= {one.name: _unwrapped(one.description) for one in section.value}
        else:
            break
    return _unwrapped("\n\n".join(texts)), arguments


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
