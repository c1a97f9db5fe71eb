"""The command `errors`: what failed, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from agent.models.errors import RULES, Kind
from batch_trajectories.basics.errors import AgentFailed, SandboxLost
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from batch_trajectories.report.remedies import find_remedy
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import run, write_rows

OPTIONS: JSON = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "m",
    "enabled_toolsets": "none",
    "num_workers": 1,
}


def test_each_kind_of_failure_has_a_remedy() -> None:
    others = "check_failed", "internal", "session_failed", "stopped", "worker_died"
    raised = (AgentFailed, SandboxLost, SetupFailed)
    for kind in (*get_args(Kind), *others, *(error.error_class for error in raised)):
        assert find_remedy(kind).endswith("."), kind
    assert find_remedy("of_a_later_version") == ""


def test_the_failures_of_a_run_are_listed_with_what_to_do(tmp_path: Path) -> None:
    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        if "refuse" in str(body["messages"]):
            return 400, {"error": {"message": "no\x1b[2J", "code": "invalid_value"}}
        return 200, chat_reply("hi")

    rows = [{"id": "a", "prompt": "Go."}, {"id": "b", "prompt": "refuse"}]
    write_rows(tmp_path / "p.jsonl", *rows)
    with answering(answer) as (url, _):
        run(tmp_path, **OPTIONS, key_env="none", base_url=f"{url}/v1")
    told = run(tmp_path, "errors", "r").stdout
    assert "bad_request: 1 failed attempt\n" in told
    assert "b: HTTP 400: no" in told
    assert RULES["bad_request"].remedy in told
    assert "\x1b" not in told
    (listed,) = json.loads(run(tmp_path, "errors", "r", "--json").stdout)
    assert (listed["class"], listed["count"]) == ("bad_request", 1)
    assert listed["remedy"] == RULES["bad_request"].remedy


def test_conversations_that_ended_early_are_listed_with_what_to_do(tmp_path: Path) -> None:
    rows = [{"id": n, "prompt": "Go."} for n in "ab"]
    write_rows(tmp_path / "p.jsonl", *rows)
    cut = chat_reply("hi") | {
        "choices": [{**chat_reply("hi")["choices"][0], "finish_reason": "length"}]
    }
    with answering(lambda path, body: (200, cut)) as (url, _):
        assert run(tmp_path, **OPTIONS, key_env="none", base_url=f"{url}/v1").returncode == 0
    told = run(tmp_path, "errors", "r").stdout
    assert "No attempt of a task has failed." in told
    assert "length: 2 conversations ended early\n" in told
    assert "what to do:   Raise --max_tokens." in told


def test_without_a_run_all_kinds_are_listed(tmp_path: Path) -> None:
    told = run(tmp_path, "errors").stdout
    assert all(rule.remedy in told for rule in RULES.values())
    assert run(tmp_path, "errors", "--json").returncode == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (402, {"message": "Insufficient Balance", "code": "invalid_request_error"}),
        (402, {"message": "This request requires more credits, or fewer max_tokens.", "code": 402}),
        (429, {"message": "You exceeded your current quota.", "code": "insufficient_quota"}),
        (400, {"message": "Your credit balance is too low.", "type": "invalid_request_error"}),
        (412, {"message": "Account a is suspended, possibly due to reaching the monthly spending "
               "limit.", "code": "invalid_request_error"}),
    ],
)  # fmt: skip
def test_a_run_out_of_credit_says_whose_key_it_was(
    tmp_path: Path, status: int, error: JSON
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "Go."})
    with answering(lambda path, body: (status, {"error": error})) as (url, _):
        env = {"OPENAI_API_KEY": "sk-1234567890"}
        stopped = run(tmp_path, **OPTIONS, base_url=f"{url}/v1", env=env)
    assert stopped.returncode == 4, stopped.stderr
    assert f"{RULES['no_credit'].meaning}: HTTP {status}: " in stopped.stderr
    assert "The key is that of the environment variable OPENAI_API_KEY" in stopped.stderr
    assert RULES["no_credit"].remedy in stopped.stderr
    assert "No key was sent" not in stopped.stderr
