"""Sessions for the viewer of agent traces on the Hugging Face Hub.

Each conversation has a file of its own, as the viewer shows a file as one session. The files are in
the Session Trace Simple Format (STS-Format): the first line describes the session, and each other
line is a message of the system, the user, the model or a tool. The viewer shows a result beside the
call whose id it has.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Any

from batch_trajectories.basics.exact_json import stringify_large_integers
from batch_trajectories.export.conversation.metadata import row_metadata
from batch_trajectories.export.conversation.row_json import dumps_row, write_json
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.tolerance import (
    COMMON_FLAWS,
    NON_TEXT_FLAWS,
    TAG_FLAWS,
)
from batch_trajectories.export.conversation.turns import Conversation, Turn, UserMessage
from batch_trajectories.export.conversation.validity import Reason, Rejection
from batch_trajectories.export.rows.files import Candidate, CandidateFiles, CustomFormat, Export
from batch_trajectories.export.rows.row_files import HashingFile, Written

_HARNESS = "batch-trajectories"
"""The harness of conversations that are not those of an agent program."""

_NAME_CHARS = 80


def render_session(conversation: Conversation, style: Style) -> list[dict[str, Any]]:
    """Render the lines of a session; raises Rejected."""
    style.tolerance.refuse(conversation.flaws)
    record = conversation.record
    header = {
        "type": "session",
        "harness": (record.agent.name if record.agent is not None else None) or _HARNESS,
        "id": record.id,
        "name": _title(conversation) or record.id,
        "metadata": stringify_large_integers(
            {"completed": conversation.completed, **row_metadata(conversation)}
        ),
    }
    messages = _messages(conversation, has_system=style.has_system(by_default=True))
    return [header, *({"type": "message", "message": message} for message in messages)]


def _title(conversation: Conversation) -> str:
    """The beginning of the first message of the user, in one line."""
    first = next((e.text for e in conversation.entries if isinstance(e, UserMessage)), "")
    text = " ".join(first.split())
    return text if len(text) <= _NAME_CHARS else f"{text[: _NAME_CHARS - 1]}…"


def _messages(conversation: Conversation, *, has_system: bool) -> Iterator[dict[str, Any]]:
    if conversation.system and has_system:
        yield {"role": "system", "content": conversation.system}
    replies = conversation.replies_by_turn
    record = conversation.record
    for entry in conversation.entries:
        if isinstance(entry, UserMessage):
            yield {"role": "user", "content": entry.text}
            continue
        message: dict[str, Any] = {"role": "assistant", "content": entry.text}
        if entry.reasoning:
            message["reasoningContent"] = entry.reasoning
        if entry.calls:
            message["toolCalls"] = _calls(entry)
        if own := replies.get(entry.number):
            message["timestamp"] = round(own[0].started_at * 1000)
            if model := own[-1].model or record.model_returned or record.model:
                message["model"] = model
        yield message
        for result in entry.results:
            yield {"role": "tool", "toolCallId": result.id, "content": result.content}


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": write_json(call.value)}}
        for call in turn.calls
    ]


class _SessionFiles(CandidateFiles):
    """Writes a file for each conversation; the rows that it counts are lines."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self._style = export.format.limit(export.recipe.style).with_calls("keep")
        self._files: list[dict[str, Any]] = []

    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        style = self._style
        lines = [
            dumps_row(line) for line in render_session(apply_style(candidate.parsed, style), style)
        ]
        # Ids can hold any character, and differ in case only.
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", candidate.record.id)[:_NAME_CHARS]
        path = f"{self.export.format.name}/{split}/{len(self._files):06}-{name}.jsonl"
        file = HashingFile(self.export.target.open(path))
        content = b"".join(lines)
        file.write(content)
        written = Written(path, rows=len(lines), size=file.size, sha256=file.finish())
        self._files.append({"split": split, **written.to_json()})
        self._rows += len(lines)
        self._used += 1
        self._lengths.add(len(content))
        return None

    def finish(self) -> dict[str, Any]:
        return {**super().finish(), "files": self._files}


FORMAT = CustomFormat(
    name="traces",
    card="A session per file, for the hub's viewer of agent traces; not meant for `load_dataset`.",
    holds=COMMON_FLAWS | TAG_FLAWS,
    # Nothing tokenizes sessions; see `atif`.
    accepts=(COMMON_FLAWS | TAG_FLAWS)
    - NON_TEXT_FLAWS
    - {Reason.LEAKED_CALL, Reason.PROVIDER_CALL},
    files=_SessionFiles,
)
