"""How deep JSON is nested: it can be read far deeper than it can be written again."""

from __future__ import annotations

import re

MAX_NESTING = 100
"""Deepest JSON that is taken in, from a dataset or an endpoint; the writer refuses about 250,
and widely used readers of training files refuse 128."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
"""Possessive, because marks to backtrack to would cost a hundred times the text's memory."""

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def is_nested_deeper(json_text: bytes, levels: int) -> bool:
    """Whether valid JSON is nested deeper than `levels`; nearly free where brackets are few."""
    if json_text.count(b"[") + json_text.count(b"{") <= levels:
        return False
    depth = 0
    for character in _STRING.sub(b"", json_text):
        depth += _STEPS.get(character, 0)
        if depth > levels:
            return True
    return False
