"""Segments of conversations, as the model saw them, for formats to render.

A segment has calls of a conversation of which each one only adds messages to the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agent.messages.message import NON_CHAT_CALLS, SIMULATED_USER, SUMMARY, Message, summary_upto
from agent.models.providers import PROVIDERS
from batch_trajectories.basics import exact_json
from batch_trajectories.export.conversation.authors import (
    is_agent_conversation,
    merge_messages,
    other_models,
)
from batch_trajectories.export.conversation.own_work import AuthoredWork, first_reply, tool_stats
from batch_trajectories.export.conversation.reading import (
    joined_system_prompt,
    mark_hidden_reasoning,
    read_entries,
)
from batch_trajectories.export.conversation.tolerance import Flaw
from batch_trajectories.export.conversation.turns import Conversation, Entry, Turn
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.masking import Masked, Masks, masks_to_json
from batch_trajectories.records.record_types import (
    InnerRecord,
    Record,
    StoredConversation,
    StoredMessage,
    StoredPatch,
    StoredRewrite,
    StoredTurn,
    Tools,
)

# The view of each call of a record: the messages of its request, and the tools on offer.
#
# Views of the program's own loop are computed again from the record: summaries, shortened turns,
# reasoning that an API does not take. For agents that run as commands, the record has the requests
# (`StoredRequest`). Messages that the user keeps out of records (`ephemeral_system_prompt`,
# `prefill_messages`) are in no view. Calls in the text protocol appear as calls.

MAIN = "main"
"""The name of the main conversation of a record."""


class CallView(NamedTuple):
    """A model call: the messages and tools of its request, and the reply."""

    turn: StoredTurn
    messages: Sequence[StoredMessage]
    """The messages in the order of the request; requests of agents may have any order of roles."""
    reply: StoredMessage
    tools: Tools


@dataclass(slots=True)
class ConversationViews:
    """The views of one conversation of a record, in the order of the calls."""

    name: str
    conversation: StoredConversation
    views: list[CallView] = field(default_factory=list)
    unknown: int = 0
    """Number of calls of this run whose view is not in the record."""


def views_by_conversation(
    record: Record, *, since_user: bool = False
) -> Iterator[ConversationViews]:
    """The conversations of a record with this run's model: the main one, then those inside it.

    Conversations of simulated users, and those that are no chats, are left out. With `since_user`,
    the views lack reasoning from before the last user message, as some endpoints drop it.
    """
    offers = _read(record.offers) or []
    tools_of = _read(record.inner_tools) or {}
    others = other_models(record, with_inner=True)
    models = {turn.model for turn in record.turns}
    depth = (record.options or {}).get("max_subagent_depth")

    def read(part: StoredConversation, tools: Tools | None, name: str) -> ConversationViews:
        found = ConversationViews(name, part)
        if is_agent_conversation(part):
            views = _agent_views(record, part, tools or (), offers)
            found.views = [view for view in views if view.turn.model not in others]
            paid = [turn for turn in part.own_turns if turn.model not in others]
        else:
            paid = part.own_turns
            if part is not record and any(turn.model not in models for turn in paid):
                return found  # of another model
            found.views = [] if tools is None else [*_loop_views(record, part, tools)]
        found.unknown = len(paid) - len(found.views)
        if since_user:
            found.views = [_drop_old_reasoning(view) for view in found.views]
        return found

    def inside(part: StoredConversation, level: int) -> Iterator[ConversationViews]:
        for inner in part.inner:
            if inner.name not in (SIMULATED_USER, *NON_CHAT_CALLS):
                yield read(
                    inner, _offered_tools(inner, tools_of, is_deepest=level == depth), inner.name
                )
                yield from inside(inner, level + 1)

    yield read(record, record.tools, MAIN)
    yield from inside(record, 1)


def _offered_tools(
    inner: InnerRecord, by_name: Mapping[str, Tools], *, is_deepest: bool
) -> Tools | None:
    """The tools that an inner conversation was offered; None if the record does not say."""
    if (recorded := _read(inner.raw_tools)) is not None:
        return list(recorded)
    if inner.name == SUMMARY:
        return ()
    tools = by_name.get(inner.name)
    if tools is None or not is_deepest:
        return tools
    return [tool for tool in tools if tool["function"]["name"] not in by_name]


def _read(raw: msgspec.Raw) -> Any:
    """Parse JSON; None for an empty text."""
    return exact_json.loads(bytes(raw)) if bytes(raw) else None


def _drop_old_reasoning(view: CallView) -> CallView:
    messages = view.messages
    last = max((n for n, m in enumerate(messages) if m.role == "user"), default=0)
    return view._replace(messages=[*map(_drop_reasoning, messages[:last]), *messages[last:]])


def _drop_reasoning(message: StoredMessage) -> StoredMessage:
    return replace(message, reasoning=None) if message.reasoning else message


def _loop_views(record: Record, part: StoredConversation, tools: Tools) -> Iterator[CallView]:
    """The views of a conversation of the program's own loop."""
    messages, turns = part.messages, part.turns
    replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
    replies = replies[len(replies) - len(turns) :]
    if not replies:
        return
    shown = [
        message if _is_reasoning_sent(message, record) else _drop_reasoning(message)
        for message in messages
    ]
    task = replies[0] - 1
    system = [message for message in shown[:1] if message.role == "system"]
    after = (record.options or {}).get("compact_after") if part is record else None
    shorten = _Shortening(after, record) if after else None
    tasks: dict[str, StoredMessage] = {}
    summaries = {
        inner.key: inner.messages[-1].content.strip()
        for inner in part.inner
        if inner.name == SUMMARY and inner.turns
    }
    for turn, at in zip(turns, replies, strict=True):
        if turn.inherited is not None:
            continue
        seen: list[StoredMessage] = shown[:at]
        if summaries and (key := _summary_key(turn, part)) is not None:
            if key not in tasks:
                text = f"{shown[task].content}\n\n[Summary of the conversation so far]\n"
                tasks[key] = replace(shown[task], content=text + summaries[key])
            seen = [*system, tasks[key], *shown[summary_upto(key) : at]]
        if shorten is not None:
            seen = shorten(seen)
        yield CallView(turn, seen, messages[at], tools)


def _summary_key(turn: StoredTurn, part: StoredConversation) -> str | None:
    """The key of the summary that a reply saw; None if it saw none.

    Records that do not name it are read by times.
    """
    if any(other.request is not None for other in part.turns):
        return None if turn.request is None else turn.request.summary
    begun = [
        inner.key
        for inner in part.inner
        if inner.name == SUMMARY and inner.turns and inner.turns[0].started_at < turn.started_at
    ]
    return max(begun, key=summary_upto, default=None)


def _is_reasoning_sent(message: StoredMessage, record: Record) -> bool:
    """Whether the reasoning of a reply is sent back to the API of the run."""
    # All APIs take their own reasoning; some clients leave out reasoning of other models.
    if not message.reasoning or message.role != "assistant":
        return True
    blocks = message.provider_blocks
    if blocks is not None and blocks.api == record.api:
        return True
    if record.api in ("anthropic_messages", "openai_responses"):
        return False
    provider = PROVIDERS.get((record.model or "").partition(":")[0])
    return provider is None or provider.reasoning_field is not None


class _Shortening:
    """Shortens older replies as the option `compact_after` does."""

    def __init__(self, after: int, record: Record) -> None:
        from agent.views.views import compact

        self._after = after
        self._compact = compact
        self._record = record
        self._plain: dict[int, Message] = {}
        self._short: dict[int, StoredMessage] = {}

    def __call__(self, messages: Sequence[StoredMessage]) -> list[StoredMessage]:
        for message in messages:
            if id(message) not in self._plain:
                self._plain[id(message)] = msgspec.to_builtins(message)
        before = [self._plain[id(message)] for message in messages]
        return [
            message if now is was else self._to_stored(message, now)
            for message, was, now in zip(
                messages, before, self._compact(before, self._after), strict=True
            )
        ]

    def _to_stored(self, message: StoredMessage, short: Message) -> StoredMessage:
        if id(message) not in self._short:
            made = msgspec.convert(short, StoredMessage)
            made = made if _is_reasoning_sent(made, self._record) else _drop_reasoning(made)
            self._short[id(message)] = made
        return self._short[id(message)]


def _agent_views(
    record: Record, part: StoredConversation, tools: Tools, offers: Sequence[Tools]
) -> Iterator[CallView]:
    """The views of a conversation of an agent that runs as a command, in the order of the calls."""
    found = []
    seen = _PatchedMessages(part.messages)
    for turn in part.turns:
        request = turn.request
        if request is None or request.at is None:
            continue
        seen.apply(request.shown)
        if turn.inherited is None:
            offered = tools if request.tools is None else offers[request.tools]
            shown = seen.messages[: request.at]
            found.append(CallView(turn, shown, part.messages[request.at], offered))
    turn_by_exchange = {turn.exchange: turn for turn in part.turns}
    key = part.key if isinstance(part, InnerRecord) else next((t.key for t in record.threads), "")
    for changed in record.rewritten or ():
        if changed.thread != key or changed.until is None:
            continue
        messages = _apply_rewrite(changed, part.messages)
        seen = _PatchedMessages(messages)
        for request in changed.requests:
            seen.apply(request.shown)
            turn = turn_by_exchange[request.exchange]
            if turn.request is None and turn.inherited is None and request.at is not None:
                offered = tools if request.tools is None else offers[request.tools]
                found.append(
                    CallView(turn, seen.messages[: request.at], messages[request.at], offered)
                )
    yield from sorted(found, key=lambda view: view.turn.exchange or 0)


def _apply_rewrite(
    changed: StoredRewrite, messages: Sequence[StoredMessage]
) -> list[StoredMessage]:
    """The messages that calls were shown instead of the recorded ones, the last reply included."""
    assert changed.until is not None
    after = messages[changed.end : changed.until + 1]
    return [*messages[: changed.start], *changed.messages, *after]


class _PatchedMessages:
    """The messages of a conversation with the changes that its requests had."""

    def __init__(self, recorded: Sequence[StoredMessage]) -> None:
        self._recorded = recorded
        self.messages = list(recorded)

    def apply(self, patches: Sequence[StoredPatch]) -> None:
        """Apply the changes since the request before."""
        for patch in patches:
            at = patch.at if patch.message_at is None else patch.message_at
            message = self._recorded[at]
            if patch.content is not None:
                message = replace(message, content=patch.content)
            if patch.reasoning is not None:
                message = replace(message, reasoning=patch.reasoning or None)
            if patch.tool_calls is not None:
                message = replace(message, tool_calls=patch.tool_calls)
            self.messages[patch.at] = message


# Calls are joined into a segment as long as each one only adds messages to the one before.

_OPEN = 8
"""Number of last segments that a call may continue: agents interleave few conversations."""

START = "start"


@dataclass(slots=True)
class Segment:
    """Calls of a conversation that continue each other, with their replies."""

    messages: Sequence[StoredMessage]
    """The messages of the last request, and its reply."""
    learnt: dict[int, StoredTurn]
    """The turns that are learnt in this segment, by position; each turn is learnt in one
    segment."""
    tools: Tools
    why: str
    """The reason why the segment begins: `start`, or the part of the request that changed otherwise
    than by messages at its end (`tools`, `system`, `reasoning`, `messages`)."""


def split_segments(part: ConversationViews) -> list[Segment]:
    """The segments of a conversation, in the order of their first calls."""
    found: list[Segment] = []
    for view in part.views:
        shown = view.messages
        continued = next((one for one in reversed(found[-_OPEN:]) if _extends(one, view)), None)
        if continued is None:
            why = _break_cause(found[-1], view) if found else START
            continued = Segment((), {}, view.tools, why)
            found.append(continued)
        continued.learnt[len(shown)] = view.turn
        continued.messages = [*shown, view.reply]
    return found


def _extends(segment: Segment, view: CallView) -> bool:
    known = segment.messages
    if len(known) > len(view.messages) or segment.tools != view.tools:
        return False
    return view.messages[: len(known)] == known


def _break_cause(before: Segment, view: CallView) -> str:
    if before.tools != view.tools:
        return "tools"
    pairs = zip(before.messages, view.messages, strict=False)
    was, now = next(((a, b) for a, b in pairs if a != b), (None, None))
    if was is None or now is None:
        return "messages"
    if was.role == now.role == "system":
        return "system"
    if was.role == "assistant" and _comparable(was) == _comparable(now):
        return "reasoning"
    return "messages"


def _comparable(message: StoredMessage) -> tuple[object, ...]:
    return message.role, message.content, message.tool_calls


Row = dict[str, Any]

_WHOLE_CONVERSATION_ONLY = (
    "view_compacted",
    "summaries",
    "rewritten_calls",
    "trimmed_replies",
    "masked",
)
"""Metadata of whole conversations that does not hold for their segments."""


@dataclass(slots=True)
class SegmentCounts:
    """Counts of segments for the manifest."""

    begun: Counter[str] = field(default_factory=Counter)
    """Segments by the reason why they begin."""
    conversations: Counter[str] = field(default_factory=Counter)
    """Segments by the name of their conversation."""
    turns: int = 0
    """Turns that are learnt, each in one row."""
    unknown_turns: int = 0
    """Turns whose view is not in the record."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Segments without a row, by reason."""


class SegmentRows:
    """Makes and counts the rows of segments."""

    def __init__(
        self,
        render: Callable[[Conversation], tuple[Conversation, Row]],
        *,
        masks: Masks | None,
        since_user: bool,
        by_turn: bool,
    ) -> None:
        """`render` may raise Rejected. The masked turns of rows are counted in `masks`.

        For `since_user` see `views_by_conversation`. With `by_turn` there is a row for each learnt
        turn, which ends with this turn.
        """
        self._render = render
        self._masks = masks
        self._since_user = since_user
        self._by_turn = by_turn
        self._counts = SegmentCounts()

    def render(self, whole: Conversation, record: Record) -> list[tuple[Conversation, Row]]:
        """Make the rows of a record's conversations, each after the conversation that it shows.

        `whole` is the conversation of the record. `record` is the record as it was stored: the one
        in `whole` can have its messages in another order. Ids are `ID#s2` for the second segment,
        with `by_turn` `ID#s2.t3` for its third turn. Raises Rejected if no segment keeps the rules
        of rows.
        """
        rows: list[tuple[Conversation, Row]] = []
        counts = self._counts
        number = 0
        why = Rejected(Reason.NO_REPLY, "the record does not say what its calls were shown")
        for part in views_by_conversation(record, since_user=self._since_user):
            counts.unknown_turns += part.unknown
            masked = (
                self._masks.masked_turns(part.conversation) if self._masks and part.views else {}
            )
            for segment in split_segments(part):
                number += 1
                try:
                    found = _conversation(whole, part, segment, number=number, masked=masked)
                    parts = _split_by_turn(found) if self._by_turn else (found,)
                    rows += [*map(self._render, parts)]
                except Rejected as rejected:
                    counts.rejected[rejected.reason.value] += 1
                    why = rejected if not rows else why
                    continue
                if self._masks is not None:
                    self._masks.count(turn.masked for turn in found.own_turns)
                counts.begun[segment.why] += 1
                counts.conversations[part.name] += 1
                counts.turns += len(segment.learnt)
        if not rows:
            raise why
        return rows

    def to_json(self) -> dict[str, Any]:
        """The counts, for the manifest."""
        counts = self._counts
        return {
            "begun": dict(sorted(counts.begun.items())),
            "conversations": dict(sorted(counts.conversations.items())),
            "turns": counts.turns,
            "unknown_turns": counts.unknown_turns,
            "rejected": dict(sorted(counts.rejected.items())),
        }


def _conversation(
    whole: Conversation,
    part: ConversationViews,
    segment: Segment,
    *,
    number: int,
    masked: Masked,
) -> Conversation:
    """Turn a segment into a conversation; `masked` are masked turns of `part`. Raises Rejected."""
    messages = (
        merge_messages(segment.messages)
        if is_agent_conversation(part.conversation)
        else segment.messages
    )
    positions = [n for n, m in enumerate(segment.messages) if m.role == "assistant"]
    learnt = [segment.learnt.get(position) for position in positions]
    flaws: list[Flaw] = []
    entries = read_entries(messages, segment.tools, flaws, as_sent=True)
    tokens = [None if turn is None else turn.reasoning_tokens for turn in learnt]
    entries = mark_hidden_reasoning(entries, messages, tokens)
    marked = [*_mark_context(entries, learnt, masked)]
    if not any(isinstance(entry, Turn) and entry.has_loss for entry in marked):
        raise Rejected(Reason.ALL_MASKED, "none of its turns carries loss")
    turns = [replace(turn, inherited=None) for turn in segment.learnt.values()]
    own = messages[first_reply(messages, turns=len(turns)) :]
    stats = tool_stats(own)
    record = replace(
        whole.record, id=f"{whole.record.id}#s{number}", messages=[*messages], turns=turns
    )
    metadata = {
        key: value for key, value in whole.metadata.items() if key not in _WHOLE_CONVERSATION_ONLY
    }
    reasons = {
        turn.turn: masked[turn.turn] for turn in segment.learnt.values() if turn.turn in masked
    }
    if reasons:
        metadata["masked"] = masks_to_json(reasons)
    described = {"of": part.name, "number": number, "why": segment.why}
    return replace(
        whole,
        system=joined_system_prompt(messages),
        entries=marked,
        tools=segment.tools,
        record=record,
        authored=AuthoredWork(record),
        metadata={
            **metadata,
            "finish_reason": turns[-1].finish_reason,
            "tool_stats": stats,
            "segment": described,
        },
        num_tool_calls=sum(tool["count"] for tool in stats),
        flaws=flaws,
        has_other_authors=True,
    )


def _mark_context(
    entries: Sequence[Entry], learnt: Sequence[StoredTurn | None], masked: Masked
) -> Iterator[Entry]:
    """The entries with masks; turns that are not learnt in this segment are marked as context."""
    next_reply = 0
    for entry in entries:
        if isinstance(entry, Turn):
            replies = learnt[next_reply : next_reply + entry.replies]
            turns = [turn for turn in replies if turn is not None]
            next_reply += entry.replies
            if turns:
                reasons = (name for turn in turns for name in masked.get(turn.turn, ()))
                entry = replace(entry, masked=tuple(dict.fromkeys(reasons)))
            else:
                entry = replace(entry, author="context")
        yield entry


def _split_by_turn(segment: Conversation) -> Iterator[Conversation]:
    """Cut a segment: for each learnt turn, yield the segment up to this turn."""
    for index, entry in enumerate(segment.entries):
        if not isinstance(entry, Turn) or not entry.has_loss:
            continue
        yield replace(
            segment,
            entries=[*segment.entries[:index], replace(entry, results=())],
            record=replace(segment.record, id=f"{segment.record.id}.t{entry.number}"),
            num_tool_calls=len(entry.calls),
            is_for_turn=True,
        )
