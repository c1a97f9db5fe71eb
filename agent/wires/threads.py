"""The fold of an agent's calls into threads.

A call continues the thread whose messages it
repeats; if it repeats only the beginning of one, a new thread branches off there. A restart sets
all calls aside; those that are asked for again become part of their conversations again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, is_
from typing import Any, NamedTuple

from agent.messages.message import (
    EARLIER,
    AgentEvent,
    AgentExitEvent,
    ExchangeEvent,
    Message,
    Parts,
    ReplyEvent,
    ToolCall,
    TurnTokens,
)
from agent.messages.tokens import has_ids, restated
from agent.models.dialects.openai_responses import API as RESPONSES
from agent.models.dialects.openai_responses import conversation_of
from agent.wires.base import Wire
from agent.wires.reading import CallsInOrder, message_digest
from agent.wires.thread import (
    Patches,
    Thread,
    before_results,
    changed,
    changes,
    common,
    moved_results,
    patch_of,
    same_first,
)
from agent.wires.wire import NOTHING_VOLATILE, Part, Volatile, WireRequest
from batch_trajectories.basics.exact_json import objects_among

# Which recorded reply an agent repeats, also where it has changed it.
#
# Agents keep the ids of calls and change other things: they write defaults into arguments, cut
# `cd` off commands, drop text, or keep one of several calls. A reply is found by its ids, at its
# place where several replies have an id. Where an agent makes its own ids it is found by its
# digest, and else as the only reply that followed the same messages.


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
        reply = _Reply(
            number=exchange["number"], at=at, digests=digests, text=message["content"], calls=calls
        )
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
                    reply.alike(digests),
                    reply.digests[n] == digests[n],
                    reply.names == names,
                    reply.number in live,
                    reply.number,
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


_MOST_RECENT = 8
"""Requests that are remembered for reading the next: one of each of the latest threads."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs; see the fields of `ExchangeEvent`."""

    thread: int
    shared: int
    added: list[Message]
    tools: list[dict[str, Any]] | None
    of: int | None
    echoes: list[list[int]]
    turn: int
    """The number of the reply among those of the thread."""
    after: int | None
    """The number of the latest earlier call with token ids in the thread."""
    call_ids: Sequence[str]
    """The ids of the calls before the reply."""
    shown: Patches
    """What changes among the messages that the request shows otherwise than the thread has them."""


class _Recent(NamedTuple):
    """The call with which the next ones of its thread are compared."""

    request: WireRequest
    repeated: Found
    patches: Patches


class Threads:
    """The calls of one agent, as threads; see `Trajectory.agent_calls`."""

    def __init__(self) -> None:
        self.volatile: Volatile = NOTHING_VOLATILE
        """Decides how requests are placed; set it before the first `place`."""
        self.exchanges: list[ExchangeEvent] = []
        """All recorded calls, by number."""
        self.threads: list[Thread] = []
        self.live: set[int] = set()
        """The numbers of the calls that the last start has made."""
        self.starts = 1
        """How often the agent's command was started."""
        self.exit: AgentExitEvent | None = None
        """How the last start ended, if it did."""
        self.parts = Parts()
        """Parts that events hold in full; later events refer to them by digest."""
        self._repeats = Repeats()
        self._recent_of: dict[int, _Recent] = {}
        self._by_id: dict[str, int] = {}
        """The latest call by the ids of replies and of conversations at the endpoint."""
        self._items: dict[str, Mapping[str, Any]] = {}
        """The items of all replies by their ids; see `Wire.with_items`."""
        self._ends: list[tuple[int, int]] = []
        """The thread of each call, and how many messages it had after the reply."""
        self._tools: list[list[dict[str, Any]]] = []
        self._starts: list[int] = []
        self._shown: list[Patches] = []
        self._aside: defaultdict[str, list[int]] = defaultdict(list)
        """The numbers of the calls that are set aside, by key, the earliest last."""
        self._after: list[int | None] = []
        """See `Placement.after`, for each call."""
        self._has_ids = False
        self._answered = 0
        self._diverged_at: int | None = None

    @property
    def next_number(self) -> int:
        """The number of the next call to be recorded."""
        return len(self.exchanges)

    @property
    def calls(self) -> int:
        """How many calls were paid for."""
        return len(self.exchanges)

    def read(self, wire: Wire, path: str, body: Mapping[str, Any]) -> WireRequest:
        """A model call of this agent; see `Wire.read`. Raises `WireError`."""
        whole = wire.with_items(body, self._items)
        return wire.read(path, whole, self.volatile, self._recent, self._earlier)

    @property
    def _recent(self) -> list[WireRequest]:
        """The latest requests of the latest threads; none after a resume."""
        return [recent.request for recent in reversed(self._recent_of.values())]

    @property
    def diverged_at(self) -> int | None:
        """How many calls the last start answered before its first new one, while others were set
        aside; None if none are set aside now.
        """
        return self._diverged_at if self._aside else None

    def _earlier(self, id: str) -> Part | None:
        """See `Earlier`. Replies have the ids that the agent got."""
        if (number := self._by_id.get(id)) is None:
            return None
        thread, end = self.end_of(number)
        first = int(self.exchanges[number].get("instructed", False))
        messages = thread.messages[:end]
        for at, reply in thread.replies:
            if at < end and (ids := self.exchanges[reply].get("ids")):
                made = zip(messages[at]["tool_calls"], ids, strict=True)
                got = [ToolCall(**{**call, "id": id}) for call, id in made]
                messages[at] = {**messages[at], "tool_calls": got}
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        digests = thread.own_digests(self.volatile)[first:end]
        return Part((EARLIER, id, number), messages[first:], digests, calls, first_call=0)

    def end_of(self, number: int) -> tuple[Thread, int]:
        """The thread of a call, and how many messages it had after the reply."""
        thread, end = self._ends[number]
        return self.threads[thread], end

    def tools_of(self, number: int) -> list[dict[str, Any]]:
        """The tools that a call offered."""
        return self._tools[number]

    def shown_to(self, number: int) -> Patches:
        """The patches of one call."""
        return self._shown[number]

    def start_of(self, number: int) -> int:
        """The start of the agent that made a call, from 1."""
        return self._starts[number]

    def token_chain(self, number: int | None) -> list[ReplyEvent]:
        """The replies whose tokens a call's prompt continues, in order, and its own at the end."""
        chain: list[ReplyEvent] = []
        while number is not None:
            chain.append(self.exchanges[number]["reply"])
            number = self._after[number]
        return chain[::-1]

    def tokens_after(self, number: int, last: int | None) -> TurnTokens:
        """The tokens of a call where the latest earlier one with token ids is `last`."""
        if self._after[number] == last or not has_ids(self.exchanges[number]["reply"]):
            return self.exchanges[number]["reply"]["tokens"]
        return restated(self.token_chain(number), self.token_chain(last))

    def unanswered(self, key: str) -> ExchangeEvent | None:
        """The earliest call with this key that is set aside, if there is one."""
        numbers = self._aside.get(key)
        return self.exchanges[numbers[-1]] if numbers else None

    def apply(self, event: AgentEvent) -> None:
        """Take one event into the fold."""
        match event["kind"]:
            case "exchange":
                self._apply_exchange(event)
            case "answered":
                self._answered += 1
                self.live.add(event["exchange"])
                key = self.exchanges[event["exchange"]]["key"]
                self._aside[key].remove(event["exchange"])
                if not self._aside[key]:
                    del self._aside[key]
            case "agent_restarted":
                self.starts += 1
                self.exit = None
                self.live.clear()
                self._aside.clear()
                for exchange in reversed(self.exchanges):
                    self._aside[exchange["key"]].append(exchange["number"])
                self._answered, self._diverged_at = 0, None
            case "agent_exit":
                self.exit = event

    def _apply_exchange(self, event: ExchangeEvent) -> None:
        if event["thread"] == len(self.threads):
            parent = event.get("of")
            source = None if parent is None else self.threads[parent]
            self.threads.append(Thread(event["thread"], source, event["shared"]))
        thread = self.threads[event["thread"]]
        echoes = {at: call for at, call in event.get("echoes", ())}  # noqa: C416 - lists of two
        for n, message in enumerate(self.parts.whole(event["added"])):
            if n in echoes:
                thread.replies.append((len(thread.messages), echoes[n]))
                message = self.exchanges[echoes[n]]["reply"]["message"]
            thread.messages.append(message)
        self._after.append(self._latest_with_ids(number for _, number in thread.replies))
        self._has_ids = self._has_ids or has_ids(event["reply"])
        thread.replies.append((len(thread.messages), event["number"]))
        thread.messages.append(event["reply"]["message"])
        thread.tools = event.get("tools", thread.tools)
        change = {at: patch for at, patch in event.get("shown", ())}  # noqa: C416 - lists of two
        thread.shown = changed(thread.shown, change)
        self._shown.append(thread.shown)
        if self._aside and self._diverged_at is None:
            self._diverged_at = self._answered
        if event["dialect"] == RESPONSES:
            ids = event["reply"]["response_id"], conversation_of(event["body"])
            self._by_id |= {id: event["number"] for id in ids if id}
            items = objects_among(event["body"].get("output"))
            self._items |= {id: item for item in items if isinstance(id := item.get("id"), str)}
        self.exchanges.append(event)
        self.live.add(event["number"])
        self._tools.append(thread.tools)
        self._starts.append(self.starts)
        self._ends.append((thread.number, len(thread.messages)))

    def place(self, request: WireRequest) -> Placement:
        """Where a request belongs now: call it once its reply is complete."""
        repeated = self._repeated(request)
        source, shared = self._longest(request.messages, repeated.digests)
        added = request.messages[shared:]
        echoes = self._echoes(source, shared, request, repeated)
        replies = {at: number for at, number in source.replies if at < shared} if source else {}
        replies |= {shared + at: number for at, number in echoes}
        recorded = self._recorded_calls(source, shared, request, replies)
        ids = [call["id"] for made in recorded for call in made]
        if ids != [call["id"] for part in request.parts for call in part.calls]:
            added = self._with_ids(request, shared, replies, recorded)
        continues = source is not None and shared == len(source.messages)
        if source and continues and source.tools and not request.tools:
            # After an answer, a call without tools is about the conversation, not part of it.
            continues = bool(source.messages[-1].get("tool_calls"))
        thread = source.number if source and continues else len(self.threads)
        tools = source.tools if source else []
        patches = self._patches(request, source, shared, replies)
        before = source.shown if source else {}
        self._remember(thread, _Recent(request, repeated, patches))
        return Placement(
            thread=thread,
            shared=shared,
            added=added,
            tools=None if tools == request.tools else request.tools,
            of=None if source is None or continues else source.number,
            echoes=echoes,
            turn=1 + len(echoes) + (source.replies_within(shared) if source else 0),
            call_ids=ids,
            shown=changes({at: patch for at, patch in before.items() if at < shared}, patches),
            after=self._latest_with_ids(number for _, number in sorted(replies.items())),
        )

    def _latest_with_ids(self, numbers: Iterable[int]) -> int | None:
        """The last of these calls whose reply has token ids."""
        if not self._has_ids:
            return None
        having = (n for n in reversed([*numbers]) if has_ids(self.exchanges[n]["reply"]))
        return next(having, None)

    def _longest(
        self, messages: Sequence[Message], digests: list[bytes]
    ) -> tuple[Thread | None, int]:
        """The thread that has most of the first messages, and how many it has.

        Of several, the best is one that would be continued, then one of this start, then the
        latest.
        """
        best: Thread | None = None
        rank = (0, False, False)
        for thread in reversed(self.threads):
            theirs = thread.digests(self.volatile)
            limit = min(len(theirs), len(digests))
            if limit < rank[0] or theirs[0] != digests[0]:
                continue
            shared = limit if theirs[:limit] == digests[:limit] else common(theirs, digests)
            for one in (thread.messages, messages):
                shared = before_results(one, shared)
            is_live = bool(thread.replies) and thread.replies[-1][1] in self.live
            if (mine := (shared, shared == len(theirs), is_live)) > rank:
                best, rank = thread, mine
        return best, rank[0]

    def _repeated(self, request: WireRequest) -> Found:
        for exchange in self.exchanges[self._repeats.count :]:
            thread, end = self.end_of(exchange["number"])
            self._repeats.add(exchange, end - 1, thread.digests(self.volatile))
        before = (recent.repeated for recent in self._recent_of.values())
        return self._repeats.find(request, self.volatile, live=self.live, before=before)

    def _echoes(
        self, source: Thread | None, shared: int, request: WireRequest, repeated: Found
    ) -> list[list[int]]:
        """The recorded replies among the messages after the first `shared`.

        An agent that changes earlier messages repeats the replies after them.
        """
        last = max((n for at, n in source.replies if at < shared), default=-1) if source else -1
        echoes = []
        for n in range(shared, len(request.messages)):
            if request.messages[n]["role"] != "assistant":
                continue
            if (number := repeated.replies.get(n)) is None:
                known = self._repeats.with_digest(repeated.digests[n])
                later = [number for number in known if number > last]
                number = min(
                    later,
                    key=lambda number: (number not in self.live, number),
                    default=known[-1] if known else None,
                )
            if number is not None:
                last = number
                echoes.append([n - shared, number])
        return echoes

    def _recorded_calls(
        self, source: Thread | None, shared: int, request: WireRequest, replies: Mapping[int, int]
    ) -> list[Sequence[ToolCall]]:
        """The calls of each message of a request as the record has them."""
        before = source.messages[:shared] if source else []
        after = enumerate(request.messages[shared:], shared)
        said = (
            self.exchanges[replies[n]]["reply"]["message"] if n in replies else message
            for n, message in after
        )
        return [message.get("tool_calls", ()) for message in (*before, *said)]

    def _with_ids(
        self,
        request: WireRequest,
        shared: int,
        replies: Mapping[int, int],
        recorded: Sequence[Sequence[ToolCall]],
    ) -> list[Message]:
        """The messages after the first `shared`, with the ids of the record.

        An agent makes its own ids where a server gives none, and some servers repeat ids.
        """
        new: dict[str, str] = {}
        mapped = []
        for n, message in enumerate(request.messages):
            ids = _ids(message.get("tool_calls", ()))
            got = _ids(self._repeats.calls(replies[n])) if n in replies else ids
            # Where an agent has left calls out, those that it kept are found by the ids it got.
            pairs = zip(got if {*ids} <= {*got} else ids, _ids(recorded[n]), strict=False)
            new.update(pairs)
            if n >= shared:
                id = message.get("tool_call_id", "")
                mapped.append({**message, "tool_call_id": new.get(id, id)} if id else message)
        return mapped

    def _patches(
        self, request: WireRequest, source: Thread | None, shared: int, replies: Mapping[int, int]
    ) -> Patches:
        """What the request shows otherwise; see `agent.wires.thread`.

        What it has in common with the thread's previous request was compared then.
        """
        messages = request.messages
        recent = self._recent_of.get(source.number) if source else None
        same = min(shared, same_first(recent.request.messages, messages)) if recent else 0
        same = before_results(messages, same)
        found = {n: patch for n, patch in recent.patches.items() if n < same} if recent else {}
        moved = moved_results(source.messages[:shared], messages, same) if source else {}
        for n in range(same, len(messages)):
            ids: Mapping[str, str] = {}
            if n in replies:
                known = self.exchanges[replies[n]]["reply"]["message"]
                got = _ids(self._repeats.calls(replies[n]))
                ids = dict(zip(got, _ids(known.get("tool_calls", ())), strict=True))
            elif source and n < shared:
                known = source.messages[moved.get(n, n)]
            else:
                continue
            patch = patch_of(known, messages[n], ids)
            if n in moved:
                patch["message_at"] = moved[n]
            if patch:
                found[n] = patch
        return found

    def _remember(self, thread: int, recent: _Recent) -> None:
        self._recent_of.pop(thread, None)
        self._recent_of[thread] = recent
        if len(self._recent_of) > _MOST_RECENT:
            del self._recent_of[next(iter(self._recent_of))]


def opening_of(request: WireRequest) -> str:
    """The messages up to the first of the user, as a digest: requests of one thread share it.

    It is known before the reply is, and also in parallel calls; threads that part later share it,
    too, and so the prompt that an endpoint may have cached.
    """
    roles = [message["role"] for message in request.messages]
    end = roles.index("user") + 1 if "user" in roles else 1
    return b"".join(request.digests[:end]).hex()


def _ids(calls: Sequence[ToolCall]) -> list[str]:
    return [call["id"] for call in calls]
