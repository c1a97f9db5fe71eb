"""Trees that are compared, packed and unpacked, also by an archive that lies."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from batch_trajectories_e2b import tree


def packed(root: Path, before: tree.Tree | None = None) -> io.BytesIO:
    now = tree.scan(str(root))
    out = io.BytesIO()
    tree.pack(str(root), now, *tree.differences(before or {}, now), out)
    out.seek(0)
    return out


def unpack(root: Path, file: io.BytesIO, max_bytes: int = 1 << 30) -> list[str]:
    return tree.unpack(str(root), file, str(root.parent), max_bytes)[1]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def forged(*members: tarfile.TarInfo, control: Any = None) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        text = json.dumps(control if control is not None else {"gone": []}).encode()
        first = tarfile.TarInfo(tree.CONTROL)
        first.size = len(text)
        archive.addfile(first, io.BytesIO(text))
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    out.seek(0)
    return out


def member(path: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(path)
    made.type, made.size = kind, 3 if kind == tarfile.REGTYPE else 0
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def here(tmp_path: Path) -> Path:
    made = tmp_path / "here"
    (made / "d" / "empty").mkdir(parents=True)
    (made / "d" / "run").write_bytes(b"\0\xff")
    (made / "d" / "run").chmod(0o755)
    os.utime(made / "d" / "run", ns=(1, 1_234_567_890_123_456_789))
    (made / "link").symlink_to("/nowhere/at all")
    (made / os.fsdecode(b"bad \xff\n name")).write_text("x")
    os.mkfifo(made / "pipe")
    return made


@pytest.fixture
def there(tmp_path: Path) -> Path:
    made = tmp_path / "there"
    made.mkdir()
    return made


def shape(root: Path) -> dict[str, list[Any]]:
    """The tree without what differs between two copies."""
    return {path: described[:4] for path, described in tree.scan(str(root)).items()}


def test_a_copy_has_all_but_what_is_no_file(here: Path, there: Path) -> None:
    unpack(there, packed(here))
    assert shape(there) == shape(here)
    assert "pipe" not in shape(here)
    assert (there / "d" / "run").stat().st_mtime_ns == 1_234_567_890_123_456_789
    assert names_in(there.parent) == ["here", "there"], "no temporary file is left"


def test_changes_replace_files_by_directories_and_back(here: Path, there: Path) -> None:
    unpack(there, packed(here))
    before = tree.scan(str(here))
    (here / "link").unlink()
    (here / "link").mkdir()
    (here / "link" / "in").write_text("now a directory")
    for name in ("empty", "run"):
        path = here / "d" / name
        path.rmdir() if path.is_dir() else path.unlink()
    (here / "d").rmdir()
    (here / "d").write_text("now a file")
    unpack(there, packed(here, before))
    assert shape(there) == shape(here)


def test_a_file_that_changes_while_it_is_packed_does_not_break_the_archive(
    here: Path, there: Path
) -> None:
    now = tree.scan(str(here))
    (here / "d" / "run").write_bytes(b"")
    (here / "link").unlink()
    out = io.BytesIO()
    tree.pack(str(here), now, sorted(now), [], out)
    out.seek(0)
    unpack(there, out)
    assert (there / "d" / "run").read_bytes() == b"\0\0"


@pytest.mark.parametrize(
    "path", ["../out", "a/../../out", "/out", "a//b", "", "a/./b", "x" * 256, "/".join("a" * 256)]
)
def test_a_path_that_leads_elsewhere_is_refused(there: Path, path: str) -> None:
    with pytest.raises(tree.TreeError):
        unpack(there, forged(member("tree/" + path)))
    with pytest.raises(tree.TreeError):
        unpack(there, forged(control={"gone": [path]}))
    assert names_in(there.parent) == ["there"]


def test_no_link_is_followed(there: Path) -> None:
    outside = there.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    links = member("tree/link", tarfile.SYMTYPE, linkname=str(outside))
    unpack(there, forged(links, member("tree/link/kept"), member("tree/link/new")))
    assert (outside / "kept").read_text() == "mine"
    assert names_in(outside) == ["kept"]
    (there / "again").symlink_to(outside)
    unpack(there, forged(control={"gone": ["again/kept"]}))
    assert names_in(outside) == ["kept"]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_other_kinds_of_files_are_refused(there: Path, kind: bytes) -> None:
    with pytest.raises(tree.TreeError, match="no file, directory or link"):
        unpack(there, forged(member("tree/x", kind, linkname="/etc/passwd")))


def test_an_archive_that_is_too_large_or_cut_is_refused(here: Path, there: Path) -> None:
    with pytest.raises(tree.TreeError, match="larger"):
        unpack(there, forged(member("tree/x", size=30), member("tree/y", size=30)), max_bytes=50)
    with pytest.raises(tree.TreeError):
        unpack(there, io.BytesIO(packed(here).getvalue()[:2000]))
    with pytest.raises(tree.TreeError):
        unpack(there, io.BytesIO(b"no archive"))


def test_modes_give_no_more_than_a_sandbox_may(there: Path) -> None:
    unpack(there, forged(member("tree/x", mode=0o6755), member("tree/d", tarfile.DIRTYPE, mode=0)))
    assert (there / "x").stat().st_mode & 0o7777 == 0o755
    assert (there / "d").stat().st_mode & 0o7777 == 0o700


class TestExchanges:
    """The program on the machine."""

    @pytest.fixture
    def ask(self, tmp_path: Path, there: Path) -> Any:
        state = tmp_path / "state"
        state.mkdir()

        def ask(act: str, have: int) -> dict[str, Any]:
            argv = [sys.executable, "-I", "-S", tree.__file__, act, str(state), str(there)]
            done = subprocess.run([*argv, str(have), "1000000"], capture_output=True, check=True)
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer

        ask.state = state  # type: ignore[attr-defined]
        return ask

    def test_nothing_comes_if_nothing_changed(self, ask: Any, there: Path) -> None:
        assert ask("pull", 0) == {"number": 0, "bytes": 0}
        (there / "x").write_text("1")
        assert ask("pull", 0)["number"] == 1
        assert ask("pull", 1) == {"number": 1, "bytes": 0}

    def test_a_repeated_request_gives_the_same_again(self, ask: Any, there: Path) -> None:
        (there / "x").write_text("1")
        assert ask("pull", 0) == ask("pull", 0)
        (there / "y").write_text("2")
        ask("pull", 0)
        with (ask.state / "out-1.tar").open("rb") as file, tarfile.open(fileobj=file) as archive:
            assert archive.getnames() == [tree.CONTROL, "tree/x", "tree/y"]

    def test_what_was_pushed_does_not_come_back(self, ask: Any, here: Path) -> None:
        (ask.state / "in-1.tar").write_bytes(packed(here).getvalue())
        assert ask("push", 0) == ask("push", 0) == {"number": 1}
        assert ask("pull", 1) == {"number": 1, "bytes": 0}

    def test_a_state_that_commands_have_removed_brings_all(self, ask: Any, there: Path) -> None:
        (there / "x").write_text("1")
        ask("pull", 0)
        for path in ask.state.iterdir():
            path.unlink()
        ask.state.rmdir()
        assert ask("pull", 1)["number"] == 2
        with (ask.state / "out-2.tar").open("rb") as file, tarfile.open(fileobj=file) as archive:
            first = archive.extractfile(tree.CONTROL)
            assert first is not None
            assert json.loads(first.read()) == {"gone": [], "all": ["x"]}

    def test_more_than_allowed_is_refused(self, ask: Any, there: Path) -> None:
        (there / "big").write_bytes(bytes(1_000_001))
        assert "holds 1 bytes more" in ask("pull", 0)["refused"]
