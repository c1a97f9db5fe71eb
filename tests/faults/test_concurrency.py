"""Two runners, stale locks, readers, clocks."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.engine.run_dir import read_holder
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import resume_and_judge
from tests.faults.test_disk import scripted_rows
from tests.faults.test_process import asking
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    WRITE_A_NOTE,
    command,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
)


@pytest.mark.long
def test_of_two_that_start_at_once_one_works(tmp_path: Path) -> None:
    """The other is refused by exit code 5, and no call is made twice."""
    write_prompts(tmp_path / "p.jsonl", 8)
    with FakeEndpoint(turns=3, latency_s=0.3, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        both = [
            subprocess.Popen(command(**given), cwd=tmp_path, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        assert sorted(process.wait(timeout=PATIENCE_S) for process in both) == [0, 5]
        assert endpoint.journal()["requests"] == 24
        resume_and_judge(tmp_path, given, tasks=8, endpoint=endpoint)


@pytest.mark.slow
def test_the_content_of_a_lock_file_locks_nothing(tmp_path: Path) -> None:
    """Pids are used again, and hosts vanish; only the kernel's lock counts."""
    scripted_rows(tmp_path, 1)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    claims: list[object] = [{"pid": 1, "host": "elsewhere"}, {"pid": os.getpid()}, []]
    for said in claims:
        (tmp_path / "trajectories" / "r" / "lock").write_bytes(orjson.dumps(said))
        assert read_holder(tmp_path / "trajectories" / "r") is None
    resume_and_judge(tmp_path, SCRIPTED, tasks=1)


@pytest.mark.long
def test_readers_of_a_running_run_see_whole_lines(tmp_path: Path) -> None:
    """Records are whole up to the last newline, and exports made meanwhile are whole."""
    write_prompts(tmp_path / "p.jsonl", 30)
    training = tmp_path / "trajectories" / "r.jsonl"
    records = tmp_path / "trajectories" / "r" / "records.jsonl"
    seen: set[int] = set()

    def look() -> bool:
        content = records.read_bytes() if records.exists() else b""
        whole = content[: content.rfind(b"\n") + 1].splitlines()
        seen.add(len([orjson.loads(line)["id"] for line in whole]))
        return len(whole) >= 20

    with FakeEndpoint(turns=3, latency_s=0.05, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given) as process:
            wait_until(look)
            exported = run(tmp_path, "export", "r")
            assert exported.returncode == 0, exported.stderr
            assert [orjson.loads(line) for line in training.read_bytes().splitlines()]
            assert process.wait(timeout=PATIENCE_S) == 0
        resume_and_judge(tmp_path, given, tasks=30, endpoint=endpoint)
    assert len(seen) > 1


def fake_clock() -> str | None:
    """The library that moves the wall clock of a process, where it is installed."""
    found = ctypes.util.find_library("faketime")
    usual = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
    named = os.environ.get("LIBFAKETIME", usual)
    return found or (named if Path(named).exists() else None)


@pytest.mark.slow
@pytest.mark.parametrize("jump", ["-2d", "+2d"])
def test_a_clock_that_jumps_during_a_run_changes_nothing(
    tmp_path: Path, jump: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is taken for silent or late, and no call is made twice."""
    library = fake_clock()
    if library is None:
        pytest.skip("libfaketime is not installed (LIBFAKETIME names one elsewhere)")
    write_prompts(tmp_path / "p.jsonl", 8)
    clock = tmp_path / "clock"
    clock.write_text("+0")
    with FakeEndpoint(turns=4, latency_s=0.1, answers=8, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with monkeypatch.context() as moved:
            moved.setenv("LD_PRELOAD", library)
            moved.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
            moved.setenv("FAKETIME_NO_CACHE", "1")
            moved.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            with started(tmp_path, **given) as process:
                wait_until(lambda: endpoint.journal()["replies"] == 8)
                clock.write_text(jump)
                endpoint.answer(None)
                assert process.wait(timeout=PATIENCE_S) == 0
        assert (tmp_path / "trajectories" / "r" / "failures.jsonl").read_bytes() == b""
        ends = {turn["started_at"] > time.time() - 86400 for turn in turns_of(tmp_path)}
        assert ends == ({True, False} if jump == "-2d" else {True})
        resume_and_judge(tmp_path, given, tasks=8, endpoint=endpoint)
        assert endpoint.journal()["requests"] == 32


def turns_of(cwd: Path) -> list[dict[str, Any]]:
    records = lines(cwd / "trajectories" / "r" / "records.jsonl")
    return [turn for record in records for turn in record["turns"]]
