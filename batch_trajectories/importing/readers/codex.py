"""Session files of Codex: ~/.codex/sessions/**/rollout-*.jsonl.

A line has `type` and `payload`: facts of the session, items of the Responses API in the order in
which the model read and wrote them, and events. After a compaction the model reads another history;
the conversation before it becomes an inner conversation of the record. Session files have no tools.
If an error or a kill cut a reply off, the session and later requests have the items that had
arrived. A record of usage follows only a complete reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agent.models.parsing import get_object, text_or_none
from agent.models.usage import count_or_none
from agent.wires.agent_conversations import BEFORE_COMPACTION
from agent.wires.openai_responses import is_reply_item
from agent.wires.wires import WIRES
from batch_trajectories.basics.exact_json import objects_among
from batch_trajectories.importing.codex_fields import ASIDE, check_event, check_item, has_failed
from batch_trajectories.importing.conversation import (
    Dialogue,
    Reader,
    SourceConversation,
    SourceRow,
    Unreadable,
    read_messages,
    refuse_unknown,
    usage,
)

_API = "openai_responses"
_LINE_KEYS = frozenset({"type", "timestamp", "ordinal", "metadata", "record_type"})
_ABORTED_RESULT = "aborted"
"""The result that Codex 0.171 sends for a call without one."""


@dataclass(slots=True)
class _Reply:
    """The facts about a reply in a session."""

    facts: dict[str, Any]
    """The keys of a record's turn."""
    last_read_item: int | None
    """The number of the last item that the model had read; None if unknown."""
    items: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False


class _Item(NamedTuple):
    """An item of the Responses API in a session."""

    line: int
    """The number of the line with the item."""
    content: dict[str, Any]


@dataclass(slots=True)
class _Context:
    """The items of one context of the model, until a compaction."""

    items: list[_Item] = field(default_factory=list)
    replies: list[_Reply] = field(default_factory=list)
    has_ended: bool = True
    """Whether the last reply has ended, so that the next item of the model begins another."""
    failed: set[str] = field(default_factory=set)
    """The ids of calls whose results say that they failed."""

    def add(self, row: SourceRow, item: Mapping[str, Any], place: str, model: str | None) -> None:
        """Add an item that the session recorded. Raises `Unreadable`."""
        content = check_item(item, place, row.number)
        if content is None:
            return
        if has_failed(item):
            self.failed.add(str(content.get("call_id")))
        self.items.append(_Item(row.number, content))
        if not is_reply_item(content):
            self.has_ended = True
            return
        metadata = get_object(row.content, "metadata")
        last_read_item = count_or_none(metadata.get("sampled_through_sequence"))
        if self.has_ended or last_read_item != self.replies[-1].last_read_item:
            facts = {"model": model, "started_at": row.time()}
            self.replies.append(_Reply(facts, last_read_item))
            self.has_ended = False
        self.replies[-1].items.append(content)

    def mark_cut_replies(self) -> None:
        """Remove replies that were cut off within their reasoning, and mark other cut ones."""
        # A reply that directly follows a cut one continues it: later requests have both as one
        # message.
        whole: list[_Reply] = []
        for reply in self.replies:
            is_cut = reply.last_read_item is not None and "response_id" not in reply.facts
            if is_cut and all(item.get("type") == "reasoning" for item in reply.items):
                removed = {id(item) for item in reply.items}
                self.items = [item for item in self.items if id(item.content) not in removed]
                continue
            reply.is_cut = is_cut
            if whole and whole[-1].is_cut and self._are_adjacent(whole[-1], reply):
                del whole[-1]
                reply.is_cut = True
            whole.append(reply)
        self.replies = whole

    def answer_calls(self) -> None:
        """Add the results that Codex sends for calls that a kill ended.

        Calls at the end of the session may still run and get none.
        """
        answered = {
            item.content.get("call_id") for item in self.items if not is_reply_item(item.content)
        }
        items: list[_Item] = []
        aborted: list[_Item] = []
        for line, item in self.items:
            if not is_reply_item(item):
                items += aborted
                aborted = []
            items.append(_Item(line, item))
            id, kind = item.get("call_id"), str(item.get("type"))
            if is_reply_item(item) and id is not None and id not in answered:
                kind = "custom_tool_call" if kind == "custom_tool_call" else "function_call"
                output = {"type": f"{kind}_output", "call_id": id, "output": _ABORTED_RESULT}
                aborted.append(_Item(line, output))
        self.items = items

    def _are_adjacent(self, one: _Reply, other: _Reply) -> bool:
        """Whether nothing came between two replies."""
        ids = [id(item.content) for item in self.items]
        return ids.index(id(one.items[-1])) + 1 == ids.index(id(other.items[0]))

    def conversation(self, instructions: str | None) -> Dialogue:
        """Make the conversation of the context. Raises `Unreadable`."""
        wire = WIRES[_API]
        items = iter(self.items)
        _, pieces = wire.split_messages({"input": [item.content for item in self.items]})
        placed: list[tuple[int | None, str, Any]] = []
        if instructions:
            placed.append((None, "base_instructions", ("system", instructions)))
        for piece in pieces:
            line = next(items).line
            # A list holds the items of one reply.
            for _ in piece[1:] if isinstance(piece, list) else ():
                next(items)
            placed.append((line, "payload", piece))
        read = read_messages(_API, placed)
        messages = [message for messages in read for message in messages]
        for message in messages:
            if message["role"] == "tool" and message["tool_call_id"] in self.failed:
                message["is_error"] = True
        return Dialogue(
            messages,
            [reply.facts for reply in self.replies],
            cut=[n for n, reply in enumerate(self.replies, start=1) if reply.is_cut],
        )


def _read_session(path: Path, rows: Sequence[SourceRow]) -> SourceConversation:
    contexts = [_Context()]
    meta: Mapping[str, Any] = {}
    model: str | None = None
    total: Any = None
    thoughts = _find_event_thoughts(rows)
    for row in rows:
        kind, payload = _kind_and_payload(row)
        if thought := thoughts.get(row.number):
            payload = {**payload, "content": [{"type": "reasoning_text", "text": thought}]}
        match kind:
            case "session_meta":
                meta = meta or payload
            case "turn_context":
                model = payload.get("model") or model
            case "response_item":
                contexts[-1].add(row, payload, "payload", model)
            case "compacted":
                contexts.append(_begin_context(row, payload))
            case "token_usage_record":
                if not contexts[-1].replies:
                    continue
                facts = contexts[-1].replies[-1].facts
                facts["response_id"] = text_or_none(payload.get("response_id"))
                _add_usage(facts, get_object(payload, "usage"))
                contexts[-1].has_ended = True
            case "event_msg":
                check_event(payload, row.number)
                info = get_object(payload, "info")
                before, total = total, info.get("total_token_usage")
                is_new_call = total is None or total != before
                if contexts[-1].replies and is_new_call:
                    _add_usage(contexts[-1].replies[-1].facts, get_object(info, "last_token_usage"))
            case _ if kind not in ASIDE:
                try:
                    refuse_unknown(row.content, _LINE_KEYS, "", row.number, only_text=True)
                except Unreadable as error:
                    what = f"type: {kind!r} is unknown"
                    raise Unreadable(f"{what}, and the line has {error}", row.number) from None
    version = meta.get("cli_version")
    return SourceConversation(
        _join_contexts(
            contexts, get_object(meta, "base_instructions").get("text") or meta.get("instructions")
        ),
        _API,
        id=str(meta.get("id") or path.stem),
        columns={"cwd": str(meta["cwd"])} if "cwd" in meta else {},
        agent={"name": "codex", "version": None if version is None else str(version)},
    )


def _join_contexts(contexts: Sequence[_Context], instructions: str | None) -> Dialogue:
    """Make the conversation of the last context, with those before it inside.

    Raises `Unreadable`.
    """
    # Sessions of older versions have no records of usage, by which a whole reply is recognized.
    if any("response_id" in reply.facts for context in contexts for reply in context.replies):
        for context in contexts:
            context.mark_cut_replies()
    for context in contexts:
        context.answer_calls()
    dialogues = [context.conversation(instructions) for context in contexts if context.items]
    if not dialogues:
        return Dialogue([], [])
    *before, last = dialogues
    for n, dialogue in enumerate(before, start=1):
        dialogue.key = f"thread#{n}"
        dialogue.name = BEFORE_COMPACTION
    last.inner = before
    return last


def _kind_and_payload(row: SourceRow) -> tuple[str, Mapping[str, Any]]:
    """Return the type of a line, and its payload. Raises `Unreadable`."""
    if "payload" in row.content:
        payload = row.content["payload"]
        if not isinstance(payload, dict):
            raise Unreadable("payload: it must be an object", row.number)
        refuse_unknown(row.content, _LINE_KEYS | {"payload"}, "", row.number, only_text=True)
        return str(row.content.get("type")), payload
    # The first versions wrote items without anything around them, after a line of facts.
    if "type" in row.content or "role" in row.content:
        return "response_item", row.content
    kind = "session_meta" if "instructions" in row.content else str(row.content.get("record_type"))
    return kind, row.content


def _find_event_thoughts(rows: Sequence[SourceRow]) -> dict[int, str]:
    """Find the reasoning that only events have, by the line of the item that lacks it.

    Raises `Unreadable` if events and items do not correspond.
    """
    # Codex leaves reasoning that is no summary out of items, and writes the reasoning of open
    # models as events, in the same order.
    in_events: list[tuple[int, str]] = []
    in_items: list[str] = []
    lines_without: list[int] = []
    for row in rows:
        kind, payload = _kind_and_payload(row)
        match kind, payload:
            case "event_msg", {"type": "agent_reasoning_raw_content", "text": str(text)} if text:
                in_events.append((row.number, text))
            case "response_item", {"type": "reasoning"}:
                texts = [
                    text_or_none(one.get("text")) for one in objects_among(payload.get("content"))
                ]
                in_items += filter(None, texts)
                lines_without += [] if any(texts) else [row.number]
    missing = [(line, text) for line, text in in_events if text not in in_items]
    if missing and len(missing) != len(lines_without):
        raise Unreadable("payload.text: reasoning of an event that no item has", missing[0][0])
    return {line: text for line, (_, text) in zip(lines_without, missing, strict=False)}


def _begin_context(row: SourceRow, payload: Mapping[str, Any]) -> _Context:
    """Make the context with which the model continues. Raises `Unreadable`."""
    context = _Context()
    history, place = payload.get("replacement_history"), "payload.replacement_history"
    if not history:
        message = payload.get("message")
        if not isinstance(message, str) or not message:
            raise Unreadable("payload.message: it must be text", row.number)
        text = {"type": "input_text", "text": message}
        history = [{"type": "message", "role": "user", "content": [text]}]
    if not isinstance(history, list) or not all(isinstance(item, dict) for item in history):
        raise Unreadable(f"{place}: it must be a list of objects", row.number)
    for n, item in enumerate(history):
        context.add(row, item, f"{place}[{n}]", None)
    context.replies, context.has_ended = [], True  # these replies belong to the context before
    return context


def _add_usage(reply: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """Add the tokens of a reply, if an event has them and they are not known yet."""
    if counts and "usage" not in reply:
        reply["usage"] = usage(
            counts.get("input_tokens"),
            counts.get("output_tokens"),
            counts.get("cached_input_tokens"),
            written=counts.get("cache_write_input_tokens"),
            reasoned=counts.get("reasoning_output_tokens"),
        )


def _is_session(row: Mapping[str, Any]) -> bool:
    return row.get("type") == "session_meta" or {"id", "timestamp", "instructions"} <= row.keys()


READER = Reader(_is_session, session=_read_session)
