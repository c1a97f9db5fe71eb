"""Conversations that an agent held over the gateway, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.conversation.texts import conversation_texts
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.records.index import index_fields
from batch_trajectories.report.conversation_text import ConversationText
from batch_trajectories.report.facts import make_table_row
from tests.agent.gateway.talking import MessagesTalk, Recording, Said
from tests.helpers.builders import record_of
from tests.helpers.exporting import export_to_dataset, make_run
from tests.helpers.running import lines
from tests.helpers.stored import ROW_FORMATS, to_record, written_row

PROMPT = "Count the files."


def agents_record(
    *, ends_by_call: bool = False, acknowledges: str = "", **changes: Any
) -> dict[str, Any]:
    """What Claude Code leaves: reminders, a system message in the middle, and a side call.

    In that one it `acknowledges` a message itself, as Qwen Code does.
    """
    recording = Recording(PROMPT)
    side, talk = MessagesTalk(system="Make a title.", has_tools=False), MessagesTalk()
    if acknowledges:
        side.say("Mind the rules.")
        side.items.append({"role": "assistant", "content": acknowledges})
    side.say(PROMPT)
    recording.relay(side, Said("Counting"))
    talk.say("Mind the rules.")
    talk.say(PROMPT)
    talk.items.append({"role": "system", "content": [{"type": "text", "text": "It is Monday."}]})
    recording.relay(talk, Said("Looking.", "ls", thought="What is there?"))
    talk.result("a b")
    talk.items[-1]["content"].append({"type": "text", "text": "Keep your list up to date."})
    recording.relay(talk, Said("", "wc", thought="Two, I think."))
    if not ends_by_call:
        talk.result("2")
        recording.relay(talk, Said("Two.", thought="Now I know."))
    recording.take(
        {
            "kind": "agent_exit",
            "exit_code": 0,
            "stdout": "Two.",
            "stderr": "",
            "duration_s": 2.0,
            "timed_out": False,
        }
    )
    made = recording.trajectory.to_record()
    made["agent"] = {"name": "claude-code", "version": "2.1", **made["agent"]}
    plain = record_of(options={}, view_compacted=False, status_reason=None, finished_at=9.0)
    return {**plain, "attempt": 1, "input_digest": "d", **made, **changes}


def test_messages_out_of_order_are_added_to_those_before_them() -> None:
    training_row = written_row(agents_record(), "openai")
    assert [(m["role"], m["content"]) for m in training_row["messages"]] == [
        ("system", "You work."),
        ("user", f"Mind the rules.\n\n{PROMPT}\n\nIt is Monday."),
        ("assistant", "Looking."),
        ("tool", "a b\n\nKeep your list up to date."),
        ("assistant", ""),
        ("tool", "2"),
        ("assistant", "Two."),
    ]
    thoughts = [
        m["reasoning_content"] for m in training_row["messages"] if m["role"] == "assistant"
    ]
    assert thoughts == ["What is there?", "Two, I think.", "Now I know."]
    assert [tool["function"]["name"] for tool in json.loads(training_row["tools"])] == ["bash"]
    metadata = json.loads(training_row["metadata"])
    assert metadata["agent"] == {"name": "claude-code", "version": "2.1"}
    assert metadata["tool_stats"] == [{"tool": "bash", "count": 2, "success": 2, "failure": 0}]


def test_what_an_agent_says_after_results_is_no_result_in_hermes_rows() -> None:
    """It follows the response in the same entry, as the roles have to alternate."""
    tool = written_row(agents_record(), "hermes")["conversations"][3]
    response, text = tool["value"].split("\n</tool_response>\n")
    assert tool["from"] == "tool"
    assert json.loads(response.removeprefix("<tool_response>\n"))["content"] == "a b"
    assert text == "Keep your list up to date."


def test_a_tag_after_results_is_refused_in_hermes_rows() -> None:
    record = agents_record()
    for message in record["messages"]:
        message["content"] = message["content"].replace("Keep", "</tool_response>Keep")
    with pytest.raises(Rejected, match="marker_in_result: what follows the results of turn 1"):
        written_row(record, "hermes")


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_every_format_holds_an_agents_conversation(name: str) -> None:
    training_row = written_row(agents_record(), name)
    text = json.dumps(training_row)
    for part in ("What is there?", "Keep your list up to date.", "It is Monday.", "Two."):
        assert part in text
    if name == "llamafactory":
        assert [turn["from"] for turn in training_row["conversations"]] == [
            "system",
            "human",
            "function_call",
            "observation",
            "function_call",
            "observation",
            "gpt",
        ]


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_a_conversation_that_ends_by_a_call_ends_so_in_every_format(name: str) -> None:
    """Some agents end their task by a command: no model sees its result."""
    training_row = written_row(agents_record(ends_by_call=True), name)
    turns = (
        training_row.get("conversations")
        or training_row.get("messages")
        or training_row.get("steps")
        or [training_row]
    )
    assert "wc" in json.dumps(turns[-1])


def test_a_row_says_how_many_calls_saw_other_messages() -> None:
    """An agent with the time in its system prompt: the row has the last one."""
    recording, talk = Recording(PROMPT), MessagesTalk(system="It is 10:00.")
    talk.say(PROMPT)
    recording.relay(talk, Said("Looking.", "ls"))
    talk.result("a b")
    talk.system = "It is 10:01."
    recording.relay(talk, Said("Two."))
    record = agents_record() | recording.trajectory.to_record()
    training_row = written_row(record, "openai")
    assert training_row["messages"][0]["content"] == "It is 10:01."
    assert json.loads(training_row["metadata"])["rewritten_calls"] == 1


def test_other_conversations_of_an_agent_are_documents_of_their_own() -> None:
    training_row = written_row(agents_record(), "atif")
    assert training_row["agent"]["name"] == "claude-code"
    assert training_row["agent"]["version"] == "2.1"
    [side] = training_row["subagent_trajectories"]
    assert (side["agent"]["name"], side["extra"]) == ("side", {"key": "thread#0"})
    assert [step["message"] for step in side["steps"]] == [
        "Make a title.",
        PROMPT,
        "Counting",
    ]
    assert "subagents_left_out" not in training_row["extra"]


def test_replies_that_an_agent_wrote_itself_are_context_in_documents() -> None:
    document = written_row(agents_record(acknowledges="Got it."), "atif")
    [inner] = document["subagent_trajectories"]
    said = [step for step in inner["steps"] if step["source"] == "agent"]
    assert [step["message"] for step in said] == ["Got it.", "Counting"]
    assert [step.get("is_copied_context", False) for step in said] == [True, False]
    assert ["timestamp" in step for step in said] == [False, True]


def test_a_run_of_agents_is_exported_in_all_formats(tmp_path: Path) -> None:
    """Also by filters, which read the texts of records."""
    source = make_run(tmp_path, agents_record(), agents_record(ends_by_call=True))
    filters = {"exact_duplicates": True, "secrets": "patterns"}
    formats = "openai,hermes,llamafactory,atif"
    directory, _ = export_to_dataset(source, formats=formats, filters=filters)
    for name in formats.split(","):
        assert len(lines(directory / name / "train.jsonl")) == 2


def test_all_texts_of_an_agent_are_searched() -> None:
    aside = {"number": 4, "added": [{"role": "user", "content": "an old question"}]}
    aside["message"] = {"role": "assistant", "content": "an old answer"}
    changed = {
        "exchanges": [1],
        "thread": "thread#1",
        "start": 0,
        "end": 1,
        "messages": [{"role": "system", "content": "an old rule"}],
    }
    record = agents_record(set_aside=[aside], rewritten=[changed])
    found = {text for _, text in conversation_texts(to_record(record))}
    expected = {"an old question", "an old answer", "an old rule", "Counting", "claude-code"}
    assert expected <= found


def test_the_table_and_the_index_count_what_the_agent_did() -> None:
    record = agents_record()
    table_row = make_table_row(to_record(record))
    assert (table_row["turns"], table_row["calls"], table_row["answer"]) == (3, 2, "Two.")
    assert table_row["flags"] == ["inner conversations"]
    assert index_fields(to_record(record))[4:8] == (3, 2, 40, 20)


def test_a_terminal_shows_the_agent_and_its_threads() -> None:
    text = "\n".join(ConversationText(to_record(agents_record()), colours=False).text())
    assert (
        "agent: claude-code 2.1 · 1 start · exit code 0 · main (thread#1): 3 calls · "
        "side (thread#0): 1 call"
    ) in text
    assert "conversation of side (thread#0)" in text
