"""Runs of earlier commits resume, verify and export with this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.config.fingerprint import data_options, fill_defaults
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import lines, run
from tests.stored_runs.make import (
    CONVERSATIONS,
    FAILED,
    FINISHED,
    INPUTS,
    KILLED,
    REPLIES,
    TURNS,
)

HERE = Path(__file__).parent
COMMITS = ("cc79584", "837301e")
FORMATS = "hermes,openai,llamafactory,atif,rl,raw,predictions,dpo,kto"


@pytest.fixture(params=COMMITS)
def stored(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


@pytest.fixture
def cwd(stored: Path, tmp_path: Path) -> Path:
    """A directory with copies of the runs of one commit."""
    shutil.copytree(stored, tmp_path / "trajectories")
    for name in INPUTS:
        shutil.copy(HERE / name, tmp_path)
    for name in ("finished", "killed", "failed"):
        file = tmp_path / "trajectories" / name / "run.json"
        identity = json.loads(file.read_text())
        identity["dataset"]["path"] = str(tmp_path / f"{name}.jsonl")  # moved with the run
        identity.pop("crc32", None)
        file.write_text(json.dumps(identity))
    return tmp_path


def assert_verifies(cwd: Path, name: str) -> None:
    checked = run(cwd, "verify", name)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_complete_run_starts_again_and_its_training_file_is_the_same(
    cwd: Path, stored: Path
) -> None:
    (cwd / "trajectories" / "finished.jsonl").unlink()
    again = run(cwd, *FINISHED)
    assert again.returncode == 1, again.stderr  # of one failed row, as at its own commit
    for name in ("finished.jsonl", "finished/exports/partial.jsonl", "finished/records.jsonl"):
        assert (cwd / "trajectories" / name).read_bytes() == (stored / name).read_bytes()
    assert_verifies(cwd, "finished")


@pytest.mark.parametrize("name", ["finished", "failed"])
def test_a_run_verifies_as_it_was_left(cwd: Path, name: str) -> None:
    """Its totals have the meaning that they had."""
    assert_verifies(cwd, name)


def test_what_the_totals_of_a_run_always_meant_is_compared(cwd: Path) -> None:
    summary = cwd / "trajectories" / "failed" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"tool_calls": 5}))
    checked = run(cwd, "verify", "failed")
    assert checked.returncode == 6
    assert "summary.json: it has tool_calls 5, the records give 4\n" in checked.stdout


def test_failed_attempts_continue(cwd: Path) -> None:
    with FakeEndpoint(latency_s=0.0, turns=TURNS, tool="list_files") as endpoint:
        done = run(cwd, *FAILED, f"--base_url={endpoint.openai_url}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert endpoint.journal()["requests"] == 2
    assert_verifies(cwd, "failed")


RECIPES = {
    "whole": {"formats": FORMATS, "filters": {"status": "any"}},
    "turns": {"formats": "openai,llamafactory", "per_turn": True},
}


@pytest.mark.parametrize("name", RECIPES)
def test_rows_keep_their_bytes(cwd: Path, stored: Path, name: str) -> None:
    """As commit 4676de56 made them of the same records."""
    run_dir = StoredRun(cwd / "trajectories" / "finished")
    source = Source(run_dir.path, run_dir.scan, run_dir.config.num_samples)
    manifest = export_dataset(source, Recipe.model_validate(RECIPES[name]), cwd / "out")
    files = [file for part in manifest["formats"] for file in part["files"]]
    found = {file["path"]: file["sha256"] for file in [*files, manifest["rejects"]]}
    assert found == json.loads((HERE / "exports.json").read_text())[stored.name][name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("status", "finished"),
        ("stats", "finished"),
        ("report", "finished"),
        ("show", "finished", "answer"),
        ("export", "finished", "--format=openai,raw"),
        (
            "fork",
            "finished",
            "--run_name=branches",
            "--at_turn=1",
            "--n=2",
            "--not_passed",
            "--trust_run",
        ),
        ("merge", "finished", "--into=merged"),
    ],
    ids=lambda args: args[0],
)
def test_commands_read_it(cwd: Path, args: tuple[str, ...]) -> None:
    done = run(cwd, *args)
    assert done.returncode == 0, done.stdout + done.stderr


def test_any_option_may_be_missing(tmp_path: Path) -> None:
    """As in the run.json of a version that did not have it."""
    agent = {"name": "counter", "description": "Counts."}
    user = {"system_prompt": "A user."}
    options = {
        "dataset_file": tmp_path / "p.jsonl",
        "run_name": "r",
        "model": "scripted",
        "subagents": [agent],
        "mcp": {"raw": {"command": "serve"}},
        "simulated_user": user,
    }
    config = RunConfig.model_validate(options)
    meaning = json.loads(json.dumps(data_options(config)))
    given = {"model": "scripted", "subagents": [agent], "simulated_user": user}
    given["mcp"] = meaning["mcp"]
    assert fill_defaults(given) == fill_defaults(meaning)
    given["subagents"] = [{**agent, "max_turns": 3}]
    assert fill_defaults(given) != fill_defaults(meaning)


def test_runs_of_two_commits_have_the_same_options(tmp_path: Path) -> None:
    for commit in COMMITS:
        shutil.copytree(HERE / commit / "finished", tmp_path / commit)
    compared = run(tmp_path, "compare", *COMMITS, "--json", output_dir=".")
    assert compared.returncode == 0, compared.stderr
    assert '"options": {}' in compared.stdout


def test_a_killed_run_asks_only_for_the_replies_that_it_does_not_have(cwd: Path) -> None:
    with FakeEndpoint(latency_s=0.0, turns=TURNS, tool="write_file") as endpoint:
        done = run(cwd, *KILLED, f"--base_url={endpoint.openai_url}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "their recorded calls may run again on this machine" in done.stderr, "not marked"
        assert endpoint.journal()["requests"] == CONVERSATIONS * TURNS - REPLIES
    records = lines(cwd / "trajectories" / "killed" / "records.jsonl")
    assert [len(record["turns"]) for record in records] == [TURNS] * CONVERSATIONS
    assert_verifies(cwd, "killed")
