"""What containers leave when a run is killed, with programs in the place of engine and monitor."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.running import wait_until
from toolsets.sandbox.base import ImageSpec, Limits, SandboxSettings
from toolsets.sandbox.channel import Channel, Launch
from toolsets.sandbox.containers.docker import (
    EngineImages,
    make_container_name,
    remove_containers,
    run_label,
)
from toolsets.sandbox.containers.engine import engine_warning
from toolsets.workspace.workspace import Workspace

PODMAN = SandboxSettings(engine="podman")

ENGINE = """\
#!/bin/sh
echo "$*" >> {place}/asked
case "$*" in
"images "*) test ! -e {place}/half || exit 125; cat {place}/images ;;
"rmi --force "[0-9a-f]*) rm -f {place}/half ;;
*GraphRoot*) echo {place}/graph/overlay ;;
*"{{{{.ID}}}}"*) cat {place}/ids ;;
"ps "*) cat {place}/containers ;;
*OCIRuntime*) echo {place}/bin/runtime ;;
*RunRoot*) cat {place}/root ;;
esac
"""
RUNTIME = """\
#!/bin/sh
echo "$*" >> {place}/runtime
kill -9 $(cat {place}/$3)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a `podman` on the PATH, which notes in `asked` what it was asked."""
    place = tmp_path / "engine"
    (place / "bin").mkdir(parents=True)
    for name, script in (("podman", ENGINE), ("runtime", RUNTIME)):
        program = place / "bin" / name
        program.write_text(script.format(place=place))
        program.chmod(0o755)
    for name in ("ids", "containers", "images", "root", "asked", "runtime"):
        (place / name).touch()
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    return place


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose conversation `here` has not ended."""
    (tmp_path / "r" / "workspaces" / "here").mkdir(parents=True)
    return tmp_path / "r"


def test_a_client_learns_that_its_input_has_ended_though_its_output_was_not_read(
    tmp_path: Path,
) -> None:
    """Podman does not tell the container where it read a reset instead, and both live on."""
    client = (
        "import os, time\n"
        "os.read(0, 9); os.write(1, b'\\0\\0\\0\\x08{\"id\":0}')\n"
        "while not os.path.exists('begun'): time.sleep(0.01)\n"
        "os.write(1, b'what nobody reads'); open('written', 'w')\n"
        "try:\n"
        "    while os.read(0, 999): pass\n"
        "except ConnectionResetError:\n"
        "    time.sleep(1000)\n"
        "open('ended', 'w')\n"
    )

    async def ask() -> None:
        channel = Channel(None, output_bytes=1000)
        argv = [sys.executable, "-c", client]
        channel.launch(Launch(argv, {}, str(tmp_path), reads_to_its_end=True))
        try:
            await channel.begin({}, "")
            (tmp_path / "begun").touch()
            wait_until((tmp_path / "written").exists)
        finally:
            await channel.close()

    asyncio.run(ask())
    assert (tmp_path / "ended").exists()


def test_containers_are_removed_that_nobody_uses(engine: Path, run_dir: Path) -> None:
    prefix = f"bt-{run_label(run_dir)}-"
    around = make_container_name(run_dir / "workspaces" / "here")
    gone = make_container_name(run_dir / "workspaces" / "gone")
    assert around.startswith(f"{prefix}here.")
    states = {
        f"{prefix}here": "Exited",  # its conversation continues in it
        f"{prefix}gone": "Exited",
        around: "Exited",
        f"{around}2": "Running",  # by another worker
        f"{around}3": "Created",
        gone: "Running",
    }
    (engine / "containers").write_text("".join(f"{n} {s}\n" for n, s in states.items()))
    assert remove_containers(PODMAN, run_dir) == 3
    asked = (engine / "asked").read_text().splitlines()
    removed = [line.split()[-1] for line in asked if line.startswith("rm --force")]
    assert removed == [f"{prefix}gone", around, gone]


def removed_images(engine: Path) -> list[str]:
    asked = (engine / "asked").read_text().splitlines()
    return [line.removeprefix("rmi ") for line in asked if line.startswith("rmi ")]


def test_images_are_removed_that_nobody_uses(engine: Path, run_dir: Path) -> None:
    """Of a container's files; one without a name is what a killed `commit` has left."""
    run = run_label(run_dir)
    names = [f"localhost/bt-{run}-here", f"localhost/bt-{run}-gone", "<none>", "localhost/mine"]
    listed = [f"{number}{'0' * 11} {name}\n" for number, name in enumerate(names)]
    (engine / "images").write_text("".join(listed))
    assert remove_containers(PODMAN, run_dir) == 0
    assert removed_images(engine) == [f"--force localhost/bt-{run}-gone:files", f"2{'0' * 11}"]


def test_half_an_image_is_removed_if_it_is_of_the_run(engine: Path, run_dir: Path) -> None:
    """Whose it is says its configuration; Podman may list no image as long as it is there."""
    own = {"config": {"Labels": {"batch-trajectories.run": run_label(run_dir)}}}
    other = {"config": {"Labels": {"batch-trajectories.run": "0" * 12}}}
    graph = engine / "graph" / "overlay-images"
    images: list[dict[str, object]] = []
    for number, (config, more) in enumerate(
        [
            (own, {}),
            (other, {}),
            ({"config": {}}, {}),
            (None, {}),
            (own, {"names": ["a:1"]}),
            (own, {"big-data-names": ["manifest"]}),
        ]
    ):
        id = f"{number}" * 64
        (graph / id).mkdir(parents=True)
        images.append({"id": id, **more})
        if config is not None:
            name = base64.b64encode(f"sha256:{id}".encode()).decode()
            (graph / id / f"={name}").write_text(json.dumps(config))
    (graph / "images.json").write_text(json.dumps(images[::-1]))
    (engine / "half").touch()
    (engine / "images").write_text(f"a localhost/bt-{run_label(run_dir)}-gone\n")
    remove_containers(PODMAN, run_dir)
    gone = f"--force localhost/bt-{run_label(run_dir)}-gone:files"
    assert removed_images(engine) == [f"--force {'0' * 64}", gone]


def test_the_name_of_a_directory_can_be_any(tmp_path: Path) -> None:
    name = make_container_name(tmp_path / "workspaces" / ".a b/é[1]")
    assert name.isascii()
    assert set(name) <= {*"abcdefghijklmnopqrstuvwxyz0123456789-."}


Monitors = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def monitor(engine: Path) -> Iterator[Monitors]:
    """Starts what looks like the monitor of a container, by its id and name."""
    program = engine / "conmon"
    shutil.copy(Path(sys.executable).resolve(), program)
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with ExitStack() as stack:

        def start(id: str, name: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [str(program), "-i", "-c", id, "-n", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            stack.callback(process.communicate)
            (engine / id).write_text(str(process.pid))
            cmdline = Path(f"/proc/{process.pid}/cmdline")
            wait_until(lambda: name in cmdline.read_text(errors="replace"))
            return process

        yield start


def test_a_container_that_podman_has_forgotten_is_ended(
    engine: Path, run_dir: Path, monitor: Monitors
) -> None:
    """As it forgets one whose removal was killed. What Podman knows, or is another's, lives."""
    prefix = f"bt-{run_label(run_dir)}-"
    forgotten = monitor("1" * 64, f"{prefix}gone")
    living = [
        monitor("2" * 64, f"{prefix}here"),
        monitor("3" * 64, "bt-000000000000-gone"),
        monitor("4" * 63, f"{prefix}gone"),
    ]
    (engine / "ids").write_text("2" * 64 + "\n")
    assert remove_containers(PODMAN, run_dir) == 1
    assert forgotten.wait(timeout=60) == -9
    assert [process.poll() for process in living] == [None] * 3
    assert (engine / "runtime").read_text() == f"delete --force {'1' * 64}\n"


def test_a_process_in_a_sandbox_is_no_monitor(
    engine: Path, run_dir: Path, monitor: Monitors
) -> None:
    """A command of a conversation can call itself what it likes."""
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("mount namespaces need root")
    inside = monitor("1" * 64, f"bt-{run_label(run_dir)}-gone")
    assert inside.stdin is not None
    inside.stdin.write(b"import ctypes; print(ctypes.CDLL(None).unshare(0x20000))\n")
    inside.stdin.flush()
    own = Path("/proc/self/ns/mnt").readlink()
    wait_until(lambda: Path(f"/proc/{inside.pid}/ns/mnt").readlink() != own)
    assert remove_containers(PODMAN, run_dir) == 0
    assert inside.poll() is None


HALF_THERE = """\
#!/bin/sh
echo "$1" >> {place}/asked
case "$1 $2" in
"image inspect") case "$5" in a:1) echo 'sha256:12 {{}}' ;; *) exit 1 ;; esac ;;
"container inspect") echo 'Error: container not known' >&2; exit 1 ;;
"create "*) test -e {place}/removed || {{ echo 'Error: {said}' >&2; exit 1; }} ;;
"rm "*) : > {place}/removed ;;
esac
"""


@pytest.mark.parametrize(
    "said",
    [
        'creating container storage: the container name "bt-1" is already in use by 12ab',
        'name "bt-1" is in use: container already exists',
    ],
    ids=["half made", "half removed"],
)
def test_what_a_kill_has_left_half_there_is_made_again(
    engine: Path, run_dir: Path, said: str
) -> None:
    program = engine / "bin" / "podman"
    program.write_text(HALF_THERE.format(place=engine, said=said))
    images = EngineImages(PODMAN, run_dir)
    workspace = Workspace(run_dir / "workspaces" / "here")
    images.make(workspace, Limits(), ImageSpec("a:1")).make()
    assert (engine / "asked").read_text().split()[-3:] == ["create", "rm", "create"]


def test_half_an_image_hides_no_other(engine: Path, run_dir: Path) -> None:
    """As a killed `commit` leaves one, with which Podman lists none."""
    script = HALF_THERE.replace("esac", '"images "*) exit 125 ;;\nesac')
    (engine / "bin" / "podman").write_text(script.format(place=engine, said=""))
    images = EngineImages(PODMAN, run_dir)
    assert images.digests(["a:1", "b:1"]) == {"a:1": "sha256:12"}


def test_a_long_run_root_is_named(engine: Path) -> None:
    (engine / "root").write_text("/" + "r" * 49)
    assert engine_warning("podman") is None
    (engine / "root").write_text("/" + "r" * 50)
    assert "has more than 50 characters" in str(engine_warning("podman"))
