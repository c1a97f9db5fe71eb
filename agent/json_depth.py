"""How deep JSON is nested: it can be read far deeper than it can be written again."""

from __future__ import annotations

import re

MAX_NESTING = 100
"""Deepest JSON that is taken in, from a dataset or an endpoint; the writer refuses about 250,
and widely used readers of training files refuse 128."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
"""Possessive, because marks to backtrack to would cost a hundred times the text's memory."""

_BRACES = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_nested_deeper(json_text: bytes, levels: int) -> bool:
    """Whether valid JSON is nested deeper than `levels`; nearly free where brackets are few."""
    if json_text.count(b"[") + json_text.count(b"{") <= levels:
        return False
    brackets = _STRING.sub(b"", json_text).translate(_BRACES, _NO_BRACKETS)
    # Each round takes the innermost level away, everywhere at once.
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
