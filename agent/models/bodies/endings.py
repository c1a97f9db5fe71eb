"""Why a reply ended, in the same words for every API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent.messages.message import FinishReason, Message
from agent.models.endpoint_words import ending_of
from agent.models.errors import ModelError


class ReplyEnding(NamedTuple):
    """Why a reply ended."""

    reason: FinishReason
    unknown: Mapping[str, Any]
    """The API's own word under its own name, if the table of words lacks it; else empty."""

    @property
    def word(self) -> str | None:
        """The unknown word; None if it is known."""
        return next(iter(self.unknown.values()), None)


def read_ending(field: str, word: Any, message: Message) -> ReplyEnding:
    """Read the word with which an API says why `message` ended; `field` is where it stood.

    A word that the table of words lacks counts as a usual end, and is kept. Raises
    `ModelError("malformed")` if there is no word, which is how a cut reply looks, if the word says
    that the server broke the reply off, or if the reply has nothing beside an unknown word.
    """
    ending = ending_of(word)
    if ending is not None and ending != "cut":
        return ReplyEnding(ending, {})
    has_calls = bool(message.get("tool_calls"))
    is_empty = not (has_calls or message["content"].strip())
    if ending == "cut":
        raise ModelError("malformed", f"the server broke the reply off: its {field} is {word!r}")
    if not isinstance(word, str) or not word.strip() or is_empty:
        raise ModelError("malformed", f"the reply's {field} is {word!r}")
    return ReplyEnding("tool_calls" if has_calls else "stop", {field: word})
