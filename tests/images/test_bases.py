"""Images whose history is removed once, for all conversations that begin so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import records_by_id, run, started, wait_until, write_rows
from tests.images.test_image_runs import (
    FLAGS,
    INTERRUPTED,
    NOT_UNDONE,
    OPTIONS,
    assert_nothing_is_left,
    kill,
    row,
    terminal,
)
from toolsets.images.bases import find_base, keep_base, remove_bases, use_base

ONE_AT_A_TIME = {**OPTIONS, "num_workers": 1, "batch_size": 1}
"""So that each has its own time: clocks of file systems stand still for some milliseconds."""
MADE = "stat -c %y .git/refs"
"""Prints when the repository got its refs: removing the history makes them anew."""
JUDGED: dict[str, Any] = {
    "base_commit": "HEAD",
    "check": {"command": f"{MADE}; git status --short", "in": "fresh"},
}


def layer(layers: Path, name: str, content: str = "") -> Path:
    made = layers / name
    (made / "upper").mkdir(parents=True)
    (made / "upper/file").write_text(content)
    return made


def test_a_base_is_whole_and_the_first_one_made(tmp_path: Path) -> None:
    conversation = layer(tmp_path, "conversation")
    assert not use_base(conversation, "b")
    assert find_base(conversation) is None
    for content in ("first", "second"):
        keep_base(layer(tmp_path, ".tmp-making", content), "b")
    assert use_base(conversation, "b")
    assert find_base(conversation) == "b.base"
    assert (tmp_path / "b.base/upper/file").read_text() == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"b.base", "conversation"}


def test_bases_in_use_stay_and_few_others(tmp_path: Path) -> None:
    conversation = layer(tmp_path, "conversation")
    for n in range(20):
        keep_base(layer(tmp_path, ".tmp-making"), f"b{n}")
        if n == 0:
            use_base(conversation, "b0")
        os.utime(tmp_path / f"b{n}.base", (n, n))
    left = {f"b{n}.base" for n in (0, *range(4, 20))}
    assert {path.name for path in tmp_path.glob("*.base")} == left
    remove_bases(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"b0.base", "conversation"}


def _outputs(cwd: Path) -> dict[str, list[str]]:
    """What the first command of each conversation and its check printed."""
    return {
        name: [record["messages"][2]["content"], record["check"]["stdout"]]
        for name, record in records_by_id(cwd).items()
    }


def _times(cwd: Path) -> set[str]:
    """When histories were removed, as each conversation and its check say it."""
    texts = [text for both in _outputs(cwd).values() for text in both]
    return {text[text.index("20") :][:29] for text in texts}


@pytest.mark.slow
def test_rows_of_an_image_begin_alike_and_change_nothing_for_others(
    images: Path, tmp_path: Path
) -> None:
    spoil = "rm -rf .git/objects .git/refs/heads; echo x > pkg/calc.py"
    rows = [row(str(n), "python:1", terminal(f"{MADE}; {spoil}"), **JUDGED) for n in range(3)]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, *FLAGS, images=images, **ONE_AT_A_TIME)
    assert done.returncode == 0, done.stderr
    assert len(_times(tmp_path)) == 1, _outputs(tmp_path)
    assert all(" M pkg/calc.py" in check for _, check in _outputs(tmp_path).values())
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"setup": "true"}, {"files": {"a": "b"}}], ids=["command", "files"]
)
def test_what_a_row_adds_is_its_own(images: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = [row(str(n), "python:1", terminal(MADE), **JUDGED, **changes) for n in range(2)]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, *FLAGS, images=images, **ONE_AT_A_TIME)
    assert done.returncode == 0, done.stderr
    assert len(_times(tmp_path)) == 4, "two conversations and the copies of their checks"


def _interrupted(cwd: Path, images: Path) -> Path:
    """A run that was killed in the second turn of its conversation; its directory of layers."""
    turns = (
        terminal("echo kept > .git/mine; git update-ref refs/heads/b HEAD"),
        terminal(INTERRUPTED),
        terminal("cat .git/mine; git log --oneline b"),
    )
    write_rows(cwd / "p.jsonl", row("a", "python:1", *turns, **JUDGED))
    layers = cwd / "trajectories/r/workspaces"
    with started(cwd, *FLAGS, images=images, **NOT_UNDONE) as process:
        wait_until(lambda: list(layers.glob("*/upper/testbed/begun")))
        kill(process)
    return layers


def _nothing(layers: Path) -> None:
    del layers


def _remove(layers: Path) -> None:
    (base,) = layers.glob("*.base")
    base.rename(layers.parent.parent / "gone")


@pytest.mark.slow
@pytest.mark.parametrize(("lose", "is_kept"), [(_nothing, True), (_remove, False)])
def test_a_killed_conversation_has_what_is_below_or_begins_again(
    images: Path, tmp_path: Path, lose: Callable[[Path], None], is_kept: bool
) -> None:
    lose(_interrupted(tmp_path, images))
    options = {**NOT_UNDONE, "command_timeout_s": 4, "accept_config_change": "command_timeout_s"}
    done = run(tmp_path, *FLAGS, images=images, **options)
    assert done.returncode == 0, done.stderr
    record = records_by_id(tmp_path)["a"]
    assert ("restarts" not in record) == is_kept
    assert "kept\\n" in record["messages"][-2]["content"]
    assert " start" in record["messages"][-2]["content"]
    assert_nothing_is_left(tmp_path)
