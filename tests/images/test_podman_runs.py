"""Runs whose rows name images, in containers of a real Podman with a storage of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import (
    lines,
    records_by_id,
    run,
    session_of,
    started,
    wait_until,
    write_rows,
)
from tests.images.conftest import podman
from tests.images.test_diffs import check_right_fixes, check_special_repositories
from tests.images.test_image_runs import (
    FIXED,
    INTERRUPTED,
    OPTIONS,
    kill,
    row,
    run_fixes,
    run_with_rewards,
    terminal,
)
from tests.images.test_task_runs import forty_tasks, judge_forty_tasks, kill_often, results_of
from toolsets.sandbox.base import ImageSpec, Limits, SandboxSettings
from toolsets.sandbox.containers.docker import (
    EngineImages,
    remove_containers,
    run_label,
)
from toolsets.sandbox.containers.engine import engine_warning
from toolsets.workspace.workspace import Workspace

pytestmark = pytest.mark.long

PODMAN = {**OPTIONS, "sandbox": "docker", "container_engine": "podman"}


def assert_nothing_is_left(cwd: Path) -> None:
    assert podman("ps", "--all", "--quiet") == ""
    assert _processes_of(cwd) == []
    assert not [
        name for name in podman("images", "--format", "{{.Repository}}").split() if "bt-" in name
    ]
    assert list((cwd / "trajectories/r/workspaces").iterdir()) == []


def _processes_of(cwd: Path) -> list[str]:
    """The command lines that name a container of the run."""
    label = f"bt-{run_label(cwd / 'trajectories/r')}"
    collected = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            collected.append(process.read_text(errors="replace"))
    return [line for line in collected if label in line]


@pytest.mark.usefixtures("engine")
def test_rows_are_worked_on_in_containers(tmp_path: Path) -> None:
    found = run_fixes(tmp_path, **PODMAN)
    assert "podman does not have it" in found["lost"]["error"]["message"]
    assert "+    return a + b" in found["by the file tools"]["diff"]["patch"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_reward_functions_read_the_files_in_the_container(tmp_path: Path) -> None:
    run_with_rewards(tmp_path, **PODMAN)
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_check_as_another_user_has_the_same_files(tmp_path: Path) -> None:
    check = {"command": f"python3 -c '{FIXED}' && id -u", "user": "agent", "env": {"A": "b"}}
    turn = terminal("sed -i s/-/+/ pkg/calc.py; echo 1 > /made")
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", turn, check=check))
    done = run(tmp_path, "--row_setup", max_attempts=1, **PODMAN)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert record["check"]["passed"], record["check"]
    assert record["check"]["stdout"].split() == ["1234"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_right_fix_passes_its_fresh_check(tmp_path: Path) -> None:
    check_right_fixes(tmp_path, **PODMAN)
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_right_fix_passes_wherever_the_repository_is_special(tmp_path: Path) -> None:
    check_special_repositories(tmp_path, **PODMAN)
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_only_root_of_an_image_has_capabilities(tmp_path: Path) -> None:
    """Another user cannot change the programs of its verifier, nor read what only root may."""
    tried = "grep Cap /proc/self/status; echo >> /usr/bin/python3 || echo refused"
    fixing = terminal("sed -i s/-/+/ pkg/calc.py")
    written = {"command": "cat /check/right", "files": {"/check/right": "x"}}
    rows = [
        row("root", "python:1", terminal(tried)),
        row("user", "agent:1", terminal(tried), fixing, check=f"python3 -c '{FIXED}'"),
        row("named", "python:1", terminal(tried), user="agent"),
        row("written", "agent:1", terminal("true"), check=written),
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", max_attempts=1, **PODMAN)
    assert done.returncode == 0, done.stderr
    records = records_by_id(tmp_path)
    said = {name: results_of(record)[0]["stdout"] for name, record in records.items()}
    masks = {
        name: {int(line.split()[1], 16) for line in text.splitlines() if line.startswith("Cap")}
        for name, text in said.items()
    }
    assert masks["root"] == {0, 0b11001011}
    assert masks["user"] == masks["named"] == {0}
    assert said["user"].endswith("refused\n")
    assert said["named"].endswith("refused\n")
    assert records["user"]["check"]["passed"], records["user"]["check"]
    assert records["user"]["check"]["in"] == "same"
    assert records["written"]["check"]["stdout"] == "x"
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
    done = run(
        tmp_path,
        "--row_setup",
        **{**PODMAN, "command_timeout_s": 5},
        accept_config_change="command_timeout_s",
    )
    assert done.returncode == 0, done.stderr
    entries: list[dict[str, Any]] = lines(tmp_path / "trajectories/r/records.jsonl")
    assert ["kept" in record["messages"][-2]["content"] for record in entries] == [True, True]
    assert sorted("restarts" in record for record in entries) == [False, True]
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_an_image_that_was_replaced_is_refused_by_name(tmp_path: Path) -> None:
    podman("tag", "localhost/python:1", "localhost/own:1")
    write_rows(tmp_path / "p.jsonl", row("a", "own:1", terminal("true")))
    assert run(tmp_path, **PODMAN).returncode == 0
    digest = "sha256:" + podman("image", "inspect", "--format", "{{.Id}}", "localhost/own:1")
    assert records_by_id(tmp_path)["a"]["image"] == {"reference": "own:1", "digest": digest}
    podman("tag", "localhost/shell:1", "localhost/own:1")
    done = run(tmp_path, **PODMAN)
    assert done.returncode == 2
    assert f"images: the run has {{'own:1': '{digest}'}}" in done.stderr
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("is_of_row", [True, False])
def test_an_image_around_a_directory_that_was_replaced_is_refused_by_name(
    tmp_path: Path, is_of_row: bool
) -> None:
    options = {**PODMAN, "workspace": "directory"}
    if not is_of_row:
        options["docker_image"] = "own:1"
    podman("tag", "localhost/python:1", "localhost/own:1")
    image = {"image": "own:1" if is_of_row else None}
    write_rows(tmp_path / "p.jsonl", row("a", "own:1", terminal("true")) | image)
    done = run(tmp_path, **options)
    assert done.returncode == 0, done.stderr
    digest = "sha256:" + podman("image", "inspect", "--format", "{{.Id}}", "localhost/own:1")
    assert records_by_id(tmp_path)["a"]["image"] == {"reference": "own:1", "digest": digest}
    podman("tag", "localhost/shell:1", "localhost/own:1")
    done = run(tmp_path, **options)
    assert done.returncode == 2
    assert f"images: the run has {{'own:1': '{digest}'}}" in done.stderr
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_later_commits_are_removed_in_containers(tmp_path: Path) -> None:
    """What the set-up adds to the history of the image stands for a fix that came with it."""
    later = (
        "git checkout -qb fix && sed -i s/-/+/ pkg/calc.py && git -c user.name=t -c user.email=t "
    )
    later += "commit -qam fix && git tag v2 && git checkout -q main"
    cheat = terminal("git checkout v2 -- pkg/calc.py; git log --all --format=%s")
    check = {"command": f"python3 -c '{FIXED}'", "in": "fresh"}
    rows = (
        row(name, "python:1", cheat, setup=later, base_commit="main", check=check, **more)
        for name, more in (("clean", {}), ("kept", {"keep_history": True}))
    )
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **PODMAN)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    assert {name: record["check"]["reward"] for name, record in done_records.items()} == {
        "clean": 0.0,
        "kept": 1.0,
    }
    assert "invalid reference: v2" in done_records["clean"]["messages"][2]["content"]
    assert_nothing_is_left(tmp_path)


def _begun(label: str) -> int:
    """How many conversations have reached their second turn."""
    names = podman(
        "ps", "--filter", f"label=batch-trajectories.run={label}", "--format", "{{.Names}}"
    ).split()
    tests = (
        subprocess.run(["podman", "exec", name, "cat", "/testbed/begun"], capture_output=True)
        for name in names
    )
    return sum(done.returncode == 0 for done in tests)


@pytest.mark.usefixtures("engine")
def test_a_container_that_a_kill_has_left_half_made_is_made_again(tmp_path: Path) -> None:
    settings = SandboxSettings(engine="podman")
    images = EngineImages(settings, tmp_path)
    sandbox = images.make(Workspace(tmp_path / "w"), Limits(), ImageSpec("localhost/python:1"))
    name = f"bt-{run_label(tmp_path)}-w"
    create = ["podman", "create", "--name", name, "localhost/python:1", "true"]
    for step in cycle(range(1, 40)):  # until it is known to the storage alone
        creating = subprocess.Popen(create, stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            creating.wait(step / 40)
        creating.kill()
        creating.wait()
        if name in podman("ps", "--all", "--format", "{{.Names}}").split():
            podman("rm", "--force", name)
        elif name in podman("ps", "--all", "--external", "--format", "{{.Names}}").split():
            break
    sandbox.make()
    made = podman("ps", "--all", "--format", "{{.Names}}").split()
    assert made == [name]
    assert podman("inspect", "--format", "{{.Config.StopTimeout}}", name) == "0"
    sandbox.discard()
    assert podman("ps", "--all", "--external", "--quiet") == ""


@pytest.mark.usefixtures("engine")
def test_half_an_image_that_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    """Podman would say so of every list of images, or refuse it; one of another run stays."""
    runs = [tmp_path / name for name in ("own", "other")]
    known = _stored_images()
    for run_dir in runs:
        (run_dir / "workspaces").mkdir(parents=True)
        label = run_label(run_dir)
        name = f"bt-{label}-w"
        labelled = f"batch-trajectories.run={label}"
        podman("create", "--name", name, "--label", labelled, "localhost/python:1", "true")
        half = _half_committed(name)
        podman("rm", "--force", name)
    remove_containers(SandboxSettings(engine="podman"), runs[0])
    assert _stored_images() == {**known, half: 1}
    remove_containers(SandboxSettings(engine="podman"), runs[1])
    assert _stored_images() == known
    podman("images", "--all")


def _half_committed(name: str) -> str:
    """Commit a container, and kill that when the image has its configuration alone."""
    graph = podman("info", "--format", "{{.Store.GraphRoot}}")
    before = _stored_images(graph)
    while True:
        commit = ["podman", "commit", name, f"localhost/{name}:files"]
        committing = subprocess.Popen(commit, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while committing.poll() is None and not _stored_images(graph).keys() - before:
            pass
        committing.kill()
        committing.wait()
        made = {id: parts for id, parts in _stored_images(graph).items() if id not in before}
        for id, parts in made.items():
            if parts == 1:
                return id
            podman("rmi", "--force", id)


def _stored_images(graph: str | None = None) -> dict[str, int]:
    """How many parts each image has in Podman's storage."""
    graph = graph or podman("info", "--format", "{{.Store.GraphRoot}}")
    stored = json.loads((Path(graph) / "overlay-images/images.json").read_text())
    return {image["id"]: len(image.get("big-data-names", ())) for image in stored}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("workspace", ["image", "directory"])
def test_no_container_lives_on_after_a_kill(tmp_path: Path, workspace: str) -> None:
    """Even where the result of a command waited unread for the processes that are killed."""
    turns = [terminal("touch begun; sleep 1; touch ended"), terminal("sleep 1000")]
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", *turns))
    options = {**PODMAN, "workspace": workspace}

    def has(name: str) -> bool:
        [container] = podman("ps", "--quiet").split() or [""]
        at = "/testbed" if workspace == "image" else "/workspace"
        asked = ["podman", "exec", container, "cat", f"{at}/{name}"]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    with started(tmp_path, "--row_setup", **options) as process:
        wait_until(lambda: has("begun"))
        for pid in session_of(process.pid):
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: has("ended"))
        time.sleep(0.5)  # until the result has come as far as it comes
        kill(process)
    wait_until(lambda: podman("ps", "--quiet") == "")
    wait_until(lambda: _processes_of(tmp_path) == [])
    done = run(
        tmp_path,
        "--row_setup",
        **{**options, "command_timeout_s": 3},
        accept_config_change="command_timeout_s",
    )
    assert done.returncode == 0, done.stderr
    assert_nothing_is_left(tmp_path)


@pytest.mark.usefixtures("engine")
def test_a_container_that_podman_has_forgotten_is_ended(tmp_path: Path) -> None:
    """It forgets one that lives where it was killed while it removed it, and then removes it."""
    run_dir = tmp_path / "trajectories/r"
    (run_dir / "workspaces").mkdir(parents=True)
    name = f"bt-{run_label(run_dir)}-w"
    deaf = ["python3", "-c", "import sys; sys.stdin.read()"]  # to SIGTERM, for ten seconds
    podman("create", "--interactive", "--name", name, "localhost/python:1", *deaf)
    client = ["podman", "start", "--attach", "--interactive", name]
    with subprocess.Popen(client, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: podman("ps", "--quiet") != "")
            removing = subprocess.Popen(["podman", "rm", "--force", name])
            wait_until(lambda: "Stopping" in podman("ps", "--all", "--format", "{{.Status}}"))
            removing.kill()
            removing.wait()
            podman("rm", "--force", name)
            assert podman("ps", "--all", "--quiet") == ""
            assert len(_processes_of(tmp_path)) == 2  # the client and conmon
            assert remove_containers(SandboxSettings(engine="podman"), run_dir) == 1
            process.wait(timeout=60)
        finally:
            process.kill()
    assert_nothing_is_left(tmp_path)


def test_slow_storage_is_named(
    engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_warning("podman") is None
    slow = tmp_path / "storage.conf"
    with tempfile.TemporaryDirectory(prefix="bt-") as short:
        slow.write_text(
            f'[storage]\ndriver="vfs"\ngraphroot="{tmp_path}/graph"\nrunroot="{short}/run"\n'
        )
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(slow))
        assert "vfs" in str(engine_warning("podman"))


@pytest.mark.usefixtures("engine")
def test_forty_tasks_are_killed_and_resumed_in_containers(tmp_path: Path) -> None:
    kills = 10
    write_rows(tmp_path / "p.jsonl", *forty_tasks(kills))
    options = {**PODMAN, "num_workers": 2, "batch_size": 4}
    kill_often(tmp_path, kills, **options)
    with started(tmp_path, "--row_setup", **options) as process:
        assert process.wait(timeout=1800) == 0, (tmp_path / "output.txt").read_text()
    judge_forty_tasks(tmp_path)
    assert_nothing_is_left(tmp_path)
