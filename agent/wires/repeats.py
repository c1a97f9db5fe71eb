"""Which recorded reply an agent repeats, also where it has changed it.

Agents keep the ids of calls and change other things: they write defaults into arguments, cut `cd`
off commands, drop text, or keep one of several calls. A reply is found by its ids, at its place
where several replies have an id. Where an agent makes its own ids it is found by its digest, and
else as the only reply that followed the same messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from operator import eq, is_
from typing import NamedTuple

from agent.messages.message import ExchangeEvent, Message, ToolCall
from agent.wires.canonical import CallsInOrder, message_digest
from agent.wires.wire import Volatile, WireRequest


class _Reply(NamedTuple):
    """A recorded reply, with the calls as the agent got them."""

    number: int
    at: int
    """Its position in its thread."""
    digests: list[bytes]
    """Those of its thread."""
    text: str
    calls: list[ToolCall]

    @property
    def names(self) -> list[str]:
        return _names(self.calls)

    def alike(self, digests: Sequence[bytes]) -> int:
        """How many of the messages before it are also in another conversation."""
        return sum(map(eq, self.digests[: self.at], digests))


class Found(NamedTuple):
    """The recorded replies found in the messages of a request."""

    messages: list[Message]
    digests: list[bytes]
    """One per message; those of replies that were found are the replies' own."""
    replies: dict[int, int]
    """The numbers of these replies, by the positions of the messages."""
    is_whole: bool
    """No call of these replies is missing."""

    def same(self, messages: Sequence[Message]) -> int:
        """How many first messages are the very same ones."""
        if not self.is_whole:
            return 0
        limit = min(len(messages), len(self.messages))
        pairs = enumerate(map(is_, self.messages, messages))
        return next((n for n, is_same in pairs if not is_same), limit)


_NOTHING = Found([], [], {}, is_whole=True)


class Repeats:
    """Finds recorded replies in requests."""

    def __init__(self) -> None:
        self._replies: list[_Reply] = []
        self._by_digest: defaultdict[bytes, list[int]] = defaultdict(list)
        self._by_id: defaultdict[str, list[_Reply]] = defaultdict(list)
        self._by_place: defaultdict[tuple[int, str], list[_Reply]] = defaultdict(list)
        """By position and id; "" stands for all of a position."""

    @property
    def count(self) -> int:
        """How many replies are known."""
        return len(self._replies)

    def add(self, exchange: ExchangeEvent, at: int, digests: list[bytes]) -> None:
        """Take the next recorded reply, which is at position `at` of a thread with `digests`."""
        message = exchange["reply"]["message"]
        made = message.get("tool_calls", [])
        ids = exchange.get("ids") or [call["id"] for call in made]
        calls = [
            ToolCall(id=id, type=call["type"], function=call["function"])
            for call, id in zip(made, ids, strict=True)
        ]
        reply = _Reply(exchange["number"], at, digests, message["content"], calls)
        self._replies.append(reply)
        self._by_digest[digests[at]].append(reply.number)
        self._by_place[at, ""].append(reply)
        for id in {*ids} - {""}:
            self._by_id[id].append(reply)
            self._by_place[at, id].append(reply)

    def with_digest(self, digest: bytes) -> Sequence[int]:
        """The numbers of the replies with this digest."""
        return self._by_digest.get(digest, ())

    def calls(self, number: int) -> Sequence[ToolCall]:
        """The calls of a reply, with the ids that the agent got."""
        return self._replies[number].calls

    def find(
        self,
        request: WireRequest,
        volatile: Volatile,
        *,
        live: Collection[int],
        before: Iterable[Found],
    ) -> Found:
        """The replies that a request repeats; of several, one of `live` is more likely.

        What `before`, of earlier requests, has of the same messages is not looked for again.
        """
        messages = request.messages
        best = max(before, key=lambda earlier: earlier.same(messages), default=_NOTHING)
        same = best.same(messages)
        digests = best.digests[:same] + request.digests[same:]
        replies = {n: number for n, number in best.replies.items() if n < same}
        calls: CallsInOrder | None = None  # needed once a message has not all calls of its reply
        for n, message in enumerate(messages[same:], same):
            if message["role"] == "assistant":
                made = _calls(message)
                if (reply := self._find(message, n, digests, live)) is not None:
                    replies[n], digests[n] = reply.number, reply.digests[reply.at]
                    if calls is None and len(made) != len(reply.calls):
                        calls = CallsInOrder()
                        for earlier in messages[:n]:
                            calls.add(_calls(earlier))
                    made = reply.calls if _is_by_id(message, reply) else made
                if calls is not None:
                    calls.add(made)
            elif calls is not None and message["role"] == "tool":
                digests[n] = message_digest(message, calls, volatile)
        return Found(messages, digests, replies, is_whole=calls is None)

    def _find(
        self, message: Message, n: int, digests: Sequence[bytes], live: Collection[int]
    ) -> _Reply | None:
        """The reply that a message repeats, other than by its digest."""
        ids, names = [call["id"] for call in _calls(message)], _names(_calls(message))
        here = [
            reply
            for id in ids
            for reply in self._by_place.get((n, id), ())
            if reply.digests[n - 1 : n] == digests[n - 1 : n]
        ]
        if len(here) == 1:  # as nearly always; to compare takes time
            return here[0]
        if here:
            return max(
                here,
                key=lambda reply: (
                    *(reply.alike(digests), reply.digests[n] == digests[n]),
                    *(reply.names == names, reply.number in live, reply.number),
                ),
            )
        having = {reply.number: reply for id in ids for reply in self._by_id.get(id, ())}
        if len(having) == 1:
            [reply] = having.values()
            return reply if {*names} <= {*reply.names} else None
        if having or digests[n] in self._by_digest:
            return None
        following = [r for r in self._by_place.get((n, ""), ()) if r.alike(digests) == n]
        if len(following) != 1 or following[0].names != names:
            return None
        text = message["content"].strip()
        return following[0] if text in following[0].text and (text or ids) else None


def _is_by_id(message: Message, reply: _Reply) -> bool:
    ids = {call["id"] for call in reply.calls}
    return any(call["id"] in ids for call in _calls(message))


def _calls(message: Message) -> Sequence[ToolCall]:
    return message.get("tool_calls", ())


def _names(calls: Sequence[ToolCall]) -> list[str]:
    return [call["function"]["name"] for call in calls]
