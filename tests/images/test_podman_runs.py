"""Runs whose rows name images, in containers of a real Podman with a storage of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.images.test_image_runs import FIXED, INTERRUPTED, OPTIONS, kill, row, terminal, worked_on
from tests.images.test_image_runs import records as records_of
from tests.images.test_task_runs import forty_tasks
from tests.running import lines, run, started, wait_until, write_rows
from toolsets.sandbox.docker import engine_warning, run_label

pytestmark = pytest.mark.long

PODMAN = {**OPTIONS, "sandbox": "docker", "container_engine": "podman"}


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def engine(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Podman that has the images, and whose storage is named by variables only."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("podman and runc are not installed")
    place = tmp_path_factory.mktemp("podman")
    monkeypatch = pytest.MonkeyPatch()
    (place / "containers.conf").write_text(
        '[containers]\ndefault_ulimits=["nofile=4096:4096", "nproc=4096:4096"]\n'
        '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
    )
    (place / "storage.conf").write_text(
        f'[storage]\ndriver="overlay"\ngraphroot="{place}/graph"\nrunroot="{place}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(place / "storage.conf"))
    tried = subprocess.run(["podman", "info"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"podman does not work here: {tried.stderr.strip()[-200:]}")
    for name in ("python", "agent", "shell"):
        made = podman("pull", "--quiet", f"oci:{images / name}:1")
        podman("tag", made.split()[-1], f"localhost/{name}:1")
    yield
    subprocess.run(["podman", "system", "reset", "--force"], capture_output=True, check=False)
    monkeypatch.undo()


def assert_nothing_is_left(cwd: Path) -> None:
    assert podman("ps", "--all", "--quiet") == ""
    assert not [name for name in podman("images", "--format", "{{.Repository}}").split()
                if "bt-" in name]  # fmt: skip
    assert list((cwd / "trajectories/r/workspaces").iterdir()) == []


@pytest.mark.usefixtures("engine")
def test_rows_are_worked_on_in_containers(tmp_path: Path) -> None:
    found = worked_on(tmp_path, **PODMAN)
    assert "podman does not have it" in found["lost"]["error"]["message"]
    assert "+    return a + b" in found["by the file tools"]["diff"]["patch"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_check_as_another_user_has_the_same_files(tmp_path: Path) -> None:
    check = {"command": f"python3 -c '{FIXED}' && id -u", "user": "agent", "env": {"A": "b"}}
    turn = terminal("sed -i s/-/+/ pkg/calc.py; echo 1 > /made")
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", turn, check=check))
    done = run(tmp_path, "--row_setup", max_attempts=1, **PODMAN)
    assert done.returncode == 0, done.stderr
    record = records_of(tmp_path)["a"]
    assert record["check"]["passed"], record["check"]
    assert record["check"]["stdout"].split() == ["1234"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_killed_conversation_continues_in_its_container(tmp_path: Path) -> None:
    """And begins again if the container was removed."""
    turns = (terminal("echo kept > /file"), terminal(INTERRUPTED), terminal("cat /file"))
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", *turns), row("b", "python:1", *turns))
    label = run_label(tmp_path / "trajectories/r")
    with started(tmp_path, "--row_setup", **PODMAN) as process:
        wait_until(lambda: _begun(label) == 2, timeout_s=120)
        kill(process)
    (workspace, _) = sorted((tmp_path / "trajectories/r/workspaces").iterdir())
    podman("rm", "--force", f"bt-{label}-{workspace.name}")
    done = run(tmp_path, "--row_setup", **{**PODMAN, "command_timeout_s": 5},
               accept_config_change="command_timeout_s")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = lines(tmp_path / "trajectories/r/records.jsonl")
    assert ["kept" in record["messages"][-2]["content"] for record in found] == [True, True]
    assert sorted("restarts" in record for record in found) == [False, True]
    assert_nothing_is_left(tmp_path)


def _begun(label: str) -> int:
    """How many conversations have reached their second turn."""
    names = podman("ps", "--filter", f"label=batch-trajectories.run={label}", "--format",
                   "{{.Names}}").split()  # fmt: skip
    tests = (
        subprocess.run(["podman", "exec", name, "cat", "/testbed/begun"], capture_output=True)
        for name in names
    )
    return sum(done.returncode == 0 for done in tests)


def test_slow_storage_is_named(
    engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_warning("podman") is None
    slow = tmp_path / "storage.conf"
    slow.write_text(
        f'[storage]\ndriver="vfs"\ngraphroot="{tmp_path}/graph"\nrunroot="{tmp_path}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(slow))
    assert "vfs" in str(engine_warning("podman"))


@pytest.mark.usefixtures("engine")
def test_forty_tasks_are_killed_and_resumed_in_containers(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", *forty_tasks())
    options = {**PODMAN, "num_workers": 2, "batch_size": 4}
    stored = tmp_path / "trajectories/r/records.jsonl"
    with started(tmp_path, "--row_setup", **options) as process:
        wait_until(lambda: stored.exists() and stored.read_bytes().count(b"\n") >= 5, timeout_s=300)
        kill(process)
    with started(tmp_path, "--row_setup", **options) as process:
        assert process.wait(timeout=1200) == 0, (tmp_path / "output.txt").read_text()
    found = records_of(tmp_path)
    rewards = {name: record["check"]["reward"] for name, record in found.items()}
    assert rewards == {f"t{n:02}": float(n % 4 != 0) for n in range(40)}
    assert_nothing_is_left(tmp_path)
