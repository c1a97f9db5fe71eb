"""Reasoning that a model wrote inline at the start of its text, or that nobody can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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


def hides_reasoning(message: Mapping[str, Any], usage: Mapping[str, Any] | None) -> bool:
    """Whether the model reasoned for a reply that holds no reasoning in words.

    That is told by what an API gives instead (a redacted or encrypted thought, or the signature
    of one), or by the tokens that it counts. Some APIs seal an empty thought too, so a count of
    zero is believed, but not against a thought of Anthropic's, which gateways count by its words.
    """
    counted = (usage or {}).get("reasoning_tokens")
    if counted:
        return True
    held = message.get("provider_blocks")
    sealed = [] if held is None else [seal for block in held["blocks"] for seal in _seals(block)]
    if "thinking" in sealed:
        return True
    return counted is None and (bool(sealed) or any(map(_is_signed, message.get("tool_calls", ()))))


def _seals(block: Mapping[str, Any]) -> Iterator[str]:
    """The kind of each thought in a verbatim block that came without words, or beside them."""
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
        for thought in _objects(block.get("thinking_blocks")):
            yield from _seals(thought)
        for detail in _objects(block.get("reasoning_details")):
            if detail.get("data") or detail.get("signature"):
                yield "reasoning"


def _is_signed(said: Mapping[str, Any]) -> bool:
    """Whether a call or a message bears the signature of a thought, which Gemini puts there."""
    extra = said.get("extra_content")
    google = extra.get("google") if isinstance(extra, dict) else None
    return isinstance(google, dict) and bool(google.get("thought_signature"))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
