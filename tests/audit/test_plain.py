"""Audits of rows without images."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Literal

import pytest

from batch_trajectories.audit.runner import forge
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from tests.audit.planting import (
    BROKEN,
    COIN,
    FIXED,
    OPTIONS,
    SKIPPED,
    TEST,
    audit,
    audit_with_kills,
    found,
    plain_row,
    verdicts,
)
from tests.helpers.running import command, write_rows
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits, SandboxSettings
from toolsets.sandbox.local import LocalSandbox
from toolsets.workspace.workspace import Workspace

pytestmark = pytest.mark.slow

DEFECTS: dict[str, dict[str, Any]] = {
    "passes_untouched": {"check": "true"},
    "reference_fails": {"solution": {"calc.py": "pass\n"}},
    "no_reference": {"solution": None},
    "setup_fails": {"setup": "exit 3"},
    "too_slow": {"check": {"command": "sleep 60", "timeout_s": 0.5}},
    "flaky": {"check": COIN},
    "all_skipped": {
        "check": {"command": "python3 -m unittest check/t_x.py", "files": {"check/t_x.py": SKIPPED}}
    },
    "leaks_fix": {"prompt": "It must read\ndef add(a, b):\n    return a + b\n"},
    "no_check": {"check": None},
}


def test_each_defect_of_a_row_is_named(tmp_path: Path) -> None:
    rows = [plain_row(defect, **changes) for defect, changes in DEFECTS.items()]
    by_command = {"solution": None, "solution_command": "sed -i 's/a - b/a + b/' calc.py"}
    rows += [plain_row("sound"), plain_row("by_command", **by_command)]
    rows.append(plain_row("no_patch", reference={"patch": 5}))
    write_rows(tmp_path / "p.jsonl", *rows)
    code, said = audit(tmp_path, repeats=8)
    assert code == 1, said
    sound = {"sound": "sound", "by_command": "sound"}
    others = {**sound, "no_patch": "reference_fails"}
    assert verdicts(tmp_path) == {defect: defect for defect in DEFECTS} | others
    assert "sound                     2  use them" in said
    unusable = found(tmp_path)["no_patch"]
    assert unusable["why"] == (
        "the solution cannot be applied: `reference`: patch and command must be text"
    )
    failing = found(tmp_path)["reference_fails"]
    assert "exit code 1: ImportError: cannot import name 'add'" in failing["why"]
    check = failing["steps"][1]["check"]
    assert (check["passed"], check["exit_code"]) == (False, 1)


def _archive(mode: Literal["w:gz", "w:xz"], content: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        member = tarfile.TarInfo("pkg/calc.py")
        member.size = len(content.encode())
        tar.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


@pytest.mark.parametrize("whitespace", ["fix", "error"])
def test_a_patch_is_applied_as_it_is_whatever_git_is_told(tmp_path: Path, whitespace: str) -> None:
    patch = "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x  \n"
    told = f"git init -q . && git config apply.whitespace {whitespace}"
    row = plain_row("a", setup=told, solution=None, reference={"patch": patch})
    write_rows(tmp_path / "p.jsonl", row | {"check": "grep -q 'x  $' new"})
    code, said = audit(tmp_path)
    assert verdicts(tmp_path) == {"a": "sound"}, (code, said)


def test_the_solution_is_found_in_archives_and_diffs(tmp_path: Path) -> None:
    fixed = FIXED["calc.py"]
    whole = _archive("w:xz", fixed)
    patch = "@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    brought: dict[str, bytes] = {
        "a.tar.gz": _archive("w:gz", fixed),
        "a.tar.xz": whole,
        "fix.diff": patch.encode(),
        "cut.tar.xz": whole[:40],
        "damaged.tar.gz": _archive("w:gz", fixed)[:30] + b"damaged",
        "no.whl": b"PK\x03\x04 no archive",
        "before.diff": patch.replace("return a + b", "return b + a").encode(),
    }
    rows = [
        plain_row(name, files={**BROKEN, name: {"base64": base64.b64encode(content).decode()}})
        for name, content in brought.items()
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    code, said = audit(tmp_path, repeats=1)
    assert code == 1, said
    leaking = ("a.tar.gz", "a.tar.xz", "fix.diff")
    found_ = verdicts(tmp_path)
    assert found_ == {name: "leaks_fix" if name in leaking else "sound" for name in brought}
    assert found(tmp_path)["a.tar.xz"]["why"] == "a.tar.xz: pkg/calc.py has the solution"


VENV = 'mkdir -p .venv/bin && ln -s "$(command -v python3)" .venv/bin/python'
ACTIVATE = f"{VENV} && echo 'PATH=$PWD/.venv/bin:$PATH' >.venv/bin/activate"
CHECK = {"files": {"check/t.py": TEST}}

NPM = """\
import json, subprocess, sys
scripts = json.load(open("package.json"))["scripts"]
sys.exit(subprocess.run(["sh", "-c", scripts["test"]]).returncode)
"""
"""What `npm test` does."""

FROM_THE_WORKSPACE: dict[str, dict[str, Any]] = {
    "its Python": {
        "setup": VENV,
        "check": {"command": ".venv/bin/python -I -S check/t.py", **CHECK},
    },
    "its Python by the PATH": {
        "setup": VENV,
        "check": {"command": "PATH=$PWD/.venv/bin:$PATH; python -I -S check/t.py", **CHECK},
    },
    "what it activates": {
        "setup": ACTIVATE,
        "check": {"command": ". .venv/bin/activate && python3 -I -S check/t.py", **CHECK},
    },
    "a script": {
        "files": {**BROKEN, "run.sh": "python3 -I -S check/t.py\n"},
        "check": {"command": "sh ./run.sh", **CHECK},
    },
    "a script in Python": {
        "files": {**BROKEN, "tools/run.py": "exec(open('check/t.py').read())"},
        "check": {"command": "python3 tools/run.py", **CHECK},
    },
    "scripts of npm": {
        "files": {
            **BROKEN,
            "package.json": '{"scripts": {"test": "python3 -I -S check/t.py"}}',
        },
        "check": {
            "command": "npm() { python3 -I -S check/npm.py; }; npm test",
            "files": {**CHECK["files"], "check/npm.py": NPM},
        },
    },
    "rules of make": {
        "files": {**BROKEN, "Makefile": "judge:\n\tpython3 -I -S check/t.py\n"},
        "setup": "command -v make",
        "check": {"command": "make judge", **CHECK},
    },
}


def test_what_a_check_runs_from_the_workspace_is_the_models_to_write(tmp_path: Path) -> None:
    """Those rows are sound that bring what they run, or run it from elsewhere."""
    rows = [plain_row(name, **changes) for name, changes in FROM_THE_WORKSPACE.items()]
    brought = {"run.sh": "python3 -I -S check/t.py\n", "check/t.py": TEST}
    rows += [
        plain_row("sound"),
        plain_row("brings its script", check={"command": "sh ./run.sh", "files": brought}),
        plain_row("has a Python that it does not use", setup=VENV),
    ]
    if shutil.which("make") is None:
        rows = [row for row in rows if row["id"] != "rules of make"]
    write_rows(tmp_path / "p.jsonl", *rows)
    code, said = audit(tmp_path, repeats=1)
    assert code == 1, said
    wanted = {row["id"]: "forgeable" for row in rows if row["id"] in FROM_THE_WORKSPACE}
    sound = {row["id"]: "sound" for row in rows if row["id"] not in FROM_THE_WORKSPACE}
    assert verdicts(tmp_path) == wanted | sound, found(tmp_path)


def test_forging_itself_refuses_a_sandbox_without_isolation(tmp_path: Path) -> None:
    async def forge_here() -> None:
        workspace = Workspace(tmp_path / "w")
        sandbox = LocalSandbox.create(workspace, Limits(), SandboxSettings())
        rules = RowRules(with_setup=True)
        # Were it not refused, it would write conftest.py, into the workspace alone.
        await forge(ToolContext(workspace, sandbox), rules.read(plain_row("sound")), "conftest")

    with pytest.raises(SetupFailed, match="does not isolate"):
        asyncio.run(forge_here())
    assert not (tmp_path / "w" / "conftest.py").exists()


def test_a_sound_set_exits_with_zero_and_answers_are_solutions(tmp_path: Path) -> None:
    answer = {"id": "answer", "prompt": "What is six times seven?", "expected": "42"}
    both = {**plain_row("both"), "expected": "done"}
    write_rows(tmp_path / "p.jsonl", both, answer)
    code, said = audit(tmp_path, "--check_expected")
    assert code == 0, said
    assert verdicts(tmp_path) == {"both": "sound", "answer": "sound"}
    # The files of an audit are no training data.
    assert not (tmp_path / "trajectories" / "audit.jsonl").exists()


def test_no_finished_step_is_repeated_after_kills(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", *(plain_row(f"row{n}") for n in range(12)))
    assert audit_with_kills(tmp_path, 3, count=12)[0] == 0
    assert set(verdicts(tmp_path).values()) == {"sound"}


def test_nothing_is_forged_where_the_sandbox_does_not_isolate(tmp_path: Path) -> None:
    """Forged programs would be those of the machine, which only a sandbox of ours protects here."""
    write_rows(tmp_path / "p.jsonl", plain_row("sound"))
    line = command("check_tasks", **OPTIONS, sandbox="local", repeats=1)
    machine = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm"]
    shielded = ["bwrap", *machine, "--bind", str(tmp_path), str(tmp_path), *line]
    done = subprocess.run(shielded, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [one for one in found(tmp_path)["sound"]["steps"] if one["step"] == "tamper"]
    assert len(steps) == 3
    assert all("forged" not in one and "does not isolate" in one["not_tried"] for one in steps)
    assert "forged results are not tried" in done.stderr
