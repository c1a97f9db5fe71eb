"""A simulated user that has tools of its own, in the agent's workspace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.gateway.command_agent import CommandAgent
from agent.loop.simulated_user import calls_of_message
from agent.messages.message import Event, Message
from agent.options import AgentOptions, SimulatedUser
from agent.setup import Setup, set_up
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.toolsets import list_mcp_tools
from batch_trajectories.dataset.row import RowRules
from tests.helpers.playing import SETTINGS, TOOLS, Played, call, calls, play, say
from toolsets.catalog.registry import UnknownToolset
from toolsets.context import ToolContext
from toolsets.tool import tool

ANN = {"system_prompt": "You are Ann. Your phone has no data.", "stop": "STOP"}


@tool(sequential=True)
def look(context: ToolContext) -> str:
    """Look at the phone."""
    path = context.workspace.root / "phone"
    return path.read_text() if path.exists() else "data off"


@tool(sequential=True)
def switch(context: ToolContext, to: str) -> str:
    """Switch the data of the phone on or off."""
    context.workspace.root.mkdir(exist_ok=True)
    (context.workspace.root / "phone").write_text(f"data {to}")
    return "done"


PHONE = (look, switch)
SCRIPT = [say("What does it say?"), say("Turn data on."), calls(call("look")), say("It is on.")]
USER_SCRIPT = [
    calls(call("look"), content="Let me see.", reasoning="I look."),
    say("It says: data off."),
    calls(call("look")),
    calls(call("switch", to="on"), call("look")),
    say("Done."),
    say("STOP"),
]


def help_ann(root: Path, **more: Any) -> Played:
    user = {**ANN, "enabled_toolsets": ["all"], "script": USER_SCRIPT, **more.pop("user", {})}
    given: dict[str, Any] = {"tools": PHONE, "user_tools": PHONE, **more}
    return play(root, SCRIPT, simulated_user=user, **given)


def is_users(messages: Any) -> bool:
    return str(messages[0]["content"]).startswith(ANN["system_prompt"])


def users_requests(played: Played) -> list[list[Message]]:
    return [list(r.messages) for r in played.requests if is_users(r.messages)]


def test_the_user_acts_on_the_agents_workspace_and_the_agent_sees_only_the_message(
    tmp_path: Path,
) -> None:
    played = help_ann(tmp_path)
    assert played.status == "completed"
    assert [m["content"] for m in played.messages if m["role"] == "user"] == [
        "go",
        "It says: data off.",
        "Done.",
    ]
    assert [m["content"] for m in played.results] == ["data on"], "it sees the user's effect"
    agents = [r for r in played.requests if not is_users(r.messages)]
    assert all("Let me see" not in str(r.messages) for r in agents)
    assert all("switch" not in str(r.messages) for r in agents)


def test_the_users_part_of_the_record_has_its_calls_results_and_cost(tmp_path: Path) -> None:
    played = help_ann(tmp_path, cost_usd=0.25)
    record = played.trajectory.to_record()
    first, second, third = record["inner"]
    assert [m["role"] for m in first["messages"]] == ["system", "assistant", "tool", "assistant"]
    assert first["messages"][1]["reasoning"] == "I look."
    assert [(c["turn"], c["name"]) for c in second["tool_calls"]] == [
        (1, "look"),
        (2, "switch"),
        (2, "look"),
    ]
    assert [one["cost_usd"] for one in (first, second, third)] == [0.5, 0.75, 0.25]
    assert record["cost_usd"] == 0.25 * len(played.requests)
    assert [c["name"] for c in record["tool_calls"]] == ["look"], "the agent's alone"
    assert len(record["turns"]) == 4


def test_the_user_sees_its_earlier_calls_and_each_request_continues_the_one_before(
    tmp_path: Path,
) -> None:
    """Prompt caches find the beginning of each request; ids of calls are unique in it."""
    played = help_ann(tmp_path)
    requests = users_requests(played)
    assert len(requests) == len(USER_SCRIPT)
    for before, after in pairwise(requests):
        assert after[: len(before)] == before
    ids = [c["id"] for m in requests[-1] for c in m.get("tool_calls", ())]
    assert len(ids) == len(set(ids)) == 4
    ids_of_requests = {r.conversation for r in played.requests if is_users(r.messages)}
    assert len(ids_of_requests) == 1
    offered = [r.tools for r in played.requests if is_users(r.messages)]
    assert {t["function"]["name"] for t in offered[0]} == {"look", "switch"}


def test_calls_before_the_first_message_are_seen_in_each_later_one(tmp_path: Path) -> None:
    """After a kill at any event, too, the conversation begins with the user's message."""
    script = [calls(call("look")), say("No data."), *USER_SCRIPT[1:]]
    user = {"writes_first": True, "script": script}
    whole = help_ann(tmp_path / "whole", user=user, opening=[])
    assert whole.status == "completed"
    assert whole.messages[0] == Message(role="user", content="No data.")
    requests = users_requests(whole)
    assert [m["role"] for m in requests[2]] == [
        *("system", "user"),
        *("assistant", "tool", "assistant"),
        "user",
    ]
    for before, after in pairwise(requests):
        assert after[: len(before)] == before
    for length in range(1, len(whole.events)):
        past = whole.events[:length]
        root = tmp_path / str(length)
        again = help_ann(root, user=user, opening=[], past=past, knows_begun=True)
        assert (again.end.status, again.messages[0]) == ("completed", whole.messages[0])


def test_a_kill_at_any_event_pays_for_no_reply_again_and_repeats_no_call(tmp_path: Path) -> None:
    whole = help_ann(tmp_path / "a", tools=TOOLS + PHONE)
    for length in range(1, len(whole.events)):
        past = whole.events[:length]
        began = [e for e in past if e["kind"] == "sub" and e["event"]["kind"] == "began"]
        results = [e for e in past if e["kind"] == "sub" and e["event"]["kind"] == "result"]
        resumed = help_ann(tmp_path / str(length), past=past, knows_begun=True, tools=TOOLS + PHONE)
        known = sum((e["event"] if e["kind"] == "sub" else e)["kind"] == "reply" for e in past)
        assert len(resumed.requests) == len(whole.requests) - known, length
        assert resumed.end == whole.end
        interrupted = [
            m
            for inner in resumed.trajectory.inner.values()
            for m in inner.trajectory.messages
            if m.get("details", {}).get("failure") == "interrupted"
        ]
        assert len(interrupted) == len(began) - len(results), "it may have run: never twice"


def test_calls_over_the_limit_are_not_run_and_the_message_follows(tmp_path: Path) -> None:
    script = [calls(call("look")), calls(*[call("switch", to=x) for x in "abc"]), say("Done.")]
    user = {"max_calls": 3, "script": [*script, say("STOP")]}
    played = help_ann(tmp_path, user=user)
    inner = played.trajectory.inner["simulated_user#1"].trajectory
    results = [m for m in inner.messages if m["role"] == "tool"]
    assert [m["is_error"] for m in results] == [False, False, False, True]
    assert "at most 3 calls" in results[-1]["content"]
    assert (tmp_path / "phone").read_text() == "data b"
    choices = [r.tool_choice for r in played.requests if is_users(r.messages)]
    assert choices == ["auto", "auto", "none", "auto"], "a new message has calls again"
    assert played.status == "completed"


def test_a_user_that_goes_on_calling_ends_the_conversation(tmp_path: Path) -> None:
    user = {"max_calls": 1, "script": [calls(call("look"))] * 9}
    played = help_ann(tmp_path, user=user)
    assert played.status == "errors"
    assert "calls_not_allowed" in str(played.end.reason)


def test_the_users_calls_count_for_the_budget_and_its_open_calls_are_closed(
    tmp_path: Path,
) -> None:
    played = help_ann(tmp_path, cost_usd=0.5, max_cost_usd=0.7)
    assert played.status == "budget"
    inner = played.trajectory.inner["simulated_user#1"].trajectory
    assert [m.get("details", {}).get("failure") for m in inner.messages[2:]] == ["not_run"]
    assert len(played.requests) == 2


def test_failed_calls_of_the_user_end_its_message(tmp_path: Path) -> None:
    user = {"script": [calls(call("fail"))] * 3}
    played = help_ann(tmp_path, user=user, user_tools=TOOLS, max_errors=2)
    assert (played.status, played.end.reason) == (
        "errors",
        "the simulated user ended as errors: 2 errors",
    )


def test_a_user_without_tools_is_asked_as_before(tmp_path: Path) -> None:
    user = {"enabled_toolsets": ["none"], "script": [say("It says nothing."), say("STOP")]}
    played = help_ann(tmp_path, user=user)
    request = next(r for r in played.requests if is_users(r.messages))
    assert not request.tools
    assert "tools" not in str(request.messages[0]["content"])
    assert calls_of_message(played.trajectory, 1) == []


def test_a_lost_workspace_is_noted_even_if_only_the_user_had_used_it(tmp_path: Path) -> None:
    whole = help_ann(tmp_path / "a")
    past = whole.events[: 1 + next(n for n, e in enumerate(whole.events) if is_result(e))]
    for survived in (True, False):
        resumed = help_ann(tmp_path / str(survived), past=past, workspace_survived=survived)
        (resume,) = resumed.trajectory.resumes
        assert resume["workspace_kept"] is survived
        assert not whole.trajectory.resumes


def is_result(event: Event) -> bool:
    return event["kind"] == "sub" and event["event"]["kind"] == "result"


# Configs and rows.


def made(user: dict[str, Any], *, disabled: list[str] | None = None) -> Setup:
    options = AgentOptions(simulated_user=SimulatedUser(**user))
    return set_up(options, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=disabled or [])


def test_the_toolsets_of_the_user_are_apart_from_the_agents() -> None:
    setup = made({"enabled_toolsets": ["file", "python"]})
    assert setup.tools == ()
    assert setup.sandboxed_toolsets() == ["python"]
    assert {t.name for t in setup.user_tools(["python"])} == {"python"}
    assert setup.user_tools(["none"]) == ()
    assert not setup.leave_out_toolset("python").uses("python")


def test_toolsets_that_cannot_be_had_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"simulated_user\.enabled_toolsets: unknown.*phone"
    ) as error:
        made({"enabled_toolsets": ["phone"]})
    assert isinstance(error.value.__cause__, UnknownToolset)
    with pytest.raises(
        ValueError, match=r"simulated_user\.enabled_toolsets: disabled_toolsets leaves"
    ):
        made({"enabled_toolsets": ["file"]}, disabled=["file"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["terminal"],
            "`simulated_user.enabled_toolsets`: terminal not on offer; .*: file, python",
        ),
        ("file", "simulated_user.enabled_toolsets"),
        ([3], "simulated_user.enabled_toolsets"),
    ],
)
def test_a_row_names_only_toolsets_that_the_config_has(names: Any, message: str) -> None:
    options = AgentOptions(
        simulated_user=SimulatedUser(stop="STOP", enabled_toolsets=("file", "python"))
    )
    rules = RowRules(options=options, user_toolsets=frozenset({"file", "python"}))
    row = {"prompt": "x", "simulated_user": {**ANN, "enabled_toolsets": names}}
    with pytest.raises(ValueError, match=message):
        rules.read(row)


@pytest.mark.parametrize("names", [["file"], ["none"], ["all"], []])
def test_a_row_selects_among_the_users_toolsets(names: list[str]) -> None:
    options = AgentOptions(
        simulated_user=SimulatedUser(stop="STOP", enabled_toolsets=("file", "python"))
    )
    rules = RowRules(options=options, user_toolsets=frozenset({"file", "python"}))
    user = {**ANN, "enabled_toolsets": names, "max_calls": 4}
    read = rules.read({"prompt": "x", "simulated_user": user}).spec.options.simulated_user
    assert read is not None
    assert (read.enabled_toolsets, read.max_calls) == (tuple(names), 4)


def test_an_agent_that_is_a_command_refuses_a_user_with_tools() -> None:
    agent = CommandAgent(
        name="a",
        command=("agent", "{prompt}"),
        continues=("agent", "-c", "{prompt}"),
        speaks=("openai_chat",),
    )
    given: dict[str, Any] = {"dataset_file": "p", "run_name": "r", "model": "openai:m"}
    RunConfig(**given, agent=agent, simulated_user={})
    with pytest.raises(ValueError, match=r"enabled_toolsets: agent 'a' runs as"):
        RunConfig(**given, agent=agent, simulated_user={"enabled_toolsets": ["file"]})


def test_the_mcp_server_of_a_user_is_started(tmp_path: Path) -> None:
    server = {"command": [str(tmp_path / "no-such-program")]}
    given: dict[str, Any] = {"dataset_file": "p", "run_name": "r", "model": "openai:m"}
    given |= {"mcp": {"phone": server}, "enabled_toolsets": ["none"]}
    list_mcp_tools(RunConfig(**given, simulated_user={"enabled_toolsets": ["file"]}))
    with pytest.raises(ValueError, match="phone"):
        list_mcp_tools(RunConfig(**given, simulated_user={"enabled_toolsets": ["phone"]}))
