"""Reasoning that a model wrote inline, between tags, at the start of its text."""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = re.compile(
    r"\s*<(?P<tag>think|thinking|reasoning|REASONING_SCRATCHPAD)>(?P<text>.*?)</(?P=tag)>",
    re.DOTALL,
)

_OPENS = re.compile(r"\s*<(?:think|thinking|reasoning|REASONING_SCRATCHPAD)>")


class InlineReasoning(NamedTuple):
    """A text split into the reasoning at its start (None if there is none) and the rest."""

    reasoning: str | None
    rest: str


def split_inline_reasoning(text: str) -> InlineReasoning:
    """Lift the leading think blocks out of `text`; several in a row are joined by a blank line.

    A tag that is opened and never closed is left where it is: what follows it may be anything.
    """
    thoughts = []
    end = 0
    while match := _OPENING.match(text, end):
        thoughts.append(match["text"].strip())
        end = match.end()
    if not thoughts:
        return InlineReasoning(None, text)
    return InlineReasoning("\n\n".join(filter(None, thoughts)) or None, text[end:].lstrip())


def opens_reasoning(text: str) -> bool:
    """Whether `text`, its closed blocks lifted out, begins a block that it never closes."""
    return _OPENS.match(text) is not None
