"""Packed workspaces: all comes back, equal ones are one file, nothing is written elsewhere."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from toolsets.workspace.packing import TooLarge, pack, unpack


def workspace(root: Path) -> Path:
    """Files, links, an empty directory, a read-only one, a socketless pipe and odd names."""
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "pkg" / "deep" / "a.py").write_text("x = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "empty").mkdir()
    (root / "link").symlink_to("pkg/deep/a.py")
    (root / "outside").symlink_to("/etc/hostname")
    (root / os.fsdecode(b"odd \xff name")).write_bytes(bytes(range(256)))
    (root / "locked").mkdir()
    (root / "locked" / "b").write_text("b")
    (root / "locked").chmod(0o555)
    os.mkfifo(root / "pipe")
    return root


def contents(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    found: dict[str, tuple[int, bytes | str | None]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_fifo():
            continue
        content = str(path.readlink()) if path.is_symlink() else None
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()  # type: ignore[assignment]
        found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


def test_what_was_packed_comes_back(tmp_path: Path) -> None:
    first = workspace(tmp_path / "w")
    name = pack(first, tmp_path / "kept", max_bytes=10_000)
    unpack(tmp_path / "kept", name, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(first)


def test_equal_workspaces_are_one_file(tmp_path: Path) -> None:
    store = tmp_path / "kept"
    names = {pack(workspace(tmp_path / name), store, max_bytes=10_000) for name in ("a", "b")}
    assert len(names) == 1
    (tmp_path / "b" / "run.sh").write_text("#!/bin/bash\n")
    names.add(pack(tmp_path / "b", store, max_bytes=10_000))
    assert {path.name for path in store.iterdir()} == names
    assert len(names) == 2


def test_a_large_workspace_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "big").write_bytes(bytes(2000))
    with pytest.raises(TooLarge, match="more than 1,999 bytes"):
        pack(tmp_path / "w", tmp_path / "kept", max_bytes=1999)
    assert list((tmp_path / "kept").iterdir()) == []
    assert pack(tmp_path / "w", tmp_path / "kept", max_bytes=2000)


@pytest.mark.parametrize("name", ["../beside", "link/inside"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    """Also by a file that was changed on disk."""
    (tmp_path / "target").mkdir()
    with tarfile.open(tmp_path / "made", "w:gz") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "target")
        tar.addfile(link)
        entry = tarfile.TarInfo(name)
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    digest = sha256((tmp_path / "made").read_bytes()).hexdigest()
    (tmp_path / "made").rename(tmp_path / digest)
    with pytest.raises(tarfile.TarError, match="outside"):
        unpack(tmp_path, digest, tmp_path / "again")
    assert list((tmp_path / "target").iterdir()) == []
    assert not (tmp_path / "beside").exists()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    name = pack(workspace(tmp_path / "w"), tmp_path / "kept", max_bytes=10_000)
    kept = tmp_path / "kept" / name
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(tarfile.TarError, match="its content is not that of its name"):
        unpack(tmp_path / "kept", name, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_a_layer_says_of_its_image_comes_back(tmp_path: Path) -> None:
    """Files that were removed, and directories that were made anew."""
    new = tmp_path / "w" / "new"
    new.mkdir(parents=True)
    try:
        os.mknod(new / "gone", stat.S_IFCHR, os.makedev(0, 0))
        os.setxattr(new, "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"no layers here: {error}")
    name = pack(tmp_path / "w", tmp_path / "kept", max_bytes=0)
    unpack(tmp_path / "kept", name, tmp_path / "again")
    gone = (tmp_path / "again" / "new" / "gone").lstat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == os.makedev(0, 0)
    assert os.getxattr(tmp_path / "again" / "new", "user.overlay.opaque") == b"y"
