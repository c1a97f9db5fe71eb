"""Which programs of the workspace a check runs, and that a start says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.dataset.check_programs import programs_of_workspace
from tests.helpers.running import SCRIPTED, run, write_rows

FOUND: dict[str, list[str]] = {
    ".venv/bin/python -m pytest": [".venv/bin/python"],
    "cd src && timeout -k 5 60 ../.venv/bin/pytest -q": ["../.venv/bin/pytest"],
    ". .venv/bin/activate; pytest": [".venv/bin/activate"],
    "source venv/bin/activate && pytest": ["venv/bin/activate"],
    "node_modules/.bin/jest --ci": ["node_modules/.bin/jest"],
    "bash ./run_tests.sh": ["./run_tests.sh"],
    "bash -x run_tests.sh": ["run_tests.sh"],
    "python3 tools/judge.py": ["tools/judge.py"],
    "CI=1 npm test": ["package.json"],
    "make -C . check": ["Makefile"],
    "PATH=$PWD/.venv/bin:$PATH python -m pytest": ["$PWD/.venv/bin:$PATH"],
    "PATH=node_modules/.bin:$PATH; jest": ["node_modules/.bin:$PATH"],
    "if ./a; then ./b; fi": ["./a", "./b"],
}

NOT_FOUND = [
    "true",
    "pytest tests/test_a.py",
    "python3 -m pytest tests",
    "python3 -c 'import a.b'",
    "/opt/venv/bin/python -m pytest",
    "PATH=/opt/bin:$PATH pytest",
    "test -f a/b && grep -q x a/b.txt",
    "bash /tests/run.sh",
    "sh -c 'exit 0'",
    "diff out/a.txt expected/a.txt",
    "curl http://127.0.0.1/x",
]


@pytest.mark.parametrize("command", FOUND)
def test_a_command_that_runs_a_program_of_the_workspace(command: str) -> None:
    assert programs_of_workspace(command) == FOUND[command]
    assert programs_of_workspace({"command": command}) == FOUND[command]


@pytest.mark.parametrize("command", NOT_FOUND)
def test_other_commands(command: str) -> None:
    assert programs_of_workspace(command) == []


@pytest.mark.parametrize(
    "check",
    [
        {"command": "sh ./run.sh", "files": {"run.sh": "true"}},
        {"command": "python3 check/t.py", "files": {"./check/t.py": "x"}},
        {"command": "make test", "files": {"GNUmakefile": "test:"}},
        {"command": ".venv/bin/python t.py", "in": "fresh"},
        {"command": "./t", "image": "judge:1"},
        {"command": 5},
        None,
    ],
)
def test_what_a_check_brings_or_has_elsewhere_is_its_own(check: Any) -> None:
    assert programs_of_workspace(check) == []


def test_a_start_says_how_many_rows_have_such_checks(tmp_path: Path) -> None:
    said = "the checks of 2 rows run programs of the workspace"
    checks = ["./a", {"command": ". .venv/bin/activate"}, "true", "./a"]
    rows: list[dict[str, Any]] = [
        {"id": f"p{n}", "prompt": "x", "script": [{"content": "y"}], "check": check}
        for n, check in enumerate(checks)
    ]
    rows[3]["check"] = {"command": "./a", "files": {"a": "#!/bin/sh\n"}}
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", "--dry_run", **SCRIPTED)
    assert said in done.stdout + done.stderr
    assert "check_tasks" in done.stdout + done.stderr
    started = run(tmp_path, "--row_setup", **SCRIPTED)
    assert said in started.stderr
    assert said not in run(tmp_path, "--dry_run", **SCRIPTED).stderr, "nothing is checked"
