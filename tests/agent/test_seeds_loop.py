"""Behaviours of tests/seeds.md that one conversation shows, where no other test proves them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Event, Message
from agent.models.errors import ModelError
from agent.models.model import Completion, Request
from agent.options import AgentOptions
from agent.state.trajectory import Trajectory
from agent.views.summary import SummarizingModel
from agent.views.views import compact, findings_in
from tests.helpers.builders import completion
from tests.helpers.playing import call, call_echo, calls, make_file_agent, play, say
from toolsets.context import ToolContext
from toolsets.tool import tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

ANSWER = say("done")


def test_a_failing_model_leaves_what_was_said_before_and_adds_nothing() -> None:
    """The record has no turn that the model did not say, and no final text."""
    result = make_file_agent([calls(call("list_files"))]).run_conversation("x")
    assert result["failed"]
    assert "the script ends after turn 1" in result["error"]
    assert [message["role"] for message in result["messages"]] == ["user", "assistant", "tool"]
    assert result["final_response"] == ""


def test_log_lines_are_short_and_labelled(caplog: pytest.LogCaptureFixture) -> None:
    """A log line has the name, the event and at most 120 characters."""
    with caplog.at_level(logging.INFO, logger="run_agent"):
        make_file_agent([calls(call("list_files")), say("a\nb" * 100)]).run_conversation(
            "x", task_id="t1"
        )
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0] == "t1 assistant ['list_files']"
    assert texts[1].startswith("t1 list_files ")
    assert texts[2] == f"t1 assistant {('a b' * 100)[:117]}..."


def test_arguments_that_are_a_list_are_an_error_result(tmp_path: Path) -> None:
    """An older system crashed on them."""
    bad = calls({"name": "echo", "arguments": '["x"]'})
    played = play(tmp_path, [bad, ANSWER])
    assert played.status == "completed"
    assert "expected a JSON object, got an array" in played.results[0]["content"]


def test_compaction_touches_assistants_alone(tmp_path: Path) -> None:
    """Texts of users and tools stay whole, however long."""
    script = [call_echo("A" * 300, content="one"), call_echo("b", content="two"), ANSWER]
    messages = play(tmp_path, script, opening=[{"role": "user", "content": "U" * 300}]).messages
    shown = compact(messages, 2)
    assert shown[1] != messages[1]
    assert shown[1]["content"] == "one"
    for n, message in enumerate(messages):
        assert shown[n] == message or message["role"] == "assistant"


def test_subagents_of_one_reply_work_side_by_side(tmp_path: Path) -> None:
    """The second has begun before the first has ended."""
    helper = {
        "name": "helper",
        "description": "Helps.",
        "enabled_toolsets": ["file"],
        "script": [calls(call("list_files")), say("helped")],
    }
    twice = calls(call("helper", task="1"), call("helper", task="2"))
    played = play(tmp_path / "w", [twice, ANSWER], subagents=[helper])
    keys = [event["key"] for event in played.events if event["kind"] == "sub"]
    first, second = dict.fromkeys(keys)
    last_of_first = len(keys) - 1 - keys[::-1].index(first)
    assert keys.index(second) < last_of_first


def test_arguments_of_a_wrong_shape_never_reach_the_tool(tmp_path: Path) -> None:
    """Arguments are checked against the schema before the handler runs."""
    ran: list[int] = []

    @tool()
    def double(context: ToolContext, n: int) -> int:
        """Double a number."""
        ran.append(n)
        return 2 * n

    script = [calls(call("double", n="many")), calls(call("double", n=2)), ANSWER]
    played = play(tmp_path, script, tools=[double])
    assert ran == [2]
    assert [result["is_error"] for result in played.results] == [True, False]


def test_a_call_that_fails_can_be_made_again(tmp_path: Path) -> None:
    """The first call fails, the second succeeds, the answer completes."""
    attempts: list[int] = []

    @tool()
    def shaky(context: ToolContext) -> str:
        """Fail once."""
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("not yet")
        return "there"

    played = play(tmp_path, [calls(call("shaky"))] * 2 + [ANSWER], tools=[shaky])
    texts = [result["content"] for result in played.results]
    assert texts == ["Error executing shaky: not yet", "there"]
    assert played.status == "completed"


@pytest.mark.parametrize("prompt", ["What is 2+2?", "  spaced \n out\t", "a\u2028b \N{SNOWMAN}"])
def test_the_task_is_the_user_message_verbatim(prompt: str) -> None:
    """The task is the user message verbatim."""
    result = make_file_agent([ANSWER]).run_conversation(prompt)
    assert result["messages"][0] == {"role": "user", "content": prompt}


def test_the_tools_are_sent_with_every_request(tmp_path: Path) -> None:
    """Tools are sent on every turn; two of one name are an error."""
    played = play(tmp_path, [call_echo("1"), call_echo("2"), ANSWER])
    first, *others = [list(request.tools) for request in played.requests]
    assert [schema["function"]["name"] for schema in first] == [
        "count",
        "delete",
        "echo",
        "fail",
        "report_failure",
    ]
    assert others == [first, first]


def test_a_reply_that_means_to_call_and_does_not_ends_the_loop(tmp_path: Path) -> None:
    """`tool_use` without a tool block would otherwise be asked for ever."""
    played = play(tmp_path, [say("hi", finish_reason="tool_calls"), ANSWER])
    assert (played.status, played.trajectory.turns) == ("completed", 1)


def test_the_final_text_is_that_of_the_last_turn(tmp_path: Path) -> None:
    """Texts of earlier turns are not part of the answer."""
    played = play(tmp_path, [call_echo(content="I look."), ANSWER])
    assert played.trajectory.final_text() == "done"


def test_prose_in_the_text_protocol_gets_a_note_and_finally_ends_the_conversation(
    tmp_path: Path,
) -> None:
    """An older system raised here and stayed `running`."""
    prose, answer = say("I think so."), say("Final Answer: yes")
    played = play(tmp_path / "a", [prose, prose, answer], text_protocol="react")
    assert (played.status, played.trajectory.final_text()) == ("completed", "yes")
    assert [note["reason"] for note in played.trajectory.notes] == ["no_action"] * 2
    assert "neither an Action nor a Final Answer" in played.seen()
    lost = play(tmp_path / "b", [prose] * 4, text_protocol="react")
    assert (lost.status, lost.end.reason) == ("errors", "3 unusable turns in a row")


def test_a_tool_sees_the_live_conversation_while_it_runs(tmp_path: Path) -> None:
    """A tool can read the live conversation through its context, only during its call."""
    seen: list[list[str]] = []

    @tool()
    def look(context: ToolContext) -> str:
        """Look around."""
        seen.append([message["role"] for message in context.conversation])
        return str(len(seen))

    play(tmp_path, [calls(call("look"))] * 2 + [ANSWER], tools=[look])
    assert seen == [["user", "assistant"], ["user", "assistant", "tool", "assistant"]]


def test_the_link_to_the_conversation_ends_with_the_call(tmp_path: Path) -> None:
    """The tool cannot read the conversation after its call, even if it raised."""
    seen: list[int] = []

    @tool()
    def look(context: ToolContext) -> None:
        """Look and fail."""
        seen.append(len(context.conversation))
        raise RuntimeError("no")

    context = ToolContext(Workspace(tmp_path / "w"))
    result = asyncio.run(
        Toolbox([look], context).call("look", "{}", conversation=[{"role": "user"}])
    )
    assert result.is_error
    assert seen == [1]
    assert context.conversation == ()


def test_a_reference_to_a_value_that_is_not_text_becomes_its_json(tmp_path: Path) -> None:
    """References deep inside the arguments are replaced, too."""

    @tool()
    def table(context: ToolContext) -> dict[str, list[int]]:
        """Give an object."""
        return {"rows": [1, 2]}

    @tool()
    def keep(context: ToolContext, notes: dict[str, list[str]]) -> str:
        """Keep notes."""
        return notes["a"][0]

    script = [calls(call("table")), calls(call("keep", notes={"a": ["<$$table-res-1>"]})), ANSWER]
    played = play(tmp_path, script, tools=[table, keep], result_references=True)
    assert played.results[1]["content"].startswith('<{"rows":[1,2]}>')


def test_findings_have_one_of_three_signs_and_may_be_quoted() -> None:
    """Lines of another form are ignored."""
    text = "Found:\n@a = 'b'\n@b := `c`\n  @c-1: \"d e\"\nsee @d = 1\n@e\nf = 1\n@g = "
    assert findings_in(text) == ["b", "c", "d e"]


def test_a_blank_preparation_asks_nothing(tmp_path: Path) -> None:
    """A blank text is the same as no preparation."""
    played = play(tmp_path, [ANSWER], preparation="")
    assert (played.status, len(played.requests)) == ("completed", 1)


class Unwilling:
    """A model that refuses to summarize."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    async def complete(self, request: Request) -> Completion:
        self.asked.append(list(request.messages))
        if request.messages[0]["content"].startswith("Summarize"):
            raise ModelError("overloaded", "busy")
        return completion("hi")


def test_a_summary_that_fails_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    """If the summary fails, the conversation continues uncompressed."""
    messages = [Message(role="user", content="go")]
    for n in range(4):
        messages.append(Message(role="assistant", content=f"part {n}"))
        messages.append(Message(role="user", content="on"))
    collected: list[tuple[str, str, Event]] = []
    model = Unwilling()
    options = AgentOptions(summarize_over_messages=3, summarize_keep=2)
    view = SummarizingModel(
        model=model,
        writer=model,
        trajectory=Trajectory(messages[:1]),
        options=options,
        record_inner=lambda *event: collected.append(event),
    )
    completion = asyncio.run(view.complete(Request(messages)))
    assert completion.message["content"] == "hi"
    assert model.asked[-1] == messages
    kinds = [event["kind"] for _, _, event in collected]
    assert kinds == ["opening", "note"], "what was asked and that it failed is known"
    assert "no summary" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_turns": float("nan")},
        {"max_turns": 0},
        {"max_errors": float("inf")},
        {"max_turns": -1},
    ],
    ids=str,
)
def test_limits_have_defaults_and_must_be_finite(wrong: Mapping[str, Any]) -> None:
    """A wrong value is refused; an older system silently took its default."""
    options = AgentOptions()
    assert (options.max_turns, options.max_errors, options.expected_attempts) == (20, 5, 1)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AgentOptions.model_validate(wrong)


def test_a_record_is_json(tmp_path: Path) -> None:
    """The record counts messages, turns and calls, and sums usage over turns."""
    record = play(tmp_path, [call_echo("1"), calls(call("echo", text="2"), call("count")), ANSWER])
    state = json.loads(json.dumps(record.trajectory.to_record()))
    assert [turn["turn"] for turn in state["turns"]] == [1, 2, 3]
    assert [made["name"] for made in state["tool_calls"]] == ["echo", "echo", "count"]
    assert state["usage"]["output_tokens"] == 0
