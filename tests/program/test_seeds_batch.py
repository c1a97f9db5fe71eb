"""Behaviours of tests/seeds.md of whole runs, where no other test proves them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from batch_trajectories.records.files import AppendFile
from tests.helpers.answering import answering
from tests.helpers.builders import chat_reply
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows

HI = chat_reply("hi")
CONTEXT_FILES = (
    "AGENTS.md",
    "CLAUDE.md",
    "SOUL.md",
    "MEMORY.md",
    "USER.md",
    ".cursorrules",
    ".hermes/SOUL.md",
    ".hermes/memories/MEMORY.md",
    ".claude/CLAUDE.md",
)


def test_context_files_of_the_user_are_not_in_the_prompt(tmp_path: Path) -> None:
    """Context files of the home and of the current directory are not read."""
    for place in (tmp_path, tmp_path / "home"):
        for name in CONTEXT_FILES:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("canary-4711")
    write_rows(tmp_path / "p.jsonl", {"prompt": "What is it?"})
    with answering(lambda path, body: (200, HI)) as (url, requests):
        given = {**SCRIPTED, "model": "m", "base_url": url, "key_env": "none"}
        done = run(tmp_path, **given, env={"HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    (body,) = requests
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert "canary-4711" not in json.dumps(body)


def test_routing_lists_reach_the_provider_through_the_body(tmp_path: Path) -> None:
    """Lists of providers are fields of the request, under any name."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x"})
    routing = {"provider": {"only": ["a", "b"], "sort": "price"}}
    with answering(lambda path, body: (200, HI)) as (url, requests):
        given = {**SCRIPTED, "model": "m", "base_url": url, "key_env": "none"}
        assert run(tmp_path, **given, extra_body=json.dumps(routing)).returncode == 0
    assert requests[0]["provider"] == routing["provider"]


def test_disabled_reasoning_stays_disabled_at_any_effort(tmp_path: Path) -> None:
    """The flag of hermes-agent is accepted, and wins."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x"})
    with answering(lambda path, body: (200, HI)) as (url, requests):
        given = {**SCRIPTED, "model": "m", "base_url": url, "key_env": "none"}
        done = run(tmp_path, "--reasoning_disabled", **given, reasoning_effort="high")
    assert done.returncode == 0, done.stderr
    assert requests[0]["reasoning_effort"] == "none"


def test_the_tools_on_offer_are_printed_before_anything_runs(tmp_path: Path) -> None:
    """`--dry_run` and the log of each start show it."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("y")]})
    told = "toolsets   file (list_files, patch_file, read_file, search_files, write_file)"
    given = {**SCRIPTED, "enabled_toolsets": "all", "disabled_toolsets": "terminal,python"}
    assert told in run(tmp_path, "--dry_run", **given).stdout
    assert run(tmp_path, **given).returncode == 0
    logged = told.replace("toolsets   ", "INFO Its toolsets: ")
    assert logged in (tmp_path / "trajectories" / "r" / "run.log").read_text()


def test_the_flags_of_the_batch_runner(tmp_path: Path) -> None:
    """Each option works under its name with underscores, although the help hides some."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("y")]})
    (tmp_path / "prefill.json").write_text('[{"role": "user", "content": "Hi"}]')
    accepted: dict[str, Any] = {"prefill_messages_file": "prefill.json", "api_key_env": "none"}
    done = run(tmp_path, "--resume", "--reasoning_disabled", "--dry_run", **SCRIPTED, **accepted)
    assert done.returncode == 0, done.stderr
    output = run(tmp_path, "--help_all").stdout
    assert not {"--resume", *accepted} & {*output.split()}
    for name in (
        "dataset_file",
        "batch_size",
        "run_name",
        "num_workers",
        "model",
        "base_url",
        "max_turns",
        "max_samples",
        "max_tokens",
        "ephemeral_system_prompt",
        "prefill_messages",
        "reasoning_effort",
        "extra_body",
        "log_level",
        "key_env",
    ):
        assert f"--{name} " in output, name


def test_records_are_private_and_keep_a_mode_that_the_user_set(tmp_path: Path) -> None:
    """A finished row is appended to `records.jsonl` and synced; mode 0600 or as given."""
    before = os.umask(0)
    try:
        write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("y")]})
        run(tmp_path, **SCRIPTED)
        records = tmp_path / "trajectories" / "r" / "records.jsonl"
        assert stat.S_IMODE(records.stat().st_mode) == 0o600
        records.chmod(0o640)
        file = AppendFile(records)
        file.append(b"{}\n")
        file.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(records.stat().st_mode) == 0o640


def test_the_record_says_that_the_view_was_compacted(tmp_path: Path) -> None:
    """The record holds the whole conversation."""
    long = calls(call("list_files"), content="one", reasoning="R" * 300)
    script = [long, calls(call("list_files"), content="two"), say("three")]
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "whole", "prompt": "x", "script": script},
        {"id": "short", "prompt": "x", "script": script, "agent_options": {"compact_after": 1}},
    )
    assert run(tmp_path, **SCRIPTED).returncode == 0
    found = {r["id"]: r for r in lines(tmp_path / "trajectories" / "r" / "records.jsonl")}
    assert (found["whole"]["view_compacted"], found["short"]["view_compacted"]) == (False, True)
    assert found["short"]["messages"] == found["whole"]["messages"]
    assert found["short"]["messages"][1]["reasoning"] == "R" * 300
