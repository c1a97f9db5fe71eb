"""`merge`: several runs of one config become one, and none of their records is lost or doubled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.engine.run_dir import list_run_names
from batch_trajectories.maintenance.merge import common_config
from batch_trajectories.records.files import add_checksum, read_object
from tests.faults.oracle import check_run, finished_lines, resume_and_judge
from tests.helpers.running import SCRIPTED, ids, run, write_rows

SAY = [{"content": "y"}]


def rows(*numbers: int) -> list[Any]:
    return [{"id": f"p{n}", "prompt": "x", "script": SAY} for n in numbers]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a (p0, p1), b (p2, a failed attempt) and other (p0, of another config)."""
    cwd = tmp_path_factory.mktemp("parts")
    write_rows(cwd / "a.jsonl", *rows(0, 1))
    write_rows(cwd / "b.jsonl", *rows(2), {"id": "bad", "prompt": "x", "script": []})
    write_rows(cwd / "all.jsonl", *rows(2, 1, 0, 3))
    for name in ("a", "b"):
        given = {**SCRIPTED, "run_name": name, "dataset_file": f"{name}.jsonl"}
        run(cwd, **given)
    write_rows(cwd / "other.jsonl", *rows(0))
    run(cwd, **{**SCRIPTED, "run_name": "other", "dataset_file": "other.jsonl"}, max_turns=3)
    return cwd


@pytest.fixture
def cwd(parts: Path, tmp_path: Path) -> Path:
    shutil.copytree(parts, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_runs_of_different_rows_are_merged_into_one_that_can_be_resumed(cwd: Path) -> None:
    merged = run(cwd, "merge", "a", "trajectories/b", into="m", dataset_file="all.jsonl")
    assert merged.returncode == 0, merged.stderr
    assert "2 records of trajectories/a" in merged.stdout
    assert "3 records in trajectories/m" in merged.stdout
    assert ids(cwd / "trajectories" / "m.jsonl") == ["p2", "p1", "p0"], "dataset order"
    failures = (cwd / "trajectories" / "m" / "failures.jsonl").read_text()
    assert failures == (cwd / "trajectories" / "b" / "failures.jsonl").read_text()
    given = {**SCRIPTED, "run_name": "m", "dataset_file": "all.jsonl"}
    resume_and_judge(cwd, given, tasks=4)
    identity = json.loads((cwd / "trajectories" / "m" / "run.json").read_text())
    assert identity["history"][0]["merged"][1] == {"path": "trajectories/b", "records": 1}


def test_scores_come_along(cwd: Path) -> None:
    (cwd / "g.py").write_text("def one(*_): return 1\n")
    for name in ("a", "b"):
        assert run(cwd, "score", name, reward="g:one").returncode == 0
    assert run(cwd, "merge", "a", "b", into="m", dataset_file="all.jsonl").returncode == 0
    assert "0 scores" in run(cwd, "score", "m", reward="g:one").stdout
    assert sorted(ids(cwd / "trajectories" / "m" / "scores.jsonl")) == ["p0", "p1", "p2"]
    shown = run(cwd, "show", "m", "p0").stdout
    assert "\npassed, reward 1\n" in shown
    assert "rewards: one 1" in shown


def test_an_output_directory_that_is_not_there_is_made(cwd: Path) -> None:
    runs = ("trajectories/a", "trajectories/b")
    merged = run(cwd, "merge", *runs, into="m", dataset_file="all.jsonl", output_dir="new/place")
    assert merged.returncode == 0, merged.stderr
    assert ids(cwd / "new" / "place" / "m.jsonl") == ["p2", "p1", "p0"]


@pytest.mark.slow
def test_equal_records_are_taken_once_and_different_ones_refuse_all(cwd: Path) -> None:
    shutil.copytree(cwd / "trajectories" / "a", cwd / "trajectories" / "twin")
    merged = run(cwd, "merge", "a", "twin", into="m")
    assert merged.returncode == 0, merged.stderr
    assert "2 of them were equal in two runs" in merged.stdout
    resume_and_judge(cwd, {**SCRIPTED, "run_name": "m", "dataset_file": "a.jsonl"}, tasks=2)
    records = cwd / "trajectories" / "twin" / "records.jsonl"
    first, *rest = records.read_bytes().splitlines(keepends=True)
    changed = orjson.dumps(read_object(first)).replace(b'"y"', b'"z"', 1)
    records.write_bytes(b"".join([add_checksum(changed), *rest]))
    refused = run(cwd, "merge", "a", "twin", into="n")
    assert refused.returncode == 2
    assert "1 tasks have different records in two runs: p" in refused.stderr
    assert "in trajectories/a and trajectories/twin" in refused.stderr
    assert not [path.name for path in (cwd / "trajectories").iterdir() if path.name[:2] == ".n"]


@pytest.mark.slow
def test_runs_that_cannot_be_merged_are_refused(cwd: Path) -> None:
    refusals: list[tuple[list[str], dict[str, Any], str]] = [
        (["a", "other"], {}, "differs from that of trajectories/a in max_turns"),
        (["a", "b"], {}, "give a dataset with all rows by --dataset_file"),
        (["a", "b"], {"dataset_file": "all.jsonl", "into": "a"}, "it exists already"),
        (["a", "b"], {"dataset_file": "all.jsonl", "into": "../x"}, "must be letters, digits"),
        (["a", "gone"], {}, "no such run. Runs in trajectories: a, b, other. "),
        (["a", "trajectories/a"], {}, "trajectories/a: named twice; name each run once"),
    ]
    before = finished_lines(cwd / "trajectories" / "a" / "records.jsonl")
    for names, more, message in refusals:
        refused = run(cwd, "merge", *names, **{"into": "m", **more})
        assert refused.returncode == 2
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert finished_lines(cwd / "trajectories" / "a" / "records.jsonl") == before


def test_a_damaged_run_is_to_be_repaired_first(cwd: Path) -> None:
    records = cwd / "trajectories" / "a" / "records.jsonl"
    records.write_bytes(b"{" + records.read_bytes()[1:].replace(b"{", b"[", 1))
    refused = run(cwd, "merge", "a", "b", into="m", dataset_file="all.jsonl")
    assert refused.returncode == 2
    assert "trajectories/a/records.jsonl:1: unreadable; first run `verify " in refused.stderr


@pytest.mark.slow
def test_records_at_other_offsets_than_the_index_says_are_found(cwd: Path) -> None:
    """The last one lies where it should, so the index is taken for that of these records."""
    given = [{"id": f"c{n}", "prompt": "x" * n, "script": SAY} for n in (1, 200, 300, 4)]
    write_rows(cwd / "c.jsonl", *given)
    run(cwd, **{**SCRIPTED, "run_name": "c", "dataset_file": "c.jsonl"})
    records = cwd / "trajectories" / "c" / "records.jsonl"
    first, second, third, last = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(second + first + third + last)
    write_rows(cwd / "ac.jsonl", *rows(0, 1), *given)
    line = ["merge", "a", "c", "--into=m", "--dataset_file=ac.jsonl"]
    refused = run(cwd, *line)
    assert refused.returncode == 2
    assert "c/records.idx: does not match records.jsonl; first run `verify" in refused.stderr
    assert run(cwd, "verify", "c", "--repair").returncode == 0
    assert "4 records of trajectories/c" in run(cwd, *line).stdout


def test_conversations_under_way_are_left_behind_only_where_that_is_wanted(cwd: Path) -> None:
    reply = {"kind": "reply", "turn": 1, "message": {"role": "assistant", "content": ""}}
    event = {"task": "p9", "input_digest": "d", "deal": 1, "position": 0, "event": reply}
    segment = cwd / "trajectories" / "a" / "inflight" / "worker-0-0.jsonl"
    segment.write_bytes(orjson.dumps(event) + b"\n")
    line = ["merge", "a", "b", "--into=m", "--dataset_file=all.jsonl"]
    refused = run(cwd, *line)
    assert refused.returncode == 2
    assert "1 conversation with 1 turn under way" in refused.stderr
    assert run(cwd, *line, "--drop_unfinished").returncode == 0


def test_runs_of_versions_that_name_one_model_otherwise_have_one_config(tmp_path: Path) -> None:
    """A name without a provider was one of OpenRouter."""
    runs = [
        (tmp_path / model, {"meaning": {"model": model}, "config": {"model": "openrouter:a/b"}})
        for model in ("a/b", "openrouter:a/b")
    ]
    config = common_config(
        runs, run_name="m", output_dir=tmp_path, dataset_file=tmp_path / "all.jsonl"
    )
    assert config.model == "openrouter:a/b"


KILLED = """
import os, signal, sys
from pathlib import Path

import batch_runner
from batch_trajectories.maintenance import merge

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def nth(number, function):
    calls = []
    def call(*args, **more):
        calls.append(args)
        return kill() if len(calls) == number else function(*args, **more)
    return call

where, number = sys.argv[1].split("-")
owner, name = {"make": (merge, "_write_run"), "ready": (merge, "replace_json"),
               "move": (Path, "rename"), "sync": (merge, "sync_directory"),
               "remove": (os, "rmdir")}[where]
setattr(owner, name, nth(int(number), getattr(owner, name)))
del sys.argv[1]
batch_runner.cli()
"""
"""Runs the program, which is killed at a call of one of its functions."""


@pytest.mark.parametrize(
    "at",
    [
        "make-1",
        "move-2",
        "remove-1",
        *(pytest.param(at, marks=pytest.mark.slow) for at in ("ready-1", "move-1", "sync-1")),
    ],
)
def test_the_same_command_finishes_a_killed_merge(cwd: Path, at: str) -> None:
    """Until then no command finds a run; the run that is there then is whole."""
    command = ["merge", "a", "b", "--into=m", "--dataset_file=all.jsonl"]
    killed = subprocess.run([sys.executable, "-c", KILLED, at, *command], cwd=cwd, timeout=60)
    assert killed.returncode == -9
    place = cwd / "trajectories"
    assert (place / ".m.merging").exists()
    is_there = at in ("sync-1", "remove-1")
    assert list_run_names(place) == ["a", "b", *(["m"] if is_there else []), "other"]
    assert (place / "m").exists() == is_there
    done = run(cwd, *command)
    assert done.returncode == 0, done.stderr
    assert "3 records in trajectories/m" in done.stdout
    assert ids(place / "m.jsonl") == ["p2", "p1", "p0"]
    assert sorted(path.name for path in place.iterdir() if path.name[:2] in (".m", "m", "m.")) == [
        "m",
        "m.jsonl",
    ]
    assert not check_run(place / "m").found
    refused = run(cwd, *command)
    assert (refused.returncode, "it exists already" in refused.stderr) == (2, True)


def test_a_killed_merge_of_other_runs_is_not_taken_for_this_one(cwd: Path) -> None:
    killed = [sys.executable, "-c", KILLED, "move-2", "merge", "a", "--into=m"]
    assert subprocess.run(killed, cwd=cwd, timeout=60).returncode == -9
    done = run(cwd, "merge", "a", "b", into="m", dataset_file="all.jsonl")
    assert (done.returncode, "it exists already" in done.stderr) == (2, True)
    assert ids(cwd / "trajectories" / "m.jsonl") == ["p0", "p1"]
    assert not (cwd / "trajectories" / ".m.merging").exists()
