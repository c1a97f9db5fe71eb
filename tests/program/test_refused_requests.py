"""Endpoints that refuse every request: the run stops, and no task is marked as failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import lines, run, write_prompts, write_rows

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "m",
    "key_env": "none",
    "num_workers": 2,
}


@pytest.mark.parametrize(
    ("message", "remedy", "rows"),
    [
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
            "start vLLM with --enable-auto-tool-choice and --tool-call-parser NAME",
            60,
        ),
        ("registry.ollama.ai/library/gemma does not support tools", "--text_protocol=react", 2),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum "
            "context length is 4096 tokens and your request has 300 input tokens (8192 > 4096 - "
            "300).",
            "Check --max_tokens",
            3,
        ),
    ],
)
def test_a_run_stops_where_nothing_but_refusals_came(
    tmp_path: Path, message: str, remedy: str, rows: int
) -> None:
    write_prompts(tmp_path / "p.jsonl", rows)
    error = {"error": {"message": message, "type": "BadRequestError"}}
    with answering(lambda path, body: (400, error)) as (url, _):
        for _ in range(2):
            refused = run(tmp_path, **OPTIONS, base_url=url, max_attempts=1)
            assert refused.returncode == 4, refused.stderr
            assert remedy in refused.stderr
            assert "No task was marked as failed" in refused.stderr
    run_dir = tmp_path / "trajectories" / "r"
    assert not lines(run_dir / "records.jsonl")
    assert not lines(run_dir / "failures.jsonl")
    with FakeEndpoint(latency_s=0.0, turns=1) as endpoint:
        assert run(tmp_path, **OPTIONS, base_url=endpoint.openai_url).returncode == 0


@pytest.mark.parametrize(
    "told",
    [
        lambda n, body: f"Tools are refused (request req_{n}x{n * 7919:x}Zq)",
        lambda n, body: f"1 validation error for the request: input={body['messages']}",
    ],
    ids=["the id of each request", "each request itself"],
)
def test_refusals_that_repeat_the_request_are_alike(
    tmp_path: Path, told: Callable[[int, dict[str, Any]], str]
) -> None:
    write_rows(tmp_path / "p.jsonl", *({"prompt": word} for word in ("One", "two", "and three")))
    numbers = itertools.count()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 400, {"error": {"message": told(next(numbers), body)}}

    with answering(answer) as (url, _):
        refused = run(tmp_path, **OPTIONS, base_url=url)
    assert refused.returncode == 4, refused.stderr
    assert "requests were refused alike" in refused.stderr
    assert not lines(tmp_path / "trajectories" / "r" / "failures.jsonl")


@pytest.mark.parametrize("last", ["Hello", "fault:http422"], ids=["one answered", "one alone"])
def test_refusals_of_single_rows_fail_these(tmp_path: Path, last: str) -> None:
    prompts = ["fault:http400"] * 4 + [last] if last == "Hello" else [last]
    write_rows(tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": p} for n, p in enumerate(prompts)))
    with FakeEndpoint(latency_s=0.0, turns=1) as endpoint:
        done = run(tmp_path, **OPTIONS, base_url=endpoint.openai_url, max_attempts=2)
        assert done.returncode == 1, done.stderr
        failures = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
        assert len(failures) == len(prompts) - (last == "Hello")
        again = run(tmp_path, **OPTIONS, base_url=endpoint.openai_url, max_attempts=2)
        assert again.returncode == 1, "a start after replies marks what is refused"


def test_a_few_rows_at_the_beginning_do_not_stop_a_run(tmp_path: Path) -> None:
    """With one conversation at a time; more at a time are more that are tried."""
    prompts = ["fault:http400"] * 5 + ["Hello"] * 2
    write_rows(tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": p} for n, p in enumerate(prompts)))
    options = {**OPTIONS, "num_workers": 1, "batch_size": 1}
    with FakeEndpoint(latency_s=0.0, turns=1) as endpoint:
        done = run(tmp_path, **options, base_url=endpoint.openai_url)
    assert done.returncode == 1, done.stderr
    assert len(lines(tmp_path / "trajectories" / "r" / "records.jsonl")) == 2


def test_different_refusals_fail_their_rows(tmp_path: Path) -> None:
    prompts = ("fault:http400", "fault:http413", "fault:http422")
    write_rows(tmp_path / "p.jsonl", *({"prompt": prompt} for prompt in prompts))
    with FakeEndpoint(latency_s=0.0, turns=1) as endpoint:
        done = run(tmp_path, **OPTIONS, base_url=endpoint.openai_url)
    assert done.returncode == 1, done.stderr
    assert len(lines(tmp_path / "trajectories" / "r" / "failures.jsonl")) == 3


REPLY = chat_reply("fine", usage={"prompt_tokens": 10, "completion_tokens": 1})


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"error": {"message": "Your wallet is of no use any more"}}),
        (403, {"message": "the subscription of this team has lapsed"}),
        (404, {"detail": "model was withdrawn"}),
        (500, {"error": {"message": "purse is bare (77)"}}),
    ],
)
def test_an_endpoint_that_turns_everything_away_stops_the_run(
    tmp_path: Path, status: int, error: dict[str, Any]
) -> None:
    """In words that nobody knows: the rest of the tasks stay pending, and are done later."""
    write_prompts(tmp_path / "p.jsonl", 60)
    options = {**OPTIONS, "num_workers": 1, "batch_size": 4, "call_attempts": 1}
    numbers, refusals = itertools.count(1), [(status, error)]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return refusals[0] if refusals and next(numbers) > 5 else (200, REPLY)

    run_dir = tmp_path / "trajectories" / "r"
    with answering(answer) as (url, asked):
        refused = run(tmp_path, **options, base_url=url)
        assert refused.returncode == 4, refused.stderr
        assert "none was answered between them" in refused.stderr
        assert len(asked) < 30
        assert len(lines(run_dir / "records.jsonl")) == 5
        assert len(lines(run_dir / "failures.jsonl")) < 20
        refusals.clear()
        assert run(tmp_path, **options, base_url=url).returncode == 0
    assert len(lines(run_dir / "records.jsonl")) == 60


def test_refused_rows_between_answered_ones_stop_no_run(tmp_path: Path) -> None:
    """Also if they stand together, while other conversations go on."""
    prompts = [*["Hello"] * 4, *["fault:http400"] * 30, *["Hello"] * 10]
    write_rows(tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": p} for n, p in enumerate(prompts)))
    options = {**OPTIONS, "num_workers": 1, "batch_size": 44, "max_in_flight": 44}
    with FakeEndpoint(latency_s=0.3, turns=3) as endpoint:
        done = run(tmp_path, **options, base_url=endpoint.openai_url, max_attempts=1)
    assert done.returncode == 1, done.stderr
    assert len(lines(tmp_path / "trajectories" / "r" / "records.jsonl")) == 44


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_endpoint_that_has_answered_another_worker_is_not_given_up(
    tmp_path: Path, is_answered: bool
) -> None:
    """One of two workers gets nothing but replies that are none."""
    rows = [{"id": "odd", "prompt": "odd"}, {"id": "other", "prompt": "other"}]
    write_rows(tmp_path / "p.jsonl", *rows)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["messages"][-1]["content"] == "odd" or not is_answered:
            return 200, {"no": "reply"}
        return 200, chat_reply("fine")

    with answering(answer) as (url, _):
        options = {**OPTIONS, "base_url": url, "batch_size": 1, "call_attempts": 2}
        done = run(tmp_path, **options, max_attempts=1)
    run_dir = tmp_path / "trajectories" / "r"
    if not is_answered:
        assert done.returncode == 4, done.stderr
        assert "the reply was not a complete chat reply" in done.stderr
        return
    assert done.returncode == 1, done.stderr
    ended = {record["id"]: record["status"] for record in lines(run_dir / "records.jsonl")}
    assert ended == {"odd": "failed", "other": "completed"}
    assert [one["class"] for one in lines(run_dir / "failures.jsonl")] == ["malformed"]
