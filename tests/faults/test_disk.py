"""What a disk does to a run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.records.files import storage_error
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, finished_lines, judge_run_dir, resume_and_judge
from tests.faults.test_process import asking
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    WRITE_A_NOTE,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)

NOTE = {"tool_calls": [{"name": "write_file", "arguments": {"path": "n", "content": "1"}}]}


def scripted_rows(cwd: Path, count: int) -> None:
    """Rows that each play two turns."""
    rows: list[Any] = [
        {"id": f"p{n}", "prompt": "x", "script": [NOTE, {"content": "y"}]} for n in range(count)
    ]
    write_rows(cwd / "p.jsonl", *rows)


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[None]:
    """A file system of its own at `place`."""
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    mounted = subprocess.run(line, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("options", ["size=200k", "size=10m,nr_inodes=14"])
def test_a_disk_that_fills_stops_the_run_until_there_is_room(tmp_path: Path, options: str) -> None:
    """Without room or inodes: one message, exit 4, no storm of calls, a clean resume."""
    write_prompts(tmp_path / "p.jsonl", 60)
    with (
        small_disk(tmp_path / "disk", options),
        FakeEndpoint(turns=3, latency_s=0.0, **WRITE_A_NOTE) as endpoint,
    ):
        given = asking(endpoint, output_dir="disk")
        full = run(tmp_path, **given)
        assert full.returncode == 4, full.stderr
        assert "Traceback" not in full.stderr
        assert full.stderr.count("run the same command again") == 1, "one message"
        bigger = ["mount", "-o", "remount,size=50m,nr_inodes=100k", str(tmp_path / "disk")]
        subprocess.run(bigger, check=True)
        resume_and_judge(tmp_path, given, tasks=60, endpoint=endpoint, wasted=16)


def torn(tail: bytes) -> Callable[[Path], None]:
    """What a power loss leaves: the last line is cut in its middle, with `tail` in its place."""

    def damage(file: Path) -> None:
        lines = file.read_bytes().splitlines(keepends=True)
        lines[-1] = lines[-1][: len(lines[-1]) // 2] + tail
        file.write_bytes(b"".join(lines))

    return damage


def in_the_middle(file: Path) -> None:
    """A byte order mark, Windows line ends, a blank line and zeros in one file."""
    first, second, third, *rest = file.read_bytes().splitlines(keepends=True)
    second, third = second.replace(b"\n", b"\r\n"), b"\0" * (len(third) - 1) + b"\n"
    file.write_bytes(b"".join([b"\xef\xbb\xbf" + first, b"\n", second, third, *rest]))


DAMAGES = [
    pytest.param(torn(b""), id="the end is cut off", marks=pytest.mark.long),
    pytest.param(torn(b"\0" * 300), id="the end is zeros", marks=pytest.mark.long),
    pytest.param(torn(bytes(range(256)) * 2 + b"\n"), id="the end is garbage"),
    pytest.param(in_the_middle, id="the middle is damaged", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_by_a_power_loss_or_an_editor_costs_only_the_damaged_tasks(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Records and journals are damaged at the same time."""
    write_prompts(tmp_path / "p.jsonl", 16)
    run_dir = tmp_path / "trajectories" / "r"
    with FakeEndpoint(turns=3, latency_s=0.02, answers=36, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given) as process:
            wait_until(lambda: len(finished_lines(run_dir / "records.jsonl")) >= 6)
            os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
        endpoint.answer(None)
        before = finished_lines(run_dir / "records.jsonl")
        for file in (run_dir / "records.jsonl", *run_dir.glob("inflight/*.jsonl")):
            if len(file.read_bytes().splitlines()) > 3:
                damage(file)
        (run_dir / "records.idx").unlink()  # as old as the records at most, and not synced
        entries = finished_lines(run_dir / "records.jsonl")
        assert len(before) > len(entries) >= 3
        resume_and_judge(tmp_path, given, tasks=16, endpoint=endpoint, wasted=3 * 16)
    assert any(run_dir.glob("quarantine/records.jsonl*")), "what was unreadable is kept"


@pytest.mark.slow
def test_a_flipped_bit_of_a_journal_is_named_and_costs_only_its_conversation(
    tmp_path: Path,
) -> None:
    """The line stays JSON, so only its checksum shows the damage."""
    write_prompts(tmp_path / "p.jsonl", 8)
    run_dir = tmp_path / "trajectories" / "r"
    with FakeEndpoint(turns=4, latency_s=0.02, answers=10, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1, batch_size=8)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 10)
            os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
        endpoint.answer(None)
        (segment,) = run_dir.glob("inflight/*.jsonl")
        lines = segment.read_bytes().splitlines(keepends=True)
        number = next(n for n, line in enumerate(lines) if b'"kind":"reply"' in line)
        lines[number] = lines[number].replace(b'"turn":1', b'"turn":5')
        segment.write_bytes(b"".join(lines))
        done = resume_and_judge(tmp_path, given, tasks=8, endpoint=endpoint, wasted=3 + 8)
    assert "1 damaged lines were set aside in" in done.stderr
    assert f"quarantine: {segment.name}:{number + 1}; they do not" in done.stderr
    aside = run_dir / "quarantine" / f"{segment.name}.line{number + 1}"
    assert aside.read_bytes() == lines[number]


@pytest.mark.slow
def test_records_that_are_cut_under_a_run_stop_it(tmp_path: Path) -> None:
    """Otherwise the run would go on and end as if all was well."""
    write_prompts(tmp_path / "p.jsonl", 24)
    records = tmp_path / "trajectories" / "r" / "records.jsonl"
    with FakeEndpoint(turns=2, latency_s=0.02, answers=12, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1)
        with started(tmp_path, **given) as process:
            wait_until(lambda: len(finished_lines(records)) >= 4)
            os.truncate(records, 700)
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 4
        said = (tmp_path / "output.txt").read_text()
        assert "records.jsonl: it was cut or changed (it has" in said
        assert "Traceback" not in said
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
    judge_run_dir(records.parent, tasks=24)


@pytest.mark.long
def test_an_index_that_hides_damage_costs_one_more_start(tmp_path: Path) -> None:
    """The data wins; the first start names the damage, the second repairs it."""
    scripted_rows(tmp_path, 4)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    in_the_middle(tmp_path / "trajectories" / "r" / "records.jsonl")
    resume_and_judge(tmp_path, SCRIPTED, tasks=4, starts=2)


@pytest.mark.slow
def test_a_run_directory_that_vanishes_stops_the_run_and_nothing_is_written_elsewhere(
    tmp_path: Path,
) -> None:
    write_prompts(tmp_path / "p.jsonl", 40)
    with FakeEndpoint(turns=3, latency_s=0.05, answers=8, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 8)
            (tmp_path / "trajectories" / "r").rename(tmp_path / "away")
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 4
        said = (tmp_path / "output.txt").read_text()
        assert "Traceback" not in said
        assert "the run directory has vanished: it was moved or removed" in said
        assert_gone(process.pid)
        assert not list((tmp_path / "trajectories").iterdir()), "nothing is made where it was"
        (tmp_path / "away").rename(tmp_path / "trajectories" / "r")
        resume_and_judge(tmp_path, given, tasks=40, endpoint=endpoint, wasted=40)


@pytest.mark.long
def test_records_that_are_removed_under_a_run_stop_it(tmp_path: Path) -> None:
    """A file without a name takes everything, and the run would end as if all was well."""
    write_prompts(tmp_path / "p.jsonl", 16)
    records = tmp_path / "trajectories" / "r" / "records.jsonl"
    with FakeEndpoint(turns=3, latency_s=0.1, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1)
        with started(tmp_path, **given) as process:
            wait_until(lambda: len(finished_lines(records)) >= 4)
            records.unlink()
            assert process.wait(timeout=PATIENCE_S) == 4
        said = (tmp_path / "output.txt").read_text()
        assert "records.jsonl: it was removed or replaced while the run wrote to it" in said
        assert "Traceback" not in said
        refused = run(tmp_path, **given)
        assert refused.returncode == 2
        assert "remove records.idx to continue without them" in refused.stderr
        records.with_suffix(".idx").unlink()
        resume_and_judge(tmp_path, given, tasks=16, endpoint=endpoint, wasted=3 * 16)


def remove(path: Path) -> None:
    """Remove a file, or a directory although a run writes into it meanwhile."""
    if path.is_file():
        path.unlink()
        return
    while path.exists():
        with suppress(OSError):
            shutil.rmtree(path)
            return


@pytest.mark.slow
@pytest.mark.parametrize(
    "removed",
    [
        "inflight",
        pytest.param("inflight/worker-0-0.jsonl", marks=pytest.mark.long),
        "workspaces",
    ],
)
def test_journals_or_workspaces_that_are_removed_under_a_run_stop_it(
    tmp_path: Path, removed: str
) -> None:
    """No reply that was paid for is asked for again, those in flight included."""
    write_prompts(tmp_path / "p.jsonl", 8)
    gone = tmp_path / "trajectories" / "r" / removed
    with FakeEndpoint(turns=4, latency_s=0.05, answers=10, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1, batch_size=8)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 10)
            remove(gone)
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 4
        said = (tmp_path / "output.txt").read_text()
        assert removed in said, "by the worker that met it first, or by the parent"
        assert "run the same command again" in said
        assert "Traceback" not in said
        resume_and_judge(tmp_path, given, tasks=8, endpoint=endpoint, wasted=0)


@pytest.mark.long
def test_journals_that_are_moved_under_a_run_are_to_be_put_back(tmp_path: Path) -> None:
    """Conversations in flight are journaled where the directories are now."""
    write_prompts(tmp_path / "p.jsonl", 8)
    inflight = tmp_path / "trajectories" / "r" / "inflight"
    with FakeEndpoint(turns=3, latency_s=0.1, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] >= 8)
            inflight.rename(tmp_path / "away")
            assert process.wait(timeout=PATIENCE_S) == 4
        assert "inflight: it was moved during" in (tmp_path / "output.txt").read_text()
        (tmp_path / "away").rename(inflight)
        resume_and_judge(tmp_path, given, tasks=8, endpoint=endpoint, wasted=0)


def test_a_read_only_disk_is_reported_before_any_call(tmp_path: Path) -> None:
    scripted_rows(tmp_path, 1)
    with small_disk(tmp_path / "disk", "ro"):
        refused = run(tmp_path, **SCRIPTED, output_dir="disk")
    assert refused.returncode == 2
    assert "disk/r: cannot use this run directory: Read-only file system" in refused.stderr


@pytest.mark.parametrize(
    ("number", "to_do"),
    [
        (errno.ENOSPC, "make room or fix the disk"),
        (errno.EIO, "make room or fix the disk"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.EROFS, "make that file system writable"),
        (errno.EFBIG, "raise the limit of file sizes (ulimit -f)"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_with_what_helps(number: int, to_do: str) -> None:
    told = str(storage_error(Path("r/records.jsonl"), OSError(number, os.strerror(number))))
    assert told.startswith(f"r/records.jsonl: cannot write: {os.strerror(number)}. ")
    assert f"; {to_do}, then run the same command again" in told


@pytest.mark.parametrize(
    "arguments",
    [("export", "r"), ("export", "r", "--format=openai"), ("report", "r"), ("label", "r", "p0")],
    ids=" ".join,
)
def test_a_disk_that_is_only_read_is_not_called_full(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    scripted_rows(tmp_path, 1)
    with small_disk(tmp_path / "disk", "size=8m"):
        assert run(tmp_path, **SCRIPTED, output_dir="disk").returncode == 0
        mount = ["mount", "-o", "remount,ro", str(tmp_path / "disk")]
        subprocess.run(mount, check=True, timeout=PATIENCE_S)
        more: dict[str, Any] = {"verdict": "keep"} if arguments[0] == "label" else {}
        refused = run(tmp_path, *arguments, output_dir="disk", **more)
    assert refused.returncode == 4
    assert "Read-only file system" in refused.stderr
    assert "make that file system writable" in refused.stderr
    assert "room" not in refused.stderr


def test_a_full_disk_is_reported_before_any_call(tmp_path: Path) -> None:
    """Exit code 4, since the same command continues once there is room."""
    scripted_rows(tmp_path, 1)
    with small_disk(tmp_path / "disk", "size=64k"):
        with (tmp_path / "disk" / "full").open("wb") as file, suppress(OSError):
            file.write(b"x" * 100_000)
        refused = run(tmp_path, **SCRIPTED, output_dir="disk")
        assert refused.returncode == 4
        assert "disk/r: cannot write: No space left on device." in refused.stderr
        assert "run the same command again to continue" in refused.stderr
        (tmp_path / "disk" / "full").unlink()
        assert run(tmp_path, **SCRIPTED, output_dir="disk").returncode == 0


@pytest.mark.slow
def test_paths_with_spaces_and_other_alphabets_and_through_links(tmp_path: Path) -> None:
    """Others can write to no file of a run, under any umask."""
    scripted_rows(tmp_path, 2)
    (tmp_path / "da ten ü").mkdir()
    (tmp_path / "link").symlink_to("da ten ü")
    before = os.umask(0)
    try:
        assert run(tmp_path, **SCRIPTED, output_dir="da ten ü").returncode == 0
        resume_and_judge(tmp_path, {**SCRIPTED, "output_dir": "link"}, tasks=2)
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "link" / "r").rglob("*") if not path.is_symlink()]
    loose = [path.name for path in written if path.stat().st_mode & 0o022]
    assert not loose
    assert not (tmp_path / "link" / "r.jsonl").stat().st_mode & 0o022


@pytest.mark.slow
def test_a_foreign_file_in_the_run_directory_is_named_first(tmp_path: Path) -> None:
    """A pipe would be waited for without end, behind a dead link all would be paid again."""
    scripted_rows(tmp_path, 1)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    records = tmp_path / "trajectories" / "r" / "records.jsonl"
    kept = records.rename(tmp_path / "kept")
    records.symlink_to(tmp_path / "not-mounted" / "records.jsonl")
    started_again = run(tmp_path, **SCRIPTED)
    assert started_again.returncode == 2
    assert "r/records.jsonl: a dangling link; put the file" in started_again.stderr
    records.unlink()
    os.mkfifo(records)
    verified = run(tmp_path, "verify", "r")
    assert verified.returncode == 2
    assert "r/records.jsonl: not a plain file; put the file" in verified.stderr
    records.unlink()
    kept.rename(records)
    judge_run_dir(records.parent, tasks=1)


@pytest.mark.slow
@pytest.mark.parametrize("is_emptied", [False, True])
def test_lost_records_are_neither_paid_again_nor_exported(tmp_path: Path, is_emptied: bool) -> None:
    """The training file may be all that is left of them."""
    scripted_rows(tmp_path, 2)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    kept = (run_dir / "records.jsonl").rename(tmp_path / "kept")
    if is_emptied:
        (run_dir / "records.jsonl").touch()
    exported = run_dir.with_suffix(".jsonl").read_bytes()
    for refused in (run(tmp_path, **SCRIPTED), run(tmp_path, "export", "r")):
        assert refused.returncode == 2
        assert "r/records.jsonl: " + ("empty" if is_emptied else "missing") in refused.stderr
    assert run_dir.with_suffix(".jsonl").read_bytes() == exported
    kept.rename(run_dir / "records.jsonl")
    judge_run_dir(run_dir, tasks=2)
