"""`import` of rows: nothing that a row says is dropped without a word.

Each field of realistic rows gets a text that stands nowhere else. The text is in the record, or the
row is refused with the field's name, or docs/import.md lists the field as metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics import exact_json
from batch_trajectories.importing.conversation import SourceConversation, Unreadable
from batch_trajectories.importing.row_columns import METADATA, media_kind
from batch_trajectories.records.tasks import Task
from tests.helpers.importing import read_chat_row

MARKER = "zebra-7131"
LONG = f"{MARKER} " * 120

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "What."}},
            "required": ["q"],
        },
        "strict": True,
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"q": "a"}'},
}
TAGGED = '<tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>'
RESULT = '<tool_response>\n{"name": "look", "content": {"r": 1}}\n</tool_response>'
OFFER = f"Be a clerk.\n<tools>\n{json.dumps([TOOL])}\n</tools>"
OTHER = {**TOOL, "function": {**TOOL["function"], "name": "other"}}  # type: ignore[dict-item]

ROWS: dict[str, dict[str, Any]] = {
    "openai": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where?", "name": ""},
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "weight": 1},
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "There."},
            {"role": "assistant", "content": "There.", "reasoning_content": "Easy."},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": True,
        "source": "set",
    },
    "anthropic": {
        "model": "claude",
        "max_tokens": 100,
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "a"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "There."}],
            },
            {"role": "assistant", "content": "There."},
        ],
        "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
    },
    "sharegpt": {
        "id": "s1",
        "conversations": [
            {"from": "human", "value": "Where?"},
            {"from": "gpt", "value": "There.", "weight": 1},
        ],
        "system": "Be brief.",
    },
    "hermes": {
        "conversations": [
            {"from": "system", "value": OFFER},
            {"from": "human", "value": "Where?"},
            {"from": "gpt", "value": f"I look.\n{TAGGED}"},
            {"from": "tool", "value": RESULT},
            {"from": "gpt", "value": "There."},
        ],
        "tools": json.dumps([OTHER]),
        "category": "c",
        "task": "t",
    },
    "llamafactory": {
        "conversations": [
            {"from": "human", "value": "Where?"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"q": "a"}}'},
            {"from": "observation", "value": "There."},
            {"from": "gpt", "value": "There."},
        ],
        "system": "Be brief.",
        "tools": json.dumps([TOOL]),
        "kto_tag": True,
    },
    "ms-swift": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where?"},
            {"role": "tool_call", "content": '{"name": "look", "arguments": {"q": "a"}}'},
            {"role": "tool_response", "content": '{"r": "There."}'},
            {"role": "assistant", "content": "There.", "loss": True},
        ],
        "tools": json.dumps([TOOL]),
        "label": True,
        "channel": "math",
    },
    "axolotl": {
        "messages": [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "There.", "training": True},
        ],
        "tools": [TOOL],
    },
}

COLUMNS: tuple[str, ...] = (
    "available_tools",
    "tool_definitions",
    "history",
    "system_message",
    "system_prompt",
    "system_instruction",
    "instruction",
    "input",
    "output",
    "response",
    "documents",
    "objects",
    "mask",
    "loss_mask",
    "prompt",
    "context",
    "query",
    "text",
    "generations",
    "chosen",
    "rejected",
    "rejected_response",
    "image_path",
    "image_paths",
    "image_url",
    "imageUrls",
    "img",
    "picture",
    "photo",
    "screenshots",
    "media",
    "video_url",
    "audio_path",
    "question_image",
    "image_0",
    "images_b64",
    "trajectory",
    "turns",
    "next",
    "teacher_prompt",
    "train_detail",
    "weight",
    "loss",
    "training",
    "label",
    "kto_tag",
    "margin",
    "metadata",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "functions",
    "reference",
    "scores",
    "notes",
)

VALUES: dict[str, Any] = {
    "short": MARKER,
    "long": LONG,
    "list": [MARKER],
    "pairs": [[MARKER, "x"]],
    "object": {"a": {"b": MARKER}},
    "file": {"bytes": None, "path": MARKER},
    "messages": [{"role": "user", "content": MARKER}],
    "json": json.dumps({"a": [LONG]}),
}


def written(found: SourceConversation) -> str:
    """All that a record says of a row, as text."""
    task = Task(
        id="i",
        prompt_id="i",
        sample=0,
        input_digest="d",
        columns={"id": "i", "prompt": found.prompt(), **found.columns},
    )
    record = found.record(task, "c", 0.0, {"format": "f", "file": "p", "line": 1})
    return exact_json.dumps(record).decode()


def is_listed(name: str) -> bool:
    """Whether docs/import.md says that a field is metadata."""
    text = Path("docs/import.md").read_text()
    left_out = text.partition("### Fields that are left out")[2].partition("\n#")[0]
    assert left_out
    return f"`{name}`" in left_out


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value that are neither objects nor lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            yield from leaves(one, (*path, key))
    else:
        yield path


def with_value(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = deepcopy(row)
    inside: Any = made
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return made


def check(row: dict[str, Any], path: tuple[Any, ...]) -> None:
    """The marker in a row is in its record, or its field is named by a refusal or by the docs."""
    names = [str(key) for key in path if isinstance(key, str)]
    try:
        says = written(read_chat_row(**row))
        is_there = MARKER in says
    except Unreadable as error:
        says = str(error)
        is_there = any(re.search(rf"\b{re.escape(name)}\b", says) for name in names)
    assert is_there or any(map(is_listed, names)), f"{path} is gone: {says}"


def texts_with_marker(text: str) -> list[str]:
    """A text with the marker behind it, or in each text of its JSON."""
    made = [f"{text} {MARKER}"]
    for match in re.finditer(r'(?<=")[^"{}\[\]]+(?=")', text):
        made.append(f"{text[: match.start()]}{MARKER}{text[match.end() :]}")
    return made


def test_the_columns_that_are_metadata_are_listed() -> None:
    assert not [name for name in METADATA if not is_listed(name)]


@pytest.mark.parametrize("name", ROWS)
def test_each_value_of_a_row_is_read_or_named(name: str) -> None:
    read_chat_row(**ROWS[name])
    for path in leaves(ROWS[name]):
        given: Any = ROWS[name]
        for key in path:
            given = given[key]
        values = texts_with_marker(given) if isinstance(given, str) else [MARKER]
        for value in values:
            check(with_value(ROWS[name], path, value), path)


@pytest.mark.parametrize("name", ROWS)
def test_each_added_key_of_a_row_is_read_or_named(name: str) -> None:
    """In every object of a row: messages, parts, calls, functions, tools."""
    objects = {path[:n] for path in leaves(ROWS[name]) for n in range(len(path))}
    for path in objects:
        inside: Any = ROWS[name]
        for key in path:
            inside = inside[key]
        if isinstance(inside, dict):
            for value in (MARKER, [MARKER], {"a": MARKER}):
                added = (*path, "zz_unknown")
                check(with_value(ROWS[name], added, value), added)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", VALUES)
def test_each_column_is_read_or_named(column: str, kind: str) -> None:
    for row in ROWS.values():
        made = {**row, column: VALUES[kind]}
        if media_kind(column) is not None:
            (first, *_) = [
                m for m in read_chat_row(**made).conversation.messages if m["role"] == "user"
            ]
            assert first["provider_blocks"]["blocks"]  # export rejects the row by their names
        else:
            check(made, (column,))


@pytest.mark.parametrize(
    "value", [[0, 1], [1.5], {"a": 1}, [[True]], [{"begin": 0, "train": False}]]
)
@pytest.mark.parametrize("column", ["mask", "objects", "train_detail", "zz_unknown"])
def test_numbers_in_lists_are_no_metadata_by_themselves(column: str, value: Any) -> None:
    with pytest.raises(Unreadable, match=rf"^{column}: .*--metadata={column}"):
        read_chat_row(**{**ROWS["axolotl"], column: value})
