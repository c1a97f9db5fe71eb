"""Token ids of programs that write their own requests: recorded sessions and agents' calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_tokens import ids_of
from tests.helpers.running import lines, records_by_id, run, write_rows
from tests.helpers.stored import token_turns_of
from tests.program.test_agent_runs import scripted_agent
from tests.program.test_record import recording, stop
from tests.program.test_token_runs import rl_rows
from tests.toolsets.test_sandbox import needs_bwrap

pytestmark = pytest.mark.slow

IDS = {"return_token_ids": True, "logprobs": True, "temperature": 0.5}
TURNS = 3
PLAYS: dict[str, Any] = {"turns": TURNS, "latency_s": 0.0, "reasoning_chars": 40}
FIELDS = {"prompt_token_ids", "token_ids", "logprobs"}


def of_its_own(endpoint: FakeEndpoint, **more: Any) -> dict[str, Any]:
    return {"upstream": "vllm", "base_url": endpoint.openai_url, **more}


def is_what_was_sampled(record: dict[str, Any]) -> None:
    """Each prompt begins with what was sampled before, and ends as the wire's replies do."""
    turns = token_turns_of(record)
    said = [message for message in record["messages"] if message["role"] == "assistant"]
    assert len(turns) == len(said) == TURNS
    for turn, message in zip(turns, said, strict=True):
        assert turn.completion == ids_of(_as_sampled(message))
        assert turn.logprobs is not None
        assert turn.shared == turn.previous_length


def _as_sampled(message: dict[str, Any]) -> str:
    text = f"<|think|>{message['provider_blocks']['blocks'][0]['reasoning_content']}<|said|>"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = "".join(f"<|call|>{call['name']} {call['arguments']}" for call in calls)
    return f"{text}{message['content']}{called}<|end|>"


def talk(world: Any, **more: Any) -> None:
    """A conversation whose program shows reasoning again."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    for _ in range(TURNS):
        message = world.call(messages, at="/sessions/s", **more)
        messages[-1 - len(message.get("tool_calls", ()))] = message


def test_sessions_are_asked_for_ids(tmp_path: Path) -> None:
    """The program asks for nothing; newlines that the template writes split nothing."""
    write_rows(tmp_path / "c.yaml", {"token_ids": True})
    with (
        FakeEndpoint(tokens="vllm", outer_newlines=1, **PLAYS) as endpoint,
        recording(tmp_path, endpoint, config="c.yaml", **of_its_own(endpoint)) as world,
    ):
        talk(world, temperature=0.5)
        assert stop(world.process) == 0
    (record,) = records_by_id(tmp_path).values()
    is_what_was_sampled(record)
    assert record["view_trimmed"] is True
    (row,) = rl_rows(tmp_path)
    assert (row["turns"], row["segments"]) == ([1, 2, 3], 1)
    assert row["sampling"] == [{"temperature": 0.5}] * TURNS
    said = (tmp_path / "output.txt").read_text()
    assert "--token_ids" not in said
    assert f"token ids: {TURNS} turns with, 0 turns without" in said
    journals = [*(tmp_path / "trajectories/r").rglob("*.jsonl")]
    assert not any(b'"prompt_token_ids"' in path.read_bytes() for path in journals)


def test_ids_that_a_program_asks_for_itself_make_rows(tmp_path: Path) -> None:
    with (
        FakeEndpoint(tokens="vllm", **PLAYS) as endpoint,
        recording(tmp_path, endpoint, **of_its_own(endpoint)) as world,
    ):
        talk(world, **IDS)
        assert stop(world.process) == 0
    (record,) = records_by_id(tmp_path).values()
    is_what_was_sampled(record)
    (row,) = rl_rows(tmp_path)
    assert row["sampling"] == [{"temperature": 0.5}] * TURNS


def test_a_session_whose_endpoint_gives_none_is_told_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "c.yaml", {"token_ids": True})
    with (
        FakeEndpoint(**PLAYS) as endpoint,
        recording(tmp_path, endpoint, config="c.yaml", **of_its_own(endpoint)) as world,
    ):
        talk(world)
        assert stop(world.process) == 0
    assert (tmp_path / "output.txt").read_text().count("replies of m come without") == 1


def test_an_upstream_without_ids_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-x-0123456789012345")
    done = run(tmp_path, "record", "--token_ids", upstream="anthropic", run_name="r", port=0)
    assert done.returncode == 2
    assert "token_ids: no reply of the API anthropic_messages has token ids" in done.stderr


@needs_bwrap
@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_calls_of_agents_are_asked_for_ids(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The agent drops reasoning, so its template shows none, and each turn is a row."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "Please work. [t steps=1]"})
    agent = scripted_agent("chat", *flags)
    given: dict[str, Any] = {
        "dataset_file": "p.jsonl",
        "run_name": "r",
        "model": "m",
        "num_workers": 1,
    }
    given |= {"agent": json.dumps(agent), "key_env": "none", "num_workers": 1}
    plays = {**PLAYS, "arguments": '{"command": "true"}'}
    with FakeEndpoint(tokens="vllm", strip_reasoning=1, **plays) as endpoint:
        done = run(tmp_path, "--token_ids", base_url=endpoint.openai_url, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = lines(tmp_path / "trajectories/r/records.jsonl")
    turns = token_turns_of(record)
    assert len(turns) == len(record["turns"]) > 1
    rows = rl_rows(tmp_path)
    assert [turn for row in rows for turn in row["turns"]] == [*range(1, len(turns) + 1)]
