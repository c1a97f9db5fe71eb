"""Agents that run as commands and get several messages, or make one call again and again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint
from tests.helpers.running import kill_session, run, sorted_records, started, wait_until, write_rows
from tests.program.test_agent_runs import options, prompt, scripted_agent
from tests.toolsets.test_sandbox import needs_bwrap

pytestmark = needs_bwrap

GO_ON = "Please go on. [more steps=%d]"


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    with AgentEndpoint() as endpoint:
        yield endpoint


def continuing(dialect: str = "chat", **fields: Any) -> dict[str, Any]:
    agent = scripted_agent(dialect, "--stream", **fields)
    [program, script, *flags, message] = agent["command"]
    return {**agent, "continues": [program, script, *flags, "--continue", message]}


def user_messages(record: dict[str, Any]) -> list[str]:
    return [message["content"] for message in record["messages"] if message["role"] == "user"]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_the_users_messages_follow_the_answers(
    tmp_path: Path, endpoint: AgentEndpoint, dialect: str
) -> None:
    """In the same workspace and HOME; a kill between them costs nothing that was paid."""
    turns = [GO_ON % 3, GO_ON % 5]
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1), "user_turns": turns})
    given = options(endpoint, continuing(dialect))
    endpoint.answers = 6
    with started(tmp_path, **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 6 and endpoint.waiting == 1)
        kill_session(process.pid)
        process.wait()
    endpoint.answer_all()
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    [record] = sorted_records(tmp_path)
    assert record["status"] == "completed"
    assert user_messages(record) == [prompt("t", 1), *turns]
    answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
    assert [text for text in answers if text] == [f"Finished t in {n} steps." for n in (1, 3, 5)]
    assert (record["api_calls"], record["set_aside"], record["diverged_at"]) == (8, [], None)
    assert len(endpoint.exchanges) == 8, "none was paid twice"
    assert record["agent"]["starts"] == 2
    [row] = (tmp_path / "trajectories" / "r.jsonl").read_text().splitlines()
    assert [one["from"] for one in json.loads(row)["conversations"]].count("human") == 3


@pytest.mark.slow
def test_a_simulated_user_writes_to_an_agent(tmp_path: Path, endpoint: AgentEndpoint) -> None:
    """What it wrote before a kill is in the journal, and not paid again."""
    user = {"system_prompt": "You are Ann. [user 2]", "max_turns": 5}
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1)})
    given = options(endpoint, continuing(), simulated_user=json.dumps(user))
    endpoint.answers = 4  # two, the user's first message, and one after it
    with started(tmp_path, **given) as process:
        wait_until(lambda: len(endpoint.exchanges) == 4 and endpoint.waiting == 1)
        kill_session(process.pid)
        process.wait()
    endpoint.answer_all()
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    [record] = sorted_records(tmp_path)
    assert record["status"] == "completed"
    assert user_messages(record) == [prompt("t", 1), GO_ON % 4, GO_ON % 6]
    users = [inner for inner in record["inner"] if inner["name"] == "simulated_user"]
    assert [inner["messages"][-1]["content"] for inner in users] == [
        GO_ON % 4,
        GO_ON % 6,
        "###STOP###",
    ]
    paid = [one for one in endpoint.exchanges if "[user 2]" in json.dumps(one.request)]
    assert len(paid) == 3
    assert record["cost_usd"] is not None
    assert record["api_calls"] == len(endpoint.exchanges) == 12


@pytest.mark.slow
def test_an_agent_that_loses_its_session_has_failed(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    """Its next messages would be another conversation."""
    agent = {**scripted_agent(), "continues": ["true", "{prompt}"]}
    row = {"id": "p", "prompt": prompt("t", 1), "user_turns": ["And now?"]}
    write_rows(tmp_path / "p.jsonl", row)
    run(tmp_path, **options(endpoint, agent, max_attempts=1))
    [record] = sorted_records(tmp_path)
    assert record["status"] == "failed"
    assert "without going on with its conversation (`continues`)" in record["error"]["message"]


def test_an_agent_that_takes_one_message_is_named_before_any_call(
    tmp_path: Path, endpoint: AgentEndpoint
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 1), "user_turns": ["x"]})
    done = run(tmp_path, "--on_bad_row=fail", **options(endpoint, scripted_agent()))
    assert done.returncode == 2
    assert "`user_turns`: agent 'custom' has no `continues`" in done.stderr
    done = run(
        tmp_path, **options(endpoint, scripted_agent(), simulated_user='{"system_prompt": "x"}')
    )
    assert done.returncode == 2
    assert "simulated_user: agent 'custom' has no `continues`" in done.stderr
    assert not endpoint.exchanges


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "calls"), [(0, 6), (3, 3)])
def test_a_call_that_is_repeated_ends_the_agent(
    tmp_path: Path, endpoint: AgentEndpoint, limit: int, calls: int
) -> None:
    """Its results differ by what varies from start to start."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": prompt("t", 5, "same")})
    agent = scripted_agent(volatile={"texts": ["took \\d+ ns"]})
    run(tmp_path, **options(endpoint, agent, max_attempts=1, repeat_limit=limit))
    [record] = sorted_records(tmp_path)
    assert len(endpoint.exchanges) == record["api_calls"] == calls
    if limit:
        assert record["status"] == "repeat"
        assert record["status_reason"] == "the same call gave the same result 3 times in a row"
    else:
        assert record["status"] == "completed"
