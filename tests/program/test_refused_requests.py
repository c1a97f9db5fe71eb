"""Endpoints that refuse every request: the run stops, and no task is marked as failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.fake_endpoint import FakeEndpoint
from tests.answering import answering
from tests.running import lines, run, write_prompts, write_rows

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


def test_different_refusals_fail_their_rows(tmp_path: Path) -> None:
    prompts = ("fault:http400", "fault:http413", "fault:http422")
    write_rows(tmp_path / "p.jsonl", *({"prompt": prompt} for prompt in prompts))
    with FakeEndpoint(latency_s=0.0, turns=1) as endpoint:
        done = run(tmp_path, **OPTIONS, base_url=endpoint.openai_url)
    assert done.returncode == 1, done.stderr
    assert len(lines(tmp_path / "trajectories" / "r" / "failures.jsonl")) == 3
