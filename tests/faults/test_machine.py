"""A machine that has no more of something stops the run, uses no attempt and becomes no data."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import (
    HOST_ERRNOS,
    HostError,
    RunDirError,
    machine_failure,
    machine_failure_in,
)
from batch_trajectories.engine.messages import HaltRun
from tests.engine.test_suspects import Player, run_played
from tests.helpers.playing import call, calls, say
from tests.helpers.running import PATIENCE_S, ROOT, SCRIPTED, command, lines, run, write_rows

# A worker takes its own limits away, as a machine that fills up does, while `full` is there.
TOOLS = '''
import asyncio, os, resource, time
from pathlib import Path


def limits_of_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 20), hard))


async def squeeze(group: str = "") -> str:
    """Take what the machine has left."""
    if not Path("full").exists():
        return "there is room"
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        Path(group, "pids.max").write_text("1")
    else:
        limits_of_memory()
    return "squeezed"


def wait() -> str:
    """Wait in a thread."""
    time.sleep(0.2)
    return "waited"


async def take() -> str:
    """Take memory."""
    return str(len(bytearray(200 << 20)))


async def take_far_too_much() -> str:
    """Take more than there ever was."""
    return str(len(bytearray(1 << 60)))


ALL = [squeeze, wait, take, take_far_too_much]
'''


def run_options(cwd: Path, *turns: object) -> dict[str, Any]:
    (cwd / "own.py").write_text(TOOLS)
    write_rows(cwd / "p.jsonl", {"id": "a", "prompt": "q", "script": [*turns, say("ok")]})
    toolsets = {"enabled_toolsets": "own,terminal", "sandbox": "local", "tools": "own:ALL"}
    return {**SCRIPTED, **toolsets, "max_attempts": 1}


def is_stopped_and_goes_on(cwd: Path, options: dict[str, Any], message: str) -> None:
    (cwd / "full").touch()
    done = run(cwd, **options)
    assert done.returncode == 4, done.stderr
    assert message in done.stderr
    run_dir = cwd / "trajectories" / "r"
    assert lines(run_dir / "records.jsonl") == []
    assert lines(run_dir / "failures.jsonl") == []
    (cwd / "full").unlink()
    done = run(cwd, **options)
    assert done.returncode == 0, done.stderr
    (record,) = lines(run_dir / "records.jsonl")
    assert record["attempt"] == 1


@pytest.mark.slow
def test_no_thread_is_the_machines_failure(tmp_path: Path) -> None:
    options = run_options(tmp_path, calls(call("squeeze")), calls(*[call("wait")] * 12))
    is_stopped_and_goes_on(tmp_path, options, "can't start new thread; raise the limit")


REFUSING = f"""
import os, sys, threading
own, made, refused = os.getpid(), 0, int(sys.argv[1])


def refusing(start, error):
    def counted(*args):
        global made
        made += os.getpid() == own
        if os.getpid() == own and made == refused:
            raise error
        return start(*args)

    return counted


if sys.argv[2] == "thread":
    error = RuntimeError("can't start new thread")
    threading.Thread.start = refusing(threading.Thread.start, error)
else:
    os.fork = refusing(os.fork, BlockingIOError(11, "Resource temporarily unavailable"))
sys.path.insert(0, {str(ROOT)!r})
sys.argv[:3] = ["batch_runner.py"]
import batch_runner
batch_runner.cli()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number"), [("thread", 1), ("thread", 2), ("thread", 3), ("process", 2)]
)
def test_a_start_that_is_refused_a_thread_or_process_ends(
    tmp_path: Path, what: str, number: int
) -> None:
    options = {**run_options(tmp_path), "num_workers": 2, "num_samples": 2}
    _, _, *arguments = command(**options)
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, str(number), what, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("raise the limit on processes") == 1
    assert "Traceback" not in done.stderr
    assert run(tmp_path, **options).returncode == 0


@pytest.mark.parametrize(
    ("says", "exit_code", "advice"),
    [
        ("Resource temporarily unavailable", 4, "raise the limit on processes"),
        ("No space left on device", 2, "allow unprivileged user namespaces"),
        ("Operation not permitted", 2, "allow unprivileged user namespaces"),
    ],
)
def test_a_bwrap_that_gets_no_process_is_told_from_one_that_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, exit_code: int, advice: str
) -> None:
    """The kernel says ENOSPC where no further namespace is allowed."""
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.parent.mkdir()
    bwrap.write_text(
        f"#!/bin/sh\necho 'bwrap: Creating new namespace failed: {says}' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(bwrap.parent), prepend=os.pathsep)
    refused = run(tmp_path, **{**run_options(tmp_path), "sandbox": "bwrap"})
    assert refused.returncode == exit_code
    assert (says in refused.stderr, advice in refused.stderr) == (True, True)
    assert refused.stderr.count("error: ") == 1


def test_no_memory_is_the_machines_failure(tmp_path: Path) -> None:
    options = run_options(tmp_path, calls(call("squeeze")), calls(call("take")))
    is_stopped_and_goes_on(tmp_path, options, "Cannot allocate memory; give it more memory")


@pytest.mark.slow
def test_no_process_is_the_machines_failure(crowded: Path, tmp_path: Path) -> None:
    squeeze = call("squeeze", group=str(crowded))
    options = run_options(tmp_path, calls(squeeze), calls(call("terminal", command="ls")))
    is_stopped_and_goes_on(tmp_path, options, "Resource temporarily unavailable; raise the limit")


def test_one_oversized_value_is_the_tools_failure(tmp_path: Path) -> None:
    done = run(tmp_path, **run_options(tmp_path, calls(call("take_far_too_much"))))
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert "MemoryError" in str(record["messages"])


@pytest.mark.parametrize("number", sorted(HOST_ERRNOS), ids=errno.errorcode.get)
def test_every_way_to_say_no_is_known(number: int) -> None:
    said = OSError(number, os.strerror(number))
    for error in (said, ExceptionGroup("several", [ValueError(), said]), HostError(str(said))):
        assert os.strerror(number) in str(machine_failure(error))
    assert "; " in str(
        machine_failure_in(f"bwrap: Creating namespace failed: {os.strerror(number)}")
    )
    assert "; " in str(machine_failure_in(f"spawn node {errno.errorcode[number]}"))


def test_other_failures_are_not_the_machines() -> None:
    for error in (OSError(errno.ENOENT, "no"), RuntimeError("no"), ValueError()):
        assert machine_failure(error) is None
    assert machine_failure_in("bwrap: setting up uid map: Permission denied") is None


@pytest.mark.slow
def test_a_start_that_has_no_more_descriptors_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the first file that cannot be opened is; a program may start many runs."""

    def play(player: Player, message: object) -> None:
        player.say(HaltRun("enough"))

    run_played(tmp_path, monkeypatch, play, prompts=1)  # imports all that a start needs
    open_file, opened = os.open, 0
    refused = -1

    def open_few(*given: Any, **more: Any) -> int:
        nonlocal opened
        opened += 1
        if opened == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(*given, **more)

    monkeypatch.setattr(os, "open", open_few)
    before, refusals = descriptors(), 0
    while opened >= refused:
        refused, opened = max(1, refused + 1), 0
        shutil.rmtree(tmp_path / "trajectories", ignore_errors=True)
        opened = 0
        with suppress(RunDirError, OSError):
            _, stopped_by = run_played(tmp_path, monkeypatch, play, prompts=1)
            assert stopped_by == "enough" or "Too many open files" in stopped_by
        gc.collect()
        assert descriptors() == before, f"descriptor {refused}"
        refusals += opened >= refused
    assert refusals > 10


def descriptors() -> set[str]:
    """The files that this process has open, by their numbers and paths."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{fd.name} {fd.readlink()}")
    return found
