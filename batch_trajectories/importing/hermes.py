"""Imports a batch run of hermes-agent, so that a run only does the missing prompts.

Its directory has `batch_<n>.jsonl` (a trajectory per line), `trajectories.jsonl` (all of them, at
the end of the run) and `checkpoint.json` (the numbers of the prompts that count as done). Rows are
matched by prompt, because numbers shift when a dataset is edited.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from agent.messages.message import (
    Event,
    Message,
    NoteEvent,
    ReplyEvent,
    ResultEvent,
    ToolCall,
    split_inline_reasoning,
)
from agent.models.parsing import get_object, text_or_none
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import track_progress
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import first_few
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.engine.record import as_stored
from batch_trajectories.engine.run_dir import RunDir
from batch_trajectories.importing.tagged_text import reads_as_failure
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.tasks import SCHEMA_VERSION, Task

_BATCH = re.compile(r"batch_(\d+)\.jsonl")
_SHOWN = 20


@dataclass(slots=True)
class Imported:
    """The result of an import."""

    directory: Path
    completed: int = 0
    ended_early: int = 0
    there: int = 0
    """The number of tasks that had a record already."""
    repeated: list[str] = field(default_factory=list)
    """Rows (file:line) whose prompt another row has already answered."""
    unknown: list[str] = field(default_factory=list)
    """Rows whose prompt is not in the dataset."""
    unreadable: list[str] = field(default_factory=list)
    """Lines that are not trajectories, with the reasons."""
    lost: list[int] = field(default_factory=list)
    """Prompts that count as done but have no trajectory."""

    def describe(self) -> str:
        """Write a line per kind of row, with its first rows."""
        counted = [
            (self.completed, "completed", [""]),
            (self.ended_early, "ended early", [""]),
            (self.there, "already in this run", [""]),
            (len(self.repeated), "repeated, left out", self.repeated),
            (len(self.unknown), "of prompts that are not in the dataset, left out", self.unknown),
            (len(self.unreadable), "unreadable; their prompts run again", self.unreadable),
            (
                len(self.lost),
                "counted as done, but without a trajectory (discarded or lost); they run again: "
                "prompts",
                list(map(str, self.lost)),
            ),
        ]
        lines = [f"{self.directory}: rows of that run"]
        for count, kind, places in counted:
            if count:
                lines.append(f"{count:>9,} {kind} {first_few(places, _SHOWN)}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Row:
    place: str
    number: int | None
    """The `prompt_index` of hermes-agent."""
    fields: dict[str, Any]
    conversation: ImportedConversation


def import_hermes(directory: Path, scan: Scan, run_dir: RunDir) -> Imported:
    """Write a record for each task that has a trajectory in `directory`.

    Safe to repeat: it skips tasks that have a record. Raises `ConfigError` if `directory` has no
    trajectories, `StorageError` if records cannot be written.
    """
    files = _files(directory)
    imported = Imported(directory)
    rows = list(_read_rows(files, imported))
    by_prompt: defaultdict[str, list[tuple[int, Task]]] = defaultdict(list)
    first_samples = tasks(scan, range(0, scan.tasks, scan.num_samples))
    for position, task in enumerate(first_samples):
        by_prompt[_read_prompt(task, scan)].append((position, task))
    records = RecordFile(run_dir.path, run_dir.quarantine)
    there = records.take_index()
    try:
        answered: set[int] = set()
        ordered = sorted(rows, key=lambda row: row.fields.get("completed") is not True)
        for row in track_progress(ordered, "import", total=len(ordered), unit="rows"):
            if row.number is not None and row.number in answered:
                imported.repeated.append(row.place)
                continue
            taken = _take_task(by_prompt, row)
            if taken is None:
                known = row.conversation.prompt in by_prompt
                (imported.repeated if known else imported.unknown).append(row.place)
                continue
            if row.number is not None:
                answered.add(row.number)
            if taken.key in there:
                imported.there += 1
                continue
            record = as_stored(_make_record(taken, row, run_dir))
            records.add(record)
            if record.status == "completed":
                imported.completed += 1
            else:
                imported.ended_early += 1
        records.sync()
    finally:
        records.close()
    done = {row.number for row in rows if row.number is not None}
    imported.lost = sorted(_read_checkpoint(directory) - done)
    return imported


def _files(directory: Path) -> list[Path]:
    """Find the batch files in their order, then the merged file, which repeats their rows."""
    paths = sorted(
        (path for path in directory.glob("batch_*.jsonl") if _BATCH.fullmatch(path.name)),
        key=lambda path: int(path.stem.split("_")[1]),
    )
    merged = directory / "trajectories.jsonl"
    files = [*paths, merged] if merged.exists() else paths
    if not files:
        raise ConfigError(
            f"{directory}: not a run of hermes-agent (no batch_N.jsonl and no trajectories.jsonl)"
        )
    return files


def _read_rows(files: list[Path], imported: Imported) -> Iterator[_Row]:
    seen: set[bytes] = set()
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            if not line.strip() or line in seen:
                continue  # the merged file repeats the rows of the batch files
            seen.add(line)
            place = f"{file.name}:{number}"
            try:
                fields = exact_json.loads(line)
                metadata = fields.get("metadata") or {}
                conversation = read_conversation(
                    fields["conversations"],
                    model=text_or_none(metadata.get("model")),
                    at=_read_time(metadata),
                )
                index = fields.get("prompt_index")
                yield _Row(place, index if isinstance(index, int) else None, fields, conversation)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                imported.unreadable.append(f"{place} ({type(error).__name__}: {error})")


def _read_time(metadata: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(metadata["timestamp"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


def _read_prompt(task: Task, scan: Scan) -> str:
    opening = scan.rules.read(task.columns).opening
    return next(message["content"] for message in opening if message["role"] == "user")


def _take_task(by_prompt: dict[str, list[tuple[int, Task]]], row: _Row) -> Task | None:
    """Take the task that a row answers: of equal prompts the one with its number, else the first.

    Returns None if no task is left.
    """
    waiting = by_prompt.get(row.conversation.prompt)
    if not waiting:
        return None
    chosen = next((n for n, (position, _) in enumerate(waiting) if position == row.number), 0)
    return waiting.pop(chosen)[1]


def _read_checkpoint(directory: Path) -> set[int]:
    try:
        numbers = orjson.loads((directory / "checkpoint.json").read_bytes())["completed_prompts"]
        return {number for number in numbers if isinstance(number, int)}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return set()


def _make_record(task: Task, row: _Row, run_dir: RunDir) -> dict[str, Any]:
    fields, conversation = row.fields, row.conversation
    if fields.get("completed") is True and conversation.is_answered:
        status = "completed"
    else:
        status = "errors" if fields.get("partial") else "max_turns"
    content = conversation.trajectory.to_record()
    api_calls = fields.get("api_calls")
    return {
        "id": task.id,
        "status": status,
        "status_reason": f"imported from hermes-agent, {row.place}",
        "error": None,
        "prompt_id": task.prompt_id,
        "sample": task.sample,
        "input_digest": task.input_digest,
        "attempt": 1,
        "row": task.columns,
        **content,
        "api_calls": api_calls if type(api_calls) is int else content["api_calls"],
        "tools": conversation.tools,
        "options": {},
        "view_compacted": False,
        "model": content["model_returned"],
        "api": "hermes-agent",
        "endpoint": None,
        "toolsets": list(map(str, fields.get("toolsets_used") or ())),
        "sandbox": None,
        "seed": None,
        "config_digest": run_dir.digest,
        "versions": {"hermes-agent": "unknown"},
        "finished_at": conversation.trajectory.replies[-1]["started_at"],
        "schema_version": SCHEMA_VERSION,
    }


_TOOLS = re.compile(r"<tools>\s*(\[.*\])\s*</tools>", re.DOTALL)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """The conversation of a row."""

    prompt: str
    trajectory: Trajectory
    tools: list[dict[str, Any]]
    """The schemas of the tools on offer."""

    @property
    def is_answered(self) -> bool:
        """Whether the conversation ends with a message of the model without tool calls."""
        last = self.trajectory.messages[-1]
        return last["role"] == "assistant" and not last.get("tool_calls")


def read_conversation(
    entries: Sequence[Mapping[str, Any]], *, model: str | None, at: float
) -> ImportedConversation:
    """Read the `conversations` of a row that was saved `at` this time (epoch seconds).

    Raises `ValueError` with the reason if the row is not in this format.
    """
    # The format is lossy: the prompt's own system message, times and tokens are unknown, and a
    # failed call is guessed from the text of its result, as in hermes-agent.
    kinds = [entry.get("from") for entry in entries if isinstance(entry, dict)]
    if kinds[:2] != ["system", "human"] or len(kinds) != len(entries):
        raise ValueError(f"it starts with {kinds[:2]}, expected system, human")
    values = [_require_text(entry.get("value"), entry["from"]) for entry in entries]
    prompt = values[1]
    events: list[Event] = []
    ids: set[str] = set()
    turn = 0
    calls: list[ToolCall] = []
    for kind, value in zip(kinds[2:], values[2:], strict=True):
        if kind == "gpt":
            turn += 1
            reply = _read_reply(value, turn, model, at)
            calls = reply["message"].get("tool_calls", [])
            events.append(reply)
        elif kind == "tool":
            events += _read_results(value, calls, turn, at, ids)
        elif kind == "human":
            events.append(NoteEvent(kind="note", turn=turn, reason="human", text=value, at=at))
        else:
            raise ValueError(f"an entry is from {kind!r}")
    if not turn:
        raise ValueError("it has no message of the model")
    opening = [Message(role="user", content=prompt)]
    return ImportedConversation(prompt, Trajectory(opening, events), _read_tools(values[0]))


def _require_text(value: Any, who: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the value of a {who} entry is not text")
    return value


def _read_tools(system: str) -> list[dict[str, Any]]:
    match = _TOOLS.search(system)
    if match is None:
        raise ValueError("its system entry has no list of tools")
    return [
        {
            "type": "function",
            "function": {
                "name": str(tool["name"]),
                "description": str(tool.get("description") or ""),
                "parameters": get_object(tool, "parameters"),
            },
        }
        for tool in _DECODER.decode(match[1])
    ]


def _read_reply(value: str, turn: int, model: str | None, at: float) -> ReplyEvent:
    reasoning, rest = split_inline_reasoning(value)
    text, _, tail = rest.partition("<tool_call>")
    calls = [
        ToolCall(
            id=f"call_{turn}_{number}",
            type="function",
            function={
                "name": str(call["name"]),
                "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False),
            },
        )
        for number, call in enumerate(_blocks("<tool_call>" + tail if tail else "", "tool_call"))
    ]
    message = Message(role="assistant", content=text.strip())
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return ReplyEvent(
        kind="reply",
        turn=turn,
        message=message,
        finish_reason="tool_calls" if calls else "stop",
        usage=None,
        cost_usd=None,
        model=model,
        response_id=None,
        started_at=at,
        duration_s=0.0,
    )


def _read_results(
    value: str, calls: list[ToolCall], turn: int, at: float, ids: set[str]
) -> Iterator[ResultEvent]:
    """Read the results of a tool entry, in call order; calls get the ids in their results."""
    responses = list(_blocks(value, "tool_response"))
    if len(responses) > len(calls):
        raise ValueError(f"turn {turn}: {len(responses)} results for {len(calls)} calls")
    for number, (call, response) in enumerate(zip(calls, responses, strict=False)):
        id = response.get("tool_call_id")
        if isinstance(id, str) and id and id not in ids:
            call["id"] = id
        ids.add(call["id"])
        content = response.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        message = Message(
            role="tool",
            content=text,
            tool_call_id=call["id"],
            name=call["function"]["name"],
            is_error=reads_as_failure(content),
        )
        yield ResultEvent(
            kind="result", turn=turn, call=number, message=message, started_at=at, duration_s=0.0
        )


def _blocks(text: str, tag: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects between tags; their texts may contain tags, too."""
    rest = text.strip()
    while rest:
        if not rest.startswith(f"<{tag}>"):
            raise ValueError(f"text between <{tag}> blocks: {rest[:40]!r}")
        rest = rest.removeprefix(f"<{tag}>").lstrip()
        block, end = _DECODER.raw_decode(rest)
        rest = rest[end:].lstrip()
        if not isinstance(block, dict) or not rest.startswith(f"</{tag}>"):
            raise ValueError(f"a <{tag}> block without an object, or not closed")
        yield block
        rest = rest.removeprefix(f"</{tag}>").lstrip()
