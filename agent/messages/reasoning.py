"""Reasoning that a model wrote at the start of its text, and reasoning that is encrypted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from batch_trajectories.basics.exact_json import objects_among

_OPENING = re.compile(
    r"\s*<(?P<tag>think|thinking|reasoning|REASONING_SCRATCHPAD)>(?P<text>.*?)</(?P=tag)>",
    re.DOTALL,
)

_OPENS = re.compile(r"\s*<(?:think|thinking|reasoning|REASONING_SCRATCHPAD)>")


class InlineReasoning(NamedTuple):
    """A text split into the reasoning at its start, or None, and the rest."""

    reasoning: str | None
    rest: str


def split_inline_reasoning(text: str) -> InlineReasoning:
    """Take the leading think blocks out of `text`; several are joined by a blank line.

    A block that is never closed stays in the text: the end of the reasoning is unknown.
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
    """Whether `text`, without its leading closed blocks, begins with an unclosed block."""
    return _OPENS.match(text) is not None


def hides_reasoning(
    blocks: Iterable[Mapping[str, Any]], extras: Iterable[Any], reasoning_tokens: int | None
) -> bool:
    """Whether the model reasoned for a reply that has no readable reasoning.

    `blocks` are its provider blocks, `extras` the `extra_content` of its calls.

    The signs are a redacted or encrypted thought, the signature of a thought, or a count of
    reasoning tokens. Some APIs encrypt empty thoughts, too: then a count of zero decides. It does
    not decide for thoughts of Anthropic, of which gateways count only the readable text.
    """
    if reasoning_tokens:
        return True
    hidden = [kind for block in blocks for kind in _hidden(block)]
    if "thinking" in hidden:
        return True
    return reasoning_tokens is None and (bool(hidden) or any(map(_is_googles, extras)))


def _hidden(block: Mapping[str, Any]) -> Iterator[str]:
    """The kind of each encrypted or signed thought in a verbatim block."""
    kind = block.get("type")
    if kind in ("thinking", "redacted_thinking"):
        if block.get("signature") or block.get("data"):
            yield "thinking"
    elif kind == "reasoning":
        if block.get("encrypted_content"):
            yield "reasoning"
    elif kind is None:  # a message of the OpenAI chat dialect
        if _is_signed(block):
            yield "reasoning"
        for thought in objects_among(block.get("thinking_blocks")):
            yield from _hidden(thought)
        for detail in objects_among(block.get("reasoning_details")):
            if detail.get("data") or detail.get("signature"):
                yield "reasoning"


def _is_signed(part: Mapping[str, Any]) -> bool:
    """Whether a message has the signature of a thought, as Gemini writes it."""
    return _is_googles(part.get("extra_content"))


def _is_googles(extra: Any) -> bool:
    """Whether extra content of a call or a message is the signature of a thought."""
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and bool(google.get("thought_signature"))
