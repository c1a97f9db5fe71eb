"""One thread of an agent's calls, a sequence of messages that only grows, and its patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from agent.messages.message import Message, ToolCall, hides_reasoning
from agent.wires.reading import CallsInOrder, message_digest, order_by_calls, runs_of_results
from agent.wires.wire import Volatile
from batch_trajectories.basics import exact_json

# The differences between a request and its recorded thread.
#
# A request may differ from the recorded thread: agents write calls anew, drop reasoning or text,
# reorder results, and refresh texts such as the date. A thread keeps each message as it was
# recorded; a patch records how one request differs. Ids of calls, and white space around texts,
# are no difference.

Patch = dict[str, Any]
"""The keys of a message that differ from the recorded one: `content`, `reasoning` ("" if it was
dropped) and `tool_calls`. `message_at` is the position of the recorded result that the request has
here instead. An empty patch means that the message is as it was recorded."""

Patches = Mapping[int, Patch]
"""Patches by the position of the message in the request."""


def make_patch(recorded: Message, requested: Message, ids: Mapping[str, str]) -> Patch:
    """Make the patch that turns the recorded message into the requested one.

    `ids` maps the agent's ids of calls to those of the record.
    """
    patch: Patch = {}
    if recorded["content"] != requested["content"] and (
        recorded["content"].strip() != requested["content"].strip()
    ):
        patch["content"] = requested["content"]
    if recorded["role"] != "assistant":
        return patch
    thought = (requested.get("reasoning") or "").strip()
    if thought != (recorded.get("reasoning") or "").strip() and (
        thought or not _hides_reasoning(requested)
    ):
        patch["reasoning"] = thought
    made, now = recorded.get("tool_calls", ()), requested.get("tool_calls", ())
    if len(made) != len(now) or not all(map(_is_same_call, made, now)):
        patch["tool_calls"] = [{**call, "id": ids.get(call["id"], call["id"])} for call in now]
    return patch


def find_moved_results(
    recorded: Sequence[Message], requested: Sequence[Message], first: int
) -> dict[int, int]:
    """Find the results, from position `first` on, that a request has in another order.

    Returns their positions in `recorded` by their positions in `requested`.
    """
    moved: dict[int, int] = {}
    ours = dict(runs_of_results(recorded, first))
    for start, answered in runs_of_results(requested, first):
        known = ours.get(start, answered)
        if known != answered and sorted(known) == sorted(answered):
            moved |= {
                start + n: start + known.index(call)
                for n, call in enumerate(answered)
                if known[n] != call
            }
    return moved


def count_same_objects(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count the first messages of two lists that are the very same objects."""
    pairs = enumerate(map(is_, one, other))
    return next((n for n, same in pairs if not same), min(len(one), len(other)))


def diff_patches(before: Patches, now: Patches) -> dict[int, Patch]:
    """Return the patches of a later request that differ from those of an earlier one.

    A patch that only the earlier one has is empty here.
    """
    if before == now:
        return {}
    places = sorted({*before, *now})
    return {n: now.get(n, {}) for n in places if before.get(n, {}) != now.get(n, {})}


def apply_changes(before: Patches, change: Patches) -> Patches:
    """Apply what `diff_patches` returned to the patches of the earlier request."""
    if not change:
        return before
    return {n: patch for n, patch in {**before, **change}.items() if patch}


def _hides_reasoning(message: Message) -> bool:
    """Whether a message has reasoning that only the endpoint can read."""
    blocks = message.get("provider_blocks", {"blocks": []})["blocks"]
    extras = [call.get("extra_content") for call in message.get("tool_calls", ())]
    return hides_reasoning(blocks, extras, None)


def _is_same_call(one: ToolCall, other: ToolCall) -> bool:
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


class ReplyPlace(NamedTuple):
    """The place of a recorded reply in a conversation."""

    position: int
    """The index of the reply among the messages."""
    number: int
    """The number of the call that the reply answers."""


class Thread:
    """The messages of one thread, and which of them are replies of recorded calls."""

    def __init__(self, number: int, parent: Thread | None = None, shared: int = 0) -> None:
        self.number = number
        self.messages: list[Message] = parent.messages[:shared] if parent else []
        self.replies: list[ReplyPlace] = []
        """The places of the recorded replies, in order."""
        self.tools: list[dict[str, Any]] = parent.tools if parent else []
        """The tool schemas of the latest call."""
        if parent is not None:
            self.replies = [reply for reply in parent.replies if reply.position < shared]
        patches = parent.patches.items() if parent else ()
        self.patches: Patches = {at: patch for at, patch in patches if at < shared}
        """The patches of the latest call."""
        self._digests: list[bytes] = []
        self._digests_by_position: list[bytes] = []
        self._calls = CallsInOrder()

    def digests(self, volatile: Volatile) -> list[bytes]:
        """Return a digest per message; those of results are in the order of the calls."""
        known = len(self._digests)
        if known < len(self.messages):
            self._digests += order_by_calls(
                self.messages, self.digests_by_position(volatile), known
            )
        return self._digests

    def digests_by_position(self, volatile: Volatile) -> list[bytes]:
        """Return a digest per message, in the order of the messages."""
        for message in self.messages[len(self._digests_by_position) :]:
            self._digests_by_position.append(message_digest(message, self._calls, volatile))
            self._calls.add(message.get("tool_calls", ()))
        return self._digests_by_position

    def count_replies(self, end: int) -> int:
        """Count the recorded replies among the first `end` messages."""
        if end == len(self.messages):
            return len(self.replies)
        return sum(reply.position < end for reply in self.replies)


def move_before_results(messages: Sequence[Message], end: int) -> int:
    """Return `end`, or the start of the results of one reply if `end` is among them."""
    # Such results cannot be divided: their digests are in the order of calls, not in theirs.
    if end < len(messages) and messages[end]["role"] == "tool":
        while end > 0 and messages[end - 1]["role"] == "tool":
            end -= 1
    return end


def count_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Count the first digests that two lists have in common."""
    for n, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return n
    return min(len(one), len(other))
