"""`images` and runs with --pull=missing: images from a registry, before and while a run works."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, tree_of_programs
from tests.fakes.fake_registry import FakeRegistry, Faults
from tests.helpers.running import (
    kill_session,
    lines,
    records_by_id,
    run,
    started,
    wait_until,
    write_rows,
)
from tests.images.test_image_runs import OPTIONS, assert_nothing_is_left, row, terminal
from toolsets.images.store import ImageStore
from toolsets.sandbox.factory import sandbox_problem

needs_bwrap = pytest.mark.skipif(sandbox_problem("bwrap") is not None, reason="needs bubblewrap")


@pytest.fixture(autouse=True)
def without_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with a shell."""
    tree = tmp_path_factory.mktemp("tree")
    tree_of_programs(tree, with_python=False, with_git=False)
    return layer_of_tree(tree)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as made:
        yield made


def own_layer(name: str) -> bytes:
    return layer_of([Entry("work/name", name.encode()), Entry("filler", os.urandom(30_000))])


def add_image(registry: FakeRegistry, name: str, shell: bytes) -> str:
    registry.add_image(name, "1", [shell, own_layer(name)], {"WorkingDir": "/work"})
    return f"{registry.host}/{name}:1"


# The command.


def test_the_images_of_a_dataset_are_fetched(tmp_path: Path, registry: FakeRegistry) -> None:
    base = layer_of([Entry("base", os.urandom(30_000))])
    for name in ("a", "b", "check"):
        registry.add_image(name, "1", [base, own_layer(name)])
    write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "1", "image": f"{registry.host}/a:1"},
        {"prompt": "2", "docker_image": f"{registry.host}/b:1"},
        {"prompt": "3", "image": f"{registry.host}/a:1"},
        {
            "prompt": "4",
            "image": f"{registry.host}/gone:1",
            "check": {"command": "true", "image": f"{registry.host}/check:1"},
        },
    )
    done = run(tmp_path, "images", "p.jsonl", images="images")
    assert done.returncode == 1
    assert "4 images: 3 fetched, 0 here already, 1 failed" in done.stdout
    assert f"image '{registry.host}/gone:1' cannot be fetched" in done.stderr
    assert "MANIFEST_UNKNOWN" in done.stderr
    assert set(registry.whole_answers().values()) == {1}
    for name in ("a", "b", "check"):
        assert ImageStore(tmp_path / "images").has(f"{registry.host}/{name}:1")
    before = len(registry.requests_of("/blobs/"))
    again = run(tmp_path, "images", "p.jsonl", images="images")
    assert "0 fetched, 3 here already, 1 failed" in again.stdout
    assert len(registry.requests_of("/blobs/")) == before


def test_images_of_a_rows_file_and_of_a_mirror(tmp_path: Path, registry: FakeRegistry) -> None:
    registry.add_image("library/calc", "2", [own_layer("calc")])
    write_rows(tmp_path / "p.jsonl", {"question": "1", "box": "calc:2"})
    (tmp_path / "rows.yaml").write_text('columns: {prompt: "{{question}}", image: "{{box}}"}\n')
    (tmp_path / "my.yaml").write_text(
        f"images: boxes\nregistry: {{mirrors: {{docker.io: 'http://{registry.host}'}}}}\n"
    )
    done = run(tmp_path, "images", "p.jsonl", config="my.yaml", rows="rows.yaml")
    assert done.returncode == 0, done.stderr
    assert ImageStore(tmp_path / "boxes").has("calc:2")
    assert ImageStore(tmp_path / "boxes").has("docker.io/library/calc:2")


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ([{"prompt": "x"}], {"images": "images"}, "none of its 1 row names an image"),
        ([{"prompt": "x", "image": "a:1"}], {}, "--images: give the directory"),
        ([{"prompt": "x", "image": 1}], {"images": "images"}, "row 1: `image`"),
        (
            [{"prompt": "x", "image": "a:1"}],
            {"images": "images", "registry": '{"mirrors": {"docker.io": "here"}}'},
            "--registry, in mirrors.docker.io.0: must be an address",
        ),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], reason: str
) -> None:
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "images", "p.jsonl", **options)
    assert done.returncode == 2
    assert reason in done.stderr


def test_images_that_are_built_here_are_not_asked_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "image": "localhost/built:1"})
    done = run(tmp_path, "images", "p.jsonl", images="images")
    assert done.returncode == 1
    assert "images of this machine" in done.stderr


# Runs.


def options_of(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        **OPTIONS,
        "enabled_toolsets": "terminal",
        "images": tmp_path / "images",
        "pull": "missing",
        "num_workers": 2,
        "batch_size": 4,
        **more,
    }


@needs_bwrap
def test_a_run_fetches_what_it_lacks(
    tmp_path: Path, registry: FakeRegistry, shell: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing image fails its own conversations only, with the reason."""
    names = ["one", "two", "three"]
    images = {name: add_image(registry, name, shell) for name in names}
    gone = f"{registry.host}/gone:1"
    rows = [row(f"{name}-{n}", images[name], terminal("cat name")) for n in "ab" for name in names]
    write_rows(tmp_path / "p.jsonl", row("gone", gone, terminal("true")), *rows)
    run_log = tmp_path / "trajectories/r/run.log"
    # Else the run can end before the process that fetches ahead has begun.
    registry.on_blob = lambda digest: wait_until(lambda: "not fetched ahead" in run_log.read_text())
    done = run(tmp_path, max_attempts=1, **options_of(tmp_path))
    assert done.returncode in (0, 1), done.stderr
    found = records_by_id(tmp_path)
    assert len(found) == 7
    for name in names:
        assert f'"stdout":"{name}"' in str(found[f"{name}-a"]["messages"][-2]["content"])
    error = found["gone"]["error"]
    assert error["class"] == "setup_failed"
    assert f"image '{gone}' cannot be fetched" in error["message"]
    assert set(registry.whole_answers().values()) == {1}
    assert "not fetched ahead" in run_log.read_text()
    assert_nothing_is_left(tmp_path)

    # The same for what the run has: by its name alone.
    again = run(tmp_path, "images", "r")
    assert "4 images: 0 fetched, 3 here already, 1 failed" in again.stdout

    # Somebody else's run does not say where its images go.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    received = run(tmp_path, "images", "r")
    assert received.returncode == 2
    assert "not started here by you" in received.stderr
    assert "3 fetched" in run(tmp_path, "images", "r", images="other").stdout


@needs_bwrap
@pytest.mark.slow
def test_images_are_fetched_before_their_conversations(
    tmp_path: Path, registry: FakeRegistry, shell: bytes
) -> None:
    """In the order of the rows, while the first conversation still works."""
    images = {name: add_image(registry, name, shell) for name in ("a", "b", "c")}
    write_rows(
        tmp_path / "p.jsonl",
        row("a", images["a"], terminal("sleep 1000")),
        row("b", images["b"], terminal("cat name")),
        row("c", images["c"], terminal("cat name")),
    )
    options = options_of(tmp_path, num_workers=1, batch_size=1)
    host = tmp_path / "images" / "registry" / registry.host
    with started(tmp_path, **options) as process:
        wait_until(lambda: len(list(host.glob("*/index.json"))) == 3)
        assert lines(tmp_path / "trajectories/r/records.jsonl") == []
        kill_session(process.pid)
    asked = [one.path.split("/")[2] for one in registry.requests_of("/manifests/")]
    assert sorted(asked) == ["a", "b", "c"], "each once, whoever needs it"


@needs_bwrap
@pytest.mark.slow
def test_a_run_goes_on_without_its_help(tmp_path: Path, shell: bytes) -> None:
    """The process that fetches ahead is killed, and the registry fails now and then."""
    with FakeRegistry(faults=Faults(share=0.2), bytes_per_s=20e6) as registry:
        rows = []
        for number in range(12):
            image = add_image(registry, f"n{number}", shell)
            rows.append(row(f"{number}", image, terminal("cat name")))
        write_rows(tmp_path / "p.jsonl", *rows)
        with started(tmp_path, **options_of(tmp_path)) as process:
            wait_until(lambda: bool(helpers_of(process.pid)))
            for pid in helpers_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: process.poll() is not None)
        assert process.returncode == 0
    assert len(records_by_id(tmp_path)) == 12


def helpers_of(parent: int) -> list[int]:
    """The processes that fetch images ahead."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
