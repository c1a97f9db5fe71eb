"""The commands that look after a run are killed at every single system call that they make.

`verify --repair`, `merge`, `import` and `--fresh` are given again after each kill, and what
they left must then be as if they had never been killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batch_trajectories.engine.run_dir import list_run_names
from tests.faults import strace
from tests.faults.oracle import check_run, finished_lines, resume_and_judge
from tests.helpers.running import SCRIPTED, run, write_rows
from tests.importing.test_import_hermes import ANSWER, WORK, row

KILL = "signal=KILL"
SAY = [{"content": "y"}]


class Work(NamedTuple):
    """A command, what it is given, and how its run is made and judged."""

    prepare: Callable[[Path], None]
    args: list[str]
    given: dict[str, Any]
    judge: Callable[[Path], None]


def three_rows(cwd: Path) -> None:
    write_rows(
        cwd / "p.jsonl",
        *[{"id": f"p{n}", "prompt": f"Prompt {n}", "script": SAY} for n in (0, 1, 2)],
    )


def check_damaged(cwd: Path) -> None:
    """Garbage, a record twice, a torn tail and an old journal."""
    three_rows(cwd)
    assert run(cwd, **SCRIPTED).returncode == 0
    records = cwd / "trajectories" / "r" / "records.jsonl"
    first, second, third = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(first + b"garbage\n" + second + first + third[:-9])
    (cwd / "trajectories" / "r" / "inflight" / "worker-0-0.jsonl").write_bytes(b"garbage\n")


def check_repaired(cwd: Path) -> None:
    run_dir = cwd / "trajectories" / "r"
    readable = finished_lines_of_all(run_dir)
    done = run(cwd, "verify", "r", "--repair", "--read_data")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not check_run(run_dir).found
    assert finished_lines_of_all(run_dir) == readable, "nothing readable is lost"
    assert finished_lines(run_dir / "records.jsonl").keys() == {"p0", "p1"}
    resume_and_judge(cwd, SCRIPTED, tasks=3)


def finished_lines_of_all(run_dir: Path) -> set[bytes]:
    """Whole records wherever they are, the quarantine included."""
    files = [run_dir / "records.jsonl", *run_dir.glob("quarantine/records.jsonl*")]
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    return {line for line in lines if line.startswith(b"{") and line.endswith(b"}")}


def two_runs(cwd: Path) -> None:
    three_rows(cwd)
    lines = (cwd / "p.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:2]), ("b", lines[2:])):
        (cwd / f"{name}.jsonl").write_text("".join(part))
        given = {**SCRIPTED, "run_name": name, "dataset_file": f"{name}.jsonl"}
        assert run(cwd, **given).returncode == 0


def check_merged(cwd: Path) -> None:
    """It is there whole or not at all, and those that it is made of are as they were."""
    place = cwd / "trajectories"
    assert list_run_names(place) in (["a", "b"], ["a", "b", "m"])
    if not (place / "m").exists() or (place / ".m.merging").exists():
        done = run(cwd, "merge", "a", "b", into="m", dataset_file="p.jsonl")
        assert done.returncode == 0, done.stderr
    assert not (place / ".m.merging").exists()
    resume_and_judge(cwd, {**SCRIPTED, "run_name": "m"}, tasks=3)
    for name in ("a", "b"):
        assert not check_run(place / name).found


def of_hermes_agent(cwd: Path) -> None:
    three_rows(cwd)
    (cwd / "theirs").mkdir()
    rows = [row(0, "Prompt 0", *WORK, ANSWER), row(1, "Prompt 1", ANSWER)]
    write_rows(cwd / "theirs" / "batch_0.jsonl", *rows)


def check_imported(cwd: Path) -> None:
    done = run(cwd, "import", "theirs", format="hermes", **SCRIPTED)
    assert done.returncode == 0, done.stderr
    records = finished_lines(cwd / "trajectories" / "r" / "records.jsonl")
    assert records.keys() == {"p0", "p1"}
    resume_and_judge(cwd, SCRIPTED, tasks=3)


def finish(cwd: Path) -> None:
    three_rows(cwd)
    assert run(cwd, **SCRIPTED).returncode == 0


def begun_anew(cwd: Path) -> None:
    """The old run is in its place still or aside, and whole either way."""
    resume_and_judge(cwd, SCRIPTED, tasks=3)
    for aside in (cwd / "trajectories").glob("r.2*/records.jsonl"):
        assert len(finished_lines(aside)) == 3


WORKS = {
    "repair": Work(check_damaged, ["verify", "r", "--repair"], {}, check_repaired),
    "merge": Work(
        two_runs, ["merge", "a", "b"], {"into": "m", "dataset_file": "p.jsonl"}, check_merged
    ),
    "import": Work(
        of_hermes_agent, ["import", "theirs", "--format=hermes"], SCRIPTED, check_imported
    ),
    "fresh": Work(finish, ["--fresh"], SCRIPTED, begun_anew),
}


def failures_of_kills(cwd: Path, work: Work) -> tuple[int, list[str]]:
    """Kill `work` at each of its calls; how many there were, and what did not survive."""
    whole = cwd / "whole"
    whole.mkdir()
    work.prepare(whole)
    shutil.copytree(whole, cwd / "traced")
    found = strace.points(cwd / "traced", "parent", work.given, work.args)
    failed = []
    for number, point in enumerate(found):
        scene = cwd / str(number)
        shutil.copytree(whole, scene)
        killed = strace.run_with(scene, point, KILL, work.given, work.args)
        try:
            assert killed.returncode in (0, -9), killed.stderr
            work.judge(scene)
        except AssertionError as error:
            failed.append(f"{point}: exit {killed.returncode}: {str(error)[:1500]}")
        shutil.rmtree(scene)
    return len(found), failed


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
def test_a_kill_at_every_system_call_of_repair_merge_and_import(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how many calls there were, and which did not survive."""
    if problem := strace.problem():
        pytest.skip(problem)
    count, failed = failures_of_kills(tmp_path, WORKS[name])
    with capsys.disabled():
        print(f"\n{name}: {count} points, {len(failed)} failed")
    assert count > 10
    assert not failed, "\n\n".join(failed)
