"""Session files of Codex: ~/.codex/sessions/**/rollout-*.jsonl.

A line has `type` and `payload`: facts of the session, items of the Responses API in the order in
which the model read and wrote them, and events. After a compaction the model reads another history;
what came before is a conversation inside the record. Session files have no tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.models.parsing import object_of
from agent.wires.wire_responses import is_assistants
from agent.wires.wires import WIRES
from batch_trajectories.basics.exact_json import objects_among
from batch_trajectories.runs.importing.conversation import (
    BEFORE_COMPACTION,
    Dialogue,
    Foreign,
    Reader,
    SourceRow,
    Unreadable,
    read_messages,
    usage,
)

_API = "openai_responses"
_ITEM_FIELDS = frozenset(
    {
        *("type", "id", "role", "content", "name", "arguments", "call_id", "output", "input"),
        *("summary", "encrypted_content", "status", "action", "namespace", "phase"),
    }
)
"""Of items; others are Codex's own notes on them."""


@dataclass(slots=True)
class _Part:
    """What one context of the model held."""

    items: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = True
    """The last reply: the next item of a model begins another."""

    def add(self, row: SourceRow, item: Mapping[str, Any], model: str | None) -> None:
        """Take an item that the session recorded."""
        plain = {
            key: value for key, value in item.items() if key in _ITEM_FIELDS and value is not None
        }
        self.items.append((row.number, plain))
        if not is_assistants(plain):
            self.has_ended = True
        elif self.has_ended:
            self.replies.append({"model": model, "started_at": row.time()})
            self.has_ended = False

    def conversation(self, instructions: str | None) -> Dialogue:
        """Raises `Unreadable`."""
        wire = WIRES[_API]
        lines = iter(self.items)
        _, pieces = wire.messages_of({"input": [item for _, item in self.items]})
        placed: list[tuple[int | None, str, Any]] = []
        if instructions:
            placed.append((None, "base_instructions", ("system", instructions)))
        for piece in pieces:
            line, _ = next(lines)
            for _ in piece[1:] if isinstance(piece, list) else ():
                next(lines)
            placed.append((line, "payload", piece))
        read = read_messages(_API, placed)
        return Dialogue([one for messages in read for one in messages], self.replies)


def _read(path: Path, rows: Sequence[SourceRow]) -> Foreign:
    parts = [_Part()]
    meta: Mapping[str, Any] = {}
    model: str | None = None
    for row in rows:
        # The first versions wrote items without anything around them.
        kind = row.content.get("type") if "payload" in row.content else "response_item"
        payload = row.content.get("payload", row.content)
        if not isinstance(payload, dict):
            raise Unreadable("payload: it must be an object", row.number)
        match kind:
            case "session_meta":
                meta = meta or payload
            case "turn_context":
                model = payload.get("model") or model
            case "response_item" if "type" in payload:
                parts[-1].add(row, payload, model)
            case "compacted":
                parts.append(_after_compaction(row, payload))
            case "token_usage_record" | "event_msg" if parts[-1].replies:
                _add_usage(parts[-1].replies[-1], payload)
    instructions = object_of(meta, "base_instructions").get("text") or meta.get("instructions")
    *before, last = [part.conversation(instructions) for part in parts if part.items] or [
        Dialogue([], [])
    ]
    for n, one in enumerate(before, start=1):
        one.key, one.name = f"thread#{n}", BEFORE_COMPACTION
    last.inner = before
    version = meta.get("cli_version")
    return Foreign(
        last,
        _API,
        id=str(meta.get("id") or path.stem),
        columns={"cwd": str(meta["cwd"])} if "cwd" in meta else {},
        agent={"name": "codex", "version": None if version is None else str(version)},
    )


def _after_compaction(row: SourceRow, payload: Mapping[str, Any]) -> _Part:
    part = _Part()
    history = objects_among(payload.get("replacement_history"))
    if not history:
        text = {"type": "input_text", "text": str(payload.get("message"))}
        history = [{"type": "message", "role": "user", "content": [text]}]
    for item in history:
        part.add(row, item, None)
    part.replies, part.has_ended = [], True  # they are those of the part before
    return part


def _add_usage(reply: dict[str, Any], payload: Mapping[str, Any]) -> None:
    """The tokens of the last reply, if an event tells them."""
    counts = object_of(payload, "usage") or object_of(
        object_of(payload, "info"), "last_token_usage"
    )
    if id := payload.get("response_id"):
        reply["response_id"] = str(id)
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


READER = Reader(_is_session, session=_read)
