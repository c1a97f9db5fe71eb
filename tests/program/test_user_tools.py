"""Whole runs whose simulated users call tools: kills, exports, statistics and pages."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from batch_trajectories.export.rows.format_names import format_names
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import JSON, answering
from tests.helpers.playing import call, calls, say
from tests.helpers.running import (
    SCRIPTED,
    WRITE_A_NOTE,
    lines,
    run,
    session_of,
    started,
    wait_until,
    write_rows,
)
from tests.helpers.user_models import STOP, TASKS, kill_and_finish, number_replies, user_options

SCREEN, THOUGHT = "SCREEN-OF-THE-PHONE", "THOUGHT-OF-THE-USER"
"""Texts of the user's part alone."""

ROW: dict[str, Any] = {
    "id": "ann",
    "prompt": "My phone has no data.",
    "files": {"phone.json": json.dumps({"data": "off", "screen": SCREEN})},
    "check": {"command": "grep -q on phone.json"},
    "simulated_user": {
        "system_prompt": "You are Ann.",
        "script": [
            calls(call("read_file", path="phone.json"), content="Wait.", reasoning=THOUGHT),
            say("Data is off.", reasoning=THOUGHT),
            calls(
                call("write_file", path="phone.json", content=json.dumps({"data": "on"})),
                call("read_file", path="missing"),
            ),
            say("Done."),
            calls(call("read_file", path="phone.json")),
            say(STOP),
        ],
    },
    "script": [
        say("What does it say?", reasoning="I ask."),
        say("Turn data on.", reasoning="I tell."),
        calls(call("read_file", path="phone.json"), reasoning="I look."),
        say("It is on.", reasoning="I saw."),
    ],
}
USER = {"model": "scripted", "enabled_toolsets": ["file"]}


def play(cwd: Path, *args: str, user: Any = USER, **changes: Any) -> Any:
    write_rows(cwd / "p.jsonl", {**ROW, **changes})
    return run(cwd, "--row_setup", *args, **SCRIPTED, sandbox="local", simulated_user=dumps(user))


def dumps(value: Any) -> str:
    return json.dumps(value)


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("users")
    done = play(cwd)
    assert done.returncode == 0, done.stderr
    return cwd


def test_the_check_judges_what_the_user_did_and_the_record_has_it(cwd: Path) -> None:
    (record,) = lines(cwd / "trajectories" / "r" / "records.jsonl")
    assert record["check"]["passed"]
    assert [m["role"] for m in record["messages"]].count("tool") == 1
    names = [[c["name"] for c in inner["tool_calls"]] for inner in record["inner"]]
    assert names == [["read_file"], ["write_file", "read_file"], ["read_file"]]
    assert record["api_calls"] == 10
    offered = record["inner_tools"]["simulated_user"]
    assert "write_file" in {tool["function"]["name"] for tool in offered}
    assert SCREEN not in json.dumps(record["messages"])


NEED_MORE = {"dpo", "predictions", "rl", "rl_parquet"}
"""Formats that need what this run lacks: pairs, patches, token ids."""


@pytest.mark.parametrize("name", sorted({*format_names()} - NEED_MORE))
def test_no_format_but_raw_has_the_users_calls(cwd: Path, name: str) -> None:
    done = run(cwd, "export", "r", format=name, output=f"out-{name}")
    assert done.returncode == 0, done.stderr
    written = "".join(text_of(path) for path in (cwd / f"out-{name}" / "").rglob("*.*"))
    assert ROW["prompt"] in written
    for text in (SCREEN, THOUGHT, "You are Ann", "simulated_user#1"):
        assert (text in written) == (name == "raw")


def text_of(path: Path) -> str:
    if path.suffix == ".parquet":  # compressed
        return str(pq.read_table(path).to_pylist())
    return path.read_bytes().decode(errors="replace")


def test_a_row_has_the_users_message_alone(cwd: Path) -> None:
    (row,) = lines(cwd / "trajectories" / "r.jsonl")
    humans = [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]
    assert humans == ["My phone has no data.", "Data is off.", "Done."]
    assert row["num_tool_calls"] == 1
    assert (row["num_turns"], row["metadata"].count("missing")) == (4, 0)


def test_statistics_count_the_users_calls_apart(cwd: Path) -> None:
    figures = json.loads(run(cwd, "stats", "r", "--json").stdout)
    counts = {tool["tool"]: tool["count"] for tool in figures["tools"] if tool["count"]}
    assert (counts, figures["tool_errors"]) == ({"read_file": 1}, {})
    users = figures["user_tools"]
    assert (users["rows"], users["tool_errors"]) == (1, {"tool_error": 1})
    by_tool = {tool["tool"]: tool for tool in users["tools"]}
    assert (by_tool["read_file"]["count"], by_tool["read_file"]["failure"]) == (3, 1)
    assert by_tool["write_file"]["seconds"]["max"] >= 0
    assert figures["per_record"]["tool_calls"]["max"] == 1
    text = run(cwd, "stats", "r").stdout
    assert "tool of the user" in text
    assert "in 1 conversation the simulated user called tools" in text
    summary = json.loads((cwd / "trajectories/r/statistics.json").read_bytes())
    assert summary["user_tools"]["rows"] == 1


def test_show_has_the_users_calls_beside_its_messages(cwd: Path) -> None:
    text = run(cwd, "show", "r", "ann").stdout
    order = [text.index(part) for part in ("What does it say?", SCREEN, "=== user\nData is off.")]
    assert order == sorted(order)
    assert text.index("It is on.") < text.index("(simulated_user#3)"), "it was not sent"


def test_a_branch_after_the_users_calls_is_refused_by_name(cwd: Path) -> None:
    done = run(cwd, "fork", "r", at_turn=2, n=1, run_name="b")
    assert done.returncode == 2
    assert "its simulated user called tools before that turn" in done.stdout + done.stderr


def test_a_dry_run_says_which_tools_the_user_has(cwd: Path) -> None:
    said = play(cwd, "--dry_run").stdout
    assert "user       file (list_files, patch_file, read_file" in said


def test_what_cannot_be_is_named_before_anything_is_paid(tmp_path: Path) -> None:
    done = play(tmp_path, user={**USER, "enabled_toolsets": ["phone"]})
    assert done.returncode == 2
    assert "simulated_user.enabled_toolsets: unknown toolset 'phone'" in done.stderr
    done = play(tmp_path, user={**USER, "max_calls": 0})
    assert done.returncode == 2
    assert "--simulated_user, in max_calls: must be above 0" in done.stderr
    user = {**ROW["simulated_user"], "enabled_toolsets": ["terminal"]}
    done = play(tmp_path, simulated_user=user)
    assert "`simulated_user.enabled_toolsets`: terminal not on offer" in done.stderr + done.stdout


FUNCTIONS = '''
import time
from pathlib import Path

from toolsets.catalog.registry import Toolset
from toolsets.context import ToolContext
from toolsets.tool import tool


def _add(context: ToolContext, line: str) -> str:
    context.workspace.make()
    with (context.workspace.root / "log").open("a") as log:
        log.write(line + "\\n")
    while line.endswith("wait") and not Path("go").exists():
        time.sleep(0.01)
    return (context.workspace.root / "log").read_text()


@tool(name="note", effects="workspace")
def agents_note(context: ToolContext, text: str) -> str:
    """Write into the log of the company."""
    return _add(context, f"agent: {text}")


@tool(name="note", effects="workspace")
def users_note(context: ToolContext, text: str) -> str:
    """Write into the log of the phone."""
    return _add(context, f"user: {text}")


CRM = Toolset("crm", "The company.", [agents_note])
PHONE = Toolset("phone", "The phone.", [users_note])
'''


def test_a_call_of_the_user_that_a_kill_cut_off_is_undone_and_runs_again(tmp_path: Path) -> None:
    """The earlier calls are repeated, each by the tool of who made it: both are called `note`."""
    user = {
        "system_prompt": "You are Ann.",
        "script": [
            calls(call("note", text="one")),
            calls(call("note", text="wait")),
            say("Done."),
            say(STOP),
        ],
    }
    row: dict[str, Any] = {"id": "a", "prompt": "Go.", "simulated_user": user}
    row["script"] = [
        calls(call("note", text="first")),
        say("Your turn."),
        calls(call("note", text="last")),
        say("Bye."),
    ]
    write_rows(tmp_path / "p.jsonl", row)
    (tmp_path / "acts.py").write_text(FUNCTIONS)
    given = {
        **SCRIPTED,
        "tools": "acts:CRM,acts:PHONE",
        "enabled_toolsets": "crm",
        "simulated_user": dumps({"model": "scripted", "enabled_toolsets": ["phone"]}),
    }
    run_dir = tmp_path / "trajectories" / "r"

    def is_waiting() -> bool:
        return any("wait" in log.read_text() for log in run_dir.glob("workspaces/*/log"))

    with started(tmp_path, **given) as process:
        wait_until(is_waiting)
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not session_of(process.pid))
    (tmp_path / "go").touch()
    done = run(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    (record,) = lines(run_dir / "records.jsonl")
    log = ["agent: first", "user: one", "user: wait", "agent: last"]
    assert [m["content"].split("\n")[:-1] for m in record["messages"] if m["role"] == "tool"] == [
        log[:1],
        log,
    ]
    (resume,) = record["inner"][0]["resumes"]
    assert (resume["rebuilt"], resume["rebuild"]["calls"]) == (["call_2_0"], 2)


def test_token_ids_of_the_users_replies_are_in_no_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "Go."})
    user = {"system_prompt": "You are Ann.", "max_turns": 2, "enabled_toolsets": ["file"]}
    with FakeEndpoint(turns=3, tokens="vllm", **WRITE_A_NOTE) as endpoint:
        done = run(
            tmp_path,
            "--token_ids",
            run_name="r",
            dataset_file="p.jsonl",
            enabled_toolsets="file",
            model="openai:m",
            key_env="none",
            base_url=endpoint.openai_url,
            simulated_user=dumps(user),
        )
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert sum(len(inner["tool_calls"]) for inner in record["inner"]) > 0
    done = run(tmp_path, "export", "r", "--subagents", format="rl", output="out")
    assert done.returncode == 0, done.stderr
    assert "conversations of subagents left out" not in done.stdout, "they are no candidates"
    exported = lines(tmp_path / "out" / "rl" / "train.jsonl")
    assert [turn for row in exported for turn in row["turns"]] == [
        turn["turn"] for turn in record["turns"]
    ]
    assert {row["thread"] for row in exported} == {"main"}


KILLS = 4


@pytest.mark.slow
def test_users_with_tools_survive_kills(tmp_path: Path) -> None:
    """No reply that was stored is paid for again, and each call stands in the record once."""

    def write(messages: list[JSON], number: int) -> str | JSON:
        texts = [m for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]
        written = len(texts)
        if messages[-1]["role"] != "tool":
            arguments = {"path": f"user-{written}.txt", "content": str(number)}
            function = {"name": "write_file", "arguments": json.dumps(arguments)}
            wanted = {"id": "same", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [wanted]}
        return STOP if written == 3 else f"More, please ({number})."

    rows = [
        {"id": f"p{n:02}", "prompt": f"Question {n}", "simulated_user": {"system_prompt": f"#{n}"}}
        for n in range(TASKS)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    with (
        answering(number_replies(write, latency_s=0.03)) as (url, requests),
        FakeEndpoint(turns=2, latency_s=0.02, answers=0, **WRITE_A_NOTE) as endpoint,
    ):
        config = {
            "endpoints": {"user": {"base_url": f"{url}/v1", "key_env": "none"}},
            "simulated_user": {"model": "user:u", "enabled_toolsets": ["file"]},
            "prices": {"m": {"input": 1, "output": 1}, "user:u": {"input": 100, "output": 100}},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        given = user_options(endpoint, config="run.yaml")
        in_flight = kill_and_finish(tmp_path, given, endpoint, calls=TASKS * 4, kills=KILLS)
    paid = []
    for record in lines(tmp_path / "trajectories" / "r" / "records.jsonl"):
        inner = record["inner"]
        assert [one["key"] for one in inner] == [f"simulated_user#{n}" for n in (1, 2, 3)]
        for one in inner:
            roles = [message["role"] for message in one["messages"]]
            assert roles[-3:] == ["assistant", "tool", "assistant"]
            assert one["cost_usd"] == pytest.approx(2 * 15 * 100 / 1e6)
        ids = [c["id"] for one in inner for m in one["messages"] for c in m.get("tool_calls", ())]
        assert len(ids) == len(set(ids)) == 3
        users = [m["content"] for m in record["messages"] if m["role"] == "user"]
        assert [one["messages"][-1]["content"] for one in inner] == [*users[1:], STOP]
        paid += [turn["response_id"] for one in inner for turn in one["turns"]]
    assert len(paid) == len(set(paid)) == TASKS * 6
    assert len(requests) - len(paid) <= in_flight
