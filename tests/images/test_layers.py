"""Images on disk: which are found, and what of them reaches this machine's files."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import stat
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from tests.fakes.fake_images import Entry, directory, layer_of, symlink, write_layout, write_saved
from tests.helpers.running import PATIENCE_S
from toolsets.images import layers as layers_module
from toolsets.images.archives import find_images
from toolsets.images.names import ImageError
from toolsets.images.store import ImageStore, UnpackedImage, find_user
from toolsets.workspace.removal import remove_tree


def unpack(tmp_path: Path, *layers: list[Entry]) -> Path:
    """The tree of an image with these layers."""
    write_layout(tmp_path / "images" / "made", [layer_of(entries) for entries in layers], name="1")
    return ImageStore(tmp_path / "images").unpack("made:1").rootfs


def content(tree: Path) -> set[str]:
    """The paths of all that is not made for every image."""
    usual = {"dev", "proc", "sys", "tmp", "etc"}
    return {str(path.relative_to(tree)) for path in tree.rglob("*")} - usual


@pytest.mark.parametrize(
    "name",
    ["../outside", "a/../../outside", "/../outside", "./../outside", "a/b/../../../outside"],
)
def test_no_entry_leads_out_of_the_tree(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match="leads outside"):
        unpack(tmp_path, [Entry(name, b"x")])
    assert not list(tmp_path.rglob("outside"))


def test_links_of_an_image_are_followed_within_it_only(tmp_path: Path) -> None:
    """An absolute link means a place in the image; one with too many `..` ends at its root."""
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = unpack(
        tmp_path,
        [
            symlink("absolute", str(outside)),
            symlink("climbing", "../" * 20 + str(outside).lstrip("/")),
            symlink("etc/passwd", "/etc/shadow"),
        ],
        [Entry("absolute/a", b"1"), Entry("climbing/b", b"2"), Entry("etc/passwd", b"own")],
    )
    assert list(outside.iterdir()) == []
    inside = tree / str(outside).lstrip("/")
    assert {path.name for path in inside.iterdir()} == {"a", "b"}
    assert not (tree / "etc/passwd").is_symlink()
    assert (tree / "etc/passwd").read_bytes() == b"own"


def test_a_file_replaces_a_link_and_does_not_write_through_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    tree = unpack(tmp_path, [symlink("file", str(target)), Entry("file", b"theirs")])
    assert target.read_text() == "mine"
    assert (tree / "file").read_bytes() == b"theirs"


def test_hard_links_stay_within_the_tree(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    link = Entry("b", kind=tarfile.LNKTYPE, link="a")
    tree = unpack(tmp_path, [Entry("a", b"x"), link])
    assert (tree / "a").samefile(tree / "b")
    for number, bad in enumerate(("../target", str(target), "missing")):
        with pytest.raises(ImageError):
            unpack(tmp_path / str(number), [Entry("b", kind=tarfile.LNKTYPE, link=bad)])
    through = [symlink("out", str(target)), Entry("b", kind=tarfile.LNKTYPE, link="out")]
    tree = unpack(tmp_path / "through", through)
    assert (tree / "b").lstat().st_ino == (tree / "out").lstat().st_ino
    assert (tree / "b").is_symlink()
    assert target.stat().st_nlink == 1


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_what_is_left_out_is_so_under_all_names(tmp_path: Path, kind: bytes) -> None:
    """Also where it replaces a file of a lower layer, until another replaces it."""
    link = Entry("b", kind=tarfile.LNKTYPE, link="a")
    tree = unpack(
        tmp_path,
        [Entry("a", b"1"), Entry("b", b"2"), Entry("c", b"3")],
        [Entry("a", kind=kind), link, Entry("c", kind=tarfile.LNKTYPE, link="b")],
        [Entry("c", b"4")],
        [Entry("d", kind=tarfile.LNKTYPE, link="c")],
    )
    assert content(tree) == {"c", "d"}
    assert (tree / "d").read_bytes() == b"4"


def test_nothing_gives_rights_to_who_runs_it(tmp_path: Path) -> None:
    """No set-user-id bits, no devices, no pipes."""
    tree = unpack(
        tmp_path,
        [
            Entry("su", b"x", mode=0o6755),
            directory("shared", 0o7777),
            Entry("disk", kind=tarfile.BLKTYPE, device=(8, 0)),
            Entry("null", kind=tarfile.CHRTYPE, device=(1, 3)),
            Entry("pipe", kind=tarfile.FIFOTYPE),
        ],
    )
    assert content(tree) == {"su", "shared"}
    assert stat.S_IMODE((tree / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "shared").stat().st_mode) == 0o1777


def test_upper_layers_hide_what_they_say(tmp_path: Path) -> None:
    """Whiteouts remove a name of lower layers, opaque ones all of a directory's, wherever they
    are in the layer."""
    lower = ("gone", "kept", "d/old", "d/s/old", "o/old", "o/s/old", "o/t/old")
    upper = (".wh.gone", "d/.wh.s", "o/new", "o/s/new", "o/.wh..wh..opq", "o/later", ".wh..wh.plnk")
    tree = unpack(tmp_path, [Entry(name) for name in lower], [Entry(name) for name in upper])
    files = {path for path in content(tree) if (tree / path).is_file()}
    assert files == {"kept", "d/old", "o/new", "o/s/new", "o/later"}
    for number, bad in enumerate((".wh..", ".wh...", ".wh.")):
        with pytest.raises(ImageError, match="no layer may have"):
            unpack(tmp_path / str(number), [Entry("a/b")], [Entry(f"a/{bad}")])


def test_a_directory_replaces_a_link_and_a_file_a_directory(tmp_path: Path) -> None:
    tree = unpack(
        tmp_path,
        [Entry("real/x", b"1"), symlink("a", "real"), Entry("b/c/d", b"1"), directory("ro", 0o555)],
        [directory("a"), Entry("a/y", b"2"), Entry("b", b"2"), Entry("ro/z", b"2")],
    )
    assert not (tree / "a").is_symlink()
    assert {path.name for path in (tree / "real").iterdir()} == {"x"}
    assert (tree / "b").read_bytes() == b"2"
    assert (tree / "ro/z").exists()
    assert stat.S_IMODE((tree / "ro").stat().st_mode) == 0o555


@pytest.mark.parametrize("name", ["proc", "dev", "sys"])
def test_what_a_sandbox_mounts_over_must_be_a_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match=f"/{name} of the image is not a directory"):
        unpack(tmp_path, [symlink(name, "/etc")])


def test_layers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError, match="larger than"):
        unpack(tmp_path, [Entry("zeros", bytes(2 << 20))])
    assert not list((tmp_path / "images").glob(".unpacked-*/*/rootfs"))


def test_entries_and_depth_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_MAX_ENTRIES", 5)
    with pytest.raises(ImageError, match="more than 5 entries"):
        unpack(tmp_path / "many", [Entry(f"{n}") for n in range(3)], [Entry("a")] * 3)
    with pytest.raises(ImageError, match="too deep"):
        unpack(tmp_path / "deep", [Entry("d/" * 201 + "x")])
    for name in ("many", "deep"):
        assert not list((tmp_path / name / "images").glob(".unpacked-*/*/rootfs"))


def test_zeros_take_no_disk(tmp_path: Path) -> None:
    """A small compressed layer could fill it otherwise."""
    zeros = bytes(8 << 20)
    tree = unpack(tmp_path, [Entry("zeros", zeros), Entry("mixed", zeros + b"x" + zeros)])
    assert (tree / "zeros").read_bytes() == zeros
    assert (tree / "mixed").read_bytes() == zeros + b"x" + zeros
    assert (tree / "zeros").stat().st_blocks == 0
    assert (tree / "mixed").stat().st_blocks * 512 <= 1 << 20


def old_sparse(size: int, start: int, stored: int = 0) -> bytes:
    """A layer with a file of `size` bytes, in the format of GNU tar: one piece, from `start` on."""
    info = tarfile.TarInfo("big")
    info.type = tarfile.GNUTYPE_SPARSE
    info.size = stored
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = _number(start) + _number(stored)
    header[483:495] = _number(size)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def _number(value: int) -> bytes:
    return b"\x80" + value.to_bytes(11, "big")


def new_sparse(pieces: str, content: bytes = b"") -> bytes:
    """The same, of 1 MiB, in a format with extended headers; with a list of starts and sizes."""
    info = tarfile.TarInfo("big")
    info.size = len(content)
    info.pax_headers = {"GNU.sparse.realsize": str(1 << 20)}
    if content:
        info.pax_headers |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    else:
        info.pax_headers |= {"GNU.sparse.size": str(1 << 20), "GNU.sparse.map": pieces}
    return info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512 + 1024)


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("form", ["gnu", "0.0", "0.1", "1.0"])
def test_files_with_holes_keep_them(tmp_path: Path, form: str, pieces: int) -> None:
    """As GNU tar packs them, with fewer or more pieces than fit into one header."""
    made = tmp_path / "made"
    made.mkdir()
    wanted = bytearray(64 << 20)
    with (made / "big").open("wb") as file:
        for piece in range(pieces):
            at = piece * (1 << 20) + (1 << 19)
            wanted[at : at + 6] = b"piece" + bytes([piece])
            file.seek(at)
            file.write(wanted[at : at + 6])
        file.truncate(len(wanted))
    (made / "end").write_bytes(b"next")
    options = (
        [f"--format={form}"] if form == "gnu" else ["--format=posix", f"--sparse-version={form}"]
    )
    command = ["tar", "-C", str(made), "--sparse", *options, "-cf", "-", "big", "end"]
    layer = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(layer) < 1 << 20
    write_layout(tmp_path / "images" / "made", [layer], name="1")
    tree = ImageStore(tmp_path / "images").unpack("made:1").rootfs
    assert (tree / "big").read_bytes() == wanted
    assert (tree / "big").stat().st_blocks * 512 <= 1 << 20
    assert (tree / "end").read_bytes() == b"next"


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (old_sparse(1 << 60, 1 << 60), "of 1152921504606846976 bytes"),
        (old_sparse(1 << 20, 2 << 20), "bad list of holes"),
        (new_sparse("512,9,0,9"), "bad list of holes"),
        (new_sparse("0,-5"), "bad list of holes"),
        (new_sparse("0,9"), "damaged"),
        (new_sparse("x"), "damaged"),
        (new_sparse("", b"9" * 600 + b"\n"), "damaged"),
        (new_sparse("", b"999999\n" + b"1\n" * (1 << 20)), "header is too long"),
    ],
)
def test_a_bad_list_of_holes_is_refused(tmp_path: Path, layer: bytes, why: str) -> None:
    """One of exabytes takes a kilobyte of a layer."""
    write_layout(tmp_path / "images" / "made", [layer], name="1")
    with pytest.raises(ImageError, match=why):
        ImageStore(tmp_path / "images").unpack("made:1")


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="header is too long"):
        unpack(tmp_path, [Entry("x" * (2 << 20), b"")])


OTHER = gzip.compress(layer_of([Entry("a", b"other")]), mtime=0)


def damage_image(tmp_path: Path, change: bytes | None, number: int) -> ImageStore:
    """An image one blob of which was changed, or cut off."""
    made = tmp_path / "images" / "made"
    write_layout(made, [layer_of([Entry("a", b"x" * 10_000)])], name="1")
    blob = sorted((made / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)[number]
    raw = blob.read_bytes()
    blob.write_bytes(raw[: len(raw) // 2] if change is None else change)
    return ImageStore(tmp_path / "images")


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("change", [None, b"{}", OTHER], ids=["cut", "empty", "other"])
def test_a_damaged_image_is_refused_with_its_place(
    tmp_path: Path, change: bytes | None, number: int
) -> None:
    store = damage_image(tmp_path, change, number)
    with pytest.raises(ImageError, match="made"):
        store.unpack("made:1")
    assert not list((tmp_path / "images").glob(".unpacked-*/*/rootfs"))


def test_images_are_found_by_all_their_names(tmp_path: Path) -> None:
    images = tmp_path / "images"
    layer = layer_of([Entry("a", b"layout")])
    digest = write_layout(images / "org" / "tool", [layer], name="2.0")
    named = write_layout(images / "x", [layer_of([])], name="docker.io/library/base:1")
    saved = layer_of([Entry("a", b"saved")])
    write_saved(images / "s.tar", [saved], name="ghcr.io/org/saved:latest")
    (images / "z.tar.gz").write_bytes(
        gzip.compress((images / "s.tar").read_bytes().replace(b"org/saved", b"org/zaved"))
    )
    (images / "junk.tar").write_bytes(b"junk")
    os.mkfifo(images / "pipe.tar")
    store = ImageStore(images)
    assert sum("pipe.tar: neither a file" in str(found) for found in find_images(images)) == 1
    for name in ("org/tool:2.0", "docker.io/org/tool:2.0", digest, f"any@{digest}"):
        assert (store.unpack(name).rootfs / "a").read_bytes() == b"layout"
    assert store.find("base:1").digest == named
    for name in ("ghcr.io/org/saved", "ghcr.io/org/zaved:latest", "s"):
        assert (store.unpack(name).rootfs / "a").read_bytes() == b"saved"
    with pytest.raises(ImageError, match=r"'nope' is not in .*not readable there: .*junk\.tar"):
        store.find("nope")
    with pytest.raises(ImageError, match="is not in"):
        store.find("org/tool:3.0")


def test_only_this_user_may_enter_what_is_unpacked(tmp_path: Path) -> None:
    write_layout(tmp_path / "made", [layer_of([Entry("a", b"x")])], name="1")
    store = ImageStore(tmp_path)
    store.unpack("made:1")
    assert stat.S_IMODE(store.unpacked.stat().st_mode) == 0o700
    store.unpacked.chmod(0o755)
    assert "mode 0700" in str(store.problem())
    remove_tree(store.unpacked)
    store.unpacked.symlink_to(tmp_path / "made")
    with pytest.raises(ImageError, match="mode 0700"):
        store.unpack("made:1")


def unpack_there(images: Path, done: str) -> None:
    ImageStore(images).unpack("made:1")
    Path(done).touch()


@pytest.mark.slow
def test_an_image_is_unpacked_once_and_a_killed_start_leaves_nothing(tmp_path: Path) -> None:
    """Four processes want it at once; the one before was killed in the middle."""
    images = tmp_path / "images"
    write_layout(images / "made", [layer_of([Entry("a", b"x")])], name="1")
    store = ImageStore(images)
    assert store.problem() is None
    half = store.unpacked / store.find("made:1").digest.removeprefix("sha256:")
    (half.with_suffix(".tmp") / "rootfs").mkdir(parents=True)
    (half.with_suffix(".tmp") / "rootfs" / "left").touch()
    spawn = multiprocessing.get_context("spawn")
    wanting = [
        spawn.Process(target=unpack_there, args=(images, str(tmp_path / f"done{n}")))
        for n in range(4)
    ]
    for process in wanting:
        process.start()
    for process in wanting:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in wanting] == [0] * 4
    names = {path.name for path in store.unpacked.iterdir()}
    assert names == {half.name, f"{half.name}.lock"}
    assert content(store.unpack("made:1").rootfs) == {"a"}


def test_one_lock_serves_threads_too(tmp_path: Path) -> None:
    write_layout(tmp_path / "made", [layer_of([Entry("a", b"x")])], name="1")
    store = ImageStore(tmp_path)
    store.find("made:1")
    collected: list[UnpackedImage] = []
    threads = [
        threading.Thread(target=lambda: collected.append(store.unpack("made:1"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({image.path for image in collected}) == 1
    assert len(collected) == 4


def test_the_users_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    tables = [
        Entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nme:x:70:71::/home/me:/bin/sh\n"),
        Entry("etc/group", b"root:x:0:\nwheel:x:9:\n"),
    ]
    image = ImageStore(unpack(tmp_path, tables).parents[2]).unpack("made:1")
    assert find_user(image, None) == ("root", 0, 0, "/root")
    assert find_user(image, "me") == ("me", 70, 71, "/home/me")
    assert find_user(image, "70:wheel") == ("me", 70, 9, "/home/me")
    assert find_user(image, "5:6") == ("5", 5, 6, "/")
    with pytest.raises(ImageError, match="'you' is not in /etc/passwd"):
        find_user(image, "you")
    with pytest.raises(ImageError, match="group 'none'"):
        find_user(image, "me:none")
