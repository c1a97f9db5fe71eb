"""200 images on 10 bases, with faults and kills: each layer is fetched once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, tree_of_programs
from tests.fakes.fake_registry import FakeRegistry, Faults
from tests.helpers.running import (
    LONG_S,
    kill_session,
    records_by_id,
    run,
    started,
    wait_until,
    write_rows,
)
from tests.images.test_image_runs import OPTIONS, assert_nothing_is_left, row, terminal
from tests.images.test_shared_layers import disk
from toolsets.images.store import ImageStore
from toolsets.sandbox.factory import sandbox_problem

pytestmark = pytest.mark.slow

IMAGES, BASES, KILLS = 200, 10, 5
PARALLEL = 6
"""The default of `--registry`."""
FAULTS = 0.05


@pytest.fixture(autouse=True)
def without_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def fill(registry: FakeRegistry, bases: list[list[bytes]]) -> list[str]:
    """Add the images; return their names in an order in which neighbours have other bases."""
    names = []
    for number in range(IMAGES):
        own = layer_of(
            [Entry("work/name", f"n{number}".encode()), Entry("filler", os.urandom(100_000))]
        )
        layers = [*bases[number % BASES], own]
        registry.add_image(f"org/n{number}", "1", layers, {"WorkingDir": "/work"})
        names.append(f"{registry.host}/org/n{number}:1")
    return names


def refuse_twice(images: Path) -> Callable[[str], None]:
    """A function that notes layers which are asked for although they are here."""

    def check(digest: str) -> None:
        if (images / "registry/.blobs/sha256" / digest.removeprefix("sha256:")).exists():
            asked_again.append(digest)

    asked_again.clear()
    return check


asked_again: list[str] = []


def fetched_bytes(images: Path) -> int:
    """The bytes of everything that was fetched, with its indexes; directories do not count."""
    return sum(
        path.lstat().st_size
        for path in (images / "registry").rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def assert_each_layer_once(registry: FakeRegistry, images: Path, names: list[str]) -> None:
    whole, sent = registry.whole_answers(), registry.sent_bytes()
    layers = sum(map(len, registry.blobs.values()))
    stored = fetched_bytes(images)
    refused = sum(one.status in (429, 500, 503) or not one.sent for one in registry.seen)
    print(
        f"\n{len(names)} images, {len(registry.blobs)} blobs of {layers:,} bytes; sent "
        f"{sum(sent.values()):,} ({sum(sent.values()) / layers:.3f}), stored {stored:,} "
        f"({stored / layers:.3f}); {len(registry.seen)} requests, {refused} refused or dropped; "
        f"{sum(whole.values()) - len(whole)} blobs sent twice"
    )
    assert registry.sent_at_once == 1, "no layer is fetched twice at the same time"
    # What was sent as a whole, and killed before it was written down.
    assert sum(whole.values()) - len(whole) <= KILLS * PARALLEL
    assert asked_again == [], "what is here is not asked for again"
    assert stored < 1.05 * layers
    assert sum(sent.values()) < 1.25 * layers, "what a fault or a kill cuts off"
    store = ImageStore(images)
    assert all(map(store.has, names))


def wait_for_bytes(registry: FakeRegistry, share: float) -> Callable[[], bool]:
    enough = share * sum(map(len, registry.blobs.values()))
    return lambda: sum(registry.sent_bytes().values()) >= enough


def test_the_command_fetches_each_layer_once(tmp_path: Path) -> None:
    """Two processes at a time, which are killed together again and again."""
    bases = [
        [layer_of([Entry(f"base{n}", os.urandom(3_000_000))]), layer_of([Entry(f"mid{n}")])]
        for n in range(BASES)
    ]
    faults, on_blob = Faults(share=FAULTS), refuse_twice(tmp_path / "images")
    with FakeRegistry(faults=faults, bytes_per_s=4e6, on_blob=on_blob) as registry:
        names = fill(registry, bases)
        write_rows(tmp_path / "p.jsonl", *({"prompt": "x", "image": name} for name in names))
        given = ("images", "p.jsonl")
        for kill in range(KILLS):
            with (
                started(tmp_path, *given, images="images") as one,
                started(tmp_path, *given, images="images") as two,
            ):
                wait_until(wait_for_bytes(registry, 0.9 * (kill + 1) / (KILLS + 1)))
                assert one.poll() is None
                kill_session(one.pid)
                kill_session(two.pid)
            wait_until(lambda: not registry.sending_now)
        done = run(tmp_path, *given, images="images")
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        assert_each_layer_once(registry, tmp_path / "images", names)


@pytest.mark.skipif(sandbox_problem("bwrap") is not None, reason="needs bubblewrap")
def test_a_run_fetches_each_layer_once(tmp_path: Path) -> None:
    """Conversations work in the images meanwhile, and each run that is killed is resumed."""
    tree = tmp_path / "tree"
    tree_of_programs(tree, with_python=False, with_git=False)
    programs = layer_of_tree(tree)
    bases = [[programs, layer_of([Entry(f"base{n}", os.urandom(2_000_000))])] for n in range(BASES)]
    faults, on_blob = Faults(share=FAULTS), refuse_twice(tmp_path / "images")
    with FakeRegistry(faults=faults, bytes_per_s=4e6, on_blob=on_blob) as registry:
        names = fill(registry, bases)
        rows = [row(f"{n}", name, terminal("cat name")) for n, name in enumerate(names)]
        write_rows(tmp_path / "p.jsonl", *rows)
        options: dict[str, Any] = {
            **OPTIONS,
            "enabled_toolsets": "terminal",
            "images": tmp_path / "images",
            "pull": "missing",
            "batch_size": 4,
        }
        began = time.monotonic()
        for kill in range(KILLS):
            with started(tmp_path, **options) as process:
                wait_until(wait_for_bytes(registry, 0.9 * (kill + 1) / (KILLS + 1)))
                assert process.poll() is None
                kill_session(process.pid)
            wait_until(lambda: not registry.sending_now)
        with started(tmp_path, **options) as process:
            wait_until(lambda: process.poll() is not None, timeout_s=LONG_S)
        assert process.returncode == 0, (tmp_path / "output.txt").read_text()[-2000:]
        print(f"\n{time.monotonic() - began:.0f} s with {KILLS} kills")
        found = records_by_id(tmp_path)
        for number in range(IMAGES):
            content = str(found[f"{number}"]["messages"][-2]["content"])
            assert f'"stdout":"n{number}"' in content
        assert_each_layer_once(registry, tmp_path / "images", names)
        assert_nothing_is_left(tmp_path)
        layers = sum(len(layer) for layer in {layer for base in bases for layer in base})
        unpacked = disk(ImageStore(tmp_path / "images").unpacked)
        print(f"{unpacked:,} bytes unpacked; {layers + IMAGES * 100_000:,} bytes in layers")
