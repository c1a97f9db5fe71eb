"""`agent_loop`: the loop of the simplest face, with functions for the model and the tools."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest

from agent.flat import FlatSession, agent_loop, init_session, response
from tests.helpers.running import PATIENCE_S

TOOLS = [
    {
        "name": "add",
        "description": "Add.",
        "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
    }
]
HANDLERS = {"add": lambda a, b: a + b}


def use(id: str, name: str = "add", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


class Replies:
    """A model that gives one list of blocks after the other and keeps what it was asked with."""

    def __init__(self, *replies: list[dict[str, Any]]) -> None:
        self._replies = iter(replies)
        self.asked: list[tuple[Any, Any]] = []

    def __call__(self, tools: Any, session: Any) -> dict[str, Any]:
        self.asked.append((tools, json.loads(json.dumps(session))))
        return {"content": next(self._replies)}


def shapes(session: FlatSession) -> list[str]:
    return [message.get("role") or message["type"] for message in session["messages"]]


def test_it_runs_until_a_reply_without_calls() -> None:
    """Thoughts, calls and results are messages of their own, each with its time."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    model = Replies([thought, use("1", a=1, b=2), use("2", a=3, b=4)], [text("3 and 7")])
    session = init_session("Add.", "1+2 and 3+4?")
    assert agent_loop(model, TOOLS, session, HANDLERS) is session
    answer = response(session)
    assert answer is not None
    assert answer["content"] == "3 and 7"
    assert shapes(session) == [
        "system",
        "user",
        "thinking",
        "tool_call",
        "tool_call",
        "tool_result",
        "tool_result",
        "assistant",
    ]
    assert all(message["ts"].endswith("Z") for message in session["messages"])
    assert [m["output"] for m in session["messages"][5:7]] == [3, 7]
    tools, view = model.asked[1]
    assert (tools, view["system"]) == (TOOLS, "Add.")
    assert view["messages"][1]["content"][0] == thought, "signed thoughts go back unchanged"
    assert [block["type"] for block in view["messages"][2]["content"]] == ["tool_result"] * 2


@pytest.mark.parametrize(("bound", "calls"), [(0, 0), (1, 1), (2, 2)])
def test_max_turns_counts_model_calls(bound: int, calls: int) -> None:
    """The calls of the last one are run; there is no answer."""
    model = Replies(*([use(f"{n}", a=n, b=n)] for n in range(3)))
    session = agent_loop(model, TOOLS, init_session(None, "go"), HANDLERS, max_iterations=bound)
    assert len(model.asked) == calls
    assert shapes(session).count("tool_result") == calls
    assert response(session) is None


def test_without_tools_the_list_is_empty_and_without_a_system_there_is_none() -> None:
    model = Replies([text("hi")])
    agent_loop(model, [], init_session(None, "go"))
    assert model.asked == [([], {"messages": [{"role": "user", "content": "go"}]})]


def test_an_exception_of_the_model_comes_through_and_nothing_is_lost() -> None:
    """If the model fails, earlier messages stay."""
    model = Replies([use("1", a=1, b=2)])
    session = init_session(None, "go")
    with pytest.raises(RuntimeError, match="StopIteration"):
        agent_loop(model, TOOLS, session, HANDLERS)
    assert shapes(session) == ["user", "tool_call", "tool_result"]


def test_a_reply_with_no_blocks_ends_it() -> None:
    """Empty text blocks are dropped; a blank reply is no message."""
    session = agent_loop(Replies([]), TOOLS, init_session(None, "go"), HANDLERS)
    assert shapes(session) == ["user"]


def test_a_last_reply_of_thoughts_alone_was_said_all_the_same() -> None:
    """Such a reply was paid for, and ends the loop."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    session = agent_loop(Replies([thought]), TOOLS, init_session(None, "go"), HANDLERS)
    assert shapes(session) == ["user", "thinking"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (use("1", a=1), "missing 1 required positional argument"),
        (use("1", a=1, b="x"), "unsupported operand"),
        (use("1", "subtract"), "Tool 'subtract' not found. Available: add"),
        ({**use("1"), "input": [1, 2]}, "expected a JSON object, got an array"),
    ],
)
def test_mistakes_are_results(arguments: dict[str, Any], message: str) -> None:
    """Wrong arguments, exceptions, unknown tools and an input that is a list are results."""
    session = agent_loop(
        Replies([arguments], [text("ok")]), TOOLS, init_session(None, "go"), HANDLERS
    )
    result = session["messages"][2]
    assert result["is_error"]
    assert result["output"].startswith("Error")
    assert message in result["output"]


def test_calls_run_in_threads_at_the_same_time_and_results_keep_their_order() -> None:
    """The first waits for the second, which only works side by side."""
    second_ran = threading.Event()

    def wait(n: int) -> str:
        if n == 1:
            assert second_ran.wait(timeout=PATIENCE_S)
        second_ran.set()
        return f"{n}"

    tools = [{"name": "wait", "description": "Wait.", "input_schema": {"type": "object"}}]
    model = Replies([use("1", "wait", n=1), use("2", "wait", n=2)], [text("ok")])
    session = agent_loop(model, tools, init_session(None, "go"), {"wait": wait})
    assert [m["output"] for m in session["messages"][3:5]] == ["1", "2"]


def test_a_handler_may_run_an_agent_of_its_own() -> None:
    """The outer agent sees a string."""

    def shorten(words: str) -> str:
        inner = agent_loop(Replies([text(words[:3])]), [], init_session("Shorten.", words))
        answer = response(inner)
        assert answer is not None
        return str(answer["content"])

    tools = [{"name": "shorten", "description": "Shorten.", "input_schema": {"type": "object"}}]
    model = Replies([use("1", "shorten", words="abcdef")], [text("done")])
    session = agent_loop(model, tools, init_session(None, "go"), {"shorten": shorten})
    assert session["messages"][2]["output"] == "abc"


def test_the_name_labels_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each entry is one line, cut at 120 characters."""
    with caplog.at_level(logging.INFO, logger="agent.flat"):
        agent_loop(Replies([text("a\nb" * 99)]), [], init_session(None, "go"), name="judge")
    (line,) = [record.getMessage() for record in caplog.records]
    assert " judge assistant a ba b" in line
    assert len(line) == 120
    assert line.endswith("...")


def test_a_tool_without_a_handler_and_a_session_with_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match="'add' has no handler"):
        agent_loop(Replies(), TOOLS, init_session(None, "go"))
    session = init_session(None, "go")
    session["messages"].append({"type": "tool_result", "id": "x", "output": ""})
    with pytest.raises(ValueError, match="1"):
        agent_loop(Replies(), TOOLS, session, HANDLERS)
