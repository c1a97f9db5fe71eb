"""Parts of messages that are not text: pictures, documents and others, kept as they came.

A message of an agent has them in `provider_blocks`; its text has a placeholder for each. A large
part is stored once, however often it is shown: `{"repeats": digest}` stands for it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from agent.messages.message import Message, Role
from batch_trajectories.basics import exact_json

REPEATS = "repeats"

EARLIER: Literal["earlier_response"] = "earlier_response"
"""The type of a part that stands for messages which only the endpoint has."""

_LARGE = 1000
"""Bytes of JSON from which on a part is stored once."""

_IN_GEMINI = ("inlineData", "inline_data", "fileData", "file_data")

_KIND_KEYS = frozenset(("type", "kind", *_IN_GEMINI))
"""Keys that say what a part is."""


def kind_of_part(part: Mapping[str, Any]) -> Literal["image", "file", "earlier_response"]:
    """What a part is: a picture, messages that are unknown, or anything else that is not text."""
    kind = str(part.get("type", ""))
    if kind == EARLIER:
        return EARLIER
    if "image" in kind or kind == "computer_screenshot":
        return "image"
    kind = str(part.get("kind", ""))
    for key in _IN_GEMINI:
        if key in part and isinstance(data := part[key], dict):
            kind = str(data.get("mimeType") or data.get("mime_type") or kind)
            break
    return "image" if kind.startswith("image") else "file"


def parts_of(role: Role, blocks: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The parts of a message for which its text has placeholders; of a reply, its pictures."""
    if role != "assistant":
        return blocks
    return [
        block
        for block in blocks
        if not _KIND_KEYS.isdisjoint(block) and kind_of_part(block) == "image"
    ]


class Parts:
    """The large parts of the messages so far, by digest."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def once(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with their digests in place of parts that came before."""
        return [_changed(message, self._once) for message in messages]

    def whole(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the parts that digests stand for."""
        return [_changed(message, self._whole) for message in messages]

    def _once(self, part: dict[str, Any]) -> dict[str, Any]:
        if (digest := _digest_of(part)) is None:
            return part
        if digest in self._known:
            return {REPEATS: digest, "kind": kind_of_part(part)}
        self._known[digest] = part
        return part

    def _whole(self, part: dict[str, Any]) -> dict[str, Any]:
        if REPEATS in part:
            return self._known.get(part[REPEATS], part)
        if digest := _digest_of(part):
            self._known.setdefault(digest, part)
        return part


def _changed(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    given = message.get("provider_blocks")
    if given is None or message["role"] == "assistant":
        return message
    blocks = [change(block) for block in given["blocks"]]
    return {**message, "provider_blocks": {**given, "blocks": blocks}}


def _digest_of(part: Mapping[str, Any]) -> str | None:
    """The digest of a large part, None for a small one; marks for a cache move."""
    bare = {key: value for key, value in part.items() if key != "cache_control"}
    written = exact_json.dumps(bare)
    return blake2b(written, digest_size=16).hexdigest() if len(written) >= _LARGE else None
