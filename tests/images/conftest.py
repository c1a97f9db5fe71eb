"""Images that all tests of a session share, whichever of its processes makes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_images import layer_of_tree, make_repository, tree_of_programs, write_layout
from toolsets.sandbox.factory import sandbox_problem

CALC = {"pkg/__init__.py": "", "pkg/calc.py": "def add(a, b):\n    return a - b\n"}
SUM = {"sum.sh": "echo $(($1 - $2))\n"}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of images.

    `python` has a Python project in /testbed, `shell` a project without Python in /app, `agent` a
    Python project of the user `agent` in /home/agent/work, and `bare` neither shell nor Python.
    """
    if problem := sandbox_problem("bwrap"):
        pytest.skip(problem)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    directory = shared / "images"
    with (shared / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _make(shared / "making")
            (shared / "making").rename(directory)
    return directory


def _make(directory: Path) -> None:
    trees = directory.with_name("trees")
    python, shell, bare = (trees / name for name in ("python", "shell", "bare"))
    for tree in (python, shell, bare):
        tree.mkdir(parents=True)
    tree_of_programs(python)
    tree_of_programs(shell, with_python=False)
    tree_of_programs(bare, with_python=False, with_git=False, with_shell=False)
    directory.mkdir()
    programs = layer_of_tree(python)
    for name, place, files, config in (
        ("python", "testbed", CALC, {"Env": ["PATH=/usr/bin:/bin", "GREETING=hi"]}),
        ("agent", "home/agent/work", CALC, {"User": "agent"}),
        ("shell", "app", SUM, {}),
    ):
        project = trees / f"{name}-project"
        make_repository(project / place, files)
        lower = layer_of_tree(shell) if name == "shell" else programs
        layers = [lower, layer_of_tree(project, owner=1234 if name == "agent" else 0)]
        write_layout(
            directory / name, layers, name="1", config={"WorkingDir": f"/{place}", **config}
        )
    write_layout(directory / "bare", [layer_of_tree(bare)], name="1")


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def engine(images: Path) -> Iterator[None]:
    """A Podman that has the images, and whose storage is named by variables only."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("podman and runc are not installed")
    monkeypatch = pytest.MonkeyPatch()
    # In a short directory: Podman cleans up after no container whose run root is longer than 50.
    place = Path(tempfile.mkdtemp(prefix="bt-podman-"))
    (place / "containers.conf").write_text(
        '[containers]\ndefault_ulimits=["nofile=4096:4096", "nproc=4096:4096"]\n'
        '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
        # Its own, or the reset at the end takes the locks of every other Podman of this machine.
        f'lock_type="file"\ntmp_dir="{place}/tmp"\n'
    )
    (place / "storage.conf").write_text(
        f'[storage]\ndriver="overlay"\ngraphroot="{place}/graph"\nrunroot="{place}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(place / "storage.conf"))
    tried = subprocess.run(["podman", "info"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        shutil.rmtree(place)
        pytest.skip(f"podman does not work here: {tried.stderr.strip()[-200:]}")
    for name in ("python", "agent", "shell"):
        made = podman("pull", "--quiet", f"oci:{images / name}:1")
        podman("tag", made.split()[-1], f"localhost/{name}:1")
    yield
    subprocess.run(["podman", "system", "reset", "--force"], capture_output=True, check=False)
    shutil.rmtree(place, ignore_errors=True)
    monkeypatch.undo()
