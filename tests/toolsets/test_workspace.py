"""The workspace keeps every path beneath its root, with any tree in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_trajectories.basics.errors import HostError
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import PathError, Workspace

CANARY = b"canary-outside"


def exchange(one: Path, other: Path) -> None:
    """Let two names change places at once."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, bytes(one), at_cwd, bytes(other), rename_exchange):
        raise OSError(ctypes.get_errno(), "renameat2")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_bytes(CANARY)
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "tasks").mkdir()
    return Workspace(tmp_path / "tasks" / "one")


def test_directory_is_made_at_first_use_only(workspace: Workspace) -> None:
    assert not workspace.root.exists()
    assert workspace.listing() == []
    assert workspace.root.is_dir()


def test_closed_workspace_is_not_made_again(workspace: Workspace) -> None:
    workspace.close()
    with pytest.raises(PathError, match="closed"):
        workspace.write_bytes("a", b"")
    assert not workspace.root.exists()


def test_a_workspace_whose_run_has_vanished_is_not_made_elsewhere(workspace: Workspace) -> None:
    """A failure of the machine, which no model is to read as a result of its call."""
    workspace.root.parent.rmdir()
    with pytest.raises(HostError, match="has vanished"):
        workspace.write_bytes("a", b"")
    assert not workspace.root.parent.exists()


def test_the_same_file_by_relative_alias_and_real_path(workspace: Workspace) -> None:
    workspace.write_bytes("a.txt", b"1")
    workspace.write_bytes("/workspace/new/b.txt", b"2")
    for path in (
        "a.txt",
        "./a.txt",
        "//workspace/./a.txt",
        "new/../a.txt",
        f"{workspace.root}/a.txt",
    ):
        assert workspace.read_bytes(path, 10) == b"1"
    assert workspace.read_bytes("new/b.txt", 10) == b"2"
    assert workspace.read_bytes("new/b.txt", 0) == b""


def test_real_path_beneath_a_directory_named_like_the_alias(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    workspace = Workspace(tmp_path / "runs" / "one", aliases=(str(tmp_path),))
    workspace.write_bytes("a.txt", b"1")
    assert workspace.read_bytes(f"{workspace.root}/a.txt", 10) == b"1"


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../outside/secret.txt",
        "a/../../outside/secret.txt",
        "/",
        "/etc/passwd",
        "/workspace/../etc/passwd",
        "/workspacex/a",
        "/proc/self/root/etc/passwd",
    ],
)
def test_paths_that_lead_outside_are_refused(
    workspace: Workspace, outside: Path, path: str
) -> None:
    workspace.write_bytes("a/x", b"")
    with pytest.raises(PathError, match="outside the workspace"):
        workspace.read_bytes(path, 100)
    with pytest.raises(PathError, match="outside the workspace"):
        workspace.write_bytes(path, b"overwritten")
    with pytest.raises(PathError, match="outside the workspace"):
        workspace.listing(path)
    assert (outside / "secret.txt").read_bytes() == CANARY


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "y" * 300, "a/" * 300 + "f", "\ud800"])
def test_malformed_paths_are_refused(workspace: Workspace, path: str) -> None:
    with pytest.raises(PathError):
        workspace.write_bytes(path, b"")
    with pytest.raises(PathError):
        workspace.read_bytes(path, 1)


def test_symlinks_out_are_refused_for_files_and_directories(
    workspace: Workspace, outside: Path
) -> None:
    workspace.make()
    (workspace.root / "absolute").symlink_to(outside)
    (workspace.root / "relative").symlink_to("../../outside")
    (workspace.root / "file").symlink_to(outside / "secret.txt")
    (workspace.root / "proc").symlink_to("/proc/self/root")
    for path in ("absolute/secret.txt", "relative/secret.txt", "file", "proc/etc/passwd"):
        with pytest.raises(PathError, match="outside"):
            workspace.read_bytes(path, 100)
        with pytest.raises(PathError, match="outside"):
            workspace.write_bytes(path, b"overwritten")
    for path in ("absolute", "relative"):
        with pytest.raises(PathError, match="outside"):
            workspace.listing(path)
        with pytest.raises(PathError, match="outside"):
            list(workspace.walk_files(path))
    assert list(workspace.walk_files()) == []
    assert (outside / "secret.txt").read_bytes() == CANARY


def test_symlinks_inside_are_followed(workspace: Workspace) -> None:
    workspace.write_bytes("deep/er/a.txt", b"1")
    (workspace.root / "up").symlink_to("deep/er/../er")
    (workspace.root / "deep" / "alias").symlink_to("/workspace/deep/er/a.txt")
    (workspace.root / "real").symlink_to(workspace.root / "deep")
    (workspace.root / "new").symlink_to("made/here.txt")
    assert workspace.read_bytes("up/a.txt", 10) == b"1"
    assert workspace.read_bytes("deep/alias", 10) == b"1"
    assert workspace.read_bytes("real/er/../er/a.txt", 10) == b"1"
    workspace.write_bytes("new", b"2")
    assert workspace.read_bytes("made/here.txt", 10) == b"2"
    assert [entry.path for entry in workspace.listing("up")] == ["deep/er/a.txt"]


def test_symlink_loops_end_in_an_error(workspace: Workspace) -> None:
    workspace.make()
    (workspace.root / "loop").symlink_to("loop/x")
    for path in ("loop", "loop/y"):
        with pytest.raises(PathError, match="too many symlinks"):
            workspace.read_bytes(path, 1)


def test_a_symlink_swapped_in_while_paths_are_used_never_leads_outside(
    workspace: Workspace, outside: Path
) -> None:
    """A directory and a symlink to the outside change places as fast as a thread can."""
    workspace.write_bytes("way/secret.txt", b"inside")
    root = workspace.root
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            exchange(root / "way", root / "link")

    thread = threading.Thread(target=swap)
    thread.start()
    seen: set[bytes] = set()
    try:
        until = time.monotonic() + 0.7
        while time.monotonic() < until or b"inside" not in seen:
            with contextlib.suppress(PathError):
                seen.add(workspace.read_bytes("way/secret.txt", 100))
            with contextlib.suppress(PathError):
                workspace.write_bytes("way/written.txt", b"x")
    finally:
        stop.set()
        thread.join()
    assert b"inside" in seen
    assert CANARY not in seen
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]


def test_writing_to_a_hard_link_leaves_the_outside_file_alone(
    workspace: Workspace, outside: Path
) -> None:
    workspace.make()
    os.link(outside / "secret.txt", workspace.root / "linked.txt")
    workspace.write_bytes("linked.txt", b"new")
    assert (outside / "secret.txt").read_bytes() == CANARY
    assert workspace.read_bytes("linked.txt", 10) == b"new"


def test_special_files_are_refused_without_waiting(workspace: Workspace) -> None:
    workspace.make()
    os.mkfifo(workspace.root / "fifo")
    (workspace.root / "tofifo").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(workspace.root):
        server.bind("sock")
    for name in ("fifo", "tofifo", "sock"):
        with pytest.raises(PathError, match="not a regular file"):
            workspace.read_bytes(name, 1)
        with pytest.raises(PathError, match="not a regular file"):
            workspace.write_bytes(name, b"x")
    assert list(workspace.walk_files()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_devices_are_refused(workspace: Workspace) -> None:
    workspace.make()
    try:
        os.mknod(workspace.root / "zero", 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this container forbids devices")
    with pytest.raises(PathError):
        workspace.read_bytes("zero", 1)


def test_directories_and_missing_files_are_named_in_errors(workspace: Workspace) -> None:
    workspace.write_bytes("d/f", b"")
    for path in ("d", ".", "d/.."):
        with pytest.raises(PathError, match="is a directory"):
            workspace.read_bytes(path, 1)
        with pytest.raises(PathError, match="is a directory"):
            workspace.write_bytes(path, b"")
    with pytest.raises(PathError, match="'nope' does not exist"):
        workspace.read_bytes("nope", 1)
    with pytest.raises(PathError, match="not a directory"):
        workspace.write_bytes("d/f/g", b"")
    with pytest.raises(PathError, match="not a directory"):
        workspace.listing("d/f")


def test_overwriting_keeps_the_mode_and_leaves_no_temporary_file(workspace: Workspace) -> None:
    workspace.write_bytes("run.sh", b"old")
    (workspace.root / "run.sh").chmod(0o755)
    workspace.write_bytes("run.sh", b"new")
    assert (workspace.root / "run.sh").stat().st_mode & 0o777 == 0o755
    assert [entry.path for entry in workspace.listing()] == ["run.sh"]


def test_walk_yields_paths_in_their_sorted_order(workspace: Workspace) -> None:
    for path in ("a/b", "a.txt", "a-b/c", "z", "a/b2/c", "B"):
        workspace.write_bytes(path, b"")
    (workspace.root / "a" / "loop").symlink_to("..")
    paths = list(workspace.walk_files())
    assert paths == sorted(paths)
    assert paths == ["B", "a-b/c", "a.txt", "a/b", "a/b2/c", "z"]
    assert list(workspace.walk_files("a")) == ["a/b", "a/b2/c"]
    assert list(workspace.walk_files("a/b")) == ["a/b"]


names = st.sampled_from(["..", ".", "", "in", "out", "file", "abs", "up", "/workspace", "new"])


@given(parts=st.lists(names, min_size=1, max_size=7), absolute=st.booleans())
def test_no_combination_of_links_and_dots_reaches_the_outside(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], absolute: bool
) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "outside").mkdir()
    for folder in (base, base / "outside"):
        (folder / "file").write_bytes(CANARY)
    workspace = Workspace(base / "ws")
    workspace.make()
    (workspace.root / "in").mkdir()
    (workspace.root / "in" / "up").symlink_to("..")
    (workspace.root / "up").symlink_to("in/../..")
    (workspace.root / "out").symlink_to("../outside")
    (workspace.root / "abs").symlink_to(base)
    path = ("/" if absolute else "") + "/".join(parts)
    with contextlib.suppress(PathError):
        assert CANARY not in workspace.read_bytes(path, 100)
    with contextlib.suppress(PathError):
        workspace.write_bytes(path, b"x")
    with contextlib.suppress(PathError):
        workspace.write_bytes(f"{path}/new", b"x")
    assert sorted(p.name for p in base.iterdir()) == ["file", "outside", "ws"]
    assert [path.name for path in (base / "outside").iterdir()] == ["file"]
    assert (base / "file").read_bytes() == (base / "outside" / "file").read_bytes() == CANARY


def test_removal_copes_with_hostile_trees_and_follows_no_symlink(
    tmp_path: Path, outside: Path
) -> None:
    root = tmp_path / "tree"
    (root / "locked" / "inner").mkdir(parents=True)
    (root / "locked" / "inner" / "f").write_bytes(b"")
    (root / "locked" / "inner").chmod(0o000)
    (root / "locked").chmod(0o500)
    (root / os.fsdecode(b"bad\xff\nname")).mkdir()
    (root / "out").symlink_to(outside)
    os.mkfifo(root / "fifo")
    with contextlib.chdir(root):
        for _ in range(1500):
            Path("d" * 50).mkdir()
            os.chdir("d" * 50)
        Path("out").symlink_to(outside)
    remove_tree(root)
    assert not root.exists()
    assert (outside / "secret.txt").read_bytes() == CANARY
    remove_tree(root)


def test_removal_of_a_root_that_became_a_symlink_removes_only_the_link(
    tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "tree").symlink_to(outside)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").is_symlink()
    assert (outside / "secret.txt").read_bytes() == CANARY


def test_nothing_of_a_write_in_the_making_is_in_the_workspace(tmp_path: Path) -> None:
    """A crash, or another agent that lists the files meanwhile, must not show it to a model."""
    workspace = Workspace(tmp_path / "w")
    seen: list[str] = []
    rename = os.rename

    def look(*args: Any, **more: Any) -> None:
        seen.extend(entry.path for entry in workspace.walk())
        rename(*args, **more)

    workspace.write_bytes("a", b"1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", look)
        workspace.write_bytes("b", b"2")
    assert seen == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]
