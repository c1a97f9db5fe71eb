"""The lease of a mirror, and what comes back from one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.bucket import Bucket
from batch_trajectories.basics.errors import ConfigError, RunDirError, RunLocked
from batch_trajectories.mirror.copies import Copy, update_copy
from batch_trajectories.mirror.mirror import Mirror
from batch_trajectories.mirror.tail import DIRECTORY, unpack_part
from batch_trajectories.records.journal import Inflight, boot_id, journal_line, read_note
from batch_trajectories.records.tasks import task_key
from tests.helpers.running import ROOT

LINE = b'{"a":1}\n'


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{tmp_path}/bucket"


def a_run(place: Path) -> Path:
    """A directory that looks like a run."""
    path = place / "r"
    (path / "inflight").mkdir(parents=True)
    for name in ("lock", "records.idx"):
        (path / name).touch()
    for name in ("run.json", "records.jsonl", "inflight/worker-0-0.jsonl", "run.log"):
        (path / name).write_bytes(LINE)
    return path


def open_mirror(url: str, run_dir: Path) -> Mirror:
    mirror = Mirror(url, run_dir, stale_s=0.0)
    mirror.take()
    mirror.start(run_dir.parent / "p.jsonl")
    return mirror


def an_empty_run(place: Path) -> Path:
    path = place / "r"
    path.mkdir(parents=True)
    (path / "lock").touch()
    return path


def content_of(path: Path) -> dict[str, bytes]:
    """The files of a run that a mirror has."""
    files = (file for file in path.rglob("*") if file.is_file())
    names = {str(file.relative_to(path)): file.read_bytes() for file in files}
    return {name: names[name] for name in names.keys() - {"lock", "mirror.json", "records.idx"}}


def test_a_directory_comes_back_from_its_mirror(tmp_path: Path, url: str) -> None:
    run_dir = a_run(tmp_path)
    (tmp_path / "p.jsonl").write_bytes(LINE)
    mirror = open_mirror(url, run_dir)
    with (run_dir / "records.jsonl").open("ab") as file:
        file.write(LINE + b'{"torn')
    (run_dir / "inflight" / "worker-0-0.jsonl").unlink()
    (run_dir / "inflight" / "worker-1-0.jsonl").write_bytes(LINE * 3)
    new = run_dir / ".run.json"
    new.write_bytes(b"{}\n")
    new.replace(run_dir / "run.json")
    mirror.close()

    expected = content_of(run_dir) | {"records.jsonl": LINE * 2, "dataset.jsonl": LINE}
    assert content_of(update_copy(f"{url}/r")) == expected

    # What comes later is brought by parts of its own.
    mirror = open_mirror(url, run_dir)
    (run_dir / "scores.jsonl").write_bytes(LINE)
    mirror.close()
    assert content_of(update_copy(f"{url}/r")) == expected | {"scores.jsonl": LINE}


def test_a_first_start_that_comes_back_may_not_write(tmp_path: Path, url: str) -> None:
    first = open_mirror(url, a_run(tmp_path / "a"))
    second = open_mirror(url, an_empty_run(tmp_path / "b"))
    with (tmp_path / "a/r/records.jsonl").open("ab") as file:
        file.write(LINE)
    with pytest.raises(RunLocked, match="has taken over this run"):
        first.close()
    with (tmp_path / "b/r/records.jsonl").open("ab") as file:
        file.write(b'{"b":1}\n')
    second.close()
    assert (update_copy(f"{url}/r") / "records.jsonl").read_bytes() == LINE + b'{"b":1}\n'

    # Started again, it goes on from the mirror, and keeps what it had not sent.
    open_mirror(url, tmp_path / "a/r").close()
    assert (tmp_path / "a/r/records.jsonl").read_bytes() == LINE + b'{"b":1}\n'
    (kept,) = (tmp_path / "a/r/quarantine").glob("before-mirror-*/records.jsonl")
    assert kept.read_bytes() == LINE * 2


@pytest.mark.parametrize("late", [1, 9])
def test_a_machine_that_slept_while_it_sent_is_no_slow_bucket(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Another start may have the lease by then, which the next part shows."""
    first = open_mirror(url, a_run(tmp_path))
    clock, create = time.monotonic, Bucket.create
    created: list[str] = []
    are_enough = Event()

    def created_late(self: Bucket, name: str, content: bytes) -> bool:
        done = create(self, name, content)
        created.append(name)
        if len(created) > 3:
            are_enough.set()
        with (tmp_path / "r/records.jsonl").open("ab") as file:
            file.write(LINE)  # so that there is another part
        return done

    monkeypatch.setattr(Bucket, "create", created_late)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60 * min(len(created), late))
    (tmp_path / "r/run.log").write_bytes(LINE * 2)
    assert are_enough.wait(60)
    monkeypatch.undo()
    assert (first.problem is not None) == (late > 1)
    first.close()


def test_a_copy_of_a_directory_does_not_write_over_what_came_later(
    tmp_path: Path, url: str
) -> None:
    run_dir = a_run(tmp_path / "a")
    mirror = open_mirror(url, run_dir)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with (run_dir / "records.jsonl").open("ab") as file:
        file.write(LINE)
    mirror.close()
    open_mirror(url, tmp_path / "b/r").close()
    assert (tmp_path / "b/r/records.jsonl").read_bytes() == LINE * 2


def test_a_run_that_is_not_that_of_the_mirror_is_refused(tmp_path: Path, url: str) -> None:
    open_mirror(url, a_run(tmp_path / "a")).close()
    other = a_run(tmp_path / "b")
    (other / "records.jsonl").write_bytes(b'{"other":1}\n')
    with pytest.raises(RunDirError, match="were not made by one another"):
        open_mirror(url, other)


def test_journals_from_a_mirror_do_not_show_which_calls_began(tmp_path: Path, url: str) -> None:
    run_dir = a_run(tmp_path / "a")
    event = {"kind": "began", "turn": 1, "call": 0, "at": 1.0}
    line = journal_line("t", "d", event, assignment=1, position=0, boot=boot_id())  # type: ignore[arg-type]
    (run_dir / "inflight/worker-0-0.jsonl").write_bytes(line)
    open_mirror(url, run_dir).close()
    open_mirror(url, an_empty_run(tmp_path / "b")).close()
    key = task_key("t", "d")
    for place, knows in (("a", True), ("b", False)):
        inflight = Inflight(tmp_path / place / "r/inflight")
        inflight.read(settled=frozenset())
        assert inflight.has_start_events(key) == knows


def test_a_damaged_part_is_named(tmp_path: Path, url: str) -> None:
    open_mirror(url, a_run(tmp_path)).close()
    part = tmp_path / "bucket/r/parts/000000000002"
    part.write_bytes(part.read_bytes().replace(LINE, b'{"a":2}\n'))
    with pytest.raises(RunDirError, match=r"parts/000000000002: damaged"):
        update_copy(f"{url}/r")


@pytest.mark.parametrize("name", ["../x", "lock", "inflight/../../x", "/etc/x", "mirror.json"])
def test_no_part_writes_outside_its_run(name: str, url: str) -> None:
    from batch_trajectories.mirror.tail import LogPart, Piece, pack_part

    content = pack_part(LogPart(1, {}, 0.0, [Piece(name, 0, b"", 0)]))
    with pytest.raises(RunDirError, match="is no file of a run"):
        unpack_part(content, "here")


def test_without_the_extra_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[mirror\]"):
        Bucket("s3://bucket/runs")


@pytest.fixture
def holders(tmp_path: Path, url: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that want the same lease, each with a directory of its own."""
    processes = []
    for name in "ab":
        run_dir = an_empty_run(tmp_path / name)
        line = [sys.executable, "-m", "tests.mirror.holding", str(run_dir), url, "0.15"]
        processes.append(subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("takes", [200])
def test_of_two_starts_one_writes_through_stops_and_continues(
    takes: int, tmp_path: Path, url: str, holders: list[subprocess.Popen[str]]
) -> None:
    """The holder is stopped, the other takes the lease, and the first continues."""
    dice = random.Random(1)
    for _ in range(takes):
        last = _last_holder(tmp_path / "bucket/r/parts", holders)
        os.kill(last.pid, signal.SIGSTOP)
        (other,) = (process for process in holders if process is not last)
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        os.kill(last.pid, signal.SIGCONT)
        if dice.random() < 0.5:  # or as it takes the lease
            os.kill(other.pid, signal.SIGSTOP)
            os.kill(other.pid, signal.SIGCONT)
    assert all(process.poll() is None for process in holders)

    writers: dict[int, set[str]] = {}
    fences = []
    for name, content in Bucket(f"{url}/r").read_after(DIRECTORY, ""):
        part = unpack_part(content, name)
        writers.setdefault(part.fence, set()).add(part.holder["token"])
        fences.append(part.fence)
    assert fences == sorted(fences)
    assert max(fences) >= takes
    assert all(len(tokens) == 1 for tokens in writers.values())
    copy = Copy(an_empty_run(tmp_path / "c"), Bucket(f"{url}/r"))
    copy.catch_up()  # every part follows from the one before it


def _last_holder(parts: Path, holders: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    while not (names := sorted(parts.glob("?" * 12))):
        pass
    pid = unpack_part(names[-1].read_bytes(), "").holder["pid"]
    return next(process for process in holders if process.pid == pid)


def test_what_a_start_has_sent_is_not_read_again_by_the_next(url: str, tmp_path: Path) -> None:
    """A large run that is killed soon after its first upload need not read its mirror again."""
    run_dir = a_run(tmp_path)
    with (run_dir / "records.jsonl").open("wb") as file:
        file.writelines([LINE] * (20 << 17))  # three parts
    mirror = open_mirror(url, run_dir)
    try:
        note = read_note(run_dir)
        parts = sorted((tmp_path / "bucket" / "r" / DIRECTORY).iterdir())
        assert len(parts) > 3
        assert note is not None
        assert note["number"] == int(parts[-1].name)
    finally:
        mirror.close()
