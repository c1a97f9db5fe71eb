"""Groups an agent's model calls into threads by the first messages that they have in common.

A call continues the thread whose messages it repeats. If it repeats only the beginning of a thread,
a new thread branches off there. A restart of the agent sets all calls aside; a call that the agent
makes again becomes part of its thread again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, is_
from typing import Any, NamedTuple

from agent.messages.message import (
    EARLIER_RESPONSE,
    AgentEvent,
    AgentExitEvent,
    ExchangeEvent,
    Message,
    PartStore,
    ReplyEvent,
    ToolCall,
    TurnTokens,
)
from agent.messages.tokens import has_ids, rebase_tokens
from agent.models.dialects.openai_responses import API as RESPONSES
from agent.models.dialects.openai_responses import conversation_id_in
from agent.wires.base import Wire
from agent.wires.reading import CallsInOrder, message_digest
from agent.wires.thread import (
    Patches,
    ReplyPlace,
    Thread,
    apply_changes,
    count_common,
    count_same_objects,
    diff_patches,
    find_moved_results,
    make_patch,
    move_before_results,
)
from agent.wires.wire import NOTHING_VOLATILE, Part, Volatile, WireRequest
from batch_trajectories.basics.exact_json import objects_among

# Finding the recorded replies that a request repeats, although the agent may have changed them.
#
# Agents keep the ids of calls and change other things: they write defaults into arguments, cut
# `cd` off commands, drop text, or keep one of several calls. A reply is found by the ids of its
# calls; if several replies share an id, by its position, too. If the agent makes its own ids, a
# reply is found by its digest, or else as the only reply that followed the same messages.


class _Reply(NamedTuple):
    """A recorded reply, with its calls as the agent got them."""

    number: int
    """The number of the call that the reply answers."""
    at: int
    """The position of the reply in its thread."""
    digests: list[bytes]
    """The digests of the messages of its thread."""
    text: str
    calls: list[ToolCall]

    @property
    def names(self) -> list[str]:
        return _names(self.calls)

    def alike(self, digests: Sequence[bytes]) -> int:
        """Count the messages before the reply that other `digests` have at the same positions."""
        return sum(map(eq, self.digests[: self.at], digests))


class RepeatedReplies(NamedTuple):
    """The recorded replies found in the messages of a request."""

    messages: list[Message]
    digests: list[bytes]
    """A digest per message; a reply that was found has its own digest as it was recorded."""
    replies: dict[int, int]
    """The call numbers of the replies by the positions of the messages that repeat them."""
    is_whole: bool
    """Whether the messages have all calls of these replies."""

    def count_same(self, messages: Sequence[Message]) -> int:
        """Count the first messages that are the very same objects; 0 unless `is_whole`."""
        if not self.is_whole:
            return 0
        limit = min(len(messages), len(self.messages))
        pairs = enumerate(map(is_, self.messages, messages))
        return next((n for n, is_same in pairs if not is_same), limit)


_NOTHING_FOUND = RepeatedReplies([], [], {}, is_whole=True)


class RepliesIndex:
    """Finds recorded replies in requests."""

    def __init__(self) -> None:
        self._replies: list[_Reply] = []
        self._by_digest: defaultdict[bytes, list[int]] = defaultdict(list)
        self._by_id: defaultdict[str, list[_Reply]] = defaultdict(list)
        self._by_place: defaultdict[tuple[int, str], list[_Reply]] = defaultdict(list)
        """Replies by position and id of a call; the id "" has all replies of a position."""

    @property
    def count(self) -> int:
        """The number of replies that were added."""
        return len(self._replies)

    def add(self, exchange: ExchangeEvent, at: int, digests: list[bytes]) -> None:
        """Add the next recorded reply, at position `at` of a thread with these `digests`."""
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

    def find_by_digest(self, digest: bytes) -> Sequence[int]:
        """The call numbers of the replies with this digest."""
        return self._by_digest.get(digest, ())

    def calls(self, number: int) -> Sequence[ToolCall]:
        """The tool calls of the reply to call `number`, with the ids that the agent got."""
        return self._replies[number].calls

    def find(
        self,
        request: WireRequest,
        volatile: Volatile,
        *,
        live: Collection[int],
        before: Iterable[RepeatedReplies],
    ) -> RepeatedReplies:
        """Find the replies that a request repeats; if several fit, one of `live` is preferred.

        `before` has the results for earlier requests, which are used for messages in common.
        """
        messages = request.messages
        best = max(before, key=lambda one: one.count_same(messages), default=_NOTHING_FOUND)
        same = best.count_same(messages)
        digests = best.digests[:same] + request.digests[same:]
        replies = {n: number for n, number in best.replies.items() if n < same}
        calls: CallsInOrder | None = None  # needed once a message has not all calls of its reply
        for n, message in enumerate(messages[same:], same):
            if message["role"] == "assistant":
                made = _calls(message)
                if (reply := self._find_by_calls(message, n, digests, live)) is not None:
                    replies[n], digests[n] = reply.number, reply.digests[reply.at]
                    if calls is None and len(made) != len(reply.calls):
                        calls = CallsInOrder()
                        for earlier in messages[:n]:
                            calls.add(_calls(earlier))
                    made = reply.calls if _shares_call_id(message, reply) else made
                if calls is not None:
                    calls.add(made)
            elif calls is not None and message["role"] == "tool":
                digests[n] = message_digest(message, calls, volatile)
        return RepeatedReplies(messages, digests, replies, is_whole=calls is None)

    def _find_by_calls(
        self, message: Message, n: int, digests: Sequence[bytes], live: Collection[int]
    ) -> _Reply | None:
        """Find the reply that message `n` repeats by its calls; None if there is none.

        Also None if its digest is known: `Threads` then finds it by that.
        """
        ids, names = [call["id"] for call in _calls(message)], _names(_calls(message))
        here = [
            reply
            for id in ids
            for reply in self._by_place.get((n, id), ())
            if reply.digests[n - 1 : n] == digests[n - 1 : n]
        ]
        if len(here) == 1:  # nearly always: skip the slow comparison
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


def _shares_call_id(message: Message, reply: _Reply) -> bool:
    """Whether a message has a call of the reply, by its id."""
    ids = {call["id"] for call in reply.calls}
    return any(call["id"] in ids for call in _calls(message))


def _calls(message: Message) -> Sequence[ToolCall]:
    return message.get("tool_calls", ())


def _names(calls: Sequence[ToolCall]) -> list[str]:
    return [call["function"]["name"] for call in calls]


_MAX_RECENT = 8
"""Maximum requests that are kept to compare the next one with: one per thread, latest threads."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a request among the threads; see the fields of `ExchangeEvent`."""

    thread: int
    shared: int
    added: list[Message]
    tools: list[dict[str, Any]] | None
    parent: int | None
    repeated_replies: list[list[int]]
    turn: int
    """The number of the reply among those of the thread."""
    previous_with_ids: int | None
    """The number of the latest earlier call with token ids in the thread; None: there is none."""
    call_ids: Sequence[str]
    """The ids of the tool calls before the reply."""
    patch_changes: Patches
    """The patches of the request that differ from those of the thread's previous request."""


class _Recent(NamedTuple):
    """The latest call of a thread, with which its next one is compared."""

    request: WireRequest
    repeated: RepeatedReplies
    patches: Patches


class Threads:
    """The calls of one agent, as threads; see `Trajectory.agent_calls`."""

    def __init__(self) -> None:
        self.volatile: Volatile = NOTHING_VOLATILE
        """The changing texts that digests leave out. Set before the first `place`."""
        self.exchanges: list[ExchangeEvent] = []
        """All recorded calls, by number."""
        self.threads: list[Thread] = []
        self.live: set[int] = set()
        """The numbers of the calls that the latest start of the agent has made."""
        self.starts = 1
        """The number of starts of the agent's command."""
        self.exit: AgentExitEvent | None = None
        """The end of the latest start; None while it runs."""
        self.parts = PartStore()
        """Content parts that an event holds in full; later events refer to them by digest."""
        self._repeats = RepliesIndex()
        self._recent_by_thread: dict[int, _Recent] = {}
        self._by_id: dict[str, int] = {}
        """The number of the latest call by the ids of replies, and of endpoint conversations."""
        self._items: dict[str, Mapping[str, Any]] = {}
        """The items of all replies by their ids; see `Wire.insert_items`."""
        self._ends: list[tuple[int, int]] = []
        """The thread of each call, and its number of messages after the reply."""
        self._tools: list[list[dict[str, Any]]] = []
        """The tool schemas that each call offered."""
        self._starts: list[int] = []
        """The start of the agent that made each call, from 1."""
        self._patches: list[Patches] = []
        """The patches of each call."""
        self._aside: defaultdict[str, list[int]] = defaultdict(list)
        """The numbers of the calls that are set aside, by key, the earliest last."""
        self._previous_with_ids: list[int | None] = []
        """`Placement.previous_with_ids` of each call."""
        self._has_ids = False
        """Whether a reply has token ids."""
        self._answered = 0
        """The number of calls that the latest start has made again."""
        self._diverged_at: int | None = None

    @property
    def next_number(self) -> int:
        """The number of the next call to be recorded."""
        return len(self.exchanges)

    def read(self, wire: Wire, path: str, body: Mapping[str, Any]) -> WireRequest:
        """Read a model call of this agent; see `Wire.read`. Raises `WireError`."""
        whole = wire.insert_items(body, self._items)
        return wire.read(path, whole, self.volatile, self._recent, self._earlier)

    @property
    def _recent(self) -> list[WireRequest]:
        """The latest request of each of the latest threads; none after a resume."""
        return [recent.request for recent in reversed(self._recent_by_thread.values())]

    @property
    def diverged_at(self) -> int | None:
        """The number of calls that the latest start made again before its first new one.

        None if no call is set aside now, or none is new.
        """
        return self._diverged_at if self._aside else None

    def _earlier(self, id: str) -> Part | None:
        """Return the messages up to the reply with an id; see `Earlier`.

        Calls have the ids that the agent got.
        """
        if (number := self._by_id.get(id)) is None:
            return None
        thread, end = self.thread_and_end(number)
        first = int(self.exchanges[number].get("instructed", False))
        messages = thread.messages[:end]
        for at, reply in thread.replies:
            if at < end and (ids := self.exchanges[reply].get("ids")):
                made = zip(messages[at]["tool_calls"], ids, strict=True)
                got = [ToolCall(**{**call, "id": id}) for call, id in made]
                messages[at] = {**messages[at], "tool_calls": got}
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        digests = thread.digests_by_position(self.volatile)[first:end]
        return Part((EARLIER_RESPONSE, id, number), messages[first:], digests, calls, first_call=0)

    def thread_and_end(self, number: int) -> tuple[Thread, int]:
        """Return the thread of a call, and the thread's number of messages after the reply."""
        thread, end = self._ends[number]
        return self.threads[thread], end

    def offered_tools(self, number: int) -> list[dict[str, Any]]:
        """The tools that a call offered."""
        return self._tools[number]

    def request_patches(self, number: int) -> Patches:
        """The patches of one call."""
        return self._patches[number]

    def agent_start(self, number: int) -> int:
        """The number of the agent's start that made a call, from 1."""
        return self._starts[number]

    def token_chain(self, number: int | None) -> list[ReplyEvent]:
        """The replies whose tokens the prompt of call `number` continues, in order.

        The reply of the call itself is the last one. Empty for None.
        """
        chain: list[ReplyEvent] = []
        while number is not None:
            chain.append(self.exchanges[number]["reply"])
            number = self._previous_with_ids[number]
        return chain[::-1]

    def turn_tokens(self, number: int, last: int | None) -> TurnTokens:
        """The tokens of a call, for a row in which `last` is the previous call with token ids."""
        if self._previous_with_ids[number] == last or not has_ids(self.exchanges[number]["reply"]):
            return self.exchanges[number]["reply"]["tokens"]
        return rebase_tokens(self.token_chain(number), self.token_chain(last))

    def find_set_aside(self, key: str) -> ExchangeEvent | None:
        """The earliest call with this key that is set aside; None if there is none."""
        numbers = self._aside.get(key)
        return self.exchanges[numbers[-1]] if numbers else None

    def apply(self, event: AgentEvent) -> None:
        """Take the next event of the journal."""
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
        repeated = {at: call for at, call in event.get("echoes", ())}  # noqa: C416 - lists of two
        for n, message in enumerate(self.parts.restore(event["added"])):
            if n in repeated:
                thread.replies.append(ReplyPlace(len(thread.messages), repeated[n]))
                message = self.exchanges[repeated[n]]["reply"]["message"]
            thread.messages.append(message)
        self._previous_with_ids.append(self._last_with_ids(number for _, number in thread.replies))
        self._has_ids = self._has_ids or has_ids(event["reply"])
        thread.replies.append(ReplyPlace(len(thread.messages), event["number"]))
        thread.messages.append(event["reply"]["message"])
        thread.tools = event.get("tools", thread.tools)
        change = {at: patch for at, patch in event.get("shown", ())}  # noqa: C416 - lists of two
        thread.patches = apply_changes(thread.patches, change)
        self._patches.append(thread.patches)
        if self._aside and self._diverged_at is None:
            self._diverged_at = self._answered
        if event["dialect"] == RESPONSES:
            ids = event["reply"]["response_id"], conversation_id_in(event["body"])
            self._by_id |= {id: event["number"] for id in ids if id}
            items = objects_among(event["body"].get("output"))
            self._items |= {id: item for item in items if isinstance(id := item.get("id"), str)}
        self.exchanges.append(event)
        self.live.add(event["number"])
        self._tools.append(thread.tools)
        self._starts.append(self.starts)
        self._ends.append((thread.number, len(thread.messages)))

    def place(self, request: WireRequest) -> Placement:
        """Find the place of a request among the threads. Call it once its reply is complete."""
        repeated = self._find_repeated(request)
        source, shared = self._find_source(request.messages, repeated.digests)
        added = request.messages[shared:]
        repeats = self._find_repeats(source, shared, request, repeated)
        replies = {at: number for at, number in source.replies if at < shared} if source else {}
        replies |= {shared + at: number for at, number in repeats}
        recorded = self._recorded_calls(source, shared, request, replies)
        ids = [call["id"] for made in recorded for call in made]
        if ids != [call["id"] for part in request.parts for call in part.calls]:
            added = self._replace_ids(request, shared, replies, recorded)
        continues = source is not None and shared == len(source.messages)
        if source and continues and source.tools and not request.tools:
            # After an answer, a call without tools is about the conversation, such as one for a
            # title, and not part of it.
            continues = bool(source.messages[-1].get("tool_calls"))
        thread = source.number if source and continues else len(self.threads)
        tools = source.tools if source else []
        patches = self._make_patches(request, source, shared, replies)
        before = source.patches if source else {}
        self._remember(thread, _Recent(request, repeated, patches))
        return Placement(
            thread=thread,
            shared=shared,
            added=added,
            tools=None if tools == request.tools else request.tools,
            parent=None if source is None or continues else source.number,
            repeated_replies=repeats,
            turn=1 + len(repeats) + (source.count_replies(shared) if source else 0),
            call_ids=ids,
            patch_changes=diff_patches(
                {at: patch for at, patch in before.items() if at < shared}, patches
            ),
            previous_with_ids=self._last_with_ids(number for _, number in sorted(replies.items())),
        )

    def _last_with_ids(self, numbers: Iterable[int]) -> int | None:
        """The last of these calls whose reply has token ids; None if none has."""
        if not self._has_ids:
            return None
        having = (n for n in reversed([*numbers]) if has_ids(self.exchanges[n]["reply"]))
        return next(having, None)

    def _find_source(
        self, messages: Sequence[Message], digests: list[bytes]
    ) -> tuple[Thread | None, int]:
        """Find the thread that has most of the first messages, and count these messages.

        If several have equally many, the best is one that would be continued, then one of this
        start, then the latest.
        """
        best: Thread | None = None
        rank = (0, False, False)
        for thread in reversed(self.threads):
            theirs = thread.digests(self.volatile)
            limit = min(len(theirs), len(digests))
            if limit < rank[0] or theirs[0] != digests[0]:
                continue
            shared = limit if theirs[:limit] == digests[:limit] else count_common(theirs, digests)
            for one in (thread.messages, messages):
                shared = move_before_results(one, shared)
            is_live = bool(thread.replies) and thread.replies[-1].number in self.live
            if (mine := (shared, shared == len(theirs), is_live)) > rank:
                best, rank = thread, mine
        return best, rank[0]

    def _find_repeated(self, request: WireRequest) -> RepeatedReplies:
        for exchange in self.exchanges[self._repeats.count :]:
            thread, end = self.thread_and_end(exchange["number"])
            self._repeats.add(exchange, end - 1, thread.digests(self.volatile))
        before = (recent.repeated for recent in self._recent_by_thread.values())
        return self._repeats.find(request, self.volatile, live=self.live, before=before)

    def _find_repeats(
        self, source: Thread | None, shared: int, request: WireRequest, repeated: RepeatedReplies
    ) -> list[list[int]]:
        """Find the recorded replies among the messages after the first `shared`.

        Returns pairs of the position behind these messages and the call number.
        """
        # An agent that changes earlier messages repeats the replies after them.
        last = max((n for at, n in source.replies if at < shared), default=-1) if source else -1
        found = []
        for n in range(shared, len(request.messages)):
            if request.messages[n]["role"] != "assistant":
                continue
            if (number := repeated.replies.get(n)) is None:
                known = self._repeats.find_by_digest(repeated.digests[n])
                later = [number for number in known if number > last]
                number = min(
                    later,
                    key=lambda number: (number not in self.live, number),
                    default=known[-1] if known else None,
                )
            if number is not None:
                last = number
                found.append([n - shared, number])
        return found

    def _recorded_calls(
        self, source: Thread | None, shared: int, request: WireRequest, replies: Mapping[int, int]
    ) -> list[Sequence[ToolCall]]:
        """The tool calls of each message of a request, as the record has them."""
        before = source.messages[:shared] if source else []
        after = enumerate(request.messages[shared:], shared)
        recorded = (
            self.exchanges[replies[n]]["reply"]["message"] if n in replies else message
            for n, message in after
        )
        return [message.get("tool_calls", ()) for message in (*before, *recorded)]

    def _replace_ids(
        self,
        request: WireRequest,
        shared: int,
        replies: Mapping[int, int],
        recorded: Sequence[Sequence[ToolCall]],
    ) -> list[Message]:
        """Return the messages after the first `shared`, with the ids that the record has."""
        # An agent makes its own ids if a server gives none, and some servers repeat ids.
        new: dict[str, str] = {}
        mapped = []
        for n, message in enumerate(request.messages):
            ids = _call_ids(message.get("tool_calls", ()))
            got = _call_ids(self._repeats.calls(replies[n])) if n in replies else ids
            # If the agent has left calls out, the rest are found by the ids that it got.
            pairs = zip(got if {*ids} <= {*got} else ids, _call_ids(recorded[n]), strict=False)
            new.update(pairs)
            if n >= shared:
                id = message.get("tool_call_id", "")
                mapped.append({**message, "tool_call_id": new.get(id, id)} if id else message)
        return mapped

    def _make_patches(
        self, request: WireRequest, source: Thread | None, shared: int, replies: Mapping[int, int]
    ) -> Patches:
        """Record how the request differs from its thread; see `agent.wires.thread`."""
        # Messages in common with the thread's previous request were compared then.
        messages = request.messages
        recent = self._recent_by_thread.get(source.number) if source else None
        same = min(shared, count_same_objects(recent.request.messages, messages)) if recent else 0
        same = move_before_results(messages, same)
        found = {n: patch for n, patch in recent.patches.items() if n < same} if recent else {}
        moved = find_moved_results(source.messages[:shared], messages, same) if source else {}
        for n in range(same, len(messages)):
            ids: Mapping[str, str] = {}
            if n in replies:
                known = self.exchanges[replies[n]]["reply"]["message"]
                got = _call_ids(self._repeats.calls(replies[n]))
                ids = dict(zip(got, _call_ids(known.get("tool_calls", ())), strict=True))
            elif source and n < shared:
                known = source.messages[moved.get(n, n)]
            else:
                continue
            patch = make_patch(known, messages[n], ids)
            if n in moved:
                patch["message_at"] = moved[n]
            if patch:
                found[n] = patch
        return found

    def _remember(self, thread: int, recent: _Recent) -> None:
        self._recent_by_thread.pop(thread, None)
        self._recent_by_thread[thread] = recent
        if len(self._recent_by_thread) > _MAX_RECENT:
            del self._recent_by_thread[next(iter(self._recent_by_thread))]


def opening_digest(request: WireRequest) -> str:
    """Return a digest of the messages up to the first one of the user.

    All requests of a thread have the same one, and so have threads that branch off later.
    """
    # Unlike the thread, it is known before the reply, also for parallel calls. Threads that share
    # it share the prompt that an endpoint may have cached.
    roles = [message["role"] for message in request.messages]
    end = roles.index("user") + 1 if "user" in roles else 1
    return b"".join(request.digests[:end]).hex()


def _call_ids(calls: Sequence[ToolCall]) -> list[str]:
    return [call["id"] for call in calls]
