"""Session files of Claude Code: ~/.claude/projects/*/SESSION.jsonl, with those of its subagents.

A line is a message, or a block of a reply whose lines share an id. Lines name the line before them:
what was rewound is not part of the conversation. After a compaction the conversation begins again
with a summary; what came before is a conversation inside the record, as are subagents. Session
files have neither the system prompt nor tools nor the reminders that Claude Code adds to requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.models.dialects.anthropic_messages import FINISH_REASONS, usage_in
from agent.models.parsing import object_of, text_or_none
from batch_trajectories.basics import exact_json
from batch_trajectories.runs.importing.conversation import (
    BEFORE_COMPACTION,
    SUBAGENT,
    Dialogue,
    Foreign,
    Reader,
    SourceRow,
    Unreadable,
    read_messages,
)

_API = "anthropic_messages"
_BOUNDARY = "compact_boundary"
_THOUGHTS = {"thinking", "redacted_thinking"}
_NO_MODEL = "<synthetic>"
"""The model of messages that Claude Code wrote itself, such as errors of the API."""


def _read(path: Path, rows: Sequence[SourceRow]) -> Foreign:
    problems: list[Unreadable] = []
    main = [row for row in rows if not row.content.get("isSidechain")]
    if not any("message" in row.content for row in main):
        main = list(rows)  # the file of a subagent, given by itself
    *before, last = [_conversation(part) for part in _parts(main)]
    aside = [row for row in rows if row.content.get("isSidechain")] if main != rows else []
    sides = [_conversation(part) for part in (*_by_root(aside), *_files_of(path, problems))]
    last.inner = [
        *_named(BEFORE_COMPACTION, before),
        *_named(SUBAGENT, [side for side in sides if side.messages]),
    ]
    for n, inner in enumerate(last.inner, start=1):
        inner.key = f"thread#{n}"
    cut = [n for n, reply in enumerate(last.replies, start=1) if "is_cut" in reply]
    heads = [row.content for row in main]
    directory = next((str(one["cwd"]) for one in heads if "cwd" in one), None)
    version = next((str(one["version"]) for one in heads if "version" in one), None)
    id = next((str(one["sessionId"]) for one in heads if "sessionId" in one), path.stem)
    return Foreign(
        last,
        _API,
        id=id,
        columns={} if directory is None else {"cwd": directory},
        imported={"no_loss": cut} if cut else {},
        agent={"name": "claude-code", "version": version},
        problems=problems,
    )


def _named(name: str, conversations: Sequence[Dialogue]) -> Iterator[Dialogue]:
    for one in conversations:
        one.name = name
        yield one


def _parts(rows: Sequence[SourceRow]) -> list[list[SourceRow]]:
    """The messages, divided where the conversation was compacted."""
    parts: list[list[SourceRow]] = [[]]
    for row in rows:
        if row.content.get("subtype") == _BOUNDARY and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    return [part for part in parts if _has_messages(part)] or [[]]


def _has_messages(rows: Sequence[SourceRow]) -> bool:
    return any(isinstance(row.content.get("message"), dict) for row in rows)


def _by_root(rows: Sequence[SourceRow]) -> list[list[SourceRow]]:
    """Lines of subagents in the file of their session, by the line that each began with."""
    roots: dict[str, list[SourceRow]] = {}
    root_of: dict[str, str] = {}
    for row in rows:
        own, parent = str(row.content.get("uuid")), str(row.content.get("parentUuid"))
        root_of[own] = root = root_of.get(parent, own)
        roots.setdefault(root, []).append(row)
    return list(roots.values())


def _files_of(path: Path, problems: list[Unreadable]) -> Iterator[list[SourceRow]]:
    """The lines of each subagent that has a file of its own."""
    beside = path.parent.glob("agent-*.jsonl") if not path.stem.startswith("agent-") else ()
    for file in sorted([*path.with_suffix("").glob("subagents/*.jsonl"), *beside]):
        try:
            if file.parent == path.parent and _session_of(_lines_of(file, [])) != path.stem:
                continue
            yield [*_lines_of(file, problems)]
        except OSError as error:
            problems.append(Unreadable(f"{file.name}: {error.strerror}"))


def _lines_of(file: Path, problems: list[Unreadable]) -> Iterator[SourceRow]:
    """The objects of a file; `problems` gets the lines that are not JSON. Raises `OSError`."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = exact_json.loads(line)
            except exact_json.JSONDecodeError as error:
                problems.append(Unreadable(f"{file.name}:{number}: not JSON: {error}"))
                continue
            if isinstance(content, dict):
                yield SourceRow(number, content)


def _session_of(rows: Iterable[SourceRow]) -> str | None:
    """The session that the first line with one names."""
    ids = (text_or_none(row.content.get("sessionId")) for row in rows)
    return next((id for id in ids if id is not None), None)


def _is_part(path: Path, first: Sequence[SourceRow]) -> bool:
    """Whether a file is that of a subagent whose session is there, too."""
    if path.parent.name == "subagents":
        session = path.parent.parent
    elif path.stem.startswith("agent-"):
        session = path.with_name(_session_of(first) or "")
    else:
        return False
    return session.with_name(f"{session.name}.jsonl").exists()


def _conversation(rows: Sequence[SourceRow]) -> Dialogue:
    items: list[tuple[int, str, dict[str, Any]]] = []
    replies: dict[str, dict[str, Any]] = {}
    blocks: dict[str, list[Any]] = {}
    for row in _not_rewound(rows):
        message = row.content.get("message")
        if not isinstance(message, dict):
            continue
        if row.content.get("type") == "user":
            is_shown = row.content.get("isCompactSummary") or not row.content.get(
                "isVisibleInTranscriptOnly"
            )
            if is_shown:
                item = {"role": "user", "content": message.get("content")}
                items.append((row.number, "message", item))
        elif row.content.get("type") == "assistant":
            id = str(message.get("id") or row.content.get("uuid"))
            if id not in blocks:
                _mind_cut(items, blocks, replies, is_retried=not _is_own(row.content))
            if _is_own(row.content):
                continue
            content = message.get("content")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if not isinstance(content, list):
                raise Unreadable("message.content: it must be a list of objects", row.number)
            if id not in blocks:
                blocks[id] = []
                replies[id] = {"response_id": message.get("id"), "started_at": row.time()}
                item = {"role": "assistant", "content": blocks[id]}
                items.append((row.number, "message", item))
            blocks[id] += content
            replies[id] |= _facts(message)
    read = read_messages(_API, items)
    return Dialogue([one for messages in read for one in messages], [*replies.values()])


def _mind_cut(
    items: list[tuple[int, str, dict[str, Any]]],
    blocks: dict[str, list[Any]],
    replies: dict[str, dict[str, Any]],
    *,
    is_retried: bool,
) -> None:
    """Remove a last reply that was cut off and is in no later request, or note that it was cut.

    Nothing was said between it and another reply, or an error of Claude Code. Later requests have
    its text where no other reply took its place.
    """
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
    """Whether no model wrote the message."""
    return bool(line.get("isApiErrorMessage")) or line["message"].get("model") == _NO_MODEL


def _facts(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the last line of a reply says of all of it."""
    facts: dict[str, Any] = {"model": message.get("model"), "usage": usage_in(message)}
    if reason := FINISH_REASONS.get(str(message.get("stop_reason"))):
        facts["finish_reason"] = reason
    return facts


def _not_rewound(rows: Sequence[SourceRow]) -> Iterator[SourceRow]:
    """The lines that lead to the last one, with all of their replies and results.

    Where a line that another one names is missing, the one before that stands for it.
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
    is_led = [text_or_none(row.content.get("uuid")) in led for row in rows]
    replies = {_reply_id(row.content) for row, on in zip(rows, is_led, strict=True) if on} - {None}
    calls = {
        text_or_none(block.get("id"))
        for row in rows
        if _reply_id(row.content) in replies
        for block in _blocks(row.content)
    } - {None}
    for row, on in zip(rows, is_led, strict=True):
        results = (text_or_none(block.get("tool_use_id")) for block in _blocks(row.content))
        if on or _reply_id(row.content) in replies or any(id in calls for id in results):
            yield row


def _reply_id(line: Mapping[str, Any]) -> str | None:
    is_reply = line.get("type") == "assistant"
    return text_or_none(object_of(line, "message").get("id")) if is_reply else None


def _blocks(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    return exact_json.objects_among(object_of(line, "message").get("content"))


def _is_session(row: Mapping[str, Any]) -> bool:
    return "sessionId" in row and "type" in row


READER = Reader(_is_session, session=_read, is_part=_is_part)
