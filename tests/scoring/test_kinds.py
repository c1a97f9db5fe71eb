"""Rows in images, agents that are commands, and what can go wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.engine.run_dir import hold_lock
from tests.audit.planting import MUL, Images, harbor_task, swe_row
from tests.fakes.agent_endpoint import AgentEndpoint
from tests.helpers.running import (
    ROOT,
    SCRIPTED,
    lines,
    run,
    run_long,
    started,
    wait_until,
    write_rows,
)
from tests.images.test_task_runs import script_of
from tests.program.test_agent_runs import options, prompt, scripted_agent
from tests.scoring.test_kills import kill_while_judging
from tests.stored_runs.test_stored_runs import COMMITS

KINDS = ("swe-bench", "swe-rebench", "swe-smith", "r2e-gym")
MISSING = "tests/test_calc.py::test_missing"
FIX = "sed -i 's/first - second/first + second/' pkg/calc.py"
BREAK = "sed -i 's/first [+] second/first - second/' pkg/calc.py"
IN_IMAGES: dict[str, Any] = {**SCRIPTED, "sandbox": "bwrap", "enabled_toolsets": "terminal"}
PLAIN: dict[str, Any] = {**SCRIPTED, "enabled_toolsets": "terminal"}


def verdicts_of(cwd: Path, name: str = "r") -> dict[str, bool | None]:
    """The last verdict of each conversation."""
    path = cwd / "trajectories" / name / "scores.jsonl"
    return {line["id"]: line["check"]["passed"] for line in lines(path)}


def at_the_time(cwd: Path, name: str = "r") -> dict[str, bool | None]:
    records = lines(cwd / "trajectories" / name / "records.jsonl")
    return {record["id"]: record["check"]["passed"] for record in records}


def judge(cwd: Path, *args: object, code: int = 0, **flags: Any) -> str:
    done = run_long(cwd, "check", *(args or ("r",)), **flags)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_kind(cwd: Path, kind: str, images: Images, each: int) -> list[dict[str, Any]]:
    """Run rows of a kind, of which each other's model leaves correct code; returns the rows."""
    work = [script_of(FIX, BREAK, FIX, "echo x > 'a b'"), script_of(BREAK, "echo conf > setup.cfg")]
    rows = [
        {**swe_row(kind, f"{kind}-{n}", images), "script": work[n % 2]} for n in range(2 * each)
    ]
    write_rows(cwd / "p.jsonl", *rows)
    # The rows file of a user, who wants the scripts, too.
    own = (ROOT / "configs" / "rows" / f"{kind}.yaml").read_text()
    (cwd / "mine.yaml").write_text(own.replace("keep: [", "keep: [script, instance_id, "))
    few = {**IN_IMAGES, "num_workers": 2, "batch_size": 4}
    done = run_long(cwd, **few, rows="mine.yaml", images=images.directory)
    assert done.returncode == 0, done.stderr
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("each", "kills"),
    [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(63, 3, marks=pytest.mark.long)],
)
def test_conversations_of_a_kind_from_their_diffs(
    tmp_path: Path,
    task_images: Images,
    kind: str,
    each: int,
    kills: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flips = judge_kind(tmp_path, kind, task_images, each=each, kills=kills)
    with capsys.disabled():
        print(
            f"\n{kind}: {kills} kills, {2 * each} of {2 * each} judged once, all as at the time; "
            f"then {flips} changed as planted"
        )


def judge_kind(cwd: Path, kind: str, images: Images, *, each: int, kills: int) -> int:
    """Judge by the same check, killed, and by one that flips every third; returns the flips."""
    rows = run_kind(cwd, kind, images, each)
    then = at_the_time(cwd)
    assert Counter(then.values()) == {False: each, True: each}
    scores = cwd / "trajectories" / "r" / "scores.jsonl"
    kill_while_judging(cwd, kills, len(then))
    assert not scores.exists()
    judge(cwd)
    assert verdicts_of(cwd) == then
    first = lines(scores)
    assert Counter(line["id"] for line in first) == dict.fromkeys(then, 1)
    flipped = {id_ for id_ in then if number_of(id_, kind) % 3 == 0}
    new = [
        {**row, **(other_check(kind, to_pass=n % 2 == 1) if n % 3 == 0 else {})}
        for n, row in enumerate(rows)
    ]
    # A model that is asked anything would fail.
    for row in new:
        del row["script"]
    write_rows(cwd / "new.jsonl", *new)
    said = judge(cwd, dataset_file="new.jsonl")
    # What was judged by the same check is not judged again.
    second = lines(scores)[len(first) :]
    assert Counter(line["id"] for line in second) == dict.fromkeys(flipped, 1)
    expected = {id_: passed != (id_ in flipped) for id_, passed in then.items()}
    assert verdicts_of(cwd) == expected, said
    compared = run(cwd, "compare", "r", "--json")
    changed = json.loads(compared.stdout)["changed"]
    assert {one["id"] for one in changed} == flipped
    return len(flipped)


def number_of(id_: str, kind: str) -> int:
    """The place of a conversation's row."""
    return int(id_.removeprefix(f"{kind}-").partition("-")[0])


def other_check(kind: str, *, to_pass: bool) -> dict[str, Any]:
    """Columns of a check with the other verdict: for broken code, or for correct code."""
    if kind == "r2e-gym":  # correct code fails it, and broken code passes it
        return {"expected_output_json": json.dumps({"test_add": "FAILED", "test_mul": "PASSED"})}
    return {"FAIL_TO_PASS": [MUL if to_pass else MISSING], "PASS_TO_PASS": []}


@pytest.mark.slow
def test_containers_are_judged_as_they_were_left(tmp_path: Path, task_images: Images) -> None:
    """Checks in the same place see what the diff of a repository does not have."""
    tasks = tmp_path / "tasks"
    test = "#!/bin/sh\n[ -e /opt/made ] && [ ! -e /testbed/pkg/__init__.py ] && r=1 || r=0\n"
    harbor_task(tasks, "made", test=f"{test}echo $r > /logs/verifier/reward.txt\n")
    script = script_of("mkdir -p /opt; echo 1 > /opt/made", "rm pkg/__init__.py")
    (tmp_path / "script.yaml").write_text(json.dumps(script))
    given = {
        **IN_IMAGES,
        "dataset_file": "tasks",
        "rows": "harbor",
        "images": task_images.directory,
        "script_file": "script.yaml",
    }
    done = run(tmp_path, **given, keep_workspaces=10)
    assert done.returncode == 0, done.stderr
    assert at_the_time(tmp_path) == {"made": True}
    judge(tmp_path)
    assert verdicts_of(tmp_path) == {"made": True}
    done = run(tmp_path, **{**given, "run_name": "other"})
    assert done.returncode == 0, done.stderr
    assert "1  its check runs in the container as it was" in judge(tmp_path, "other", code=1)


@pytest.mark.slow
def test_conversations_of_agents_are_judged(tmp_path: Path) -> None:
    rows = [
        {"id": name, "prompt": prompt(name, 2), "check": "test -f a1", "files": {"a1": ""}}
        for name in ("a", "b")
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    with AgentEndpoint() as endpoint:
        given = options(endpoint, scripted_agent(), keep_workspaces=1)
        done = run(tmp_path, "--row_setup", **given)
        assert done.returncode == 0, done.stderr
        calls = len(endpoint.exchanges)
        judge(tmp_path)
        write_rows(tmp_path / "new.jsonl", *({**row, "check": "test ! -e a1"} for row in rows))
        assert "2  passed -> not passed" in judge(tmp_path, dataset_file="new.jsonl")
        assert len(endpoint.exchanges) == calls
    assert verdicts_of(tmp_path) == {"a": False, "b": False}


def plain_run(cwd: Path, **more: Any) -> None:
    rows = [
        {
            "id": f"p{n}",
            "prompt": f"Work {n}",
            "check": "test -f made",
            "script": script_of("touch made" if n else f"head -c {3 << 20} /dev/zero > large"),
        }
        for n in range(3)
    ]
    write_rows(cwd / "p.jsonl", *rows)
    done = run(cwd, "--row_setup", **{**PLAIN, **more})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_not_judged_is_named(tmp_path: Path) -> None:
    plain_run(tmp_path, keep_workspaces=1)
    write_rows(tmp_path / "new.jsonl", {"id": "p1", "prompt": "Work 1", "check": "false"})
    said = judge(tmp_path, code=1)
    assert "(its files have more than 1 MB): p0" in said
    assert verdicts_of(tmp_path) == {"p1": True, "p2": True}
    said = judge(tmp_path, dataset_file="new.jsonl", code=1)
    assert "2  the dataset has no row for it: p" in said
    assert "1  passed -> not passed" in said
    (kept,) = (tmp_path / "trajectories" / "r" / "kept_workspaces").iterdir()
    kept.unlink()
    write_rows(tmp_path / "new.jsonl", {"id": "p1", "prompt": "Work 1", "check": "test 1"})
    said = judge(tmp_path, dataset_file="new.jsonl", code=1)
    assert "not rebuilt" in said
    assert "its kept workspace cannot be read" in said
    assert verdicts_of(tmp_path)["p1"] is False, "the last verdict stays"
    assert "no such run" in judge(tmp_path, "another", code=2)
    with hold_lock(tmp_path / "trajectories" / "r"):
        assert "another process is working on this run" in judge(tmp_path, code=5)


@pytest.mark.slow
def test_an_interrupted_check_resumes_and_two_cannot_mix(tmp_path: Path) -> None:
    plain_run(tmp_path, keep_workspaces=9, grace_s=1)
    rows = [{"id": f"p{n}", "prompt": "w", "check": "true"} for n in range(3)]
    write_rows(tmp_path / "new.jsonl", {**rows[0], "check": "sleep 600"}, *rows[1:])
    args = ("check", "r", "--dataset_file=new.jsonl")
    checks = tmp_path / "trajectories" / "r" / "checks"
    with started(tmp_path, *args) as process:
        wait_until(
            lambda: any(
                path.read_bytes().count(b"\n") == 2
                for path in checks.glob("*/judging/records.jsonl")
            )
        )
        assert run(tmp_path, *args).returncode == 5
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130
    assert not (tmp_path / "trajectories" / "r" / "scores.jsonl").exists()
    write_rows(tmp_path / "new.jsonl", *rows)
    judge(tmp_path, dataset_file="new.jsonl")
    assert verdicts_of(tmp_path) == dict.fromkeys(("p0", "p1", "p2"), True)


@pytest.mark.slow
def test_a_full_disk_stops_it_and_loses_no_verdict(tmp_path: Path) -> None:
    plain_run(tmp_path, keep_workspaces=9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        full = run(tmp_path, "check", "r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.returncode == 4, full.stdout + full.stderr
    assert not (tmp_path / "trajectories" / "r" / "scores.jsonl").exists()
    judge(tmp_path)
    assert verdicts_of(tmp_path) == at_the_time(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("commit", COMMITS)
def test_runs_of_earlier_commits_name_what_they_lack(tmp_path: Path, commit: str) -> None:
    shutil.copytree(ROOT / "tests" / "stored_runs" / commit, tmp_path / "trajectories")
    said = judge(tmp_path, "finished", code=1)
    assert "neither a diff nor its workspace was kept" in said
