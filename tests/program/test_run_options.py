"""Options of conversations in whole runs: real processes, config files, rows and kills."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.playing import call, calls, say
from tests.helpers.running import (
    SCRIPTED,
    lines,
    records_by_id,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)

LOOK = calls(call("list_files"))
HELPER = {"name": "helper", "description": "Helps.", "enabled_toolsets": ["none"]}


def read_rows(cwd: Path) -> list[dict[str, Any]]:
    return lines(cwd / "trajectories" / "r.jsonl")


def write_config(cwd: Path, **options: Any) -> dict[str, Any]:
    """The same options in a YAML file."""
    (cwd / "run.yaml").write_text(yaml.safe_dump({**SCRIPTED, **options}))
    return {"config": "run.yaml"}


def test_options_come_from_flags_config_and_rows(tmp_path: Path) -> None:
    script = [LOOK, LOOK, LOOK, say("done")]
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "all", "prompt": "x", "script": script},
        {"id": "own", "prompt": "x", "script": script, "agent_options": {"max_turns": 1}},
    )
    done = run(tmp_path, **write_config(tmp_path, max_turns=2), repeat_limit=0)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    assert (done_records["all"]["status"], done_records["all"]["api_calls"]) == ("max_turns", 2)
    assert (done_records["own"]["status"], done_records["own"]["api_calls"]) == ("max_turns", 1)
    assert done_records["all"]["options"] == {"max_turns": 2, "repeat_limit": 0}
    assert done_records["own"]["options"] == {"max_turns": 1, "repeat_limit": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"agent_options": {"max_turn": 1}}, "`agent_options.max_turn`: unknown option"),
        ({"agent_options": {"plan": "maybe"}}, "`agent_options.plan`: must be true or false"),
        ({"expected": None, "agent_options": {"check_expected": True}}, "`expected` must be text"),
        (
            {"user_replies": "yes", "agent_options": {"awaiting_input": True}},
            "`user_replies` must be a list of texts",
        ),
    ],
)
def test_a_row_with_a_wrong_option_is_named_and_the_others_run(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = {"prompt": "x", "script": [say("done")]}
    write_rows(tmp_path / "p.jsonl", good, {**good, **row})
    done = run(tmp_path, **SCRIPTED)
    assert done.returncode == 0
    assert f"p.jsonl:2: discarded: {message}" in done.stderr
    assert len(records_by_id(tmp_path)) == 1


@pytest.mark.slow
def test_an_edited_option_of_a_row_is_new_work(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "x", "script": [LOOK, say("done")]}
    write_rows(tmp_path / "p.jsonl", row)
    run(tmp_path, **SCRIPTED)
    write_rows(tmp_path / "p.jsonl", {**row, "agent_options": {"max_turns": 1}})
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert [row["id"] for row in read_rows(tmp_path)] == []
    assert records_by_id(tmp_path, may_repeat=True)["a"]["status"] == "max_turns"


def test_rows_in_chat_form_are_read_as_their_first_user_text(tmp_path: Path) -> None:
    """The run makes anew all that follows in the row."""
    script = [say("mine")]
    write_rows(
        tmp_path / "p.jsonl",
        {
            "id": "openai",
            "script": script,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "old"},
            ],
        },
        {
            "id": "sharegpt",
            "script": script,
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "old"}],
        },
        {"id": "bad", "script": script, "messages": [{"role": "assistant", "content": "x"}]},
    )
    done = run(tmp_path, **SCRIPTED)
    assert "messages[0] must be a system or user message" in done.stderr
    done_records = records_by_id(tmp_path)
    assert [m["content"] for m in done_records["openai"]["messages"]] == ["Be brief.", "Hi", "mine"]
    assert [m["content"] for m in done_records["sharegpt"]["messages"]] == ["Hi", "mine"]


@pytest.mark.slow
def test_an_ephemeral_prompt_is_in_no_file_and_decides_the_data(tmp_path: Path) -> None:
    """The run keeps its digest, so that another one is refused."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [LOOK, say("done")]})
    given = {**SCRIPTED, "ephemeral_system_prompt": "canary-7281"}
    assert run(tmp_path, **given).returncode == 0
    assert run(tmp_path, **given).returncode == 0
    assert run(tmp_path, "export", "r").returncode == 0
    other = run(tmp_path, **{**given, "ephemeral_system_prompt": "canary-9999"})
    assert other.returncode == 2
    assert "ephemeral_system_prompt" in other.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"canary-" not in path.read_bytes(), path


@pytest.mark.slow
def test_prefill_comes_from_a_file_and_counts_by_its_content(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    (tmp_path / "prefill.json").write_text('[{"role": "user", "content": "Hi"}]')
    given = {**SCRIPTED, "prefill_messages": "prefill.json"}
    assert run(tmp_path, **given).returncode == 0
    (record,) = records_by_id(tmp_path).values()
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
    (tmp_path / "prefill.json").write_text('[{"role": "tool", "content": "Hi"}]')
    wrong = run(tmp_path, **given)
    assert wrong.returncode == 2
    assert "prefill_messages, in 0.role: must be 'user' or 'assistant'" in wrong.stderr


@pytest.mark.slow
def test_require_reasoning_is_a_filter_of_the_export(tmp_path: Path) -> None:
    """Nothing that was paid for is lost, and the filter can be taken back."""
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "with", "prompt": "x", "script": [say("a", reasoning="why")]},
        {"id": "without", "prompt": "x", "script": [say("b")]},
    )
    assert run(tmp_path, **SCRIPTED, require_reasoning="true").returncode == 2, "it is a flag"
    assert run(tmp_path, "--require_reasoning", **SCRIPTED).returncode == 0
    assert [row["id"] for row in read_rows(tmp_path)] == ["with"]
    assert len(records_by_id(tmp_path)) == 2
    assert run(tmp_path, "--no_require_reasoning", **SCRIPTED).returncode == 0
    assert [row["id"] for row in read_rows(tmp_path)] == ["with", "without"]


def test_the_text_protocol_gives_calls_as_any_other(tmp_path: Path) -> None:
    """`text_protocol: react`: Thought, Action, Action Input, Observation, Final Answer."""
    script = [
        say(
            'Thought: look\nAction: write_file\nAction Input: {"path": "a", "content": "A"}\n'
            "Observation: invented"
        ),
        say("Thought: done\nFinal Answer: wrote it"),
    ]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    assert run(tmp_path, **SCRIPTED, text_protocol="react").returncode == 0
    (record,) = records_by_id(tmp_path).values()
    assert record["status"] == "completed"
    assert record["messages"][2]["content"] == "wrote 1 bytes to a"
    assert "invented" not in json.dumps(record["messages"][2:])
    (row,) = read_rows(tmp_path)
    assert [turn["from"] for turn in row["conversations"]] == [
        "system",
        "human",
        "gpt",
        "tool",
        "gpt",
    ]
    assert row["conversations"][-1]["value"] == "<think>\ndone\n</think>\nwrote it"


@pytest.mark.slow
def test_a_budget_needs_a_known_price_and_ends_conversations(tmp_path: Path) -> None:
    """It is refused before the first call, or ended before the tools."""
    write_prompts(tmp_path / "p.jsonl", 6)
    with FakeEndpoint(turns=5, latency_s=0.0) as endpoint:
        given = {**SCRIPTED, "base_url": endpoint.openai_url, "key_env": "none"}
        unknown = run(tmp_path, **{**given, "model": "openai:m"}, max_cost_usd=1)
        assert unknown.returncode == 2
        assert "the price of model 'm' is unknown" in unknown.stderr
        assert endpoint.journal()["requests"] == 0
        known = {**given, "model": "openai:gpt-4.1"}
        assert run(tmp_path, **known, max_cost_usd=0.0000001).returncode == 0
        assert endpoint.journal()["requests"] == 6
    for record in records_by_id(tmp_path).values():
        assert record["status"] == "budget"
        assert record["cost_usd"] > 0.0000001
        assert "is over the budget of" in record["status_reason"]
        assert record["messages"][-1]["details"] == {"failure": "not_run"}


def test_a_hook_of_the_current_directory_approves_calls(tmp_path: Path) -> None:
    (tmp_path / "my_hooks.py").write_text(
        "def approve(name, arguments):\n    return 'deny' if name == 'write_file' else 'approve'\n"
    )
    script = [calls(call("write_file", path="a", content="A"), call("list_files")), say("done")]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    assert run(tmp_path, **SCRIPTED, approve="my_hooks:approve").returncode == 0
    (record,) = records_by_id(tmp_path).values()
    assert [m["is_error"] for m in record["messages"] if m["role"] == "tool"] == [True, False]


@pytest.mark.slow
def test_subagents_survive_a_kill_of_everything(tmp_path: Path) -> None:
    """Nothing inside a subagent that was received is asked for again after the kill."""
    write_prompts(tmp_path / "p.jsonl", 20)
    task = json.dumps({"task": "part {turn} of {conversation}"})
    with FakeEndpoint(latency_s=0.02, answers=60, tool="helper", arguments=task) as endpoint:
        given = {
            **SCRIPTED,
            "model": "openai:m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "enabled_toolsets": "none",
            "batch_size": 5,
            "num_workers": 2,
            "subagents": json.dumps([HELPER]),
        }
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 60)
            os.killpg(process.pid, signal.SIGKILL)
        endpoint.answer(None)
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        journal = endpoint.journal()
    assert journal["conversations"] == 20 * 5
    assert journal["repeated"] <= 10, "at most what was in flight"
    for record in records_by_id(tmp_path).values():
        assert record["status"] == "completed"
        assert len(record["inner"]) == 4
        assert record["api_calls"] == 9
        assert record["usage"]["output_tokens"] > 0
        results = [m for m in record["messages"] if m["role"] == "tool"]
        assert [m["is_error"] for m in results] == [False] * 4
    assert len(read_rows(tmp_path)) == 20


@pytest.mark.slow
def test_a_subagent_can_ask_another_model(tmp_path: Path) -> None:
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        helper = {**HELPER, "model": "openai:other"}
        write_rows(
            tmp_path / "p.jsonl",
            {"prompt": "x", "script": [calls(call("helper", task="t")), say("done")]},
        )
        refused = run(
            tmp_path, **write_config(tmp_path, subagents=[helper]), env={"OPENAI_API_KEY": ""}
        )
        assert refused.returncode == 2
        assert "OPENAI_API_KEY" in refused.stderr
        given = {
            **SCRIPTED,
            "model": "m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "subagents": json.dumps([{**HELPER, "model": "scripted", "script": [say("hi")]}]),
        }
        assert run(tmp_path, **given).returncode == 0
    (record,) = records_by_id(tmp_path).values()
    assert record["status"] == "completed"


@pytest.mark.slow
def test_files_on_their_way_are_cleared_by_the_next_start(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    assert run(tmp_path, **SCRIPTED).returncode == 0
    left = tmp_path / "trajectories" / "r" / "workspaces" / ".tmp-0123456789abcdef"
    left.write_text("half")
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_turns": "9" * 20}, "--max_turns: must be at most"),
        ({"seed": "9" * 20}, "--seed: must be below"),
        ({"max_cost_usd": "inf"}, "--max_cost_usd: must be a finite number"),
        ({"approve": "leaves:hook"}, "approve: cannot import 'leaves:hook': SystemExit: 3"),
        ({"base_url": "http://u:secret@host/v1"}, "--base_url: must not have a password"),
    ],
)
def test_options_that_no_run_can_satisfy_are_refused(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    done = run(tmp_path, **{**SCRIPTED, **given})
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_price_of_a_subagent_must_be_known_where_a_row_has_a_budget(tmp_path: Path) -> None:
    row = {"prompt": "x", "agent_options": {"max_cost_usd": 1}}
    write_rows(tmp_path / "p.jsonl", row)
    helper = {**HELPER, "model": "nobody-knows-this-one"}
    given = {
        **SCRIPTED,
        "model": "openai:gpt-4.1",
        "key_env": "none",
        "base_url": "http://127.0.0.1:9",
    }
    done = run(tmp_path, **given, subagents=json.dumps([helper]))
    assert done.returncode == 2
    assert "`max_cost_usd` needs a model whose price is known" in done.stderr


def test_disabled_toolsets_are_not_offered_to_subagents(tmp_path: Path) -> None:
    helper = {**HELPER, "enabled_toolsets": ["file", "python"], "script": [say("hi")]}
    script = [calls(call("helper", task="t")), say("done")]
    row = {"prompt": "x", "script": script}
    wrong = {**row, "agent_options": {"preparation": "p", "preparation_toolsets": ["nope"]}}
    write_rows(tmp_path / "p.jsonl", row, wrong)
    given = write_config(tmp_path, subagents=[helper], disabled_toolsets=["python"])
    planned = run(tmp_path, "--dry_run", **given)
    assert "sandbox    not needed" in planned.stdout, "python runs commands, file does not"
    assert "p.jsonl:2: discarded: `preparation_toolsets`: nope not on offer" in planned.stderr
