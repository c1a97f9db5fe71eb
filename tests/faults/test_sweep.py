"""A run is killed, or refused by the disk, at every single call that it makes."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.faults import strace
from tests.faults.oracle import check_run, resume_and_judge
from tests.faults.strace import Point, Who
from tests.helpers.running import SCRIPTED, write_rows

TASKS = 2
NOTE = {"tool_calls": [{"name": "write_file", "arguments": {"path": "n", "content": "1"}}]}

KILL = "signal=KILL"
FULL = "error=ENOSPC"
BROKEN = "error=EIO"

SHORT = [
    ("parent", KILL, "write", "records.jsonl"),
    ("parent", BROKEN, "fdatasync", "records.jsonl"),
    ("worker", KILL, "write", "inflight"),
]
"""Who, which fault, at which call, on what: the points that the default run of the tests takes."""


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    if problem := strace.problem():
        pytest.skip(problem)
    return prompts(tmp_path)


def prompts(cwd: Path) -> Path:
    rows: list[Any] = [
        {"id": f"p{n}", "prompt": "x", "script": [NOTE, {"content": "y"}]} for n in range(TASKS)
    ]
    write_rows(cwd / "p.jsonl", *rows)
    return cwd


@functools.cache
def points(who: Who) -> list[Point]:
    with TemporaryDirectory() as place:
        return strace.points(prompts(Path(place)), who, SCRIPTED)


def assert_survived(scene: Path, point: Point, fault: str) -> None:
    """Run with the fault, judge how that ended, resume, and judge all again."""
    done = strace.run_with(scene, point, fault, SCRIPTED)
    output = f"{point} {fault}: exit {done.returncode}, {done.stderr}"
    run_dir = scene / "trajectories" / "r"
    try:
        assert "Traceback" not in done.stderr
        if fault == KILL and point.who == "parent":
            assert done.returncode in (0, -9)
        else:
            assert done.returncode in (0, 2, 4)
            assert done.returncode == 0 or done.stderr.startswith("error: ")
            assert done.stderr.count("run the same command again") <= 1
        if done.returncode == 0:
            problems = check_run(run_dir)
            assert (problems.found, problems.records) == ([], TASKS), problems.describe()
        resume_and_judge(scene, SCRIPTED, tasks=TASKS)
    except AssertionError as error:
        error.add_note(output)
        raise
    shutil.rmtree(scene / "trajectories")


@pytest.mark.slow
@pytest.mark.parametrize(("who", "fault", "call", "on"), SHORT)
def test_a_fault_at_one_call(scene: Path, who: Who, fault: str, call: str, on: str) -> None:
    matching = [point for point in points(who) if point.call == call and on in point.what]
    assert_survived(scene, matching[0], fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", [KILL, FULL, BROKEN])
@pytest.mark.parametrize("who", ["parent", "worker"])
def test_a_fault_at_every_call(
    scene: Path, who: Who, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how many points there were, and which did not survive."""
    found = points(who)
    failed = []
    for point in found:
        try:
            assert_survived(scene, point, fault)
        except AssertionError as error:
            failed.append("\n".join([str(error)[:1500], *getattr(error, "__notes__", ())]))
            shutil.rmtree(scene / "trajectories", ignore_errors=True)
    with capsys.disabled():
        print(f"\n{who}, {fault}: {len(found)} points, {len(failed)} failed")
    assert not failed, "\n\n".join(failed)
