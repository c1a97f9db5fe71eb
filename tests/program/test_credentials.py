"""Runs whose credentials change while they work, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.fake_batches import FakeBatches
from tests.fakes.fake_script import Options
from tests.helpers.running import run, session_of, started, wait_until, write_prompts

PROMPTS, TURNS, KILLS = 60, 4, 2
SECRET = b"token-of-turn-"
OPTIONS = Options(turns=TURNS, tool="terminal", arguments='{"command": "env; echo {turn}"}')

OWN_CLIENT = """
from pathlib import Path

def make(root, token_file):
    from openai import AsyncOpenAI

    async def token():
        return Path(token_file).read_text()

    return AsyncOpenAI(base_url=root, api_key=token)
"""


def endpoint_of(way: str, api: FakeBatches) -> dict[str, Any]:
    if way == "key_command":
        return {"base_url": api.openai_url, "key_command": ["cat", str(api.token_file)]}
    options = {"root": api.openai_url, "token_file": str(api.token_file)}
    return {"client": "my_clients:make", "client_options": options}


def shows_secret(leader: int) -> bool:
    """Whether a command line or an environment of a run's processes has a token."""
    for pid in session_of(leader):
        for name in ("cmdline", "environ"):
            try:
                if SECRET in Path(f"/proc/{pid}/{name}").read_bytes():
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
    return False


def replies_on_disk(run_dir: Path) -> set[tuple[str, int]]:
    content = b"".join(path.read_bytes() for path in run_dir.rglob("*.jsonl"))
    matches = re.findall(rb'"response_id":"chatcmpl-(\w+)_(\d+)"', content)
    return {(conversation.decode(), int(turn)) for conversation, turn in matches}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["key_command", "client"])
def test_a_killed_run_with_changing_credentials_pays_no_stored_call_again(
    tmp_path: Path, way: str
) -> None:
    write_prompts(tmp_path / "p.jsonl", PROMPTS)
    (tmp_path / "my_clients.py").write_text(OWN_CLIENT)
    token_file = tmp_path / "token"
    given: dict[str, Any] = {
        "config": "run.yaml",
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "own:m",
        "enabled_toolsets": "terminal",
        "sandbox": "local",
        "num_workers": 2,
        "batch_size": 4,
    }
    run_dir = tmp_path / "trajectories" / "r"
    with FakeBatches(options=OPTIONS, token_file=token_file, calls_per_token=40) as api:
        config = {"endpoints": {"own": endpoint_of(way, api)}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        stored: dict[tuple[str, int], int] = {}  # how often they were paid at the time
        for _ in range(KILLS):
            enough = api.answers = api.live.total() + 40
            with started(tmp_path, **given) as process:
                wait_until(
                    lambda enough=enough, process=process: (
                        api.live.total() == enough or process.poll() is not None
                    )
                )
                assert process.poll() is None, (tmp_path / "output.txt").read_text()
                assert not shows_secret(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            stored = {key: api.live[key] for key in replies_on_disk(run_dir)} | stored
        assert 0 < len(stored) < PROMPTS * TURNS, "killed in mid-run"
        api.answers = None
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        assert api.refused >= 4
        assert {key: api.live[key] for key in stored} == stored
        assert len(api.live) == PROMPTS * TURNS
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["done"], summary["failed"]) == (PROMPTS, 0)
    records = (run_dir / "records.jsonl").read_bytes()
    assert b"PATH=" in records, "the tool has printed its environment"
    token_file.unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET in path.read_bytes()] == []
    assert SECRET.decode() not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["key_command", "client"])
def test_a_kill_during_batches_with_changing_credentials(tmp_path: Path, way: str) -> None:
    write_prompts(tmp_path / "p.jsonl", 6)
    (tmp_path / "my_clients.py").write_text(OWN_CLIENT)
    given: dict[str, Any] = {
        "config": "run.yaml",
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "num_workers": 2,
        "model": "own:gpt-5-mini",
        "enabled_toolsets": "terminal",
        "sandbox": "local",
    }
    run_dir = tmp_path / "trajectories" / "r"
    # With fewer calls per token, requests side by side could be refused again and again.
    fake: dict[str, Any] = {"token_file": tmp_path / "token", "calls_per_token": 8}
    with FakeBatches(options=OPTIONS, create_s=0.5, **fake) as api:
        config = {"endpoints": {"own": endpoint_of(way, api)}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        for batches in (1, 2):
            with started(tmp_path, "--batch_api", **given) as process:
                wait_until(lambda batches=batches: len(api.batches) == batches)
                assert not shows_secret(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        api.create_s = 0.0
        done = run(tmp_path, "--batch_api", **given)
        assert done.returncode == 0, done.stderr
        assert api.paid.total() == 6 * TURNS
        assert not api.live
        assert api.refused >= 2
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if SECRET in path.read_bytes()] == []
    assert SECRET.decode() not in done.stdout + done.stderr
