"""One thread of an agent's calls: a sequence of messages that only grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.messages.message import Message
from agent.wires.canonical import CallsInOrder, in_order_of_calls, message_digest
from agent.wires.shown import Patches
from agent.wires.wire import Volatile


class Thread:
    """The messages of one thread, and which of them are replies of recorded calls."""

    def __init__(self, number: int, parent: Thread | None = None, shared: int = 0) -> None:
        self.number = number
        self.messages: list[Message] = parent.messages[:shared] if parent else []
        self.replies: list[tuple[int, int]] = []
        """The position and the number of each recorded reply, in the order of the messages."""
        self.tools: list[dict[str, Any]] = parent.tools if parent else []
        """Those of its latest call."""
        if parent is not None:
            self.replies = [reply for reply in parent.replies if reply[0] < shared]
        patches = parent.shown.items() if parent else ()
        self.shown: Patches = {at: patch for at, patch in patches if at < shared}
        """The patches of its latest call."""
        self._digests: list[bytes] = []
        self._own_digests: list[bytes] = []
        self._calls = CallsInOrder()

    def digests(self, volatile: Volatile) -> list[bytes]:
        """One per message, as those of a request."""
        known = len(self._digests)
        if known < len(self.messages):
            self._digests += in_order_of_calls(self.messages, self.own_digests(volatile), known)
        return self._digests

    def own_digests(self, volatile: Volatile) -> list[bytes]:
        """One per message, in the order of the messages."""
        for message in self.messages[len(self._own_digests) :]:
            self._own_digests.append(message_digest(message, self._calls, volatile))
            self._calls.add(message.get("tool_calls", ()))
        return self._own_digests

    def replies_within(self, shared: int) -> int:
        """How many of its first messages are recorded replies."""
        if shared == len(self.messages):
            return len(self.replies)
        return sum(at < shared for at, _ in self.replies)


def before_results(messages: Sequence[Message], end: int) -> int:
    """`end`, or the start of the run of results that it would split: their order differs from that
    of their digests."""
    if end < len(messages) and messages[end]["role"] == "tool":
        while end > 0 and messages[end - 1]["role"] == "tool":
            end -= 1
    return end


def common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many first items two lists have in common."""
    for n, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return n
    return min(len(one), len(other))
