"""Started where it cannot run, the program says what to do."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from batch_trajectories.basics.requirements import OLDEST, PACKAGES, requirements_problem
from tests.helpers.running import ROOT

PROGRAMS = ("batch_runner.py", "run_agent.py")
IMPORTED_AS = {"PyYAML": "yaml"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_its_packages_it_says_what_to_do(program: str, tmp_path: Path) -> None:
    # -S leaves out where packages are installed.
    python = Path(sys.executable).resolve()
    done = subprocess.run(
        [python, "-S", ROOT / program, "hello"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: {python} does not have what the program needs (aiohttp, anthropic"
    )
    assert f". In {ROOT}: " in line or f" {ROOT / '.venv'}" in line
    assert f"python {program} ..." in line or f" {ROOT / program} ..." in line


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_docstrings_is_refused(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-OO", ROOT / program, "hello"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {program} cannot run without docstrings")


def test_an_old_python_is_named_with_the_one_that_is_needed() -> None:
    message = requirements_problem("batch_runner.py", (3, 9))
    assert message is not None
    assert message.startswith(
        f"batch_runner.py needs Python 3.11 or newer; {sys.executable} is 3.9"
    )
    assert requirements_problem("batch_runner.py", OLDEST) is None


_PACKAGE = "batch_trajectories"
READ_FIRST = (
    f"{_PACKAGE}/__init__.py",
    f"{_PACKAGE}/basics/__init__.py",
    f"{_PACKAGE}/basics/requirements.py",
)


@pytest.mark.parametrize("module", [*PROGRAMS, *READ_FIRST])
def test_an_old_python_can_read_so_far(module: str) -> None:
    ast.parse((ROOT / module).read_text(), feature_version=(3, 8))


def test_it_asks_for_what_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, OLDEST))
    names = [needed.partition(">")[0] for needed in project["dependencies"]]
    assert list(PACKAGES) == [IMPORTED_AS.get(name, name.replace("-", "_")) for name in names]
