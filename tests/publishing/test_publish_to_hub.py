"""A publication sent to a hub: a loopback server that answers as the real one does."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.export.test_export_push import hub
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import run

pytest.importorskip("huggingface_hub")


def send(folder: Path, address: str, *args: object) -> Any:
    """Publish a run to a repository of the hub."""
    make_run(folder, call_record())
    env = {
        "HF_ENDPOINT": address,
        "HF_TOKEN": "hf_of_a_test",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return run(folder, "publish", folder / "r", "hf:me/mine", *args, env=env, format="openai")


def commit_operations(received: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
    """The operations of all commits that a hub got, without the header of each."""
    bodies = [body for path, body in received if "/commit/" in path]
    return [json.loads(line) for body in bodies for line in body.splitlines()[1:]]


def test_sends_all_files_in_one_commit(tmp_path: Path) -> None:
    with hub() as (address, received):
        done = send(tmp_path, address, "--push_for_real")
    assert done.returncode == 0, done.stderr
    assert "commit/1" in done.stdout
    files = {one["value"]["path"]: one["value"]["content"] for one in commit_operations(received)}
    assert {*files} == {
        "README.md",
        "manifest.json",
        "openai/train.jsonl",
        "prompts.jsonl",
        "recipe.yaml",
        "reproduce.sh",
        "run.yaml",
    }
    received_at = tmp_path / "received"
    for name, content in files.items():
        (received_at / name).parent.mkdir(parents=True, exist_ok=True)
        (received_at / name).write_bytes(base64.b64decode(content))
    assert run(tmp_path, "verify", received_at).returncode == 0


def test_shows_what_it_would_send(tmp_path: Path) -> None:
    with hub() as (address, received):
        done = send(tmp_path, address)
    assert done.returncode == 0, done.stderr
    assert "nothing was sent; --push_for_real does it" in done.stdout
    assert not received


def test_replaces_what_is_there_only_if_asked(tmp_path: Path) -> None:
    with hub(files=["manifest.json", "old.jsonl"]) as (address, received):
        refused = send(tmp_path, address, "--push_for_real")
        assert (refused.returncode, commit_operations(received)) == (2, []), refused.stderr
        assert "--replace" in refused.stderr
        done = send(tmp_path, address, "--push_for_real", "--replace")
    assert done.returncode == 0, done.stderr
    deleted = [one for one in commit_operations(received) if one["key"] == "deletedFile"]
    assert [one["value"]["path"] for one in deleted] == ["old.jsonl"]
