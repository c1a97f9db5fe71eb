"""One thread of an agent's calls: a sequence of messages that only grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from agent.messages.message import Message, ToolCall, hides_reasoning
from agent.wires.reading import CallsInOrder, in_order_of_calls, message_digest, runs_of_results
from agent.wires.wire import Volatile
from batch_trajectories.basics import exact_json

# The differences between a request and its recorded thread.
#
# Agents write calls again, drop reasoning or text, put results in another order, and texts that
# change from start to start stand in their requests as they are now. A thread keeps each message
# as it was recorded; a patch says what a call was shown in its place. Ids of calls, and white
# space around texts, are no difference.

Patch = dict[str, Any]
"""The keys of a message that are otherwise: `content`, `reasoning` ("" if it was dropped) and
`tool_calls`; `message_at`: the position of the recorded result that stands here instead. An empty
patch: the message is as it was recorded."""

Patches = Mapping[int, Patch]
"""By position among the messages of a request."""


def patch_of(known: Message, shown: Message, ids: Mapping[str, str]) -> Patch:
    """The patch that turns `known` into `shown`; `ids` maps the agent's ids to the record's."""
    patch: Patch = {}
    if known["content"] != shown["content"] and (
        known["content"].strip() != shown["content"].strip()
    ):
        patch["content"] = shown["content"]
    if known["role"] != "assistant":
        return patch
    thought = (shown.get("reasoning") or "").strip()
    if thought != (known.get("reasoning") or "").strip() and (thought or not _hides(shown)):
        patch["reasoning"] = thought
    made, now = known.get("tool_calls", ()), shown.get("tool_calls", ())
    if len(made) != len(now) or not all(map(_says_same, made, now)):
        patch["tool_calls"] = [{**call, "id": ids.get(call["id"], call["id"])} for call in now]
    return patch


def moved_results(
    recorded: Sequence[Message], shown: Sequence[Message], first: int
) -> dict[int, int]:
    """The results, from position `first` on, that a request shows in another one's place.

    By their positions in `shown`, the positions in `recorded`.
    """
    moved: dict[int, int] = {}
    ours = dict(runs_of_results(recorded, first))
    for start, answered in runs_of_results(shown, first):
        known = ours.get(start, answered)
        if known != answered and sorted(known) == sorted(answered):
            moved |= {
                start + n: start + known.index(call)
                for n, call in enumerate(answered)
                if known[n] != call
            }
    return moved


def same_first(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many first messages are the very same objects."""
    pairs = enumerate(map(is_, one, other))
    return next((n for n, same in pairs if not same), min(len(one), len(other)))


def changes(before: Patches, now: Patches) -> dict[int, Patch]:
    """The change from the patches of an earlier request to those of a later one."""
    if before == now:
        return {}
    places = sorted({*before, *now})
    return {n: now.get(n, {}) for n in places if before.get(n, {}) != now.get(n, {})}


def changed(before: Patches, change: Patches) -> Patches:
    """Apply the result of `changes`."""
    if not change:
        return before
    return {n: patch for n, patch in {**before, **change}.items() if patch}


def _hides(message: Message) -> bool:
    """Whether it has reasoning that only the endpoint can read."""
    blocks = message.get("provider_blocks", {"blocks": []})["blocks"]
    extras = [call.get("extra_content") for call in message.get("tool_calls", ())]
    return hides_reasoning(blocks, extras, None)


def _says_same(one: ToolCall, other: ToolCall) -> bool:
    """Whether two calls have the same name and arguments, however these are written."""
    made, now = one["function"], other["function"]
    if made["name"] != now["name"]:
        return False
    if made["arguments"] == now["arguments"]:
        return True
    try:
        read = [exact_json.loads(one["arguments"].strip() or "{}") for one in (made, now)]
    except exact_json.JSONDecodeError:
        return made["arguments"].strip() == now["arguments"].strip()
    return bool(read[0] == read[1])


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
