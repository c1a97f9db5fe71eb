"""The file tools on files of an image are the same as on those of a directory."""

from __future__ import annotations

import asyncio
import binascii
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ToolError
from tests.images.test_image_sandbox import sandbox_in
from toolsets.builtin import file
from toolsets.context import ToolContext
from toolsets.sandbox.base import ImageSpec
from toolsets.sandbox.channel import Reply
from toolsets.sandbox.image_files import ImageFiles
from toolsets.sandbox.inside.file_requests import exact_text, real_path
from toolsets.tool import ToolResult
from toolsets.workspace.files import Files
from toolsets.workspace.workspace import PathError, Workspace

FILES = {
    "a.txt": b"alpha\nbeta\n",
    "a/b.py": b"def beta():\n    pass\n",
    "a/c/d.py": b"BETA = 1\n",
    "a.b/e": b"\0binary beta",
    "long": b"line\n" * 3000,
    "latin": b"caf\xe9 beta\n",
    "large": b"x" * 700_000 + b"\nbeta\n",
}

Use = Callable[[Files], Any]


def in_directory(tmp_path: Path, use: Use) -> Any:
    return use(Workspace(tmp_path / "directory"))


def in_image(images: Path, tmp_path: Path, use: Use) -> Any:
    async def act() -> Any:
        spec = ImageSpec("shell:1", workdir="/made")
        sandbox = sandbox_in(images, tmp_path / "layer", spec)
        try:
            return await asyncio.to_thread(use, ImageFiles(Workspace(tmp_path / "layer"), sandbox))
        finally:
            await sandbox.stop()

    return asyncio.run(act())


def text_of(result: ToolResult | str) -> str:
    return result if isinstance(result, str) else result.content


def all_tools(files: Files) -> list[str]:
    """What every tool says, for paths of all kinds."""
    context = ToolContext(files)
    said = [text_of(file.write_file.function(context, name, "x")) for name in ("new/x", "y")]
    for name, content in FILES.items():
        files.write_bytes(name, content)
    calls: list[Callable[[], ToolResult | str]] = [
        lambda: file.list_files.function(context),
        lambda: file.list_files.function(context, ".", True),
        lambda: file.list_files.function(context, "a", True),
        lambda: file.list_files.function(context, "./a/", True, "*.py"),
        lambda: file.list_files.function(context, "a.txt", True),
        lambda: file.list_files.function(context, "a.txt"),
        lambda: file.list_files.function(context, "missing"),
        lambda: file.search_files.function(context, "beta"),
        lambda: file.search_files.function(context, "beta", "a"),
        lambda: file.search_files.function(context, "BETA", ".", True),
        lambda: file.search_files.function(context, "b.ta$", ".", False, True),
        lambda: file.search_files.function(context, "beta", ".", False, False, "*.py"),
        lambda: file.search_files.function(context, "nowhere"),
        lambda: file.read_file.function(context, "a/b.py"),
        lambda: file.read_file.function(context, "latin"),
        lambda: file.read_file.function(context, "long", 10, 3),
        lambda: file.read_file.function(context, "a.b/e"),
        lambda: file.read_file.function(context, "a"),
        lambda: file.read_file.function(context, "a.txt/b"),
        lambda: file.read_file.function(context, "missing"),
        lambda: file.read_file.function(context, ""),
        lambda: file.patch_file.function(context, "large", "beta", "gamma"),
        lambda: file.patch_file.function(context, "a.txt", "a", "b"),
        lambda: file.write_file.function(context, "a", "x"),
        lambda: file.write_file.function(context, "a.txt/b", "x"),
    ]
    for call in calls:
        try:
            said.append(text_of(call()))
        except ToolError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.slow
def test_the_tools_say_the_same(images: Path, tmp_path: Path) -> None:
    expected = in_directory(tmp_path, all_tools)
    assert in_image(images, tmp_path, all_tools) == expected


@pytest.mark.slow
def test_long_lists_and_walks_come_in_parts(images: Path, tmp_path: Path) -> None:
    """More entries than one answer holds, with names around the order of a directory's own."""
    odd = ("d1.x/a", "d1-x", "d1/z.txt")

    def use(files: Files) -> tuple[list[Any], list[Any]]:
        for name in odd:
            files.write_bytes(name, b"x")
        return list(files.walk(".")), files.listing("many")

    async def act() -> tuple[Any, Any]:
        sandbox = sandbox_in(images, tmp_path / "layer", ImageSpec("shell:1", workdir="/made"))
        try:
            made = await sandbox.run(
                "shell",
                "for ((i = 0; i < 7; i++)); do mkdir d$i; for ((j = 0; j < 45; j++)); do "
                "mkdir d$i/$j; for ((k = 0; k < 9; k++)); do : > d$i/$j/$k; done; done; done"
                "; mkdir many; cd many; for ((n = 0; n < 2500; n++)); do : > f$n; done",
            )
            assert made.exit_code == 0, made.stderr
            files = ImageFiles(Workspace(tmp_path / "layer"), sandbox)
            return await asyncio.to_thread(use, files)
        finally:
            await sandbox.stop()

    walked, listed = asyncio.run(act())
    tree = Workspace(tmp_path / "layer" / "upper" / "made")
    assert walked == list(tree.walk("."))
    assert len(walked) > 2 * 2000
    assert len(listed) == 2500


@pytest.mark.slow
def test_names_that_are_not_text_are_told_from_each_other(images: Path, tmp_path: Path) -> None:
    """Also where one answer does not hold all; the text for U+FFFD itself is another one, too."""
    made = (
        "for ((n = 0; n < 2100; n++)); do : > $'\\xff'$n; done; "
        "mkdir -p $'\\xfe/\\ufffd' $'\\xfeb'; "
        "echo 1 > $'\\xfe/\\ufffd/\\xc3'; echo 1 > $'\\xfeb/ö'; ln -s $'\\xc3' link"
    )

    async def act() -> None:
        sandbox = sandbox_in(images, tmp_path / "layer", ImageSpec("shell:1", workdir="/made"))
        files = ImageFiles(Workspace(tmp_path / "layer"), sandbox)
        try:
            done = await sandbox.run("shell", made)
            assert done.exit_code == 0, done.stderr
            tree = await asyncio.to_thread(files.tree, "/made")
            named = {name: state for name, state in tree.items() if not name.startswith("\ufffdff")}
            assert {name: state.kind for name, state in named.items()} == {
                "\ufffdfe": "dir",
                "\ufffdfe/\ufffdef\ufffdbf\ufffdbd": "dir",
                "\ufffdfe/\ufffdef\ufffdbf\ufffdbd/\ufffdc3": "file",
                "\ufffdfeb": "dir",
                "\ufffdfeb/ö": "file",
                "link": "link",
            }
            assert tree["link"].has_odd_target
            assert len(tree) - len(named) == 2100
            assert all(state.mark for state in tree.values() if state.kind == "file")
            paths = [name for name, state in tree.items() if state.kind == "file"] + [
                "link",
                "none",
            ]
            sums = await asyncio.to_thread(files.checksums, "/made", paths)
            crc = f"{binascii.crc32(b'1' + bytes([10])):08x}"
            assert Counter(sums) == {"00000000": 2100, crc: 2, "": 2}
        finally:
            await sandbox.stop()

    asyncio.run(act())


@pytest.mark.parametrize("name", [b"a", b"\xff", "\ufffd".encode(), "ö".encode(), b"\xc3a\xef\xbf"])
def test_a_text_for_a_name_leads_to_it(name: bytes) -> None:
    text = exact_text(os.fsdecode(name))
    text.encode()
    assert os.fsencode(real_path(text)) == name


def test_absolute_paths_reach_the_whole_image(images: Path, tmp_path: Path) -> None:
    def use(files: Files) -> None:
        assert files.read_bytes("/etc/group", 4) == b"root"
        assert {"shadow", "passwd"} & {
            entry.path.rpartition("/")[2] for entry in files.walk("/etc")
        }
        files.write_bytes("/made/own", b"x")
        files.write_bytes("/opt/new/own", b"y")
        # Within the workspace paths are shown relative to it.
        assert [entry.path for entry in files.walk("/made")] == ["own"]
        assert [entry.path for entry in files.walk("/opt")] == ["/opt/new", "/opt/new/own"]

    in_image(images, tmp_path, use)


def test_a_file_keeps_its_mode_and_links_are_followed(images: Path, tmp_path: Path) -> None:
    async def act() -> None:
        sandbox = sandbox_in(images, tmp_path / "layer", ImageSpec("shell:1"))
        files = ImageFiles(Workspace(tmp_path / "layer"), sandbox)
        try:
            await sandbox.run("shell", "echo 1 > run; chmod 750 run; ln -s run link; ln -s / root")
            await asyncio.to_thread(files.write_bytes, "link", b"2")
            said = await sandbox.run("shell", "stat -c '%a %F' run link; cat run; ls -A | wc -l")
            assert said.stdout == "750 regular file\n777 symbolic link\n25\n"
            entries = await asyncio.to_thread(lambda: list(files.walk(".")))
            assert ("root", "link") in {(entry.path, entry.kind) for entry in entries}
        finally:
            await sandbox.stop()

    asyncio.run(act())


class Liar:
    """A sandbox whose server commands have taken over."""

    home = "/made"

    def __init__(self, **said: Any) -> None:
        self.said = said

    async def ask_files(self, request: dict[str, Any]) -> Reply:
        return Reply(id=0, **self.said)


@pytest.mark.parametrize(
    ("said", "use"),
    [
        ({"contents": [(0, b"not base64")]}, lambda files: files.read_bytes("a", 9)),
        (
            {"entries": [("a", "file", 1)], "more": True},
            lambda files: list(files.walk(".")),
        ),
        (
            {"entries": [("a", "file", 1)], "contents": [(7, b"")], "seen": 1},
            lambda files: list(files.contents(".", lambda _: True, b"", max_bytes=9)),
        ),
        (
            {"entries": [("a", "file", 1)], "seen": 0},
            lambda files: list(files.contents(".", lambda _: True, b"", max_bytes=9)),
        ),
        ({}, lambda files: files.checksums(".", ["a"])),
        ({"marks": ["1", "2"]}, lambda files: files.checksums(".", ["a"])),
        (
            {"entries": [("a", "file", 1)], "marks": ["-1 x"]},
            lambda files: files.tree("."),
        ),
    ],
)
def test_answers_of_a_sandbox_are_not_trusted(
    tmp_path: Path, said: dict[str, Any], use: Use
) -> None:
    """Neither endless walks nor files that were not asked for."""

    async def act() -> None:
        files = ImageFiles(Workspace(tmp_path), Liar(**said))  # type: ignore[arg-type]
        with pytest.raises(ToolError, match="what it may not"):
            await asyncio.to_thread(use, files)

    asyncio.run(act())


@pytest.mark.slow
def test_a_full_file_system_inside_is_not_this_machines(images: Path, tmp_path: Path) -> None:
    def use(files: Files) -> None:
        with pytest.raises(PathError, match="No space left"):
            files.write_bytes("/dev/shm/large", bytes(300 << 20))

    in_image(images, tmp_path, use)
