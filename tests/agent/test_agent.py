"""AIAgent: one conversation from Python."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.resolve import UnknownModel
from batch_trajectories.api.ai_agent import COMPLETED_FILE, FAILED_FILE, AIAgent
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import ROOT, WRITE_A_NOTE, lines
from toolsets.catalog.registry import UnknownToolset

ANSWER = [{"reasoning": "easy", "content": "42"}]
LOOK = {"tool_calls": [{"name": "list_files", "arguments": {}}]}


def make_agent(tmp_path: Path, script: list[Any], **more: Any) -> AIAgent:
    return AIAgent(
        "scripted", script=script, enabled_toolsets=["file"], output_dir=tmp_path, **more
    )


def test_chat_gives_the_final_text(tmp_path: Path) -> None:
    assert make_agent(tmp_path, ANSWER).chat("What is it?") == "42"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_key": "sk-of-a-file\n"}, "api_key: it has invalid characters"),
        ({"base_url": "127.0.0.1:8000/v1"}, "base_url: must start with http"),
        ({"base_url": "http://127.0.0.1/v1?version=1"}, "base_url: must not have a password"),
    ],
)
def test_options_that_cannot_be_sent_are_refused_at_once(
    given: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        AIAgent("m", **{"base_url": "http://127.0.0.1/v1", **given})  # type: ignore[arg-type]
    assert "sk-of-a-file" not in str(caught.value)


def test_a_conversation_reports_all_its_events(tmp_path: Path) -> None:
    history: list[Message] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    agent = make_agent(tmp_path, [LOOK, *ANSWER], system_prompt="Be brief.")
    result = agent.run_conversation("And?", conversation_history=history, task_id="t1")
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert (result["status"], result["completed"], result["partial"]) == ("completed", True, False)
    assert (result["api_calls"], result["task_id"], result["error"]) == (2, "t1", None)
    assert len(history) == 2, "the caller's list is copied"


def test_the_system_message_of_a_call_wins(tmp_path: Path) -> None:
    agent = make_agent(tmp_path, ANSWER, system_prompt="default")
    result = agent.run_conversation("x", system_message="mine")
    assert result["messages"][0]["content"] == "mine"


def test_a_conversation_that_reaches_its_limit_is_partial(tmp_path: Path) -> None:
    result = make_agent(tmp_path, [LOOK] * 3, max_turns=2).run_conversation("x")
    assert (result["status"], result["partial"]) == ("max_turns", True)
    assert result["final_response"] == ""


def test_every_way_out_is_saved(tmp_path: Path) -> None:
    """Completed ones in one file; early endings, failures and rejects in the other."""
    make_agent(tmp_path, ANSWER, save_trajectories=True).chat("good")
    make_agent(tmp_path, [LOOK] * 2, save_trajectories=True, max_turns=1).chat("bound")
    make_agent(tmp_path, [LOOK], save_trajectories=True).chat("failed")
    make_agent(tmp_path, [{"content": "<tool_call>"}], save_trajectories=True).chat("forged")
    (good,) = lines(tmp_path / COMPLETED_FILE)
    assert set(good) == {"conversations", "timestamp", "model", "completed", "status"}
    assert [turn["from"] for turn in good["conversations"]] == ["system", "human", "gpt"]
    bound, failed, forged = lines(tmp_path / FAILED_FILE)
    assert [turn["from"] for turn in bound["conversations"]] == ["system", "human", "gpt", "tool"]
    assert failed["status"] == "failed"
    assert "leaked_call" in forged["rejected"]


def test_a_failing_endpoint_is_a_result() -> None:
    with FakeEndpoint(turns=1, latency_s=0.0, key="right") as endpoint:
        agent = AIAgent("m", "wrong", endpoint.openai_url, enabled_toolsets=["none"])
        result = agent.run_conversation("x")
    assert result["failed"]
    assert "auth" in result["error"]
    assert result["final_response"] == ""


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic_messages"])
def test_it_speaks_both_dialects_with_the_key_it_was_given(dialect: Any) -> None:
    with FakeEndpoint(turns=3, latency_s=0.0, key="k", reasoning_chars=50, **WRITE_A_NOTE) as fake:
        url = fake.openai_url if dialect == "openai_chat" else fake.anthropic_url
        agent = AIAgent("m", "k", url, api=dialect, enabled_toolsets=["file"])
        result = agent.run_conversation("x")
    assert (result["status"], result["api_calls"]) == ("completed", 3)
    assert all(m["reasoning"] for m in result["messages"] if m["role"] == "assistant")
    assert result["usage"]["input_tokens"] > 0


def test_it_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    """A notebook has a loop of its own."""

    async def notebook() -> str:
        return make_agent(tmp_path, ANSWER).chat("x")

    assert asyncio.run(notebook()) == "42"


def test_wrong_settings_are_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownModel):
        AIAgent("foo:bar")
    with pytest.raises(UnknownToolset, match="known: browser, file"):
        AIAgent("scripted", enabled_toolsets=["flight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "'temprature' is not one of the options: "),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"base_url": "http://127.0.0.1:1"}, "'base_url' is not one of the options"),
        ({"endpoint": "x"}, "'endpoint' is not one of the options"),
    ],
)
def test_wrong_model_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model_options: {message}"):
        AIAgent("scripted", model_options=options)


@pytest.mark.slow
def test_the_command_line_prints_the_answer_and_its_errors(tmp_path: Path) -> None:
    with FakeEndpoint(turns=1, latency_s=0.0, text_chars=30) as endpoint:
        command = [sys.executable, str(ROOT / "run_agent.py"), "hello", "--model=m"]
        flags = [f"--base-url={endpoint.openai_url}", "--enabled_toolsets=none"]
        done = subprocess.run(
            [*command, *flags, "--save_trajectories"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0
    assert done.stderr.startswith("The price of model m is unknown, and so is what its calls cost")
    assert done.stdout.strip()
    (row,) = lines(tmp_path / "trajectories" / COMPLETED_FILE)
    assert row["conversations"][-1]["value"].endswith(done.stdout.strip())
    wrong = subprocess.run(
        [sys.executable, str(ROOT / "run_agent.py"), "hello", "--model=foo:bar"],
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert "Traceback" not in wrong.stderr


def test_the_row_is_the_same_as_that_of_a_batch_run(tmp_path: Path) -> None:
    """One converter serves both doors."""
    from tests.helpers.running import run, write_rows

    script: list[Any] = [LOOK, *ANSWER]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    run(tmp_path, dataset_file="p.jsonl", run_name="r", model="scripted", enabled_toolsets="file")
    (batch_row,) = lines(tmp_path / "trajectories" / "r.jsonl")
    make_agent(tmp_path, script, save_trajectories=True).chat("x")
    (single_row,) = lines(tmp_path / COMPLETED_FILE)
    assert json.dumps(single_row["conversations"]) == json.dumps(batch_row["conversations"])
