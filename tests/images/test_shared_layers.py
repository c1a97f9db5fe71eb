"""Images with the same lower layers share their files on disk, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tarfile
from pathlib import Path

import pytest

from tests.fakes.fake_images import Entry, directory, layer_of, symlink, write_layout
from tests.helpers.running import PATIENCE_S
from toolsets.images.store import ImageStore

pytestmark = pytest.mark.slow

MIB = 1 << 20
BASE = [
    Entry("big", os.urandom(4 * MIB)),
    Entry("lib/a", b"a"),
    Entry("lib/b", b"b"),
    Entry("gone/x", b"x"),
    Entry("script", b"#!/bin/sh\n", mode=0o755),
    symlink("link", "lib"),
    Entry("hard", kind=tarfile.LNKTYPE, link="big"),
    directory("closed", 0o555),
    Entry("pipe", kind=tarfile.FIFOTYPE),
]
MIDDLE = [Entry("middle", os.urandom(MIB)), Entry(".wh.gone")]
TOPS = {
    "one": [Entry("own", b"1"), Entry("lib/a", b"changed"), directory("closed", 0o700)],
    "two": [Entry("own", b"2"), Entry(".wh.lib"), Entry("link/c", b"c")],
    "three": [Entry("lib/.wh..wh..opq"), Entry("lib/d", b"d"), symlink("script", "big")],
    "four": [Entry("pipe2", kind=tarfile.LNKTYPE, link="pipe"), Entry("big", b"small")],
}


def write_images(images: Path) -> None:
    base, middle = layer_of(BASE), layer_of(MIDDLE)
    for name, top in TOPS.items():
        layers = [base, layer_of(top)] if name == "four" else [base, middle, layer_of(top)]
        write_layout(images / name, layers, name="1")
    write_layout(images / "base", [base], name="1")
    write_layout(images / "same", [base], name="1", config={"WorkingDir": "/lib"})


def describe(tree: Path) -> dict[str, tuple[int, bytes]]:
    """The mode and the content of everything in a tree."""
    collected = {}
    for path in [tree, *tree.rglob("*")]:
        mode = path.lstat().st_mode
        content = b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        collected[str(path.relative_to(tree))] = (mode, content)
    return collected


def disk(place: Path) -> int:
    """The bytes of all files, each once."""
    files = {}
    for path in place.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def unpack(images: Path, name: str) -> Path:
    return ImageStore(images).unpack(f"{name}:1").rootfs


@pytest.mark.parametrize("order", [[*TOPS, "base", "same"], ["same", "base", *reversed(TOPS)]])
def test_images_with_one_base_cost_the_base_once(tmp_path: Path, order: list[str]) -> None:
    """And each is what it is when it is unpacked alone."""
    images = tmp_path / "images"
    write_images(images)
    body = {name: describe(unpack(images, name)) for name in order}
    assert disk(ImageStore(images).unpacked) < 5.5 * MIB
    for name in order:
        alone = tmp_path / "alone" / name
        alone.mkdir(parents=True)
        (alone / name).symlink_to(images / name)
        assert body[name] == describe(unpack(alone, name))
    assert body["one"] == describe(unpack(images, "one")), "no other has changed it"
    assert ImageStore(images).unpack("same:1").workdir == "/lib"


def _unpack_all(images: Path, names: list[str]) -> None:
    for name in names:
        unpack(images, name)


def test_many_processes_unpack_what_they_share_once(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_images(images)
    names = [*TOPS, "base", "same"]
    turned = [names[n:] + names[:n] for n in range(len(names))]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_unpack_all, args=(images, order)) for order in turned]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    assert disk(ImageStore(images).unpacked) < 5.5 * MIB
    assert not list(ImageStore(images).unpacked.glob("*.tmp"))


def test_a_file_with_too_many_names_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 allows 65,000."""
    images = tmp_path / "images"
    write_images(images)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(31, "Too many links")

    whole = describe(unpack(images, "two"))
    monkeypatch.setattr(os, "link", refuse)
    for left in ImageStore(images).unpacked.iterdir():
        if left.is_dir() and not left.name.endswith(".base"):
            left.rename(tmp_path / left.name)
    assert describe(unpack(images, "two")) == whole
