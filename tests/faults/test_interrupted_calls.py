"""A group kill during tool calls: which results say that they were interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from agent.messages.message import call_failure
from batch_trajectories.records.files import add_checksum, strip_checksum
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, judge_run_dir
from tests.faults.test_group_kills import wait_for
from tests.faults.test_process import asking
from tests.helpers.running import (
    SCRIPTED,
    Process,
    lines,
    run_long,
    session_of,
    started,
    wait_until,
    write_rows,
)

TURNS = 4

FILES = {"log": "["}
"""The files of each workspace."""

FUNCTIONS = '''
import os
import time
from pathlib import Path

from toolsets.context import ToolContext
from toolsets.tool import tool


@tool()
def act(context: ToolContext, turn: str, seconds: float) -> str:
    """Do what must not be done twice."""
    file = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{context.workspace.root.name}:{turn}\\n".encode())
    os.close(file)
    time.sleep(seconds)
    return f"{turn} is done"


@tool()
def compute(context: ToolContext, turn: str) -> str:
    """As `act`, for a while without a pause, so that few threads are started."""
    answer = act.function(context, turn, 0.0)
    enough = time.thread_time() + 0.1
    while time.thread_time() < enough:
        pass
    return answer


@tool(effects="workspace")
def add(context: ToolContext, turn: str, seconds: float) -> str:
    """Add a line to a file of the workspace, which must not have it twice."""
    context.workspace.make()
    path = context.workspace.root / "log"
    with path.open("a") as file:
        file.write(turn + "\\n")
    time.sleep(seconds)
    return path.read_text()


ALL = [act, compute, add]
'''


class Killed(NamedTuple):
    """What came of a run that was killed and resumed."""

    records: list[dict[str, Any]]
    begun: int
    """Calls without a result that had begun at a kill, as the journals say."""
    rows: bytes
    """The training file."""
    kills: int


class OpenCalls(NamedTuple):
    """Calls that have no result yet, each by its task and id."""

    begun: set[tuple[str, str]]
    waiting: set[tuple[str, str]]
    """Calls that have not begun."""


class Case(NamedTuple):
    """What the model calls."""

    toolset: str
    tool: str
    arguments: dict[str, Any]


def act(seconds: float) -> Case:
    return Case("acts", "act", {"turn": "{turn}", "seconds": seconds})


def kill_in_calls(
    cwd: Path,
    case: Case,
    draw: random.Random,
    *,
    prompts: int,
    kills: int,
    workers: int = 2,
    moment: Callable[[OpenCalls], bool] | None = None,
    after: Callable[[Path], None] = lambda _: None,
) -> Killed:
    """Kill a run of `prompts` conversations, all in flight, do `after`, and resume it to its end.

    Each kill comes at a random moment after the first reply of its start. With `moment`, it comes
    when that holds for the calls that are open.
    """
    rows = [{"id": f"p{n}", "prompt": f"Question {n}", "files": FILES} for n in range(prompts)]
    write_rows(cwd / "p.jsonl", *rows)
    (cwd / "acts.py").write_text(FUNCTIONS)
    arguments = json.dumps(case.arguments)
    run_dir = cwd / "trajectories" / "r"
    begun: set[tuple[str, str]] = set()
    killed = 0
    with FakeEndpoint(turns=TURNS, latency_s=0.1, tool=case.tool, arguments=arguments) as endpoint:
        given = asking(endpoint, num_workers=workers, batch_size=prompts // workers)
        given |= {"enabled_toolsets": case.toolset, "tools": "acts:ALL", "sandbox": "bwrap"}
        for _ in range(kills):
            replies = endpoint.journal()["replies"]
            with started(cwd, "--row_setup", **given) as process:
                wait_until(
                    lambda process=process, replies=replies: (
                        process.poll() is not None or endpoint.journal()["replies"] > replies
                    )
                )
                if moment is None:
                    wait_for(process, draw.uniform(0, 1))
                else:
                    stop_at(process, run_dir, moment)
                if process.poll() is not None:
                    assert process.returncode == 0, (cwd / "output.txt").read_text()
                    break
                os.killpg(process.pid, signal.SIGKILL)
                assert_gone(process.pid)
            killed += 1
            begun |= open_calls(run_dir).begun
            after(run_dir)
        done = run_long(cwd, "--row_setup", **given)
        assert done.returncode == 0, done.stderr
    judge_run_dir(run_dir, tasks=prompts)
    rows_file = cwd / "trajectories" / "r.jsonl"
    return Killed(lines(run_dir / "records.jsonl"), len(begun), rows_file.read_bytes(), killed)


def stop_at(process: Process, run_dir: Path, moment: Callable[[OpenCalls], bool]) -> None:
    """Stop a run, not to be continued, at a moment when `moment` holds for its open calls."""

    def is_stopped_then() -> bool:
        if process.poll() is not None:
            return True
        os.killpg(process.pid, signal.SIGSTOP)
        wait_until(lambda: all(is_stopped(pid) for pid in session_of(process.pid)))
        if moment(open_calls(run_dir)):
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    wait_until(is_stopped_then)


def is_stopped(pid: int) -> bool:
    """Whether a process that was sent SIGSTOP runs no more of its program.

    One that waits in the kernel (D) stops when it returns; after a vfork it waits for its child.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "DTZ"


def open_calls(run_dir: Path) -> OpenCalls:
    """The calls without a result, as the journals of a run that does not work now say."""
    events = [
        (entry["deal"], entry["position"], entry["task"], entry["event"])
        for journal in run_dir.glob("inflight/*.jsonl")
        for entry in map(orjson.loads, journal.read_bytes().splitlines())
    ]
    begun, waiting = set(), set()
    for *_, task, event in sorted(events, key=itemgetter(0, 1)):
        if event["kind"] == "reply":
            waiting |= {(task, call["id"]) for call in event["message"].get("tool_calls", ())}
        elif event["kind"] == "began":
            waiting.discard((task, event["call_id"]))
            begun.add((task, event["call_id"]))
        elif event["kind"] == "result":
            waiting.discard((task, event["message"]["tool_call_id"]))
            begun.discard((task, event["message"]["tool_call_id"]))
    return OpenCalls(begun, waiting)


def rebuilds(record: dict[str, Any]) -> int:
    return sum("rebuilt" in resume for resume in record["resumes"])


def count_interrupted(record: dict[str, Any]) -> int:
    return sum(call_failure(message) == "interrupted" for message in record["messages"])


@pytest.mark.slow
def test_of_calls_with_effects_elsewhere_only_those_that_had_begun_are_interrupted(
    tmp_path: Path,
) -> None:
    """Calls that wait for a thread at the kill run once, as if nothing had happened."""
    case = Case("acts", "compute", {"turn": "{turn}"})
    killed = kill_in_calls(
        tmp_path,
        case,
        random.Random(1),
        prompts=32,
        kills=2,
        workers=1,
        moment=lambda open: bool(open.begun and open.waiting),
    )
    check_acts(tmp_path, killed)
    assert killed.kills == 2


def check_acts(cwd: Path, killed: Killed) -> None:
    """No call ran twice, and those and only those are interrupted that had begun at a kill."""
    ran = Counter((cwd / "done").read_text().split())
    assert set(ran.values()) == {1}, "a call with effects elsewhere was repeated"
    assert sum(map(count_interrupted, killed.records)) == killed.begun
    calls = len(killed.records) * (TURNS - 1)
    assert calls - killed.begun <= len(ran) <= calls


def is_in_a_call(open: OpenCalls) -> bool:
    return bool(open.begun)


def undone(seconds: float) -> dict[str, Case]:
    """Calls with effects in the workspace, which show whether they ran twice."""
    shell = f"echo {{turn}} >> log; n=$((n+1)); sleep {seconds}; echo $n; cat log"
    code = (
        "import time\nn = globals().get('n', 0) + 1\nprint(n, file=open('log', 'a'))\n"
        f"time.sleep({seconds})\nprint(n, open('log').read())"
    )
    return {
        "terminal": Case("terminal", "terminal", {"command": shell}),
        "python": Case("python", "python", {"code": code}),
        "file": Case("file", "patch_file", {"path": "log", "old_text": "[", "new_text": "{turn}["}),
        "own": Case("acts", "add", {"turn": "{turn}", "seconds": seconds}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["terminal", "python", "own"])
def test_calls_with_effects_in_the_workspace_are_undone(tmp_path: Path, name: str) -> None:
    """Kills also hit starts that rebuild workspaces."""
    check_undone(tmp_path, undone(0.5)[name], prompts=8, kills=3, moment=is_in_a_call)


@pytest.mark.slow
def test_calls_are_undone_after_a_loss_of_power(tmp_path: Path) -> None:
    """It takes the journal's last lines, and what was written into workspaces."""
    case = undone(0.5)["terminal"]
    check_undone(tmp_path, case, prompts=8, kills=2, moment=is_in_a_call, after=lose_power)


@pytest.mark.slow
def test_after_a_loss_of_power_what_may_have_begun_is_not_repeated(tmp_path: Path) -> None:
    """It takes the lines that say which calls began, and results; effects elsewhere stay."""
    draw = random.Random(2)
    killed = kill_in_calls(
        tmp_path, act(0.5), draw, prompts=16, kills=3, moment=is_in_a_call, after=lose_last_calls
    )
    ran = Counter((tmp_path / "done").read_text().split())
    assert set(ran.values()) == {1}, "a call with effects elsewhere was repeated"
    assert sum(map(count_interrupted, killed.records)) >= killed.begun > 0


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.1, 5])
@pytest.mark.parametrize("prompts", [64, 256])
def test_20_kills_never_repeat_calls_with_effects_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float, prompts: int
) -> None:
    cut_off = kills = runs = 0
    while kills < 20:
        cwd = tmp_path / str(runs)
        cwd.mkdir()
        draw = random.Random(runs)
        killed = kill_in_calls(cwd, act(seconds), draw, prompts=prompts, kills=20 - kills)
        check_acts(cwd, killed)
        cut_off, kills, runs = cut_off + killed.begun, kills + killed.kills, runs + 1
    with capsys.disabled():
        what = f"own, undeclared, {seconds:g} s, {prompts} in flight"
        print(f"\n{what}: {runs} runs, {cut_off} calls cut off, none repeated")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.1, 5])
@pytest.mark.parametrize("name", undone(0))
@pytest.mark.parametrize("prompts", [64, 256])
def test_20_kills_with_many_conversations_in_flight(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    seconds: float,
    prompts: int,
) -> None:
    runs: list[Killed] = []
    while (left := 20 - sum(killed.kills for killed in runs)) > 0:
        cwd = tmp_path / str(len(runs))
        cwd.mkdir()
        case = undone(seconds)[name]
        runs.append(check_undone(cwd, case, prompts=prompts, kills=left, seed=len(runs)))
    cut_off = sum(killed.begun for killed in runs)
    rebuilt = sum(rebuilds(record) for killed in runs for record in killed.records)
    with capsys.disabled():
        what = f"{name}, {seconds:g} s, {prompts} in flight"
        print(f"\n{what}: {len(runs)} runs, {cut_off} calls cut off, {rebuilt} rebuilds")


def check_undone(
    cwd: Path,
    case: Case,
    *,
    prompts: int,
    kills: int,
    seed: int = 1,
    moment: Callable[[OpenCalls], bool] | None = None,
    after: Callable[[Path], None] = lambda _: None,
) -> Killed:
    """The training file is that of a run which was not killed."""
    (cwd / "whole").mkdir()
    (cwd / "killed").mkdir()
    whole = kill_in_calls(cwd / "whole", case, random.Random(1), prompts=prompts, kills=0)
    draw = random.Random(seed)
    killed = kill_in_calls(
        cwd / "killed", case, draw, prompts=prompts, kills=kills, moment=moment, after=after
    )
    assert sum(map(count_interrupted, killed.records)) == 0
    assert killed.rows == whole.rows
    return killed


def lose_power(run_dir: Path) -> None:
    """What a loss of power leaves: another start of the machine, journals and files cut."""

    def cut(later: list[bytes]) -> None:
        while later and b'"kind":"began"' in later.pop():
            pass  # files lose their ends: what begins is not synced

    change_journals(run_dir, cut)
    for file in run_dir.glob("workspaces/*/log"):
        file.write_bytes(b"")


def lose_last_calls(run_dir: Path) -> None:
    """The same where the replies have just been synced: what follows the last one is lost."""

    def cut(later: list[bytes]) -> None:
        while later and (b'"kind":"began"' in later[-1] or b'"kind":"result"' in later[-1]):
            later.pop()

    change_journals(run_dir, cut)


def change_journals(run_dir: Path, cut: Callable[[list[bytes]], None]) -> None:
    """Have journals be of another start of the machine, and their later lines be cut."""
    for journal in run_dir.glob("inflight/*.jsonl"):
        if not (content := journal.read_bytes()):
            continue  # a kill can leave one without a line
        first, *later = content.splitlines(keepends=True)
        entry = orjson.loads(strip_checksum(first))
        if entry["boot"] == "another":
            continue  # of an earlier start: it was synced long ago
        entry["boot"] = "another"
        cut(later)
        journal.write_bytes(b"".join([add_checksum(orjson.dumps(entry)), *later]))


LATE = '''
import os
import time
from pathlib import Path

from toolsets.context import ToolContext
from toolsets.tool import tool


@tool(effects="workspace")
def write(context: ToolContext) -> str:
    """Write a file, late where there is a file `late`."""
    context.workspace.make()
    text = "in time"
    if Path("late").exists():
        ends = time.monotonic() + float(Path("late").read_text())
        while Path("late").exists() and time.monotonic() < ends:
            time.sleep(0.01)
        text = "late"
    (context.workspace.root / "log").write_text(text)
    Path("wrote").touch()
    return text


@tool(effects="workspace")
def wait(context: ToolContext) -> str:
    """Wait until the process is killed, or until all has been written."""
    Path("waits").touch()
    while not (Path("go").exists() and Path("wrote").exists()):
        time.sleep(0.01)
    return (context.workspace.root / "log").read_text()


@tool()
def read(context: ToolContext) -> str:
    """What is in the file once all has been written."""
    return wait.function(context)


ALL = [write, wait, read]
'''


@pytest.mark.slow
@pytest.mark.parametrize("is_endless", [False, True])
def test_a_function_that_runs_on_when_its_call_is_repeated_writes_into_no_workspace(
    tmp_path: Path, is_endless: bool
) -> None:
    """What was put back is what the conversation had; or it waits for the next start."""
    (tmp_path / "acts.py").write_text(LATE)
    turns = [{"tool_calls": [{"name": name}]} for name in ("write", "wait", "read")]
    row = {"id": "a", "prompt": "a", "script": [*turns, {"content": "done"}]}
    write_rows(tmp_path / "p.jsonl", row)
    given = {**SCRIPTED, "tools": "acts:ALL", "enabled_toolsets": "acts"}
    given |= {"tool_timeout_s": 1, "max_rebuild_s": 12 if is_endless else 60}
    run_dir = tmp_path / "trajectories" / "r"
    with started(tmp_path, **given) as process:
        wait_until(lambda: (tmp_path / "waits").exists())
        os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
    (tmp_path / "wrote").unlink()
    (tmp_path / "go").touch()
    (tmp_path / "late").write_text("1000" if is_endless else "2")
    done = run_long(tmp_path, **given)
    if is_endless:
        assert done.returncode == 1, done.stderr
        assert "has not returned" in lines(run_dir / "failures.jsonl")[0]["message"]
        (tmp_path / "late").unlink()
        done = run_long(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    (record,) = lines(run_dir / "records.jsonl")
    told = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert told[0] == told[2] == "in time"
    assert count_interrupted(record) == (not is_endless)
