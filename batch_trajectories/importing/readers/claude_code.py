"""Session files of Claude Code: ~/.claude/projects/*/SESSION.jsonl, with those of its subagents.

A line is a message, or a block of a reply whose lines share an id. Each line names the line before
it; lines that were rewound are not part of the conversation. After a compaction the conversation
begins again with a summary, and with the last messages before it if the session names them. The
messages before are a conversation inside the record, as are subagents. Session files have neither
the system prompt nor tools nor the reminders that Claude Code adds to requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.models.dialects.anthropic_messages import usage_in
from agent.models.endpoint_words import find_ending
from agent.models.parsing import get_object, text_or_none
from agent.models.usage import NOTHING_USED
from agent.wires.agent_conversations import BEFORE_COMPACTION, SUBAGENT
from batch_trajectories.basics import exact_json
from batch_trajectories.importing.claude_code_fields import (
    LOCAL_COMMAND,
    REPLY_PARTS,
    check_user_content,
    prepare_lines,
    read_queued,
)
from batch_trajectories.importing.conversation import (
    Dialogue,
    Reader,
    SourceConversation,
    SourceRow,
    Unreadable,
    check_parts,
    read_messages,
)

_API = "anthropic_messages"
_BOUNDARY = "compact_boundary"
_THOUGHTS = {"thinking", "redacted_thinking"}
_NO_MODEL = "<synthetic>"
"""The model name of messages that Claude Code wrote itself. Requests have those that are no errors:
the beginning of a block that a user interrupted, and a word in place of a reply."""
_INTERRUPTED = "[Request interrupted by user"
"""The beginning of the user's message that Claude Code writes after an interruption."""


def _read(path: Path, rows: Sequence[SourceRow]) -> SourceConversation:
    rows = prepare_lines(rows)
    problems: list[Unreadable] = []
    main = [row for row in rows if not row.content.get("isSidechain")]
    if not any("message" in row.content for row in main):
        main = list(rows)  # the file of a subagent, given by itself
    *before, last = [_conversation(part, _find_kept(part, main)) for part in _parts(main)]
    aside = [row for row in rows if row.content.get("isSidechain")] if main != rows else []
    sides = [_conversation(part, _Kept()) for part in _group_by_root(aside)]
    sides += _subagents(path, problems)
    last.inner = [
        *_set_names(BEFORE_COMPACTION, before),
        *_set_names(SUBAGENT, [side for side in sides if side.messages]),
    ]
    for n, inner in enumerate(last.inner, start=1):
        inner.key = f"thread#{n}"
    heads = [row.content for row in main]
    directory = next((str(one["cwd"]) for one in heads if "cwd" in one), None)
    version = next((str(one["version"]) for one in heads if "version" in one), None)
    id = next((str(one["sessionId"]) for one in heads if "sessionId" in one), path.stem)
    return SourceConversation(
        last,
        _API,
        id=id,
        columns={} if directory is None else {"cwd": directory},
        agent={"name": "claude-code", "version": version},
        problems=problems,
    )


def _set_names(name: str, conversations: Sequence[Dialogue]) -> Iterator[Dialogue]:
    for one in conversations:
        one.name = name
        yield one


def _parts(rows: Sequence[SourceRow]) -> list[list[SourceRow]]:
    """Divide the messages at the compactions of the conversation."""
    parts: list[list[SourceRow]] = [[]]
    for row in rows:
        if row.content.get("subtype") == _BOUNDARY and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    return [part for part in parts if _has_messages(part)] or [[]]


class _Kept(NamedTuple):
    """Messages that a compaction kept beside its summary."""

    after: str | None = None
    """The id of the line that these lines follow; None without any."""
    rows: Sequence[SourceRow] = ()


def _find_kept(part: Sequence[SourceRow], rows: Sequence[SourceRow]) -> _Kept:
    """Find the messages at the start of a part that a compaction kept from the part before."""
    for row in part:
        facts = get_object(row.content, "compactMetadata")
        named = get_object(facts, "preservedMessages")
        ids = named.get("allUuids") or named.get("uuids")
        if isinstance(ids, list):
            led = {text_or_none(id) for id in ids} - {None}
            return _Kept(text_or_none(named.get("anchorUuid")), [*_add_results(rows, led)])
    return _Kept()


def _has_messages(rows: Sequence[SourceRow]) -> bool:
    return any(
        isinstance(row.content.get("message"), dict) or read_queued(row.content) for row in rows
    )


def _group_by_root(rows: Sequence[SourceRow]) -> list[list[SourceRow]]:
    """Group the lines of subagents in a session's file by the first line of each."""
    roots: dict[str, list[SourceRow]] = {}
    root_of: dict[str, str] = {}
    for row in rows:
        own, parent = str(row.content.get("uuid")), str(row.content.get("parentUuid"))
        root_of[own] = root = root_of.get(parent, own)
        roots.setdefault(root, []).append(row)
    return list(roots.values())


def _subagents(path: Path, problems: list[Unreadable]) -> Iterator[Dialogue]:
    """Read the conversation of each subagent that has a file of its own.

    A subagent with an unreadable line is left out and added to `problems`.
    """
    beside = path.parent.glob("agent-*.jsonl") if not path.stem.startswith("agent-") else ()
    for file in sorted([*path.with_suffix("").glob("subagents/*.jsonl"), *beside]):
        try:
            is_beside = file.parent == path.parent
            if is_beside and _find_session(_read_lines(file)) != path.stem:
                continue
            yield _conversation(prepare_lines([*_read_lines(file)]), _Kept())
        except Unreadable as error:
            place = "" if error.line is None else f"{file.name}:{error.line}: "
            problems.append(Unreadable(f"{place}{error}; the whole subagent is left out"))
        except OSError as error:
            problems.append(Unreadable(f"{file.name}: {error.strerror}"))


def _read_lines(file: Path) -> Iterator[SourceRow]:
    """Read the objects of a file. Raises `Unreadable` for a line that is none, and `OSError`."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = exact_json.loads_with_valid_text(line)
            except exact_json.JSONDecodeError as error:
                raise Unreadable(f"{file.name}:{number}: not JSON: {error}") from error
            if not isinstance(content, dict):
                raise Unreadable(f"{file.name}:{number}: not an object")
            yield SourceRow(number, content)


def _find_session(rows: Iterable[SourceRow]) -> str | None:
    """Return the session that the first line with one names; None without one."""
    ids = (text_or_none(row.content.get("sessionId")) for row in rows)
    return next((id for id in ids if id is not None), None)


def _is_part(path: Path, first: Sequence[SourceRow]) -> bool:
    """Whether a file is that of a subagent whose session has a file, too."""
    if path.parent.name == "subagents":
        session = path.parent.parent
    elif path.stem.startswith("agent-"):
        session = path.with_name(_find_session(first) or "")
    else:
        return False
    return session.with_name(f"{session.name}.jsonl").exists()


def _conversation(rows: Sequence[SourceRow], kept: _Kept) -> Dialogue:
    items: list[tuple[int, str, dict[str, Any]]] = []
    replies: dict[str, dict[str, Any]] = {}
    blocks: dict[str, list[Any]] = {}
    for row in _insert_kept(_drop_rewound(rows), kept):
        message, kind = row.content.get("message"), row.content.get("type")
        if queued := _user_text_in(row.content):
            items.append((row.number, "its message", {"role": "user", "content": queued}))
            continue
        if not isinstance(message, dict):
            if kind in ("user", "assistant"):
                raise Unreadable("message: it must be an object", row.number)
            continue
        if row.content.get("isVirtual"):
            continue  # only people see it
        if kind == "user":
            is_shown = row.content.get("isCompactSummary") or not row.content.get(
                "isVisibleInTranscriptOnly"
            )
            if is_shown:
                content = message.get("content")
                check_user_content(content, row.number)
                if _first_text(content).startswith(_INTERRUPTED):
                    _mark_cut(items, blocks, replies, is_retried=False)
                item = {"role": "user", "content": content}
                items.append((row.number, "message", item))
        elif kind == "assistant":
            id = _key(row.content)
            is_own = _is_own(row.content)
            if id not in blocks:
                _mark_cut(items, blocks, replies, is_retried=not is_own)
            content = message.get("content")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if not isinstance(content, list):
                raise Unreadable("message.content: it must be a list of objects", row.number)
            check_parts(content, REPLY_PARTS, "message.content", row.number)
            if is_own and (row.content.get("isApiErrorMessage") or not _first_text(content)):
                continue
            if id not in blocks:
                blocks[id] = []
                replies[id] = {"started_at": row.time(), "is_cut": is_own}
                item = {"role": "assistant", "content": blocks[id]}
                items.append((row.number, "message", item))
            blocks[id] += content
            if is_own:
                replies[id]["usage"] = NOTHING_USED  # no call was made
            else:
                replies[id] |= {"response_id": message.get("id"), **_read_facts(message)}
    read = read_messages(_API, items)
    given = {_key(row.content) for row in kept.rows}
    told = [reply for id, reply in replies.items() if id not in given]
    cut = [n for n, reply in enumerate(told, start=1) if reply.pop("is_cut")]
    return Dialogue([one for messages in read for one in messages], told, cut=cut)


def _user_text_in(line: Mapping[str, Any]) -> Any:
    """Return the text of a line that is no message but is sent as one of the user; else None."""
    if line.get("type") == "system" and line.get("subtype") == LOCAL_COMMAND:
        return line["content"]
    return read_queued(line)


def _insert_kept(rows: Iterable[SourceRow], kept: _Kept) -> Iterator[SourceRow]:
    for row in rows:
        yield row
        if kept.after is not None and row.content.get("uuid") == kept.after:
            yield from kept.rows


def _mark_cut(
    items: list[tuple[int, str, dict[str, Any]]],
    blocks: dict[str, list[Any]],
    replies: dict[str, dict[str, Any]],
    *,
    is_retried: bool,
) -> None:
    """Remove the last reply if it was cut off and is in no later request, or mark it as cut."""
    # Such a reply is directly followed by another one, or by an error of Claude Code. Later
    # requests have its text if no other reply took its place.
    last = items[-1][2].get("content") if items else None
    cut = next((id for id, one in blocks.items() if one is last), None)
    if cut is None:
        return
    kinds = {block.get("type") for block in blocks[cut]}
    if kinds <= _THOUGHTS or (is_retried and "tool_use" not in kinds):
        del items[-1], blocks[cut], replies[cut]
    else:
        replies[cut]["is_cut"] = True


def _is_own(line: Mapping[str, Any]) -> bool:
    """Whether Claude Code wrote the message."""
    return bool(line.get("isApiErrorMessage")) or line["message"].get("model") == _NO_MODEL


def _first_text(content: Any) -> str:
    """Return the first text of a message; "" without one."""
    if isinstance(content, str):
        return content
    texts = (text_or_none(block.get("text")) for block in exact_json.objects_among(content))
    return next((text for text in texts if text), "")


def _read_facts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts that the last line of a reply has about the whole reply."""
    facts: dict[str, Any] = {"model": message.get("model"), "usage": usage_in(message)}
    ending = find_ending(message.get("stop_reason"))
    if ending is not None and ending != "cut":
        facts["finish_reason"] = ending
    return facts


def _drop_rewound(rows: Sequence[SourceRow]) -> Iterator[SourceRow]:
    """Return the lines that lead to the last one, with all of their replies and results.

    If a line names one that is missing, the line above it is used.
    """
    known = {text_or_none(row.content.get("uuid")) for row in rows} - {None}
    led: set[str | None] = set()
    parent: str | None = None
    for row in reversed(rows):
        own = text_or_none(row.content.get("uuid"))
        if own is not None and (not led or own == parent or parent not in known):
            led.add(own)
            parent = text_or_none(row.content.get("parentUuid"))
            if parent is None:
                break
    return _add_results(rows, led)


def _add_results(rows: Sequence[SourceRow], led: Container[str | None]) -> Iterator[SourceRow]:
    """Yield the lines with these ids, and the other lines of their replies and results."""
    is_led = [text_or_none(row.content.get("uuid")) in led for row in rows]
    replies = {_reply_id(row.content) for row, on in zip(rows, is_led, strict=True) if on} - {None}
    calls = {
        text_or_none(block.get("id"))
        for row in rows
        if _reply_id(row.content) in replies
        for block in _blocks(row.content)
    } - {None}
    is_taken = False
    for row, on in zip(rows, is_led, strict=True):
        if "uuid" not in row.content and read_queued(row.content):
            if is_taken:  # one that only the queue has follows the line before it
                yield row
            continue
        results = (text_or_none(block.get("tool_use_id")) for block in _blocks(row.content))
        is_here = on or _reply_id(row.content) in replies or any(id in calls for id in results)
        if is_here:
            yield row
        if "uuid" in row.content:
            is_taken = is_here


def _key(line: Mapping[str, Any]) -> str:
    """Return a key that all lines of a reply share."""
    return str(get_object(line, "message").get("id") or line.get("uuid"))


def _reply_id(line: Mapping[str, Any]) -> str | None:
    is_reply = line.get("type") == "assistant"
    return text_or_none(get_object(line, "message").get("id")) if is_reply else None


def _blocks(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    return exact_json.objects_among(get_object(line, "message").get("content"))


def _is_session(row: Mapping[str, Any]) -> bool:
    return "sessionId" in row and "type" in row


READER = Reader(_is_session, session=_read, is_part=_is_part)
