"""Starting, killing and inspecting real runs, for the tests that need real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from runs.store.checksum import without_checksum
from testing.fake_endpoint import FakeEndpoint
from tests.prefork import Forked, can_fork

ROOT = Path(__file__).parent.parent

WRITE_A_NOTE: dict[str, Any] = {
    "tool": "write_file",
    "arguments": '{"path": "n{turn}", "content": "{turn}"}',
}
"""Options of the fake endpoint: each turn but the last asks to write a file."""

SCRIPTED: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "scripted",
    "enabled_toolsets": "file",
    "num_workers": 1,
}
"""Options of a run that plays the scripts of its rows."""


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"id": f"p{n:04}", "prompt": f"Question number {n}"} for n in range(count)]
    return write_rows(path, *rows)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*args: object, **options: object) -> list[str]:
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, str(ROOT / "batch_runner.py"), *map(str, args), *flags]


Process = subprocess.Popen[bytes] | Forked
"""A command that was started."""


def start(
    cwd: Path, args: list[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
) -> Process:
    """Start a `command`, by a fork where that is equal to a new interpreter."""
    if can_fork(env) and args[1] != "-c":
        return Forked(args[1:], cwd=cwd, env=env, stdout=output, stderr=errors)
    return subprocess.Popen(
        args,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


# With a second thread, the program starts its workers as new interpreters instead of forking.
_WITH_A_THREAD = f"""
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = "batch_runner.py"
import batch_runner
batch_runner.cli()
"""


def spawning(line: Sequence[str]) -> list[str]:
    """A command line of `command` whose workers are spawned, not forked."""
    return [line[0], "-c", _WITH_A_THREAD, *line[2:]]


def run(
    cwd: Path, *args: object, env: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run batch_runner.py to its end."""
    given = command(*args, **options)
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = start(cwd, given, {**os.environ, **(env or {})}, output, errors)
        try:
            code = process.wait(timeout=120)
        except BaseException:
            process.kill()
            raise
        texts = [_text_of(file) for file in (output, errors)]
    return subprocess.CompletedProcess(given, code, *texts)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def started(cwd: Path, *args: object, forks: bool = True, **options: object) -> Iterator[Process]:
    """A run in a process group of its own; what is left of it is killed at the end."""
    given = command(*args, **options)
    with (cwd / "output.txt").open("ab") as output:
        line = given if forks else spawning(given)
        process = start(cwd, line, os.environ, output, output)
    try:
        yield process
    finally:
        for pid in session_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def session_of(leader: int) -> list[int]:
    """The living processes of the session that `leader` leads or led."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def kill_repeatedly(
    cwd: Path, given: Mapping[str, Any], endpoint: FakeEndpoint, calls: Iterable[int]
) -> int:
    """Kill the process group of a run after each of these numbers of further calls.

    Stops at a run that ends before its kill. Returns how many were killed.
    """
    kills = 0
    for more in calls:
        with started(cwd, **given) as process:
            if not _kill_after(process, endpoint, more):
                break
        kills += 1
    return kills


def _kill_after(process: Process, endpoint: FakeEndpoint, calls: int) -> bool:
    """Kill the process group after so many further calls; False if the run ended before."""
    enough = endpoint.journal()["requests"] + calls
    wait_until(lambda: process.poll() is not None or endpoint.journal()["requests"] >= enough)
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not session_of(process.pid))
    return True


def workers_of(parent: int) -> list[int]:
    """The worker processes of a run: children forked by it, or with the spawn entry point."""
    found = []
    try:
        own = Path(f"/proc/{parent}/cmdline").read_bytes()
    except FileNotFoundError:
        return []
    for pid in session_of(parent):
        try:
            cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        is_child = int(stat.rpartition(")")[2].split()[1]) == parent
        if is_child and (cmdline == own or b"spawn_main" in cmdline):
            found.append(pid)
    return found


def wait_until(condition: Any, *, timeout_s: float = 30.0) -> None:
    """Poll until `condition()` holds; the time is a bound for a broken test, not a measure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a JSONL file, without their checksums; fails on any that is not whole JSON."""
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(without_checksum(line)) for line in content.splitlines()]


def ids(path: Path) -> Sequence[str]:
    return [line["id"] for line in lines(path)]
