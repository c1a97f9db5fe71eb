"""Images of tasks, with real git and pytest."""

from __future__ import annotations

import compileall
import io
import shutil
import subprocess
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.audit.planting import FIXED_TEXT, OLD_TEXT, R2E_TEST, SMITH_TESTS, SOLVE, Images
from tests.fakes.fake_images import (
    Entry,
    layer_of,
    layer_of_tree,
    make_repository,
    tree_of_programs,
    write_layout,
)
from tests.images.conftest import images

__all__ = ["images", "task_images"]

_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_RUN_PYTEST = b"#!/usr/bin/python3\nimport sys, pytest\nsys.exit(pytest.main())\n"


def _layer_of_pytest(place: Path) -> bytes:
    """pytest and what it needs, compiled, where the Python of the images looks for packages."""
    inside = Path(sysconfig.get_path("stdlib")) / "site-packages"
    for name in _PACKAGES:
        for file in metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = place / str(inside).lstrip("/") / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), target)
    compileall.compile_dir(str(place), stripdir=str(place), quiet=1)
    # As an editable installation of the project, so that its own start-up files count, too.
    (place / str(inside).lstrip("/") / "project.pth").write_text("/testbed\n")
    program = place / "usr/bin/pytest"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(_RUN_PYTEST)
    program.chmod(0o755)
    return layer_of_tree(place)


def _git(tree: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, "-C", str(tree), *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pkg/calc.py", FIXED_TEXT)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def task_images(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """`calc` has the task's repository with the fix in its history; the others are like it.

    `smith` has the correct code, `r2e` hidden tests; `copy`, `wheel` and `clone` have the fix in
    another file, a package and another repository.
    """
    directory = tmp_path_factory.mktemp("task_images")
    tree_of_programs(python := tmp_path_factory.mktemp("python"), with_caches=True)
    programs = layer_of_tree(python)
    tools = _layer_of_pytest(tmp_path_factory.mktemp("pytest"))
    tree = tmp_path_factory.mktemp("calc")
    work = tree / "testbed"
    make_repository(work, {"pkg/__init__.py": "", "pkg/calc.py": OLD_TEXT})
    base = _git(work, "rev-parse", "HEAD")
    (work / "pkg/calc.py").write_text(FIXED_TEXT)
    _git(work, "commit", "-qam", "fix")
    _git(work, "tag", "v2")
    fix = _git(work, "rev-parse", "HEAD")
    _git(work, "reset", "-q", "--hard", base)
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(clone / "srv.git")], check=True)
    other = tmp_path_factory.mktemp("other")
    (other / "srv").mkdir()
    (clone / "srv.git").rename(other / "srv/calc.git")
    smith = tmp_path_factory.mktemp("smith")
    make_repository(
        smith / "testbed",
        {"pkg/__init__.py": "", "pkg/calc.py": FIXED_TEXT, "tests/test_calc.py": SMITH_TESTS},
    )
    calc = layer_of_tree(tree)
    hidden = layer_of(
        [
            Entry("r2e_tests/test_1.py", R2E_TEST.encode()),
            Entry("testbed/run_tests.sh", b"pytest -rA r2e_tests/test_1.py\n"),
        ]
    )
    more = {
        "calc": [calc],
        "smith": [layer_of_tree(smith)],
        "r2e": [calc, hidden],
        "copy": [calc, layer_of([Entry("opt/old/calc.py", FIXED_TEXT.encode())])],
        "wheel": [calc, layer_of([Entry("root/.cache/pkg.whl", _wheel())])],
        "clone": [calc, layer_of_tree(other)],
        "solution": [calc, layer_of([Entry("solution/solve.sh", SOLVE.encode())])],
    }
    for name, layers in more.items():
        config = {"WorkingDir": "/testbed"}
        write_layout(directory / name, [programs, tools, *layers], name="1", config=config)
    return Images(directory, base, fix)
