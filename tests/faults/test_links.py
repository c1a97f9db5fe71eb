"""A run directory from somebody else, and the modes of what is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.playing import say
from tests.helpers.running import SCRIPTED, run, write_rows


def files_and_directories(run_dir: Path) -> list[Path]:
    return [path for path in [run_dir, *run_dir.rglob("*")] if not path.is_symlink()]


def test_nothing_is_written_through_a_link_in_a_run_directory(tmp_path: Path) -> None:
    """It may come from somebody else: a link in it would have this user overwrite a file."""
    given = scripted_options(tmp_path)
    run_dir = tmp_path / "trajectories" / "r"
    assert run(tmp_path, **given).returncode == 0
    for name in (
        "lock",
        "run.log",
        "run.json",
        "records.jsonl",
        "records.idx",
        "failures.jsonl",
        "inflight",
        "workspaces",
        "exports",
        "quarantine",
        f"workspaces/{'0' * 32}",
    ):
        with replaced_by_a_link(run_dir / name, tmp_path / "mine") as target:
            before = {path: path.stat().st_mtime_ns for path in files_and_directories(target)}
            refused = run(tmp_path, **given)
            assert refused.returncode == 2, refused.stderr
            assert f"r/{name}: a symbolic link, which nothing is written through" in refused.stderr
            assert before == {
                path: path.stat().st_mtime_ns for path in files_and_directories(target)
            }


@contextmanager
def replaced_by_a_link(entry: Path, target: Path) -> Iterator[Path]:
    """`entry` as a link to `target`, which has what was there, or is a directory with a file."""
    was_there = entry.exists()
    if was_there:
        entry.rename(target)
    else:
        target.mkdir()
    if target.is_dir():
        (target / "file").touch()
    entry.symlink_to(target)
    yield target
    entry.unlink()
    if target.is_dir():
        (target / "file").unlink()
    if was_there:
        target.rename(entry)
    else:
        target.rmdir()


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("export", "r", "--format=openai"), "exports/dataset"),
        (("score", "r", "--reward=own.py:score"), "scores.jsonl"),
    ],
)
def test_other_commands_write_through_no_link_either(
    tmp_path: Path, args: tuple[str, ...], name: str
) -> None:
    given = scripted_options(tmp_path)
    assert run(tmp_path, **given).returncode == 0
    (tmp_path / "own.py").write_text("def score(conversation, workspace, row):\n    return 1.0\n")
    target = tmp_path / "mine"
    target.mkdir() if name == "exports/dataset" else target.touch()
    (tmp_path / "trajectories" / "r" / name).symlink_to(target)
    refused = run(tmp_path, *args)
    assert refused.returncode == 2, refused.stderr
    assert "a symbolic link, which nothing is written through" in refused.stderr
    assert target.is_file() or not any(target.iterdir())


@pytest.mark.parametrize("name", ["batches", "inflight", "workspaces"])
def test_a_repair_removes_nothing_behind_a_link(tmp_path: Path, name: str) -> None:
    given = scripted_options(tmp_path)
    assert run(tmp_path, **given).returncode == 0
    with replaced_by_a_link(tmp_path / "trajectories" / "r" / name, tmp_path / "mine") as target:
        (target / "worker-0-0.jsonl").touch()
        (target / ("0" * 32)).mkdir()
        refused = run(tmp_path, "verify", "r", "--repair")
        assert refused.returncode == 2, refused.stderr
        assert f"r/{name}: a symbolic link" in refused.stderr
        assert {path.name for path in target.iterdir()} == {"file", "worker-0-0.jsonl", "0" * 32}
        (target / "worker-0-0.jsonl").unlink()
        (target / ("0" * 32)).rmdir()


def test_a_run_directory_may_be_a_link_itself(tmp_path: Path) -> None:
    given = scripted_options(tmp_path)
    (tmp_path / "fast").mkdir()
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "r").symlink_to(tmp_path / "fast")
    assert run(tmp_path, **given).returncode == 0
    assert run(tmp_path, "export", "r", "--format=openai").returncode == 0
    assert (tmp_path / "fast" / "exports" / "dataset" / "openai").is_dir()


def test_without_a_umask_only_the_owner_may_write(tmp_path: Path) -> None:
    given = scripted_options(tmp_path)
    before = os.umask(0)
    try:
        assert run(tmp_path, **given).returncode == 0
        assert run(tmp_path, "export", "r", "--format=openai").returncode == 0
        assert run(tmp_path, "report", "r").returncode == 0
    finally:
        os.umask(before)
    written = files_and_directories(tmp_path / "trajectories")
    assert len(written) > 10
    assert [path for path in written if path.stat().st_mode & 0o022] == []


def scripted_options(cwd: Path) -> dict[str, Any]:
    write_rows(cwd / "p.jsonl", {"id": "a", "prompt": "x", "script": [say("done")]})
    return SCRIPTED


@pytest.mark.parametrize("note", [b"x", b"[]", b'{"url": "file:///m"}'])
def test_a_damaged_note_of_a_mirror_is_named(tmp_path: Path, note: bytes) -> None:
    """By what looks at conversations in flight; it is no bug of this program."""
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "q", "script": [say("ok")]})
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    (run_dir / "mirror.json").write_bytes(note)
    told = run(tmp_path, "status", "r")
    assert told.returncode == 2, told.stderr
    assert "mirror.json: damaged: " in told.stderr
    whole = b'{"url": "file:///m", "number": 0, "files": {}}'
    (run_dir / "mirror.json").write_bytes(whole)
    assert run(tmp_path, "status", "r").returncode == 0, "earlier versions noted no `fetched`"
