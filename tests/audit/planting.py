"""Rows whose verdict is known: sound ones, and ones with a defect that was planted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.audit.audited import samples_per_row
from tests.dataset.test_harbor import write_task
from tests.helpers.running import command, kill_session, lines, started, wait_until

TEST = "import sys\nsys.path.insert(0, '.')\nfrom calc import add\nassert add(2, 2) == 4\n"
BROKEN = {"calc.py": "def add(a, b):\n    return a - b\n"}
FIXED = {"calc.py": "def add(a, b):\n    return a + b\n"}
SKIPPED = """\
import unittest
class Tests(unittest.TestCase):
    @unittest.skip("not here")
    def test_add(self): pass
"""
COIN = "python3 -I -S -c 'import os; raise SystemExit(os.urandom(1)[0] & 1)'"
"""A check that knows nothing of the work."""

OLD_TEXT = """\
def mul(first, second):
    return first * second


def add(first, second):
    return first - second
"""
FIXED_TEXT = OLD_TEXT.replace("first - second", "first + second")
R2E_TEST = """\
import pytest
from pkg.calc import add, mul

def test_add():
    assert add(2, 2) == 4

def test_mul():
    assert mul(2, 3) == 6

@pytest.mark.skip
def test_later():
    assert add(0, 0)
"""
SMITH_TESTS = R2E_TEST
ADD, MUL = "tests/test_calc.py::test_add", "tests/test_calc.py::test_mul"

OPTIONS: dict[str, Any] = {"dataset_file": "p.jsonl", "run_name": "audit", "num_workers": 2}


class Images(NamedTuple):
    """A directory of images, and the commits of their repository."""

    directory: Path
    base: str
    fix: str


def diff(path: str, old: str, new: str) -> str:
    """A diff that replaces all lines of a file; `old` is "" for a new file."""
    before, after = old.splitlines(), new.splitlines()
    head = f"diff --git a/{path} b/{path}\n"
    head += f"--- a/{path}\n" if before else "new file mode 100644\n--- /dev/null\n"
    head += f"+++ b/{path}\n@@ -{1 if before else 0},{len(before)} +1,{len(after)} @@\n"
    return head + "".join(f"-{line}\n" for line in before) + "".join(f"+{x}\n" for x in after)


def replacing(old: str, new: str) -> str:
    """A diff of pkg/calc.py as git makes it: `old` becomes `new` in its last line."""
    return (
        "diff --git a/pkg/calc.py b/pkg/calc.py\n--- a/pkg/calc.py\n+++ b/pkg/calc.py\n"
        "@@ -3,4 +3,4 @@ def mul(first, second):\n \n \n def add(first, second):\n"
        f"-    return first {old} second\n+    return first {new} second\n"
    )


FIX, WRONG, BUG = replacing("-", "+"), replacing("-", "/"), replacing("+", "-")


def bringing(content: str) -> str:
    """The patch of a row that brings its tests."""
    return diff("tests/test_calc.py", "", content)


def plain_row(id_: str, **changes: Any) -> dict[str, Any]:
    """A sound row without an image, with changes; None removes a column."""
    check = {"command": "python3 -I -S check/t.py", "files": {"check/t.py": TEST}}
    row: dict[str, Any] = {"id": id_, "prompt": f"Repair add ({id_}).", "files": BROKEN}
    row |= {"check": check, "solution": FIXED, **changes}
    return {name: value for name, value in row.items() if value is not None}


def swe_row(kind: str, id_: str, images: Images, **changes: Any) -> dict[str, Any]:
    """A sound row of a kind of `--rows`, with changes; None removes a column."""
    row: dict[str, Any] = {
        "instance_id": id_,
        "repo": "o/r",
        "problem_statement": f"add is wrong ({id_})",
        "FAIL_TO_PASS": [ADD],
        "PASS_TO_PASS": [MUL],
    }
    if kind == "swe-smith":
        row |= {"image_name": "smith:1", "patch": BUG}
    elif kind == "r2e-gym":
        change = {"header": {"file": {"path": "pkg/calc.py"}}, "new_file_content": FIXED_TEXT}
        outcomes = {"test_add": "PASSED", "test_mul": "PASSED"}
        row |= {
            "docker_image": "r2e:1",
            "repo_name": id_,
            "commit_hash": images.fix,
            "problem_statement": f"[ISSUE]\nadd is wrong ({id_})\n[/ISSUE]",
            "parsed_commit_content": json.dumps({"file_diffs": [change]}),
            "expected_output_json": json.dumps(outcomes),
        }
    else:
        row |= {
            "image_name": "calc:1",
            "base_commit": images.base,
            "patch": FIX,
            "test_patch": bringing(R2E_TEST),
        }
    if kind == "swe-rebench":
        command_ = "pytest -rA tests/test_calc.py"
        row["install_config"] = {"test_cmd": command_, "log_parser": "parse_log_pytest"}
    row |= changes
    return {name: value for name, value in row.items() if value is not None}


ANSWERED = """\
#!/bin/sh
read -r found < answer.txt
[ "$found" = 42 ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
BY_PYTEST = """\
#!/bin/sh
pytest -p no:cacheprovider /tests/test_calc.py && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
SOLVE = "#!/bin/sh\necho 42 > answer.txt\n"


def harbor_task(
    directory: Path,
    id_: str,
    *,
    image: str = "calc:1",
    test: str = ANSWERED,
    solve: str | None = SOLVE,
    more: str = "",
    **files: str,
) -> None:
    """Write a task directory; a sound one without changes."""
    task = f'[environment]\ndocker_image = "{image}"\nworkdir = "/testbed"\n{more}'
    if solve is not None:
        files["solution/solve.sh"] = solve
    write_task(directory / id_, task, **{"tests/test.sh": test, **files})


def audit(cwd: Path, *args: object, **options: Any) -> tuple[int, str]:
    """Run `check_tasks`, however long it takes; its exit code and what it printed."""
    given = command("check_tasks", *args, **{**OPTIONS, **options})
    done = subprocess.run(given, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def audit_with_kills(cwd: Path, kills: int, **options: Any) -> tuple[int, str]:
    """Run an audit of `count` rows to its end, and kill its group of processes before so often.

    Asserts that each step has one record, and that records of before a kill are as they were.
    """
    count = options.pop("count")
    given = {**OPTIONS, **options}
    directory = cwd / "trajectories" / given["run_name"]
    records = directory / "records.jsonl"
    finished = b""

    def has_grown() -> bool:
        return records.exists() and len(records.read_bytes()) > len(finished)

    for _ in range(kills):
        with started(cwd, "check_tasks", **given) as process:
            wait_until(lambda running=process: has_grown() or running.poll() is not None)
            assert process.poll() is None, "it ended before it was killed"
            kill_session(process.pid)
        now = records.read_bytes()
        assert now.startswith(finished)
        finished = now[: now.rfind(b"\n") + 1]
    code, said = audit(cwd, **options)
    assert not kills or records.read_bytes().startswith(finished), said
    steps = [(line["prompt_id"], line["sample"]) for line in lines(records)]
    assert len(steps) == len({*steps}) == count * samples_per_row(options.get("repeats", 3)), said
    assert not [*(directory / "workspaces").iterdir()]
    return code, said


def found(cwd: Path, name: str = "audit") -> dict[str, dict[str, Any]]:
    """The lines of tasks.jsonl by id."""
    path = cwd / "trajectories" / name / "tasks.jsonl"
    return {line["id"]: line for line in lines(path)}


def verdicts(cwd: Path, name: str = "audit") -> dict[str, str]:
    """The verdict of each row."""
    return {id_: line["verdict"] for id_, line in found(cwd, name).items()}
