"""Deaths of single processes and signals; tests/program/test_run.py has further ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, judge_run_dir, resume_and_judge
from tests.helpers.running import (
    PATIENCE_S,
    ROOT,
    SCRIPTED,
    WRITE_A_NOTE,
    command,
    started,
    wait_until,
    workers_of,
    write_prompts,
    write_rows,
)
from tests.toolsets.test_sandbox import needs_bwrap


def asking(endpoint: FakeEndpoint, **more: object) -> dict[str, Any]:
    """Options of a run of two workers that asks `endpoint`."""
    given = {**SCRIPTED, "model": "openai:m", "key_env": "none", "num_workers": 2, "batch_size": 4}
    return {**given, "base_url": endpoint.openai_url, **more}


def test_killing_the_parent_alone_loses_nothing(tmp_path: Path) -> None:
    """Its workers go with it, so that the next start has the directory to itself."""
    write_prompts(tmp_path / "p.jsonl", 12)
    with FakeEndpoint(turns=3, latency_s=0.02, answers=8, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] >= 6)
            assert len(workers_of(process.pid)) == 2
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert_gone(process.pid)
            endpoint.answer(None)
            resume_and_judge(tmp_path, given, tasks=12, endpoint=endpoint, wasted=8)


@pytest.mark.parametrize(
    "signal_name", [pytest.param("the parent alone", marks=pytest.mark.long), "the whole group"]
)
@pytest.mark.slow
def test_a_sigterm_of_a_scheduler_stops_the_run_in_time(tmp_path: Path, signal_name: str) -> None:
    """Kubernetes asks the first process, Slurm all of them; calls outlast the grace."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=2, latency_s=300.0, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=1, grace_s=0.5)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["in_flight"] == 4)
            kill = os.kill if signal_name == "the parent alone" else os.killpg
            kill(process.pid, signal.SIGTERM)
            assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
            assert_gone(process.pid)
        said = (tmp_path / "output.txt").read_text()
        assert "stopping: running turns get 0.5 s to finish" in said
        assert (
            "interrupted by SIGTERM; finished work is safe: run the same command again to continue"
            in said
        )
        assert "Traceback" not in said
        endpoint.change(latency_s=0.0)
        endpoint.reset()
        resume_and_judge(tmp_path, given, tasks=4, endpoint=endpoint)
        assert endpoint.journal()["requests"] == 8


@pytest.mark.slow
def test_a_closed_output_pipe_does_not_stop_the_run(tmp_path: Path) -> None:
    """`| head -1` closes the pipe after the first line."""
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "x", "script": [{"content": "y"}]}, {})
    line = " ".join(command(**SCRIPTED)) + " 2>&1 | head -1"
    piped = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in piped.stdout + piped.stderr
    judge_run_dir(tmp_path / "trajectories" / "r", tasks=1)


def test_a_worker_that_cannot_open_its_log_says_so_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
import os, resource
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from batch_trajectories.engine.messages import decode_from_worker
from batch_trajectories.engine.worker.worker import run_worker
ours, theirs = Pipe()
setup = SimpleNamespace(
    is_remote=False, run_dir=Path({str(tmp_path)!r}), config=SimpleNamespace(log_level="info")
)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError:
    pass
try:
    run_worker(theirs, setup)
except SystemExit as error:
    print(error.code, decode_from_worker(ours.recv_bytes()).message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("1 a worker cannot work:")
    assert "run.log: Too many open files" in done.stdout


@pytest.mark.parametrize(
    ("toolset", "arguments"),
    [
        ("terminal", {"command": "echo out"}),
        pytest.param("python", {"code": "print('out')"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("files", [200, pytest.param(252, marks=pytest.mark.slow)])
def test_a_low_limit_of_open_files_stops_the_run_and_is_nobodys_result(
    tmp_path: Path, toolset: str, arguments: dict[str, str], files: int
) -> None:
    """Shells and interpreters have descriptors with high numbers, which the limit excludes."""
    call = {"tool_calls": [{"name": toolset, "arguments": arguments}]}
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [call, {"content": "y"}]})
    given = {**SCRIPTED, "enabled_toolsets": toolset, "sandbox": "local"}
    stopped = subprocess.run(
        ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(files), *command(**given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert stopped.returncode == 4, stopped.stderr
    assert "Too many open files; raise the limit of open files (ulimit -n)" in stopped.stderr
    resume_and_judge(tmp_path, given, tasks=1)
    assert "Bad file descriptor" not in (tmp_path / "trajectories" / "r.jsonl").read_text()


@pytest.mark.slow
@needs_bwrap
def test_a_run_whose_starter_ignores_the_ends_of_its_children_completes(tmp_path: Path) -> None:
    """What a program starts inherits ignored signals; bwrap waits for SIGCHLD."""
    call = {"tool_calls": [{"name": "terminal", "arguments": {"command": "echo out"}}]}
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [call, {"content": "y"}]})
    given = {**SCRIPTED, "enabled_toolsets": "terminal", "sandbox": "bwrap"}
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignoring, *command(**given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    judge_run_dir(tmp_path / "trajectories" / "r", tasks=1)
