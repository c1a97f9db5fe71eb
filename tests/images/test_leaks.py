"""Runs whose model looks for the fix in the history of its repository, in rows of all kinds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.dataset.test_harbor import write_task
from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, make_repository, write_layout
from tests.helpers.running import records_by_id, run, write_rows
from tests.images.conftest import CALC
from tests.images.test_task_runs import (
    IN_IMAGES,
    NAME,
    PYTEST,
    TEST_ADD,
    TEST_PATCH,
    results_of,
    script_of,
)

pytestmark = pytest.mark.slow

LOOK = "git cat-file --batch-all-objects --batch-check='%(objectname)'"
"""What an auditor compares with the ancestors of base_commit."""
CHEAT = "git checkout v2 -- pkg/calc.py || git checkout origin/main -- pkg/calc.py"
GOOD = {name: text.replace("a - b", "a + b") for name, text in CALC.items()}


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, "-C", str(tree), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def leaking(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory of images whose repository has the fix in every place, and base_commit."""
    directory = tmp_path_factory.mktemp("leaking")
    tree = tmp_path_factory.mktemp("tree")
    work = tree / "testbed"
    make_repository(work, CALC)
    base = git(work, "rev-parse", "HEAD")
    (work / "pkg/calc.py").write_text(GOOD["pkg/calc.py"])
    git(work, "commit", "-qam", "fix")
    git(work, "tag", "-a", "v2", "-m", "two")
    git(work, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(work, "gc", "-q")
    (work / "pkg/calc.py").write_text(GOOD["pkg/calc.py"] + "# stashed\n")
    git(work, "stash")
    git(work, "reset", "-q", "--hard", base)
    programs = layer_of_tree(images.with_name("trees") / "python")
    tools = layer_of([Entry("usr/bin/pytest", PYTEST.encode(), mode=0o755)])
    r2e = [
        Entry("r2e_tests/test_1.py", TEST_ADD.encode()),
        Entry("testbed/run_tests.sh", b"pytest -rA r2e_tests/test_1.py\n"),
    ]
    layers = [programs, tools, layer_of_tree(tree)]
    for name, more in (("leaking", []), ("r2e", [layer_of(r2e)])):
        config = {"WorkingDir": "/testbed"}
        write_layout(directory / name, [*layers, *more], name="1", config=config)
    return directory, base


def row_of(kind: str, base: str, **more: Any) -> dict[str, Any]:
    task = {
        "repo": "o/r",
        "base_commit": base,
        "image_name": "leaking:1",
        "problem_statement": "[ISSUE]\nadd is wrong\n[/ISSUE]",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": [NAME],
        "PASS_TO_PASS": [],
    }
    kinds: dict[str, dict[str, Any]] = {
        "swe-bench": {},
        "swe-rebench": {
            "install_config": {
                "test_cmd": "pytest -rA tests/test_calc.py",
                "log_parser": "parse_log_pytest",
            }
        },
        "r2e-gym": {
            "docker_image": "r2e:1",
            "repo_name": "r",
            "commit_hash": "v2",
            "expected_output_json": json.dumps({"test_add": "PASSED"}),
        },
    }
    return {**task, **kinds[kind], **more}


@pytest.mark.parametrize("kind", ["swe-bench", "swe-rebench", "r2e-gym"])
def test_the_fix_is_not_in_the_repository(
    tmp_path: Path, leaking: tuple[Path, str], kind: str
) -> None:
    """A row that keeps its history shows that it would have been found."""
    images, base = leaking
    script = script_of(LOOK, "git log --all --oneline; git status --short", CHEAT)
    write_rows(
        tmp_path / "p.jsonl",
        row_of(kind, base, id="clean", script=script),
        row_of(kind, base, id="kept", script=script, keep_history=True),
    )
    own = (Path("configs/rows") / f"{kind}.yaml").read_text()
    own = own.replace("keep: [", "keep: [script, id, ").replace('  id: "{{repo_name}}', '  name: "')
    (tmp_path / "mine.yaml").write_text(own)
    done = run(tmp_path, **IN_IMAGES, rows="mine.yaml", images=images)
    assert done.returncode == 0, done.stderr
    records = records_by_id(tmp_path)
    assert records["kept"]["check"]["reward"] == 1.0
    assert records["clean"]["check"]["reward"] == 0.0, records["clean"]["check"]
    assert records["clean"]["diff"]["patch"] == ""
    shown, log, cheat = results_of(records["clean"])
    # One commit with its two trees and two files, one of which is empty.
    assert len(shown["stdout"].split()) == 5
    assert base in shown["stdout"]
    assert [line.split(" ", 1)[1] for line in log["stdout"].splitlines() if "??" not in line] == [
        "start"
    ]
    assert "invalid reference: v2" in cheat["stderr"]


def test_tasks_of_other_kinds_have_their_history_removed_where_they_name_a_commit(
    tmp_path: Path, leaking: tuple[Path, str]
) -> None:
    images, base = leaking
    test = f"#!/bin/sh\n{CHEAT}; grep -q 'a + b' pkg/calc.py && r=1 || r=0\n"
    test += "echo $r > /logs/verifier/reward.txt\n"
    for name, more in (("named", f'[metadata]\nbase_commit = "{base}"\n'), ("plain", "")):
        task = f'[environment]\ndocker_image = "leaking:1"\nworkdir = "/testbed"\n{more}'
        write_task(tmp_path / "tasks" / name, task, **{"tests/test.sh": test})
    (tmp_path / "turns.yaml").write_text(json.dumps(script_of("true")))
    options = {**IN_IMAGES, "dataset_file": "tasks", "images": images, "script_file": "turns.yaml"}
    done = run(tmp_path, **options, rows="harbor")
    assert done.returncode == 0, done.stderr
    rewards = {id: record["check"]["reward"] for id, record in records_by_id(tmp_path).items()}
    assert rewards == {"named": 0.0, "plain": 1.0}


def test_history_that_cannot_be_removed_fails_the_setup(
    tmp_path: Path, leaking: tuple[Path, str]
) -> None:
    images, base = leaking
    write_rows(
        tmp_path / "p.jsonl",
        {
            "id": "a",
            "prompt": "Fix it.",
            "image": "leaking:1",
            "base_commit": base,
            "setup": "echo damaged > .git/HEAD",
            "script": script_of("true"),
        },
    )
    done = run(
        tmp_path, "--row_setup", **IN_IMAGES, workspace="image", images=images, max_attempts=1
    )
    assert done.returncode == 1
    error = records_by_id(tmp_path)["a"]["error"]
    assert error["class"] == "setup_failed"
    assert "`base_commit`: the history cannot be removed: git cannot read" in error["message"]
