"""Runs with `--token_ids`: what the endpoint sampled is in records and rows, also after a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_tokens import WEIGHTS, ids_of, logprob_of
from tests.faults.oracle import assert_gone, resume_and_judge
from tests.faults.test_process import asking
from tests.helpers.running import (
    PATIENCE_S,
    WRITE_A_NOTE,
    lines,
    run,
    sorted_records,
    started,
    wait_until,
    workers_of,
    write_prompts,
    write_rows,
)
from tests.helpers.stored import token_turns_of

TURNS = 3
PLAYS: dict[str, Any] = {"turns": TURNS, "latency_s": 0.0, "reasoning_chars": 60, **WRITE_A_NOTE}


def run_for_tokens(cwd: Path, endpoint: FakeEndpoint, **more: object) -> str:
    """Run two prompts with `--token_ids`; all that was said."""
    write_prompts(cwd / "p.jsonl", 2)
    given = asking(endpoint, **{"num_workers": 1, "model": "m", **more})
    done = run(cwd, "--token_ids", **given)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def rl_rows(cwd: Path, name: str = "r") -> list[dict[str, Any]]:
    done = run(cwd, "export", name, format="rl")
    assert done.returncode == 0, done.stderr
    return lines(cwd / "trajectories" / name / "exports" / "dataset" / "rl" / "train.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run at vLLM whose replies come in one piece."""
    folder = tmp_path_factory.mktemp("whole")
    with FakeEndpoint(tokens="vllm", **PLAYS) as endpoint:
        said = run_for_tokens(folder, endpoint)
    assert f"token ids: {2 * TURNS} turns with, 0 turns without" in said
    assert "--token_ids" not in said
    summary = json.loads((folder / "trajectories/r/summary.json").read_bytes())
    assert summary["token_ids"] == {"turns_with": 2 * TURNS, "turns_without": 0}
    for record in sorted_records(folder):
        _is_what_was_sampled(record)
    return rl_rows(folder)


def _is_what_was_sampled(record: dict[str, Any]) -> None:
    """The tokenizer of the endpoint gives the same ids for the messages of the record."""
    said = [message for message in record["messages"] if message["role"] == "assistant"]
    turns = token_turns_of(record)
    assert len(turns) == len(said) == TURNS
    for turn, message in zip(turns, said, strict=True):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        text = f"<|think|>{message['reasoning']}<|said|>{message['content']}"
        text = text.replace(message["reasoning"], _verbatim(message))
        text += "".join(f"<|call|>{call['name']} {call['arguments']}" for call in calls)
        assert turn.completion == ids_of(text + "<|end|>")
        assert turn.logprobs == [logprob_of(id) for id in turn.completion]
        assert turn.shared == turn.previous_length


def _verbatim(message: dict[str, Any]) -> str:
    """Reasoning with the blanks around it."""
    return str(message["provider_blocks"]["blocks"][0]["reasoning_content"])


def test_a_row_is_a_whole_conversation(whole: list[dict[str, Any]]) -> None:
    for row in whole:
        assert (row["segments"], row["split"], row["turns"]) == (1, None, [1, 2, 3])
        assert len(row["response_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        sampled = [
            id for id, mask in zip(row["response_ids"], row["loss_mask"], strict=True) if mask
        ]
        values = [v for v, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
        assert values == [logprob_of(id) for id in sampled]
        assert row["loss_mask"][-1] == 1
        assert row["policy_versions"] == ["m"] * TURNS


def test_streamed_replies_give_the_same_rows(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    with FakeEndpoint(tokens="vllm", **PLAYS) as endpoint:
        write_rows(tmp_path / "c.yaml", {"stream_replies": True})
        run_for_tokens(tmp_path, endpoint, config="c.yaml")
        assert endpoint.journal()["streamed"] == 2 * TURNS
    assert rl_rows(tmp_path) == whole


@pytest.mark.slow
def test_sglang_gives_the_same_rows(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    with FakeEndpoint(tokens="sglang", **PLAYS) as endpoint:
        run_for_tokens(tmp_path, endpoint, model="sglang:m")
    expected = [{**row, "policy_versions": [WEIGHTS] * TURNS} for row in whole]
    assert rl_rows(tmp_path) == expected


@pytest.mark.slow
def test_streams_of_sglang_have_no_ids_and_that_is_said(tmp_path: Path) -> None:
    with FakeEndpoint(tokens="sglang", **PLAYS) as endpoint:
        write_rows(tmp_path / "c.yaml", {"stream_replies": True})
        said = run_for_tokens(tmp_path, endpoint, config="c.yaml", model="sglang:m")
        assert endpoint.journal()["refused"] == 0
    assert "replies of m come without prompt token ids, token ids;" in said
    assert f"token ids: 0 turns with, {2 * TURNS} turns without" in said
    stored = [turn["tokens"] for record in sorted_records(tmp_path) for turn in record["turns"]]
    assert all(tokens.keys() == {"logprobs", "texts", "sampling"} for tokens in stored)


def test_an_endpoint_that_gives_none_is_named_once(tmp_path: Path) -> None:
    with FakeEndpoint(**PLAYS) as endpoint:
        said = run_for_tokens(tmp_path, endpoint, num_workers=2)
    assert said.count("replies of m come without prompt token ids, token ids, logprobs;") == 1
    assert f"token ids: 0 turns with, {2 * TURNS} turns without" in said
    assert not any(
        "tokens" in turn for record in sorted_records(tmp_path) for turn in record["turns"]
    )
    done = run(tmp_path, "export", "r", format="rl")
    assert "not used           2  no_token_ids" in done.stdout
    assert "without token ids" not in done.stdout  # of which conversations?


@pytest.mark.slow
def test_nothing_is_missing_of_a_simulated_user(tmp_path: Path) -> None:
    """What it saw is not kept, so there are no ids of its prompts."""
    write_prompts(tmp_path / "p.jsonl", 1)
    user = json.dumps({"system_prompt": "You are Ann.", "max_turns": 2})
    with FakeEndpoint(tokens="vllm", **{**PLAYS, "turns": 1}) as endpoint:
        done = run(
            tmp_path,
            "--token_ids",
            simulated_user=user,
            **asking(endpoint, num_workers=1, model="m"),
        )
    assert done.returncode == 0, done.stderr
    (record,) = sorted_records(tmp_path)
    inner = [turn for one in record["inner"] for turn in one["turns"]]
    assert inner
    assert not any("prompt" in turn["tokens"] for turn in inner)
    assert "come without" not in done.stdout + done.stderr
    (row,) = rl_rows(tmp_path)
    assert row["turns"] == [turn["turn"] for turn in record["turns"]]


def test_without_the_option_nothing_is_asked_for_or_said(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    with FakeEndpoint(tokens="vllm", **PLAYS) as endpoint:
        done = run(tmp_path, **asking(endpoint, num_workers=1))
    assert "token ids" not in done.stdout + done.stderr
    (record,) = sorted_records(tmp_path)
    assert not any(turn.keys() & {"tokens", "extra"} for turn in record["turns"])
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_bytes())
    assert "token_ids" not in summary


def test_a_template_that_strips_reasoning_splits_each_conversation(tmp_path: Path) -> None:
    with FakeEndpoint(tokens="vllm", strip_reasoning=1, **PLAYS) as endpoint:
        run_for_tokens(tmp_path, endpoint)
    exported = rl_rows(tmp_path)
    assert [(row["segment"], row["turns"]) for row in exported] == [
        (0, [1]),
        (1, [2]),
        (2, [3]),
    ] * 2
    for row in exported:
        assert (row["split"] is None) == (row["segment"] == 0)
        assert set(row["loss_mask"]) == {1}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_newlines_that_a_template_writes_split_nothing(tmp_path: Path, stream: bool) -> None:
    """The record keeps the wire's text, and says that the model later saw it without them."""
    write_rows(tmp_path / "c.yaml", {"stream_replies": stream})
    with FakeEndpoint(tokens="vllm", outer_newlines=1, **PLAYS) as endpoint:
        run_for_tokens(tmp_path, endpoint, config="c.yaml")
    for record in sorted_records(tmp_path):
        said = [message for message in record["messages"] if message["role"] == "assistant"]
        assert all(message["content"].startswith("\n\n") for message in said)
        assert record["view_trimmed"] is True
    assert [(row["segments"], row["split"]) for row in rl_rows(tmp_path)] == [(1, None)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "worker"])
def test_a_kill_loses_no_ids(tmp_path: Path, whole: list[dict[str, Any]], who: str) -> None:
    """The conversations continue in another process, which has only their journals."""
    write_prompts(tmp_path / "p.jsonl", 2)
    write_rows(tmp_path / "c.yaml", {"token_ids": True})
    with FakeEndpoint(tokens="vllm", answers=3, **PLAYS) as endpoint:
        given = asking(endpoint, num_workers=1, model="m", config="c.yaml")
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 3)
            if who == "worker":
                os.kill(workers_of(process.pid)[0], signal.SIGKILL)
                endpoint.answer(None)
                assert process.wait(timeout=PATIENCE_S) == 0
            else:
                os.killpg(process.pid, signal.SIGKILL)
                assert_gone(process.pid)
                endpoint.answer(None)
                resume_and_judge(tmp_path, given, tasks=2, endpoint=endpoint, wasted=2)
    assert any(record["resumes"] for record in sorted_records(tmp_path))
    assert rl_rows(tmp_path) == whole


@pytest.mark.slow
def test_a_branch_trains_on_its_own_turns(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    with FakeEndpoint(tokens="vllm", **PLAYS) as endpoint:
        run_for_tokens(tmp_path, endpoint)
        done = run(tmp_path, "fork", "r", "--at_turn=1", "--n=1", run_name="b")
        assert done.returncode == 0, done.stderr
    # Branches are in the order in which their parents ended.
    exported = sorted(rl_rows(tmp_path, "b"), key=lambda row: str(row["id"]))
    assert [row["turns"] for row in exported] == [[2, 3]] * 2
    for row, parent in zip(exported, whole, strict=True):
        own = len(row["response_ids"])
        assert (
            row["prompt_ids"] + row["response_ids"] == parent["prompt_ids"] + parent["response_ids"]
        )
        assert row["response_ids"] == parent["response_ids"][-own:]
        assert row["loss_mask"] == parent["loss_mask"][-own:]


def test_subagents_have_rows_of_what_they_sampled(tmp_path: Path) -> None:
    """The caller calls one in each turn but its last; each has two turns of its own."""
    (tmp_path / "c.yaml").write_text(
        "subagents: [{name: helper, description: Helps., max_turns: 2}]\n"
    )
    plays = {**PLAYS, "tool": "helper", "arguments": '{"task": "Part {turn}."}'}
    with FakeEndpoint(tokens="vllm", **plays) as endpoint:
        run_for_tokens(tmp_path, endpoint, config="c.yaml")
    assert len(rl_rows(tmp_path)) == 2
    done = run(tmp_path, "export", "r", "--subagents", format="rl")
    assert done.returncode == 0, done.stderr
    entries = lines(tmp_path / "trajectories/r/exports/dataset/rl/train.jsonl")
    for record in sorted_records(tmp_path):
        rows = [row for row in entries if row["id"] == record["id"]]
        assert [row["thread"] for row in rows] == ["main", "helper", "helper"]
        assert [row["thread_id"] for row in rows[1:]] == [one["key"] for one in record["inner"]]
        assert [row["turns"] for row in rows] == [[1, 2, 3], [1, 2], [1, 2]]
        for row, one in zip(rows[1:], record["inner"], strict=True):
            (first, _) = token_turns_of(one)
            assert row["prompt_ids"] == first.prompt
            assert row["response_ids"][: len(first.completion)] == first.completion
    assert run(tmp_path, "export", "r", "--check").returncode == 0
