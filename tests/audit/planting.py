"""Rows whose verdict is known: sound ones, and ones with a defect that was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.running import command, lines, run

TEST = "import sys\nsys.path.insert(0, '.')\nfrom calc import add\nassert add(2, 2) == 4\n"
BROKEN = {"calc.py": "def add(a, b):\n    return a - b\n"}
FIXED = {"calc.py": "def add(a, b):\n    return a + b\n"}
SKIPPED = """\
import unittest
class Tests(unittest.TestCase):
    @unittest.skip("not here")
    def test_add(self): pass
"""

OPTIONS: dict[str, Any] = {"dataset_file": "p.jsonl", "run_name": "audit", "num_workers": 2}


def plain_row(id_: str, **changes: Any) -> dict[str, Any]:
    """A sound row without an image, with changes; None removes a column."""
    check = {"command": "python3 -I -S check/t.py", "files": {"check/t.py": TEST}}
    row: dict[str, Any] = {"id": id_, "prompt": f"Repair add ({id_}).", "files": BROKEN}
    row |= {"check": check, "solution": FIXED, **changes}
    return {name: value for name, value in row.items() if value is not None}


def audit(cwd: Path, *args: object, **options: Any) -> tuple[int, str]:
    """Run `check_tasks`; its exit code and what it printed."""
    done = run(cwd, "check_tasks", *args, **{**OPTIONS, **options})
    return done.returncode, done.stdout + done.stderr


def audit_command(**options: Any) -> list[str]:
    """The command line of an audit."""
    return command("check_tasks", **{**OPTIONS, **options})


def found(cwd: Path, name: str = "audit") -> dict[str, dict[str, Any]]:
    """The lines of tasks.jsonl by id."""
    path = cwd / "trajectories" / name / "tasks.jsonl"
    return {line["id"]: line for line in lines(path)}


def verdicts(cwd: Path, name: str = "audit") -> dict[str, str]:
    """The verdict of each row."""
    return {id_: line["verdict"] for id_, line in found(cwd, name).items()}
