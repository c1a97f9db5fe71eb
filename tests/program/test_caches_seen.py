"""Runs against endpoints with prompt caches: what the commands say of hits and misses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_router import FakeRouter
from tests.helpers.running import run, write_rows
from tests.program.test_agent_runs import PYTHON
from tests.toolsets.test_sandbox import needs_bwrap

PRICES = json.dumps({"fake-model": {"input": 3, "output": 15, "cache_read": 0.3}})
WRITES: dict[str, Any] = {
    "tool": "write_file",
    "arguments": json.dumps({"path": "n{turn}", "content": "word " * 400}),
    "turns": 6,
    "latency_s": 0.0,
    "cache_tokens": 10**7,
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
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "fake-model",
        "num_workers": 1,
        "base_url": base_url,
        "key_env": "none",
        "enabled_toolsets": "file",
        "prices": PRICES,
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


AGENT = """
import json, os, sys, urllib.request
changes = sys.argv[1]
tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
         for name in ("write_file", "read_file")]
messages = [{"role": "system", "content": ""}, {"role": "user", "content": sys.argv[2]}]
for number in range(6):
    time = f"It is 12:{number:02}. " if changes == "system" else "It is noon. "
    messages[0] = {"role": "system", "content": time + "Be careful. " * 500}
    if changes == "tools":
        tools.reverse()
    if changes == "results":
        for message in messages:
            if message["role"] == "tool":
                message["content"] = "cleared"
    body = json.dumps({"model": "fake-model", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "")}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(reply)
    for call in reply.get("tool_calls") or ():
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"{number}: " + "x " * 900}
        messages.append(result)
"""


@pytest.mark.slow
@needs_bwrap
@pytest.mark.parametrize("changes", ["nothing", "system", "tools", "results"])
def test_what_an_agent_changes_in_its_requests_is_named(
    changes: str, tmp_path: Path, replicas: Sequence[FakeEndpoint]
) -> None:
    rows = [{"id": f"p{n}", "prompt": f"Question {n} of {changes}."} for n in range(6)]
    write_rows(tmp_path / "p.jsonl", *rows)
    agent = {
        "command": [PYTHON, "-c", AGENT, changes, "{prompt}"],
        "speaks": "openai_chat",
        "version": [PYTHON, "--version"],
        "memory_mb": 40,
    }
    options: dict[str, Any] = {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "fake-model",
        "num_workers": 1,
        "base_url": replicas[0].openai_url,
        "key_env": "none",
        "agent": json.dumps(agent),
    }
    done = run(tmp_path, **options)
    assert done.returncode == 0, done.stderr
    figures = StoredRun(tmp_path / "trajectories" / "r").statistics()
    (endpoint,) = figures["caches"]["endpoints"]
    found = {one["name"]: one["is_problem"] for one in figures["health"]}["cache_misses"]
    if changes in ("system", "tools"):
        assert (found, endpoint["cause"]) == (True, changes)
        assert endpoint["missed_turns"] >= 20  # others find the system prompt of another one
    else:
        assert not found, endpoint
