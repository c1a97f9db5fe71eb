"""`fork`: branches go on from a turn of finished conversations, at their own cost alone."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

import orjson
import pytest
from hypothesis import given, settings

from agent.loop.rules import next_step
from agent.messages.message import Event
from agent.state.trajectory import Trajectory
from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.cli.fork import chosen_records
from batch_trajectories.config.models import set_up_models, setup_of_task
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.toolsets import build_catalog
from batch_trajectories.dataset.row_fork import read_fork
from batch_trajectories.engine.run_dir import hold_lock, read_run_json
from batch_trajectories.maintenance.fork import (
    NotForkable,
    events_until,
    forked_config,
    inherited_cost,
)
from batch_trajectories.records.tasks import Task
from batch_trajectories.report.facts import make_table_row
from tests.agent.test_properties import CALM, Scene, Stage, record_of, scenes, stage, terms_of
from tests.faults.oracle import judge_run_dir
from tests.helpers.answering import JSON, answering
from tests.helpers.playing import OPENING, call, calls, play, say
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    command,
    kill_session,
    lines,
    records,
    run,
    summary,
    wait_until,
    write_rows,
)
from tests.helpers.stored import to_record

__all__ = ["stage"]

PROMPTS = 2
BRANCHES = 3


class Endpoint:
    """Two turns that change a file, then an answer; once branching, a look at it and an answer."""

    def __init__(self) -> None:
        self.branching = False
        self.held = Flag()
        self.held.set()
        self._answers: Counter[str] = Counter()

    def __call__(self, path: str, body: JSON) -> tuple[int, JSON]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn == 0:
            return 200, reply(turn, "write_file", path="n.txt", content="one")
        if turn == 1:
            return 200, reply(turn, "patch_file", path="n.txt", old_text="one", new_text="two")
        if turn == 2 and self.branching:
            return 200, reply(turn, "read_file", path="n.txt")
        self.held.wait(PATIENCE_S)
        # Of the branches of a prompt the second that comes is right.
        prompt = body["messages"][0]["content"]
        self._answers[prompt] += self.branching
        return 200, reply(turn, text="right" if self._answers[prompt] == 2 else "wrong")


def reply(turn: int, name: str | None = None, *, text: str = "", **arguments: Any) -> JSON:
    message: JSON = {"role": "assistant", "content": text, "reasoning_content": f"thought {turn}"}
    if name is not None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"id": f"c{turn}", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if name else "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


@contextmanager
def finished_parent(cwd: Path) -> Iterator[tuple[Endpoint, list[JSON]]]:
    """Run r of two conversations of three turns each, and its endpoint, now branching."""
    rows = [{"id": f"p{n}", "prompt": f"q{n}", "expected": "right"} for n in range(PROMPTS)]
    write_rows(cwd / "p.jsonl", *rows)
    endpoint = Endpoint()
    with answering(endpoint) as (url, requests):
        parent = run(
            cwd,
            "--check_expected",
            **{**SCRIPTED, "model": "openai:m", "base_url": f"{url}/v1", "key_env": "none"},
            expected_attempts=1,
        )
        assert parent.returncode == 0, parent.stderr
        endpoint.branching = True
        yield endpoint, requests


FORK = ("fork", "r", "--at_turn=2", f"--n={BRANCHES}", "--run_name=b")


@pytest.mark.slow
def test_branches_start_at_their_parent_s_turn_and_cost_only_new_calls(tmp_path: Path) -> None:
    with finished_parent(tmp_path) as (_, requests):
        before = [body["messages"] for body in requests]
        done = run(tmp_path, *FORK)
        assert done.returncode == 0, done.stderr
        assert f"{PROMPTS} conversations to branch from" in done.stdout
        after = [body["messages"] for body in requests[len(before) :]]
    assert len(after) == PROMPTS * BRANCHES * 2, "nothing of the prefix was asked again"
    last = [messages for messages in before if len(messages) == 5]
    assert all(any(messages[:5] == shared for shared in last) for messages in after)
    done_records = records(tmp_path, "b")
    assert sorted(record["id"] for record in done_records) == sorted(
        f"fork.p{n}@2{sample}" for n in range(PROMPTS) for sample in ("", "#s1", "#s2")
    )
    parents = {record["id"]: record for record in records(tmp_path, "r")}
    for record in done_records:
        fork = record["fork"]
        parent = parents[fork["record"]]
        assert (fork["run"], fork["turn"], fork["branch"]) == ("r", 2, record["sample"])
        assert record["messages"][:5] == parent["messages"][:5]
        assert record["messages"][6]["content"].endswith("two"), "the workspace was restored"
        assert fork["replay"] == {"replayed": 2, "different": [], "skipped": []}
        assert record["usage"]["input_tokens"] == 20
        assert fork["inherited"]["usage"]["input_tokens"] == 20
        assert [turn.get("inherited", False) for turn in record["turns"]] == [
            True,
            True,
            *[False] * 2,
        ]
        assert "events" not in record["row"]["fork"]
    sums = summary(tmp_path, "b")
    assert (sums["turns"], sums["tool_calls"]) == (PROMPTS * BRANCHES * 2, PROMPTS * BRANCHES)
    assert sums["input_tokens"] == PROMPTS * BRANCHES * 20
    judge_run_dir(tmp_path / "trajectories" / "b", tasks=PROMPTS * BRANCHES)
    spreads = json.loads(run(tmp_path, "stats", "b", "--json").stdout)["per_record"]
    assert (spreads["turns"]["max"], spreads["tool_calls"]["max"]) == (2, 1)
    status = json.loads(run(tmp_path, "status", "b", "--json").stdout)
    assert {one["turns"] for one in status["slowest"]} == {2}
    for line in lines(tmp_path / "trajectories" / "b.jsonl"):
        assert (line["num_turns"], line["num_tool_calls"], line["api_calls"]) == (2, 1, 2)
    for record in done_records:
        row = make_table_row(to_record(record))
        own = [turn for turn in record["turns"] if "inherited" not in turn]
        assert (row["turns"], row["calls"], row["reasoned"]) == (2, 1, 2)
        started_at = own[0]["started_at"]
        assert started_at > parents["p0"]["finished_at"]
        assert row["duration_s"] < record["finished_at"] - started_at + 0.01


@pytest.mark.slow
def test_temporary_files_of_a_killed_fork_are_removed(tmp_path: Path) -> None:
    half = tmp_path / "trajectories" / ".b.fork.jsonl.1.tmp"
    with finished_parent(tmp_path):
        half.write_bytes(b"{")
        assert run(tmp_path, *FORK).returncode == 0
    assert not half.exists()


@pytest.mark.slow
def test_the_dataset_of_a_run_that_resumes_is_not_replaced(tmp_path: Path) -> None:
    with finished_parent(tmp_path):
        assert run(tmp_path, *FORK).returncode == 0
        rows = (tmp_path / "trajectories" / "b.fork.jsonl").read_bytes()
        with hold_lock(tmp_path / "trajectories" / "b"):
            refused = run(tmp_path, "fork", "r", "--at_turn=1", "--n=1", "--run_name=b", "--fresh")
    assert "another process is working on this run" in refused.stderr
    assert (tmp_path / "trajectories" / "b.fork.jsonl").read_bytes() == rows


def test_a_fork_onto_its_parent_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "q", "script": [{"content": "a"}]})
    assert run(tmp_path, **{**SCRIPTED, "enabled_toolsets": "none"}).returncode == 0
    runs = tmp_path / "trajectories"
    before = sorted(runs.iterdir())
    refused = run(tmp_path, "fork", "r", "--at_turn=1", "--n=1", "--run_name=r")
    assert refused.returncode == 2
    assert "is a run of p.jsonl, not of branches; use another --run_name" in refused.stderr
    assert sorted(runs.iterdir()) == before


@pytest.mark.slow
def test_a_run_that_is_moved_aside_keeps_its_dataset(tmp_path: Path) -> None:
    runs = tmp_path / "trajectories"
    other = ("fork", "r", "--at_turn=1", "--n=1", "--run_name=b")
    with finished_parent(tmp_path):
        assert run(tmp_path, *FORK).returncode == 0
        first = (runs / "b.fork.jsonl").read_bytes()
        for command_line in ((*other, "--fresh"), other):  # the same command again resumes
            begun = run(tmp_path, *command_line)
            assert begun.returncode == 0, begun.stderr
            assert len(records(tmp_path, "b")) == PROMPTS
        refused = run(tmp_path, *FORK)
        assert "b.fork.2.jsonl: has the branches of another `fork`" in refused.stderr
        (aside,) = runs.glob("b.2*/")
        back = run(tmp_path, *FORK, "--fresh")
        assert back.returncode == 0, back.stderr
    assert read_run_json(runs / "b")["dataset"]["path"] == str(runs / "b.fork.jsonl")
    assert (runs / "b.fork.jsonl").read_bytes() == first
    for name in ("export", "verify"):
        done = run(tmp_path, name, aside.name)
        assert done.returncode == 0, (done.stdout, done.stderr)


@pytest.mark.slow
def test_branches_become_pairs_of_one_step(tmp_path: Path) -> None:
    with finished_parent(tmp_path):
        assert run(tmp_path, *FORK).returncode == 0
    (tmp_path / "recipe.yaml").write_text("filters: {status: any}\n")
    made = run(tmp_path, "export", "b", format="dpo", recipe="recipe.yaml", output="d")
    assert made.returncode == 0, made.stderr
    pairs = lines(next((tmp_path / "d").rglob("*train*.jsonl")))
    assert sorted(pair["id"] for pair in pairs) == ["fork.p0@2", "fork.p1@2"]
    for pair in pairs:
        assert [message["role"] for message in pair["prompt"]] == [
            "user",
            *["assistant", "tool"] * 2,
        ]
        assert pair["prompt"][-1]["tool_call_id"] == "c1"
        assert [m["role"] for m in pair["chosen"]] == ["assistant", "tool", "assistant"]
        assert pair["chosen"][-1]["content"] == "right"
        assert pair["rejected"][-1]["content"] == "wrong"
        metadata = json.loads(pair["metadata"])
        assert metadata["fork"] == {"run": "r", "record": pair["id"][5:7], "turn": 2}


@pytest.mark.slow
def test_a_killed_fork_resumes_and_repeats_no_call(tmp_path: Path) -> None:
    with finished_parent(tmp_path) as (endpoint, requests):
        count = len(requests)
        endpoint.held.clear()
        with subprocess.Popen(
            command(*FORK), cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            wait_until(lambda: len(requests) == count + 2 * PROMPTS * BRANCHES)
            kill_session(process.pid)
        endpoint.held.set()
        waiting = run(tmp_path, "status", "b", "--json")
        assert json.loads(waiting.stdout)["turns_under_way"] == PROMPTS * BRANCHES
        done = run(tmp_path, *FORK)
        assert done.returncode == 0, done.stderr
        third = [b for b in requests[count:] if b["messages"][-1].get("tool_call_id") == "c1"]
    assert len(third) == PROMPTS * BRANCHES, "journaled turns are not asked for again"
    for record in records(tmp_path, "b"):
        assert record["resumes"][0]["workspace_kept"] is True
        assert record["fork"]["replay"]["replayed"] == 2
    judge_run_dir(tmp_path / "trajectories" / "b", tasks=PROMPTS * BRANCHES)


TOOLS_FILE = """
from toolsets.tool import tool

@tool()
def pay(amount: int) -> str:
    \"\"\"Pay somebody.\"\"\"
    with open("paid", "a") as file:
        file.write("x")
    return "paid"

tools = [pay]
"""


@pytest.mark.slow
def test_calls_that_cannot_be_repeated_are_skipped_and_differences_noted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOLS_FILE)

    def calls(name: str, **arguments: Any) -> dict[str, Any]:
        return {"tool_calls": [{"name": name, "arguments": arguments}]}

    script = [
        calls("terminal", command="cat /proc/sys/kernel/random/uuid"),
        calls("pay", amount=3),
        calls("terminal", command="echo same"),
        {"content": "done"},
    ]
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "x", "script": script})
    own = {"tools": "mine.py:tools", "enabled_toolsets": "mine,terminal", "sandbox": "local"}
    parent = run(tmp_path, **{**SCRIPTED, **own})
    assert parent.returncode == 0, parent.stderr
    again = run(tmp_path, "fork", "r", "--at_turn=3", "--n=1", "--run_name=b")
    assert again.returncode == 0, again.stderr
    (record,) = records(tmp_path, "b")
    (of_parent,) = records(tmp_path, "r")
    assert record["messages"] == of_parent["messages"], "the model sees what there was"
    replay = record["fork"]["replay"]
    assert [(one["turn"], one["name"]) for one in replay["different"]] == [(1, "terminal")]
    assert [(one["turn"], one["name"]) for one in replay["skipped"]] == [(2, "pay")]
    assert replay["replayed"] == 2
    assert (tmp_path / "paid").read_text() == "x", "nobody was paid again"
    # A branch of a branch.
    second = run(tmp_path, "fork", "b", "--at_turn=1", "--n=2", "--run_name=c", max_turns=9)
    assert second.returncode == 0, second.stderr
    assert sorted(one["id"] for one in records(tmp_path, "c")) == [
        "fork.fork.p@3@1",
        "fork.fork.p@3@1#s1",
    ]
    assert records(tmp_path, "c")[0]["fork"]["record"] == "fork.p@3"


@pytest.mark.slow
def test_conversations_are_chosen_by_how_they_went(tmp_path: Path) -> None:
    steps: list[Any] = [
        {"tool_calls": [{"name": "write_file", "arguments": {"path": f"{n}", "content": ""}}]}
        for n in range(4)
    ]
    say = {"content": "y"}
    rows = [
        {"id": "long", "prompt": "x", "script": [*steps[:2], say]},
        {"id": "cut", "prompt": "x", "script": steps},
        {"id": "short", "prompt": "x", "script": [steps[0], say]},
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED, max_turns=4).returncode == 0
    (tmp_path / "ids").write_text("short\nlong\n")
    parent = tmp_path / "trajectories" / "r"
    chosen: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {"long", "cut", "short"}),
        ({"status": "completed"}, {"long", "short"}),
        ({"min_reward": 1.0}, set()),
        ({"ids": tmp_path / "ids"}, {"long", "short"}),
        ({"ids": tmp_path / "ids", "status": "max_turns"}, set()),
    ]
    for given_filters, expected in chosen:
        found = chosen_records(StoredRun(parent), **given_filters)
        assert {record["id"] for record in found} == expected
    assert len(list(chosen_records(StoredRun(parent), limit=2))) == 2
    wrong: list[dict[str, Any]] = [{"status": "complete"}, {"min_reward": float("nan")}]
    for given_filters in wrong:
        with pytest.raises(ConfigError, match=f"--{next(iter(given_filters))}: must be"):
            chosen_records(StoredRun(parent), **given_filters)
    again = run(tmp_path, "fork", "r", "--at_turn=2", "--n=1", "--status=max_turns", run_name="b")
    assert again.returncode == 0, again.stderr
    assert [record["id"] for record in records(tmp_path, "b")] == ["fork.cut@2"]
    for line, message in (
        (
            ["--at_turn=1", "--run_name=b"],
            "has the branches of another `fork`; use another --run_name",
        ),
        (["--at_turn=4", "--run_name=n"], "1 left out: it does not continue after turn 4"),
    ):
        refused = run(tmp_path, "fork", "r", *line, "--n=1", "--status=max_turns")
        assert refused.returncode == 2
        assert message in refused.stderr
    identity = read_run_json(parent)
    for flags, message in (
        ({"shard": "0/2", "run_name": "n"}, "--shard: `fork` sets this itself"),
        ({}, "--run_name: the name of the new run is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            forked_config(identity, None, flags, branches=2)


def test_a_branch_draws_what_its_parent_drew(tmp_path: Path) -> None:
    config = RunConfig(
        dataset_file=tmp_path, run_name="b", model="scripted", distribution="balanced", forks=True
    )
    setups = set_up_models(config, build_catalog(config))
    plain = config.model_copy(update={"forks": False})

    def drawn(config: RunConfig, task_id: str, **columns: Any) -> list[str]:
        return setup_of_task(
            setups,
            config,
            Task(id=task_id, prompt_id=task_id, sample=0, input_digest="d", columns=columns),
        ).toolset_names()

    parents = [drawn(plain, f"p{n}") for n in range(20)]
    branches = [drawn(config, f"fork.p{n}@1", fork={"drawn_as": f"p{n}"}) for n in range(20)]
    assert branches == parents
    assert branches != [drawn(plain, f"fork.p{n}@1") for n in range(20)]


def test_a_row_without_a_valid_beginning_is_not_a_branch() -> None:
    good = {"run": "r", "record": "p", "turn": 0, "drawn_as": "p", "inherited": {}, "events": []}
    assert read_fork({"fork": good}, OPENING).turn == 0
    bad: Any
    for bad in (None, [], {}, {**good, "turn": 1}, {**good, "events": [{"kind": "reply"}]}):
        with pytest.raises(ValueError, match="is not the beginning"):
            read_fork({"fork": bad}, OPENING)


WHAT_RULES_SEE = (
    "messages",
    "opening_length",
    "call_ids",
    "replies_used",
    "reasks",
    "new_notes",
    "_notes_of",
    "_text_before",
    "discarded",
    "results",
)


@settings(CALM, max_examples=2 * CALM.max_examples)
@given(scene=scenes())
def test_a_record_gives_back_the_events_of_any_turn(stage: Stage, scene: Scene) -> None:
    """What the rules see of a branch is what they saw of its parent at that place."""
    played = stage.play(scene)
    record = orjson.loads(record_of(played, scene))
    opening = scene.options.get("opening", OPENING)
    reasons: set[str] = set()
    for turn in range(1, len(record["turns"])):
        try:
            events = events_until(record, turn, opening=opening)
        except NotForkable as error:
            reasons.add(str(error))
            continue
        branch = Trajectory(opening, events)
        parent = Trajectory(opening, until(played.events, turn))
        for name in WHAT_RULES_SEE:
            assert without_marks(getattr(branch, name)) == getattr(parent, name), name
        assert vars(branch.tally) == vars(parent.tally)
        assert branch.api_calls() == branch.spent_usd == 0
        if not {"max_cost_usd", "max_total_tokens"} & scene.options.keys():
            spec = terms_of(scene.options)
            assert next_step(branch, spec) == next_step(parent, spec)
    assert "cannot be rebuilt from its record" not in reasons


def test_the_parent_s_cost_is_not_counted_in_a_branch(tmp_path: Path) -> None:
    scene = Scene([calls(call("echo", text=f"{n}")) for n in range(3)] + [say("done")], {})
    played = play(tmp_path, scene.script, cost_usd=0.25, reply_tokens=7)
    events = events_until(orjson.loads(record_of(played, scene)), 2, opening=OPENING)
    branch = Trajectory(OPENING, events)
    assert branch.turns == 2
    assert (branch.spent_usd, branch.spent_tokens, branch.cost_usd()) == (0, 0, None)
    paid = inherited_cost(events)
    assert (paid["api_calls"], paid["cost_usd"], paid["usage"]["input_tokens"]) == (2, 0.5, 14)


@pytest.mark.slow
def test_flags_of_a_parent_are_not_those_of_its_branch(tmp_path: Path) -> None:
    look = {"tool_calls": [{"name": "list_files", "arguments": {}}]}
    write = {"tool_calls": [{"name": "write_file", "arguments": {"path": "f", "content": ""}}]}
    script = [{"content": " "}, look, look, write, {"content": "done"}]
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "x", "script": script})
    parent = run(tmp_path, **SCRIPTED, max_reasks=1)
    assert parent.returncode == 0, parent.stderr
    assert make_table_row(to_record(records(tmp_path, "r")[0]))["flags"] == [
        "notes",
        "discarded replies",
    ]
    for turn, flags in ((2, ["notes"]), (3, [])):  # the note is made of what follows turn 2
        name = f"b{turn}"
        done = run(tmp_path, "fork", "r", f"--at_turn={turn}", "--n=1", run_name=name)
        assert done.returncode == 0, done.stderr
        assert make_table_row(to_record(records(tmp_path, name)[0]))["flags"] == flags


def until(events: list[Event], turn: int) -> list[Event]:
    """The events up to the last result of a turn."""
    ends = [
        n
        for n, event in enumerate(events)
        if event["kind"] in ("reply", "result")
        and event.get("turn") == turn
        and "discarded" not in event
    ]
    return events[: ends[-1] + 1]


def without_marks(value: Any) -> Any:
    if isinstance(value, list):
        return [without_marks(one) for one in value]
    if isinstance(value, dict) and value.get("kind") == "reply":
        return {key: one for key, one in value.items() if key != "inherited"}
    return value
