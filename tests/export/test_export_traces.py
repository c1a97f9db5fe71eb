"""The format `traces`: sessions for the hub's viewer, checked against the published schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.runs import Source
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, export_to_dataset, make_run, rejects

# The tables of https://huggingface.co/docs/hub/session-traces-format (STS-Format).


class Header(msgspec.Struct):
    """The first line; further metadata is allowed and ignored."""

    type: Literal["session"]
    harness: str
    id: str
    name: str | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON string."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: Function


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "tool"]
    content: str
    reasoningContent: str | None = None
    toolCalls: list[ToolCall] = []
    toolCallId: str | None = None
    timestamp: int | None = None
    """Epoch milliseconds."""
    model: str | None = None


class Line(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["message"]
    message: Message


def read_session(path: Path) -> tuple[Header, list[Message]]:
    """Read a file as the published tables say; each result must answer an earlier call."""
    first, *others = path.read_bytes().splitlines()
    messages = [msgspec.json.decode(line, type=Line).message for line in others]
    open_calls: set[str] = set()
    for message in messages:
        assert (message.toolCallId is not None) == (message.role == "tool")
        if message.toolCallId is not None:
            open_calls.remove(message.toolCallId)
        for made in message.toolCalls:
            assert isinstance(json.loads(made.function.arguments), dict)
            open_calls.add(made.id)
    return msgspec.json.decode(first, type=Header), messages


def sessions_of(source: Source, **recipe: Any) -> dict[str, tuple[Header, list[Message]]]:
    directory, _ = export_to_dataset(source, formats="traces", **recipe)
    files = sorted((directory / "traces").rglob("*.jsonl"))
    return {str(path.relative_to(directory / "traces")): read_session(path) for path in files}


def test_a_conversation_is_a_session_of_the_published_form(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    ((name, (header, messages)),) = sessions_of(source).items()
    assert name == "train/000000-t0.jsonl"
    assert (header.harness, header.id) == ("batch-trajectories", "t0")
    assert header.name == messages[1].content
    assert [message.role for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    turn, seen, answer = messages[2:]
    assert (turn.content, turn.reasoningContent) == ("Looking.", "Which city?")
    (made,) = turn.toolCalls
    assert json.loads(made.function.arguments) == {"city": "Oslo", "n": 1.5}
    assert (seen.toolCallId, seen.content) == (made.id, '{"c": 9}')
    assert (answer.content, answer.reasoningContent) == ("Done.", "Now I know.")
    assert turn.timestamp == 1500
    assert turn.model


def test_each_session_has_a_file_whatever_its_id(tmp_path: Path) -> None:
    """Ids may be paths, or differ in case only."""
    ids = ["../a/b", "A", "a"]
    prompts = [{"id": id, "prompt": "Q"} for id in ids]
    source = make_run(tmp_path, *(call_record() for _ in ids), prompts=prompts)
    found = sessions_of(source, filters={"exact_duplicates": False})
    assert [name.partition("/")[2] for name in found] == [
        "000000-..-a-b.jsonl",
        "000001-A.jsonl",
        "000002-a.jsonl",
    ]
    assert [header.id for header, _ in found.values()] == ids


@pytest.mark.parametrize("parallel_calls", ["keep", "split"])
def test_calls_of_a_turn_stay_together(tmp_path: Path, parallel_calls: str) -> None:
    """A session is what happened, so no turn is cut."""
    record = record_of(
        user("x" * 200),
        assistant("", call(id="c1"), call(id="c2")),
        result("a", id="c1"),
        result("b", id="c2"),
        assistant("Done."),
    )
    found = sessions_of(make_run(tmp_path, record), parallel_calls=parallel_calls)
    ((header, messages),) = found.values()
    assert [message.role for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert header.name == "x" * 79 + "…"


def test_the_export_checks_itself_and_the_card_loads_other_files(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record(), call_record("Yes."))
    directory, manifest = export_to_dataset(
        source, formats="openai,traces", splits="train=0.5,test=0.5"
    )
    assert [*find_problems(source, directory)] == []
    part = next(part for part in manifest["formats"] if part["format"] == "traces")
    assert part["used"] == len(part["files"]) == 2
    assert "traces/" not in (directory / "README.md").read_text().split("---")[1]
    file = directory / part["files"][0]["path"]
    file.write_bytes(file.read_bytes().replace(b"Done.", b"Gone.").replace(b"Yes.", b"No.."))
    assert [*find_problems(source, directory)]


def test_a_call_that_the_server_left_in_the_text_is_rejected(tmp_path: Path) -> None:
    record = call_record(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>', status="leaked_call"
    )
    source = make_run(tmp_path, record)
    found = rejects(source, formats="traces", filters={"status": "any"})
    assert found == {"t0": "leaked_call"}
