"""What `export` writes and `import` reads comes back equal, whatever the conversation says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics import exact_json
from batch_trajectories.engine.record import as_stored
from batch_trajectories.export.conversation.reading import joined_system_prompt, read_conversation
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import Entry, Turn
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.importing.conversation import SourceConversation
from batch_trajectories.importing.importing import import_conversations
from batch_trajectories.importing.readers import atif, openai, sharegpt
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.tasks import Task
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.stored import complete, row_in

CONVERSATIONS = 1_000

PIECES = [
    "Done.",
    "a",
    "é",
    "\U0001f600",
    "\u2028",
    "\x00",
    "\\",
    "\\u0041",
    '"',
    "'",
    "\n",
    "\n\n",
    " ",
    "\t",
    "\r\n",
    "{}",
    "[1, 2]",
    '{"name": "look", "content": "x"}',
    '{"a": 1.50, "b": -0}',
    "<tool_response>",
    "</tool_response>",
    "<tool_call>",
    "</tool_call>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
    "<image>",
    "say <function=f>",
    "</function>",
    "error",
    "```\n",
    "# Tools",
    "\n</tool_response>\n<tool_response>\n",
    "null",
    "false",
    "7",
    '""',
    "{'a': 1}",
    "x" * 50,
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1.5,
    2**70,
    1e300,
    "",
    "</tool_call>",
    [],
    {},
    [{"a": [None]}],
    "\u2028<",
]
TOOLS = ["look", "run", "a-b.c"]


def text(rng: random.Random, most: int = 4) -> str:
    plain = rng.random() < 0.5
    return "".join(rng.choices(PIECES[:20] if plain else PIECES, k=rng.randint(0, most)))


def conversation(rng: random.Random) -> dict[str, Any]:
    """The record of a finished conversation, with what models and tools may say."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    replies = 0
    for _ in range(rng.randint(1, 2)):
        messages.append({"role": "user", "content": text(rng) or "Go."})
        for _ in range(rng.randint(0, 2)):
            replies += 1
            calls: list[dict[str, Any]] = [
                {
                    "id": rng.choice([f"call_{replies}_{n}", f"toolu {n} é{replies}"]),
                    "type": "function",
                    "function": {"name": rng.choice(TOOLS), "arguments": arguments(rng)},
                }
                for n in range(rng.randint(1, 3))
            ]
            reply: dict[str, Any] = {"role": "assistant", "content": text(rng)}
            reply["tool_calls"] = calls
            if rng.random() < 0.5:
                reply["reasoning"] = text(rng)
            messages.append(reply)
            for call in calls:
                said = json.dumps(rng.choice(VALUES)) if rng.random() < 0.3 else text(rng)
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call["id"],
                        "content": said,
                        "name": call["function"]["name"],
                        "is_error": rng.random() < 0.2,
                    }
                )
        replies += 1
        messages.append({"role": "assistant", "content": text(rng) or "Ok."})
        if rng.random() < 0.5:
            messages[-1]["reasoning"] = text(rng)
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text(rng),
                "parameters": {"type": "object", "properties": {"q": {"description": text(rng)}}},
            },
        }
        for name in TOOLS
    ]
    return complete({"messages": messages, "turns": [{}] * replies, "tools": tools})


def arguments(rng: random.Random) -> str:
    given = {rng.choice(["q", "é", "</tool_call>", ""]): rng.choice(VALUES) for _ in range(2)}
    if rng.random() < 0.1:
        return '{"n": 1.50, "e": 1e5, "z": -0}'
    return json.dumps(
        given, ensure_ascii=rng.random() < 0.5, separators=rng.choice([None, (",", ":")])
    )


READERS = {"atif": atif.READER, "openai": openai.READER, "hermes": sharegpt.READER}
READERS["llamafactory"] = sharegpt.READER


def read(name: str, row: dict[str, Any]) -> SourceConversation:
    reader = READERS[name]
    assert reader.row is not None
    return reader.row(exact_json.loads(dumps_row(row)))


def again(found: SourceConversation) -> Record:
    columns = {"id": found.id, "prompt": found.prompt()}
    task = Task(
        id=str(found.id), prompt_id=str(found.id), sample=0, input_digest="d", columns=columns
    )
    return as_stored(found.record(task, "c", 0.0, {"format": "f", "file": "p", "line": 1}))


def read_row(name: str, row: dict[str, Any]) -> Any:
    """What a row says of the conversation and its tools."""
    if name == "atif":
        kept = ("source", "message", "reasoning_content", "tool_calls", "observation")
        steps = [{key: step.get(key) for key in kept} for step in row["steps"]]
        return steps, row["agent"].get("tool_definitions")
    said = row["messages" if name == "openai" else "conversations"]
    return [{key: _without_gap(value) for key, value in one.items()} for one in said], row["tools"]


def _without_gap(value: Any) -> Any:
    """The text without the white space between reasoning and what follows it, which no text row
    holds."""
    return re.sub(r"(?<=</think>)\s+", "", value) if isinstance(value, str) else value


def read_record(record: Record, name: str) -> list[Any]:
    """What a conversation says, as far as a format holds it."""
    return [_told(entry, name) for entry in read_conversation(record).entries]


def _told(entry: Entry, name: str) -> Any:
    if not isinstance(entry, Turn):
        return entry.text
    ids = {call.id: n for n, call in enumerate(entry.calls)}
    has_ids = name != "llamafactory"
    calls = [(call.id if has_ids else "", call.name, call.value) for call in entry.calls]
    results = [
        (one.id if has_ids else ids[one.id], one.name, _result(one.content, name))
        for one in entry.results
    ]
    is_text = name in ("hermes", "llamafactory")
    return entry.reasoning, entry.text.lstrip() if is_text else entry.text, calls, results


def _result(text: str, name: str) -> Any:
    """Hermes writes JSON with other spaces; LLaMA-Factory shows no blank results."""
    if name == "hermes" and text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return '""' if name == "llamafactory" and not text.strip() else text


STYLES: list[tuple[str, Style]] = [
    ("openai", Style()),
    ("openai", Style(reasoning="inline", arguments="text", tools="list", empty_think="text")),
    ("openai", Style(reasoning_key="reasoning", parallel_calls="split")),
    ("openai", Style(reasoning_key="thinking", call_text="reasoning")),
    ("hermes", Style()),
    ("hermes", Style(system="saved", empty_think="omit")),
    ("llamafactory", Style()),
    ("atif", Style()),
]


@pytest.mark.parametrize("number", range(len(STYLES)))
def test_conversations_come_back_equal(number: int) -> None:
    """Read again, and written again. What a format cannot hold is listed in docs/import.md."""
    name, style = STYLES[number]
    rng = random.Random(number)
    written = 0
    while written < CONVERSATIONS // len(STYLES):
        record = as_stored(conversation(rng))
        try:
            row = row_in(name, record, style)
        except Rejected:
            continue
        written += 1
        found = again(read(name, row))
        assert read_row(name, row_in(name, found, style)) == read_row(name, row)
        if style in (Style(), STYLES[5][1]):
            assert read_record(found, name) == read_record(record, name)
        if name == "openai" or style.system == "saved":
            assert joined_system_prompt(found.messages) == joined_system_prompt(record.messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["openai", "openai,parquet", "openai,hf", "hermes,parquet", "llamafactory", "atif"],
)
def test_files_come_back_equal(tmp_path: Path, names: str) -> None:
    """Also the copies of rows in Parquet and in directories of `save_to_disk`."""
    rng = random.Random(names)
    name, _, copies = names.partition(",")
    records: list[dict[str, Any]] = []
    while len(records) < 100:
        record = conversation(rng)
        try:
            row_in(name, as_stored(record))
        except Rejected:
            continue
        records.append({**record, "id": f"r{len(records)}"})
    source = make_run(tmp_path, *records)
    directory, _ = export_to_dataset(source, formats=names)
    files = directory / (f"{name}_{copies}" if copies else name)
    place = files if copies == "hf" else next(files.glob("train*"))
    end, config, _ = import_conversations([place], "again", tmp_path)
    assert (end.completed, end.unreadable) == (len(records), [])
    found = {record.id: read_record(record, name) for record in stored_records(config.run_dir)}
    before = {record.id: read_record(record, name) for record in stored_records(source.run_dir)}
    assert sorted(found.items()) == sorted(before.items())
