"""Runs against endpoints with prompt caches: what the commands say of hits and misses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from testing.fake_endpoint import FakeEndpoint
from testing.fake_router import FakeRouter
from tests.running import run, write_rows

PRICES = json.dumps({"fake-model": {"input": 3, "output": 15, "cache_read": 0.3}})
WRITES: dict[str, Any] = {
    "tool": "write_file",
    "arguments": json.dumps({"path": "n{turn}", "content": "word " * 400}),
    **{"turns": 6, "latency_s": 0.0, "cache_tokens": 10**7},
}


@pytest.fixture
def replicas() -> Iterator[Sequence[FakeEndpoint]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEndpoint(**WRITES)) for _ in range(3)]


def run_at(tmp_path: Path, base_url: str) -> StoredRun:
    """A run of six conversations that are more than 1,024 tokens long from the start."""
    rows = [{"id": f"p{n}", "prompt": f"Question {n}. {'Read this. ' * 500}"} for n in range(6)]
    write_rows(tmp_path / "p.jsonl", *rows)
    options: dict[str, Any] = {
        **{"run_name": "r", "dataset_file": "p.jsonl", "model": "fake-model", "num_workers": 1},
        **{"base_url": base_url, "key_env": "none", "enabled_toolsets": "file", "prices": PRICES},
    }
    done = run(tmp_path, **options)
    assert done.returncode == 0, done.stderr
    return StoredRun(tmp_path / "trajectories" / "r")


@pytest.mark.slow
def test_a_server_that_keeps_its_prompts_is_no_alarm(
    tmp_path: Path, replicas: Sequence[FakeEndpoint]
) -> None:
    stored = run_at(tmp_path, replicas[0].openai_url)
    caches = stored.statistics()["caches"]
    assert caches["repeated_share"] > 97
    (endpoint,) = caches["endpoints"]
    assert (endpoint["later_turns"], endpoint["missed_turns"]) == (30, 0)
    journal = replicas[0].journal()
    assert caches["cached_tokens"] == journal["cached_tokens"]
    assert run(tmp_path, "stats", "r", "--fail_on=cache_misses").returncode == 0
    shown = run(tmp_path, "show", "r", "p0").stdout
    assert "% cached)" in shown
    assert "missed the prompt cache" not in shown


def test_replicas_without_an_id_of_the_conversation_are_named(
    tmp_path: Path, replicas: Sequence[FakeEndpoint]
) -> None:
    with FakeRouter([one.port for one in replicas]) as router:
        stored = run_at(tmp_path, f"{router.url}/v1")
    figures = stored.statistics()
    (endpoint,) = figures["caches"]["endpoints"]
    assert endpoint["cause"] == "replicas"
    assert endpoint["lost_usd"] == pytest.approx(endpoint["lost_tokens"] * 2.7e-6)
    failed = run(tmp_path, "stats", "r", "--fail_on=cache_misses")
    assert failed.returncode == 6
    assert f"{endpoint['lost_tokens']:,} tokens were computed again, for about $" in failed.stdout
    assert "prompt caches: " in failed.stdout
    status = run(tmp_path, "status", "r").stdout
    assert f"{endpoint['missed_turns']} of 30 turns missed" in status
    missed = next(one for one in figures["health"] if one["name"] == "cache_misses")["examples"][0]
    assert "missed the prompt cache" in run(tmp_path, "show", "r", missed).stdout
