"""Commands in an image: what they see, what they cannot reach, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tarfile
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from batch_trajectories.basics.errors import ToolError
from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, symlink, write_layout
from tests.helpers.running import PATIENCE_S
from toolsets.images.store import ImageStore
from toolsets.sandbox import image_bwrap
from toolsets.sandbox.base import ExecResult, ImageSpec, Limits, SandboxSettings
from toolsets.sandbox.image_bwrap import BwrapImages, BwrapImageSandbox
from toolsets.sandbox.image_files import ImageFiles
from toolsets.workspace.workspace import PathError, Workspace

pytestmark = pytest.mark.slow

Act = Callable[[BwrapImageSandbox, ImageFiles], Awaitable[None]]


def sandbox_in(
    images: Path, layer: Path, spec: ImageSpec, limits: Limits | None = None
) -> BwrapImageSandbox:
    image = ImageStore(images).unpack(spec.reference)
    made = BwrapImageSandbox(Workspace(layer), limits or Limits(), image=image, spec=spec)
    made.make()
    return made


def act(
    images: Path,
    layer: Path,
    doing: Act,
    spec: ImageSpec | str = "python:1",
    limits: Limits | None = None,
) -> None:
    """Use a sandbox in an image, and stop it."""

    async def use() -> None:
        spec_of = ImageSpec(spec) if isinstance(spec, str) else spec
        sandbox = sandbox_in(images, layer, spec_of, limits)
        try:
            await doing(sandbox, ImageFiles(Workspace(layer), sandbox))
        finally:
            await sandbox.stop()

    asyncio.run(use())


async def shell(sandbox: BwrapImageSandbox, command: str) -> ExecResult:
    return await sandbox.run("shell", command)


async def out(sandbox: BwrapImageSandbox, command: str) -> str:
    result = await shell(sandbox, command)
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return result.stdout.strip()


def test_a_conversation_works_in_the_image(images: Path, tmp_path: Path) -> None:
    """Its directory, variables, Python and git; what it changes is in its own layer."""

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert sandbox.home == "/testbed"
        assert await out(sandbox, "pwd; echo $GREETING $HOME; git status --short") == (
            "/testbed\nhi /root"
        )
        python = await sandbox.run("python", "import sys, pkg.calc\npkg.calc.add(5, 2)")
        assert python.value == "3"
        await out(sandbox, "sed -i s/-/+/ pkg/calc.py && touch /usr/added && rm -r /testbed/.git")
        assert await out(sandbox, "ls /testbed; ls /usr/added") == "pkg\n/usr/added"

    act(images, tmp_path / "layer", doing)
    tree = ImageStore(images).unpack("python:1").rootfs
    assert "a - b" in (tree / "testbed/pkg/calc.py").read_text()
    assert (tree / "testbed/.git").is_dir()
    assert not (tree / "usr/added").exists()
    assert (tmp_path / "layer/upper/usr/added").exists()


def test_another_sandbox_continues_with_the_layer(images: Path, tmp_path: Path) -> None:
    async def first(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        await out(sandbox, "echo kept > /testbed/a; rm pkg/calc.py; echo x > /tmp/b")

    async def second(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert await out(sandbox, "cat a /tmp/b; ls pkg") == "kept\nx\n__init__.py"

    act(images, tmp_path / "layer", first)
    act(images, tmp_path / "layer", second)
    Workspace(tmp_path / "layer").remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "left", ["rm -rf /testbed", "rm -rf /testbed; touch /testbed", "chmod 0 /"]
)
@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_workspace_that_commands_broke_is_their_failure(
    images: Path, tmp_path: Path, left: str, user: str
) -> None:
    """The next sandbox starts: a failure of the machine would end the run."""
    spec = ImageSpec("python:1", user=user)

    async def first(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        await shell(sandbox, left)

    async def second(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        with contextlib.suppress(ToolError):
            said = await shell(sandbox, "true")
            assert said.exit_code in (0, 126, 127)
        with contextlib.suppress(PathError):
            await asyncio.to_thread(files.write_bytes, "a", b"x")

    act(images, tmp_path / "layer", first, spec)
    act(images, tmp_path / "layer", second, spec)


def test_a_user_of_the_image(images: Path, tmp_path: Path) -> None:
    """Its number, its home, and its files, without any capability."""

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert sandbox.home == "/home/agent/work"
        assert await out(sandbox, "id -u; id -g; echo $HOME $USER; git log --format=%s") == (
            "1234\n1234\n/home/agent agent\nstart"
        )
        assert await out(sandbox, "grep CapEff /proc/self/status") == "CapEff:\t" + "0" * 16
        await asyncio.to_thread(files.write_bytes, "a", b"x")
        assert await out(sandbox, "stat -c %u a") == "1234"

    act(images, tmp_path / "layer", doing, "agent:1")
    spec = ImageSpec("agent:1", user="root", env={"GREETING": "own"}, workdir="/made/here")

    async def as_root(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert await out(sandbox, "id -u; echo $GREETING; pwd") == "0\nown\n/made/here"
        await out(sandbox, "touch a && chmod 000 a && cat a && chown 0:0 a")

    act(images, tmp_path / "root", as_root, spec)


def test_an_image_without_python(images: Path, tmp_path: Path) -> None:
    """Commands and files work; a cell says what is missing and the sandbox goes on."""

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert await out(sandbox, "sh sum.sh 5 2") == "3"
        for _ in range(2):
            cell = await sandbox.run("python", "1")
            assert (cell.exit_code, cell.stderr) == (127, "python3: No such file or directory\n")
        assert await asyncio.to_thread(files.read_bytes, "sum.sh", 5) == b"echo "
        assert await out(sandbox, "pwd") == "/app"

    act(images, tmp_path / "layer", doing, "shell:1")


def test_an_image_without_a_shell(images: Path, tmp_path: Path) -> None:
    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        for _ in range(2):
            said = await shell(sandbox, "true")
            assert (said.exit_code, said.stderr) == (127, "sh: No such file or directory\n")
        read = await sandbox.exec(["cat", "/etc/group"])
        assert read.stdout.startswith("root:")
        await asyncio.to_thread(files.write_bytes, "/new/file", b"x")
        assert (await sandbox.exec(["cat", "/new/file"])).stdout == "x"

    act(images, tmp_path / "layer", doing, "bare:1")


def calling(call: str) -> str:
    """A command that fails where a call of the C library fails."""
    code = f"import ctypes; raise SystemExit(ctypes.CDLL(None).{call} < 0)"
    return f'python3 -c "{code}"'


ESCAPES = {
    "devices": "mknod /tmp/disk b 8 0",
    "mounts": calling("mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'')"),
    "unmounts": calling("umount2(b'/proc', 2)"),
    "user namespaces": calling("unshare(0x10000000)"),
    "mount namespaces": calling("unshare(0x00020000)"),
    "chroot": calling("chroot(b'/tmp')"),
    "settings of the kernel": "echo 1 > /proc/sys/kernel/panic",
    "the server's memory": "cat /proc/1/mem > /dev/null",
    "the server's descriptors": "ls /proc/1/fd/200/",
    "the network": "grep -v '^ *lo:' /proc/net/dev | grep :",
    "the server": "kill -9 1; kill -0 99999",
}


@pytest.mark.parametrize("what", ESCAPES)
@pytest.mark.parametrize("image", ["python:1", "agent:1"])
def test_no_command_gets_out(images: Path, tmp_path: Path, what: str, image: str) -> None:
    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert (await shell(sandbox, ESCAPES[what])).exit_code != 0
        assert await out(sandbox, "echo up") == "up"

    act(images, tmp_path / "layer", doing, image)


def test_nothing_of_this_machine_is_seen(images: Path, tmp_path: Path) -> None:
    """Neither its files nor other conversations' layers, by any way through /proc."""
    (tmp_path / "other" / "upper").mkdir(parents=True)
    (tmp_path / "other" / "upper" / "secret").write_text("s3cret")

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        # The directory that holds its layers, and what the fork server had there.
        found = await out(sandbox, f"ls -d {tmp_path} /workspace /images 2>/dev/null || true")
        assert found == ""
        for path in (
            "/proc/1/fd/200/../../other/upper/secret",
            "/proc/self/fd/200/../../other/upper/secret",
            "/proc/1/cwd/../../../../other/upper/secret",
            f"{tmp_path}/other/upper/secret",
            "/proc/1/root/workspace/other/upper/secret",
        ):
            with pytest.raises(PathError):
                await asyncio.to_thread(files.read_bytes, path, 10)
            # Where a name of such a path means nothing in the image, it is made there.
            with contextlib.suppress(PathError):
                await asyncio.to_thread(files.write_bytes, path.replace("secret", "made"), b"x")
        for path in ("/proc/self/mem", "/proc/kmsg", "/dev/zero", "/proc/1/fd/0"):
            with pytest.raises(PathError):
                await asyncio.to_thread(files.read_bytes, path, 10)

    act(images, tmp_path / "layer", doing)
    assert [path.name for path in (tmp_path / "other").rglob("*")] == ["upper", "secret"]
    assert {path.name for path in tmp_path.iterdir()} == {"other", "layer"}


def test_setuid_programs_give_nothing(images: Path, tmp_path: Path) -> None:
    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        await out(sandbox, "cp /usr/bin/id own; chmod 6755 own; ./own -u")
        options = await out(sandbox, "grep ' / ' /proc/mounts; grep NoNewPrivs /proc/self/status")
        assert "nosuid,nodev" in options
        assert options.endswith("NoNewPrivs:\t1")

    act(images, tmp_path / "layer", doing, "agent:1")


@pytest.mark.parametrize("name", ["redirect", "opaque", "metacopy", "origin"])
def test_no_attribute_leads_the_overlay_elsewhere(images: Path, tmp_path: Path, name: str) -> None:
    """The kernel keeps what an overlay means in attributes of the layer, which a command cannot
    set: a redirected directory would show another of the image, or of this machine."""
    code = (
        "import os\n"
        "os.makedirs('d', exist_ok=True)\n"
        f"try: os.setxattr('d', 'user.overlay.{name}', b'/../../../../etc')\n"
        "except OSError: pass\n"
    )

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert (await sandbox.run("python", code)).exit_code == 0

    async def again(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert await out(sandbox, "ls -A d") == ""

    act(images, tmp_path / "layer", doing)
    made = tmp_path / "layer/upper/testbed/d"
    assert f"user.overlay.{name}" not in os.listxattr(made)
    act(images, tmp_path / "layer", again)


def test_no_link_of_an_image_leads_out(images: Path, tmp_path: Path) -> None:
    """Of a hostile image, whose programs and directories are links to places of this machine."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    hostile = [
        symlink("link", str(secret)),
        symlink("climbing", "../" * 30 + str(secret).lstrip("/")),
        symlink("home", str(tmp_path)),
        symlink("testbed/proc", "/proc/1/root" + str(secret)),
        Entry("testbed/su", b"#!/bin/sh\nid -u", mode=0o6755),
        Entry("testbed/disk", kind=tarfile.BLKTYPE, device=(8, 0)),
    ]
    programs = images.with_name("trees") / "python"
    layers = [layer_of_tree(programs), layer_of(hostile)]
    write_layout(tmp_path / "images/made", layers, name="1", config={"WorkingDir": "/testbed"})

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        for path in ("/link", "/climbing", "/home/secret", "proc"):
            assert "s3cret" not in (await shell(sandbox, f"cat {path}")).stdout
            with contextlib.suppress(PathError):  # or what is written here is there
                assert await asyncio.to_thread(files.read_bytes, path, 10) == b"changed"
            with contextlib.suppress(PathError):
                await asyncio.to_thread(files.write_bytes, path, b"changed")
        assert await out(sandbox, "stat -c %a su; ls") == "755\nproc\nsu"

    act(tmp_path / "images", tmp_path / "layer", doing, "made:1")
    assert secret.read_text() == "s3cret"


def test_only_what_grows_counts(images: Path, tmp_path: Path) -> None:
    """The image is larger than the limit; what is written anywhere counts."""
    tree = ImageStore(images).unpack("python:1").rootfs
    taken = subprocess.run(["du", "-sm", tree], capture_output=True, text=True, check=True)
    assert int(taken.stdout.split()[0]) > 20

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert (await shell(sandbox, "true")).full_mb is None
        filled = await shell(sandbox, "dd if=/dev/zero of=/usr/full bs=1M count=30; sleep 3")
        assert filled.full_mb is not None
        assert (await shell(sandbox, "rm /usr/full; sleep 2")).full_mb is None

    act(images, tmp_path / "layer", doing, limits=Limits(workspace_mb=20))


def test_many_small_files_count_as_what_a_disk_needs_for_them(images: Path, tmp_path: Path) -> None:
    """Or a loop would use up the files that the disk can hold, and end all conversations."""
    forever = "import itertools\nfor n in itertools.count(): open(f'/usr/{n}', 'x').close()"

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        filled = await sandbox.run("python", forever)
        assert filled.was_filling
        assert filled.full_mb is not None

    limits = Limits(workspace_mb=20, timeout_s=60)
    act(images, tmp_path / "layer", doing, limits=limits)
    assert sum(1 for _ in (tmp_path / "layer/upper/usr").iterdir()) < 1_000_000


def test_the_kernel_refuses_what_tasks_do_not_need(images: Path, tmp_path: Path) -> None:
    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        tried = "import socket\nsocket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"
        assert "Address family not supported" in (await sandbox.run("python", tried)).stderr

    act(images, tmp_path / "layer", doing)


def test_nothing_is_left_of_a_sandbox(images: Path, tmp_path: Path) -> None:
    """No mount outside, no process, and a layer that can be removed."""
    seconds = f"1000.{os.getpid()}"  # which no other test waits

    def running() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if seconds in _text_of(path)]

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        await out(sandbox, f"sleep {seconds} & mkdir -p d/e && chmod 000 d && rm -r pkg")
        assert running()
        # Mounts elsewhere come and go meanwhile, as those of containers.
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()

    act(images, tmp_path / "layer", doing)
    assert not running()
    Workspace(tmp_path / "layer").remove()
    assert list(tmp_path.iterdir()) == []


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # its process has ended


@pytest.mark.parametrize("number", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_many_conversations_share_one_image(images: Path, tmp_path: Path, number: int) -> None:
    """Each sees its own changes; a layer holds only those."""

    async def use() -> None:
        sandboxes = [
            sandbox_in(images, tmp_path / f"l{n}", ImageSpec("python:1")) for n in range(number)
        ]
        try:
            said = await asyncio.gather(
                *(
                    out(box, f"echo {n} > own; sleep 0.1; cat own")
                    for n, box in enumerate(sandboxes)
                )
            )
            assert said == [str(n) for n in range(number)]
        finally:
            await asyncio.gather(*(box.stop() for box in sandboxes))

    asyncio.run(use())
    for layer in tmp_path.iterdir():
        files = [path for path in (layer / "upper").rglob("*") if path.is_file()]
        assert [path.name for path in files] == ["own"]


def test_without_overlays_each_conversation_has_a_copy(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played: the kernel here mounts overlays."""
    monkeypatch.setattr(image_bwrap, "find_layering", lambda layers, trees: "copy")

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        assert await out(sandbox, "cat pkg/calc.py; git status --short; echo x > a") != ""
        assert "overlay" not in await out(sandbox, "cat /proc/mounts")

    act(images, tmp_path / "layer", doing)
    assert (tmp_path / "layer/upper/testbed/a").exists()
    tree = ImageStore(images).unpack("python:1").rootfs
    assert not (tree / "testbed/a").exists()


def test_a_workspace_must_be_a_directory(images: Path, tmp_path: Path) -> None:
    for workdir, message in (("/etc/passwd", "not a directory"), ("relative", "absolute path")):
        with pytest.raises(ToolError, match=message):
            sandbox_in(images, tmp_path / "layer", ImageSpec("python:1", workdir=workdir))
    with pytest.raises(ToolError, match="user 'nobody-here'"):
        sandbox_in(images, tmp_path / "layer", ImageSpec("python:1", user="nobody-here"))


def test_an_overlay_is_tried_where_layers_are(images: Path, tmp_path: Path) -> None:
    """The directory of layers may be where none can be mounted."""
    unpacked = ImageStore(images).unpack("python:1").path.parent
    assert image_bwrap.overlay_problem(tmp_path, unpacked) is None
    assert list(tmp_path.iterdir()) == []
    assert image_bwrap.overlay_problem(Path("/proc"), unpacked) is not None


def test_an_overlay_that_the_parent_has_tried_is_not_tried_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_again(*_: Path) -> None:
        raise AssertionError

    monkeypatch.setattr(image_bwrap, "overlay_problem", try_again)
    monkeypatch.setattr(image_bwrap, "_overlay_problems", {})
    made = BwrapImages(SandboxSettings(images=images), tmp_path)
    made.trust_overlays()
    assert made.has_overlays()
    layer = Workspace(tmp_path / "workspaces" / "w")
    made.make(layer, Limits(), ImageSpec("python:1"))


def test_conversations_that_start_together_try_one_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    tried: list[Path] = []

    def problem(layers: Path, images: Path) -> None:
        del images
        tried.append(layers)
        begun.set()
        may_end.wait(PATIENCE_S)

    monkeypatch.setattr(image_bwrap, "overlay_problem", problem)
    ask = partial(image_bwrap.find_layering, tmp_path, tmp_path)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    begun.clear()
    threads[1].start()
    second_tries = begun.wait(0.2)
    may_end.set()
    for thread in threads:
        thread.join()
    assert not second_tries
    assert tried == [tmp_path]
