"""Whole runs whose simulated users write the first message: exports, kills, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import JSON, answering
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, WRITE_A_NOTE, lines, run, write_rows
from tests.helpers.user_models import STOP, TASKS, kill_and_finish, number_replies, user_options

ANSWERS = [calls(call("write_file", path="n.txt", content="7")), say("Which?"), say("It is 42.")]
LATER = [say("The second."), say(STOP)]
USER = {"system_prompt": "You are Ann.", "script": [say("What is it?"), *LATER]}
ROW: dict[str, Any] = {"id": "a", "expected": "42", "script": ANSWERS, "simulated_user": USER}
FIRST = '{"model": "scripted", "writes_first": true}'


def test_a_row_begins_with_the_users_message_as_with_a_prompt(tmp_path: Path) -> None:
    """The training rows have the messages of the same conversation with a prompt."""
    given = {**ROW, "prompt": "What is it?", "simulated_user": {**USER, "script": LATER}}
    write_rows(tmp_path / "p.jsonl", given)
    options: dict[str, Any] = {**SCRIPTED, "sandbox": "local", "system_prompt": "Be brief."}
    for name, user in {"r": '{"model": "scripted"}', "first": FIRST}.items():
        options |= {"run_name": name, "simulated_user": user}
        done = run(tmp_path, "--check_expected", **options)
        assert done.returncode == 0, done.stderr
        exported = run(tmp_path, "export", name, "--format=openai", f"--output={name}-rows")
        assert exported.returncode == 0, exported.stderr
        write_rows(tmp_path / "p.jsonl", ROW)
    with_prompt, first = (
        json.dumps(lines(tmp_path / "trajectories" / f"{name}.jsonl")[0]["conversations"])
        for name in ("r", "first")
    )
    assert first == with_prompt
    rows = [lines(tmp_path / f"{name}-rows/openai/train.jsonl") for name in ("r", "first")]
    assert rows[0][0]["messages"] == rows[1][0]["messages"]
    (record,) = lines(tmp_path / "trajectories/first/records.jsonl")
    assert record["status"] == "completed", "the answer was compared with `expected`"
    assert "prompt" not in record["row"]
    assert [inner["key"] for inner in record["inner"]] == [f"simulated_user#{n}" for n in range(3)]
    forked = run(tmp_path, "fork", "first", at_turn=1, n=1, run_name="branch")
    assert forked.returncode == 0, forked.stderr
    (branch,) = lines(tmp_path / "trajectories/branch/records.jsonl")
    assert branch["messages"] == record["messages"]
    assert [inner["key"] for inner in branch["inner"]] == ["simulated_user#1", "simulated_user#2"]


def test_a_dry_run_asks_no_user(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", ROW)
    with answering(lambda path, body: (500, {})) as (url, requests):
        config = {
            "endpoints": {"user": {"base_url": f"{url}/v1", "key_env": "none"}},
            "simulated_user": {"model": "user:u", "writes_first": True},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        write_rows(
            tmp_path / "p.jsonl",
            {"id": "a", "script": ANSWERS, "simulated_user": {"system_prompt": "You are Ann."}},
        )
        shown = run(tmp_path, "--dry_run", **SCRIPTED, config="run.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "user: (the simulated user writes the first message)" in shown.stdout
    assert requests == []


def test_a_conversation_without_a_first_message_is_in_no_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {**ROW, "simulated_user": {**USER, "script": [say(STOP)]}})
    done = run(tmp_path, **SCRIPTED, simulated_user=FIRST, system_prompt="Be brief.")
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "trajectories/r/records.jsonl")
    assert [m["role"] for m in record["messages"]] == ["system"]
    assert record["status"] == "errors"
    assert record["status_reason"] == f"the simulated user wrote {STOP} in place of a first message"
    exported = run(tmp_path, "export", "r", "--format=prompts")
    assert "no_reply" in exported.stderr
    for command in ("verify", "report", "stats"):
        assert run(tmp_path, command, "r").returncode == 0
    assert "simulated_user#0" in run(tmp_path, "show", "r", "a").stdout


def test_calls_before_the_first_message_are_beside_it(tmp_path: Path) -> None:
    user = {**USER, "script": [calls(call("list_files")), *USER["script"]]}
    write_rows(tmp_path / "p.jsonl", {**ROW, "simulated_user": user})
    options = json.dumps({**json.loads(FIRST), "enabled_toolsets": ["file"]})
    done = run(tmp_path, **SCRIPTED, sandbox="local", simulated_user=options)
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, "show", "r", "a").stdout
    assert shown.index("--> list_files") < shown.index("=== user") < shown.index("--> write_file")
    refused = run(tmp_path, "fork", "r", at_turn=1, n=1, run_name="branch")
    assert refused.returncode == 2
    assert "its simulated user called tools before that turn" in refused.stdout + refused.stderr


@pytest.mark.parametrize("has_id", [True, False])
def test_a_check_of_other_rows_judges_its_conversations_again(tmp_path: Path, has_id: bool) -> None:
    row = {**ROW, "check": "grep -q 7 n.txt"}
    if not has_id:
        del row["id"]
    write_rows(tmp_path / "p.jsonl", row)
    given: dict[str, Any] = {**SCRIPTED, "sandbox": "local", "simulated_user": FIRST}
    done = run(tmp_path, "--row_setup", **given, keep_workspaces=10)
    assert "passed 1 (100.0%)" in done.stdout + done.stderr
    write_rows(tmp_path / "new.jsonl", {**row, "check": "grep -q 8 n.txt"})
    checked = run(tmp_path, "check", "r", dataset_file="new.jsonl")
    assert "passed -> not passed" in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.parametrize("more", [{"writes_first": True}, {}])
def test_tasks_are_audited_without_a_model_of_their_user(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    prompt = {} if more else {"prompt": "Hi."}
    user = {"system_prompt": "You are Ann.", **more}
    row = {"id": "a", **prompt, "files": {"n.txt": "7"}, "check": "grep -q 7 n.txt"}
    write_rows(tmp_path / "p.jsonl", {**row, "simulated_user": user})
    given: dict[str, Any] = {"dataset_file": "p.jsonl", "sandbox": "local", "run_name": "audit"}
    audited = run(tmp_path, "check_tasks", "--row_setup", **given)
    assert "passes_untouched" in audited.stdout, audited.stdout + audited.stderr


def test_an_agent_that_is_a_command_begins_with_a_prompt(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", ROW)
    refused = run(
        tmp_path,
        run_name="r",
        dataset_file="p.jsonl",
        model="openai:m",
        agent="claude-code",
        simulated_user='{"writes_first": true}',
    )
    assert refused.returncode == 2
    assert "simulated_user.writes_first: agent 'claude-code' runs as a command" in refused.stderr


KILLS = 4


@pytest.mark.slow
def test_users_that_write_first_survive_kills(tmp_path: Path) -> None:
    """No stored message of a user is paid for again, and the first one is in the conversation."""

    def write(messages: list[JSON], number: int) -> str:
        written = sum(message["role"] == "assistant" for message in messages)
        return STOP if written == 2 else f"Question {number}."

    rows = [
        {"id": f"p{n:02}", "simulated_user": {"system_prompt": f"You are number {n}."}}
        for n in range(TASKS)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    with (
        answering(number_replies(write)) as (url, requests),
        FakeEndpoint(turns=2, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint,
    ):
        config = {
            "endpoints": {"user": {"base_url": f"{url}/v1", "key_env": "none"}},
            "simulated_user": {"model": "user:u", "writes_first": True},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        given = user_options(endpoint, config="run.yaml")
        in_flight = kill_and_finish(
            tmp_path, given, endpoint, calls=12 * (KILLS + 2), kills=KILLS, seed=11
        )
    stored = []
    for record in lines(tmp_path / "trajectories/r/records.jsonl"):
        users = [m["content"] for m in record["messages"] if m["role"] == "user"]
        inner = record["inner"]
        assert [one["key"] for one in inner] == [f"simulated_user#{n}" for n in range(3)]
        assert [one["messages"][-1]["content"] for one in inner] == [*users, STOP]
        assert inner[0]["messages"][0]["content"].startswith(
            f"You are number {int(record['id'][1:])}."
        )
        stored += [turn["response_id"] for one in inner for turn in one["turns"]]
    assert len(stored) == len(set(stored)) == TASKS * 3
    assert len(requests) - len(stored) <= in_flight
