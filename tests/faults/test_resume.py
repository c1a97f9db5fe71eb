"""A conversation that was killed resumes where it was, at any point.

One run with a conversation at each place is killed once and resumed once; each test looks at what
became of one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import scan, tasks
from batch_trajectories.records.tasks import task_key
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults import strace
from tests.faults.oracle import asked_of, assert_gone, resume_and_judge
from tests.faults.test_process import asking
from tests.helpers.answering import JSON, answering
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    WRITE_A_NOTE,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)

TOOLS = '''
import time
from pathlib import Path

from toolsets.context import ToolContext
from toolsets.tool import tool


def visit(name):
    with Path("visits").open("a") as file:
        file.write(name + "\\n")
    while not Path(name + ".go").exists():
        time.sleep(0.01)
    return name + " was visited"


@tool()
def act(name: str) -> str:
    """Do what must not be done twice."""
    return visit(name)


@tool(idempotent=True)
def look(name: str) -> str:
    """Do what may be done twice."""
    return visit(name)


@tool(effects="workspace")
def add(context: ToolContext, name: str) -> str:
    """Add a line to a file of the workspace, which must not have it twice."""
    context.workspace.make()
    path = context.workspace.root / name.partition("-")[0]
    with path.open("a") as file:
        file.write(name + "\\n")
    visit(name)
    return path.read_text()


@tool(effects="workspace")
def count(name: str) -> str:
    """Return another result each time."""
    visit(name)
    return str(Path("visits").read_text().split().count(name))


ALL = [act, look, add, count]
'''

HELPER = {
    "name": "helper",
    "description": "Helps.",
    "system_prompt": "Help.",
    "enabled_toolsets": ["places"],
}


def calling(*calls: tuple[str, str]) -> list[JSON]:
    keys = {"helper": "task", "write_file": "path"}
    told = [(name, {keys.get(name, "name"): value}) for name, value in calls]
    return [call(n, name, arguments) for n, (name, arguments) in enumerate(told)]


def call(n: int, name: str, arguments: JSON) -> JSON:
    if name == "write_file":
        arguments["content"] = "text"
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"c{n}", "type": "function", "function": function}


SCRIPTS: dict[str, list[list[JSON]]] = {
    "acts": [calling(("act", "acts"))],
    "looks": [calling(("look", "looks"))],
    "three": [calling(("act", "one"), ("look", "two"), ("act", "three"))],
    "gone": [calling(("write_file", "n")), calling(("look", "gone"))],
    "outer": [calling(("helper", "inner"))],
    "inner": [calling(("look", "inner"))],
    "last": [],
    "undone": [calling(("add", "undone-1")), calling(("add", "undone-2"))],
    "parallel": [calling(("add", "left"), ("add", "right"))],
    "nested": [calling(("add", "inside-1")), calling(("helper", "inside"))],
    "inside": [calling(("add", "inside-2")), calling(("add", "inside-3"))],
    "differs": [calling(("count", "counted")), calling(("add", "differs"))],
    "behind": [calling(("act", "before")), calling(("add", "behind"))],
}
"""By the first words of the user: the calls of each turn before the answer."""

INNER = {"inner", "inside"}
"""Those of subagents."""

PASSED = ("two", "undone-1", "left", "inside-1", "inside-2", "counted", "before")
"""The visits that have ended when everything is killed."""

WAITING = {
    "acts",
    "looks",
    "one",
    "three",
    "gone",
    "inner",
    "undone-2",
    "right",
    "inside-3",
    "differs",
    "behind",
}
"""The visits that last."""


class Scene(NamedTuple):
    """What became of the run."""

    records: dict[str, dict[str, Any]]
    visits: Counter[str]
    """How often each tool call really ran."""
    asked: list[JSON]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run that was killed with a conversation at each place, and resumed."""
    cwd = tmp_path_factory.mktemp("scene")
    (cwd / "places.py").write_text(TOOLS)
    for name in PASSED:
        (cwd / f"{name}.go").touch()
    rows = [{"id": name, "prompt": name} for name in SCRIPTS if name not in INNER]
    write_rows(cwd / "p.jsonl", *rows)
    run_dir = cwd / "trajectories" / "r"
    parent_is_stopped = Event()

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        user = user_of(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if user == "last":
            parent_is_stopped.wait(PATIENCE_S)
        message: JSON = {"role": "assistant", "content": f"the answer of {user}"}
        if turn < len(SCRIPTS[user]):
            message = {"role": "assistant", "content": None, "tool_calls": SCRIPTS[user][turn]}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return 200, {"id": "x", "model": "m", "choices": [choice], "usage": usage}

    def journaled() -> str:
        return "".join(path.read_text() for path in run_dir.glob("inflight/*.jsonl"))

    def visits() -> Counter[str]:
        seen = cwd / "visits"
        return Counter(seen.read_text().split()) if seen.exists() else Counter()

    with answering(answer) as (root, requests):
        given = {**SCRIPTED, "model": "openai:m", "key_env": "none", "base_url": f"{root}/v1"}
        given |= {"tools": "places:ALL", "enabled_toolsets": "file,places"}
        given |= {"subagents": json.dumps([HELPER])}
        with started(cwd, **given) as process:
            wait_until(lambda: visits().keys() >= WAITING)
            wait_until(lambda: all(f"{name}\\n" in journaled() for name in ("left", "inside-2")))
            wait_until(lambda: "two was visited" in journaled())
            os.kill(process.pid, signal.SIGSTOP)  # so that no record can be written any more
            parent_is_stopped.set()
            wait_until(lambda: "the answer of last" in journaled())
            os.killpg(process.pid, signal.SIGKILL)
            assert_gone(process.pid)
        assert not (run_dir / "records.jsonl").read_bytes()
        for name in WAITING:
            (cwd / f"{name}.go").touch()
        shutil.rmtree(workspace_of(cwd, "gone"))
        resume_and_judge(cwd, given, tasks=len(rows))
    records = {record["id"]: record for record in lines(run_dir / "records.jsonl")}
    unclear = {id for id, one in records.items() if any(r["interrupted"] for r in one["resumes"])}
    trained = {row["id"] for row in lines(cwd / "trajectories" / "r.jsonl")}
    assert unclear == {"acts", "three", "differs", "behind"}
    assert trained == records.keys() - unclear
    return Scene(records, visits(), requests)


def user_of(body: JSON) -> str:
    return next(str(m["content"]) for m in body["messages"] if m["role"] == "user")


def workspace_of(cwd: Path, id: str) -> Path:
    """The workspace of a conversation that is under way."""
    journals = (cwd / "trajectories" / "r" / "inflight").glob("*.jsonl")
    entry = next(e for path in journals for e in lines(path) if e["task"] == id)
    key = task_key(id, entry["input_digest"]).hex()
    return cwd / "trajectories" / "r" / "workspaces" / key


def resume_of(record: dict[str, Any]) -> dict[str, Any]:
    assert (record["status"], record["attempt"]) == ("completed", 1)
    (resume,) = record["resumes"]
    assert isinstance(resume, dict)
    return resume


def results_of(record: dict[str, Any]) -> list[str]:
    return [message["content"] for message in record["messages"] if message["role"] == "tool"]


def test_no_turn_of_any_of_them_is_asked_for_twice(scene: Scene) -> None:
    turns = Counter((user_of(body), len(body["messages"])) for body in scene.asked)
    assert turns.total() == sum(len(script) + 1 for script in SCRIPTS.values())
    assert set(turns.values()) == {1}


def test_during_a_call_that_must_not_be_repeated(scene: Scene) -> None:
    record = scene.records["acts"]
    assert resume_of(record)["interrupted"] == ["c0"]
    assert results_of(record)[0].startswith("Error: this call was interrupted")
    assert scene.visits["acts"] == 1


def test_during_a_call_that_may_be_repeated(scene: Scene) -> None:
    record = scene.records["looks"]
    assert resume_of(record)["repeated"] == ["c0"]
    assert results_of(record) == ["looks was visited"]
    assert scene.visits["looks"] == 2


def test_between_two_of_three_parallel_results(scene: Scene) -> None:
    """The result that was there stays; only the others are in doubt."""
    record = scene.records["three"]
    assert resume_of(record)["interrupted"] == ["c0", "c2"]
    told = [text.split(":")[0] for text in results_of(record)]
    assert told == ["Error", "two was visited", "Error"]
    assert [scene.visits[name] for name in ("one", "two", "three")] == [1, 1, 1]


def test_after_the_last_reply_and_before_the_record(scene: Scene) -> None:
    record = scene.records["last"]
    assert resume_of(record)["turn"] == 1
    assert record["messages"][-1]["content"] == "the answer of last"


def test_with_a_workspace_that_is_gone(scene: Scene) -> None:
    """It is made again by the calls that made it."""
    resume = resume_of(scene.records["gone"])
    assert resume["workspace_kept"]
    assert resume["rebuild"]["calls"] == 1
    assert results_of(scene.records["gone"])[1] == "gone was visited"


def test_during_a_call_that_can_be_undone(scene: Scene) -> None:
    resume = resume_of(scene.records["undone"])
    assert (resume["interrupted"], resume["rebuilt"]) == ([], ["call_2_0"])
    assert results_of(scene.records["undone"]) == ["undone-1\n", "undone-1\nundone-2\n"]
    assert [scene.visits[name] for name in ("undone-1", "undone-2")] == [2, 2]


def test_between_two_parallel_results_that_can_be_undone(scene: Scene) -> None:
    assert resume_of(scene.records["parallel"])["rebuilt"] == ["c1"]
    assert results_of(scene.records["parallel"]) == ["left\n", "right\n"]
    assert [scene.visits[name] for name in ("left", "right")] == [2, 2]


def test_during_a_call_of_a_subagent_that_can_be_undone(scene: Scene) -> None:
    """The calls of both are made again, in order."""
    (inner,) = scene.records["nested"]["inner"]
    assert inner["resumes"][0]["rebuilt"] == ["call_2_0"]
    assert results_of(inner)[1] == "inside-1\ninside-2\ninside-3\n"
    assert [scene.visits[f"inside-{n}"] for n in (1, 2, 3)] == [2, 2, 2]


def test_a_call_behind_one_with_another_result_is_interrupted(scene: Scene) -> None:
    """The files are those that were there, and the record says where the result differed."""
    resume = resume_of(scene.records["differs"])
    assert resume["interrupted"] == ["call_2_0"]
    where = {"turn": 1, "call": 0, "name": "count", "result": "2"}
    assert resume["rebuild"] == {"why": "its result differs", **where}
    assert [scene.visits[name] for name in ("counted", "differs")] == [2, 1]


def test_a_call_behind_one_with_effects_elsewhere_is_interrupted(scene: Scene) -> None:
    resume = resume_of(scene.records["behind"])
    assert resume["interrupted"] == ["call_2_0"]
    why = "it may have acted outside the workspace"
    assert resume["rebuild"] == {"why": why, "turn": 1, "call": 0, "name": "act"}
    assert [scene.visits[name] for name in ("before", "behind")] == [1, 1]


def test_with_a_subagent_in_the_middle(scene: Scene) -> None:
    record = scene.records["outer"]
    assert resume_of(record)["turn"] == 1
    assert results_of(record) == ["the answer of inner"]
    (inner,) = record["inner"]
    assert [turn["turn"] for turn in inner["turns"]] == [1, 2]
    assert inner["resumes"][0]["repeated"] == ["c0"]
    assert scene.visits["inner"] == 2


@pytest.mark.slow
def test_with_signed_thoughts(tmp_path: Path) -> None:
    """The endpoint refuses thoughts that do not come back as it signed them."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(
        turns=4, latency_s=0.02, answers=8, reasoning_chars=80, **WRITE_A_NOTE
    ) as endpoint:
        given = asking(endpoint, num_workers=1, base_url=endpoint.anthropic_url)
        given["model"] = "anthropic:m"
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 8)
            os.killpg(process.pid, signal.SIGKILL)
            assert_gone(process.pid)
        endpoint.answer(None)
        resume_and_judge(tmp_path, given, tasks=4, endpoint=endpoint, wasted=4)
        assert endpoint.journal()["refused"] == 0
    records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert any(record["resumes"] for record in records)


def run_traced(cwd: Path, who: strace.Who, options: list[str], given: dict[str, Any]) -> int:
    """Run with these options of strace; the exit code."""
    if problem := strace.problem():
        pytest.skip(problem)
    return strace.run_traced(cwd, who, ["-o", "/dev/null", *options], given).returncode


@pytest.mark.slow
def test_after_the_reply_and_before_its_tools(tmp_path: Path) -> None:
    """The worker dies as the first tool is about to make the workspace."""
    dataset = write_prompts(tmp_path / "p.jsonl", 1)
    rules = RunConfig(dataset_file=dataset, run_name="r").row_rules("openai")
    (task,) = tasks(scan(dataset, max_samples=None, rules=rules))
    workspace = tmp_path / "trajectories" / "r" / "workspaces" / task.key.hex()
    kill = ["-P", str(workspace), "-e", "inject=mkdir:signal=KILL:when=1"]
    with FakeEndpoint(turns=3, latency_s=0.0, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1)
        assert run_traced(tmp_path, "worker", kill, given) == 0
        (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
        resume = resume_of(record)
        assert (resume["turn"], len(resume["repeated"]), resume["workspace_kept"]) == (1, 1, True)
        resume_and_judge(tmp_path, given, tasks=1, endpoint=endpoint)
        assert endpoint.journal()["requests"] == 3


@pytest.mark.slow
def test_during_export(tmp_path: Path) -> None:
    """The training file is there whole or not at all, and made again without a call."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=2, latency_s=0.0, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1)
        training = tmp_path / "trajectories" / "r.jsonl"
        assert run(tmp_path, **given).returncode == 0
        training.unlink()
        # In a start with nothing left to run; after run.json and two smaller files it is its turn.
        assert (
            run_traced(tmp_path, "parent", ["-e", "inject=rename:signal=KILL:when=4"], given) == -9
        )
        assert not training.exists()
        (half,) = training.parent.glob(".r.jsonl.*.tmp")
        assert len(lines(half)) == 4
        before = asked_of(endpoint)
        resume_and_judge(tmp_path, given, tasks=4, endpoint=endpoint)
        assert asked_of(endpoint) == before
        assert len(lines(training)) == 4


COMMANDS = {
    "background": ("sleep 1000 &", "processes or threads ran on after it"),
    "another time": ("date +%N", "its result differs"),
    "too slow": ("sleep 5", "it was stopped at its time limit"),
    "none": ("true", None),
}
"""Commands before a call that is cut off, and why its workspace is not rebuilt."""

LONG = {"long": ("sleep 1", "its earlier calls took longer than --max_rebuild_s")}
"""Apart from the others, which need all the time that a loaded machine takes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "max_rebuild_s"), [(COMMANDS, PATIENCE_S), (LONG, 0.5)], ids=["any", "long"]
)
@pytest.mark.parametrize("network", [False, True])
def test_commands_behind_which_nothing_is_undone(
    tmp_path: Path, network: bool, commands: dict[str, tuple[str, str | None]], max_rebuild_s: float
) -> None:
    (tmp_path / "places.py").write_text(TOOLS)
    rows = []
    for id, (text, _) in commands.items():
        arguments: JSON = {"command": text, "timeout_s": 1 if id == "too slow" else 60}
        calls = [{"name": "terminal", "arguments": arguments}]
        waits = [{"name": "add", "arguments": {"name": "waiting"}}]
        script = [{"tool_calls": calls}, {"tool_calls": waits}, {"content": "done"}]
        rows.append({"id": id, "prompt": id, "script": script})
    write_rows(tmp_path / "p.jsonl", *rows)
    given = {**SCRIPTED, "tools": "places:ALL", "enabled_toolsets": "terminal,places"}
    given |= {"sandbox": "bwrap", "batch_size": 8, "config": "run.yaml"}
    settings = {"network": network, "max_rebuild_s": max_rebuild_s}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    visits = tmp_path / "visits"
    with started(tmp_path, **given) as process:
        wait_until(
            lambda: (
                process.poll() is not None
                or (visits.exists() and len(visits.read_text().split()) == len(rows))
            )
        )
        assert process.poll() is None, (tmp_path / "output.txt").read_text()
        os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
    (tmp_path / "waiting.go").touch()
    resume_and_judge(tmp_path, given, tasks=len(rows))
    for record in lines(tmp_path / "trajectories" / "r" / "records.jsonl"):
        resume = resume_of(record)
        why = commands[record["id"]][1]
        if network and record["id"] != "too slow":
            why = "it may have acted outside the workspace"
        assert resume["rebuild"].get("why") == why, record["id"]
        assert len(resume["interrupted"]) == (why is not None)


@pytest.mark.slow
def test_the_interpreter_of_a_subagent_is_rebuilt_before_its_caller_has_a_result(
    tmp_path: Path,
) -> None:
    """What the subagent defined before the kill is there behind it."""
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "outer"})
    helper = {**HELPER, "enabled_toolsets": ["python"]}
    codes = ["x = 41", "print(x + 1)"]
    is_asked, may_answer = Event(), Event()

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message: JSON = {"role": "assistant", "content": "done"}
        if user_of(body) == "outer" and not turn:
            message["tool_calls"] = calling(("helper", "inner"))
        elif user_of(body) == "inner" and turn < len(codes):
            message["tool_calls"] = [call(turn, "python", {"code": codes[turn]})]
        if turn == 1 and user_of(body) == "inner":
            is_asked.set()
            may_answer.wait(PATIENCE_S)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return 200, {"id": "x", "model": "m", "choices": [choice]}

    with answering(answer) as (root, _):
        given = {**SCRIPTED, "model": "openai:m", "key_env": "none", "base_url": f"{root}/v1"}
        given |= {"enabled_toolsets": "python", "subagents": json.dumps([helper])}
        given |= {"sandbox": "bwrap"}
        with started(tmp_path, **given) as process:
            wait_until(is_asked.is_set)
            os.killpg(process.pid, signal.SIGKILL)
            assert_gone(process.pid)
        may_answer.set()
        assert run(tmp_path, **given).returncode == 0
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    first, second = results_of(record["inner"][0])
    assert json.loads(second) == {**json.loads(first), "stdout": "42\n"}
    assert resume_of(record)["rebuild"]["calls"] == 1
