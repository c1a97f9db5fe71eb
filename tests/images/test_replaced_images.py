"""Runs whose images are replaced under the same name between two starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_images import layer_of_tree, make_repository, write_layout
from tests.helpers.running import records_by_id, run, started, wait_until, write_rows
from tests.images.conftest import CALC
from tests.images.test_image_runs import FLAGS, INTERRUPTED, OPTIONS, kill, row, terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def own(images: Path, tmp_path: Path) -> Path:
    """A directory with one image, `own:1`, whose repository a test may change."""
    directory = tmp_path / "own images"
    directory.mkdir()
    replace_image(images, directory, CALC)
    return directory


def replace_image(images: Path, directory: Path, files: dict[str, str]) -> None:
    tree = directory.with_name(f"tree {len(files)}")
    make_repository(tree / "testbed", files)
    shutil.rmtree(directory / "own", ignore_errors=True)
    layers = [layer_of_tree(images.with_name("trees") / "python"), layer_of_tree(tree)]
    write_layout(directory / "own", layers, name="1", config={"WorkingDir": "/testbed"})


def digest_of(directory: Path) -> str:
    index = json.loads((directory / "own/index.json").read_bytes())
    name = index["manifests"][0]["digest"].removeprefix("sha256:")
    manifest = json.loads((directory / "own/blobs/sha256" / name).read_bytes())
    return str(manifest["config"]["digest"])


def test_a_start_with_another_image_than_finished_records_is_refused(
    images: Path, own: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**OPTIONS, "images": own}
    write_rows(tmp_path / "p.jsonl", row("a", "own:1", terminal("cat pkg/calc.py")))
    assert run(tmp_path, **options).returncode == 0
    before = digest_of(own)
    assert records_by_id(tmp_path)["a"]["image"] == {"reference": "own:1", "digest": before}
    run_json = tmp_path / "trajectories/r/run.json"
    assert json.loads(run_json.read_bytes())["images"] == {"own:1": before}
    replace_image(images, own, {**CALC, "new.py": ""})
    write_rows(
        tmp_path / "p.jsonl",
        row("a", "own:1", terminal("cat pkg/calc.py")),
        row("b", "own:1", terminal("ls new.py")),
    )
    for more in ((), ("--dry_run",)):
        done = run(tmp_path, *more, **options)
        assert done.returncode == 2, done.stderr
        assert f"images: the run has {{'own:1': '{before}'}}, now" in done.stderr
        assert "--accept_config_change=images" in done.stderr
    done = run(tmp_path, **options, accept_config_change="images")
    assert done.returncode == 0, done.stderr
    found = {id: record["image"]["digest"] for id, record in records_by_id(tmp_path).items()}
    assert found == {"a": before, "b": digest_of(own)}
    assert json.loads(run_json.read_bytes())["images"] == {"own:1": digest_of(own)}
    assert run(tmp_path, **options).returncode == 0


def test_the_image_of_a_check_is_one_that_must_not_change(
    images: Path, own: Path, tmp_path: Path
) -> None:
    """Conversations of one run are judged alike."""
    options: dict[str, Any] = {**OPTIONS, "images": own}
    (own / "python").symlink_to(images / "python")
    check = {"command": "test ! -e new.py", "image": "own:1", "artifacts": ["pkg"]}
    rows = [row(id, "python:1", terminal("true"), check=check) for id in ("a", "b")]
    write_rows(tmp_path / "p.jsonl", rows[0])
    assert run(tmp_path, *FLAGS, **options).returncode == 0
    before = digest_of(own)
    judged = records_by_id(tmp_path)["a"]
    assert judged["check"]["image"] == {"reference": "own:1", "digest": before}
    assert judged["image"]["reference"] == "python:1"
    replace_image(images, own, {**CALC, "new.py": ""})
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, *FLAGS, **options)
    assert done.returncode == 2, done.stderr
    assert f"images: the run has {{'own:1': '{before}'}}, now" in done.stderr
    done = run(tmp_path, *FLAGS, **options, accept_config_change="images")
    assert done.returncode == 0, done.stderr
    assert records_by_id(tmp_path)["b"]["check"]["image"]["digest"] == digest_of(own)


def test_what_a_check_names_is_looked_for_before_the_first_call(
    images: Path, tmp_path: Path
) -> None:
    for_nothing: dict[str, dict[str, Any]] = {
        "no image": {"image": "no:1", "artifacts": ["pkg"]},
        "no user there": {"image": "shell:1", "user": "nobody-here", "artifacts": ["pkg"]},
        "no user": {"user": "nobody-here"},
    }
    rows = [
        row(id, "python:1", terminal("true"), check={"command": "true", **check})
        for id, check in for_nothing.items()
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, *FLAGS, **OPTIONS, images=images, max_attempts=1)
    assert done.returncode == 1, done.stderr
    found = records_by_id(tmp_path)
    assert [record["turns"] for record in found.values()] == [[], [], []]
    assert {record["error"]["class"] for record in found.values()} == {"setup_failed"}
    assert "image 'no:1' is not in" in found["no image"]["error"]["message"]


def test_a_conversation_whose_image_was_replaced_begins_again(
    images: Path, own: Path, tmp_path: Path
) -> None:
    """What it changed belongs to the image that it saw; its paid replies stay in the record."""
    options: dict[str, Any] = {**OPTIONS, "images": own}
    turns = [terminal("ls; echo kept > /file"), terminal(INTERRUPTED), terminal("ls new.py /file")]
    write_rows(tmp_path / "p.jsonl", row("a", "own:1", *turns, check="test -e new.py"))
    workspaces = tmp_path / "trajectories/r/workspaces"
    with started(tmp_path, *FLAGS, **options) as process:
        wait_until(lambda: list(workspaces.glob("*/upper/testbed/begun")))
        kill(process)
    replace_image(images, own, {**CALC, "new.py": ""})
    options |= {"command_timeout_s": 4, "accept_config_change": "command_timeout_s"}
    done = run(tmp_path, *FLAGS, **options)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert [restart["reason"] for restart in record["restarts"]] == ["the image was replaced"]
    assert len(record["discarded"]) == 2
    assert "new.py" in record["messages"][2]["content"]
    assert record["check"]["passed"]
    assert record["image"]["digest"] == digest_of(own)
