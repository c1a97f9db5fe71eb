"""Starting, killing and inspecting real runs, for the tests that need real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest
from click.testing import CliRunner

import batch_runner
from batch_trajectories.basics.process import restore_settings
from batch_trajectories.records.files import strip_checksum
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.prefork import Forked, can_fork

ROOT = Path(__file__).parents[2]

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


PATIENCE_S = 120.0
"""The longest wait for anything; only what is broken takes as long, however loaded the machine."""

LONG_S = 10 * PATIENCE_S
"""For hundreds of conversations on a loaded machine."""

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
    """Run batch_runner.py to its end; in this process, ten times faster, if it starts no worker."""
    given = command(*args, **options)
    is_main = threading.current_thread() is threading.main_thread()
    starts_nothing = "--dry_run" in args or (args and args[0] in _WITHOUT_WORKERS)
    # Libraries may read variables when they are imported: those of a test need a new process.
    if starts_nothing and is_main and not env and can_fork(os.environ):
        return _run_here(cwd, given)
    return _run(cwd, given, {**os.environ, **(env or {})}, PATIENCE_S)


def run_long(cwd: Path, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The same for hundreds of conversations."""
    return _run(cwd, command(*args, **options), os.environ, LONG_S)


def _run(
    cwd: Path, given: list[str], env: Mapping[str, str], patience_s: float
) -> subprocess.CompletedProcess[str]:
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = start(cwd, given, env, output, errors)
        try:
            code = process.wait(timeout=patience_s)
        except BaseException:
            process.kill()
            raise
        texts = [_text_of(file) for file in (output, errors)]
    return subprocess.CompletedProcess(given, code, *texts)


_WITHOUT_WORKERS = (
    "compare",
    "distributions",
    "endpoints",
    "export",
    "label",
    "limits",
    "look",
    "merge",
    "pause",
    "publish",
    "report",
    "retry",
    "score",
    "show",
    "stats",
    "status",
    "stop",
    "tools",
    "verify",
)


def _run_here(cwd: Path, given: list[str]) -> subprocess.CompletedProcess[str]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(cwd)
        patch.setattr(sys, "argv", given[1:])
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(restore_settings())
        output, errors, _ = stack.enter_context(CliRunner().isolation())
        before = set(sys.modules)
        with pytest.raises(SystemExit) as ended:
            batch_runner.cli()
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(cwd):
                del sys.modules[name]  # another test's may have the same name
        code = ended.value.code or 0
        texts = [_lines_of(stream.getvalue()) for stream in (output, errors)]
    assert isinstance(code, int)
    return subprocess.CompletedProcess(given, code, *texts)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return _lines_of(file.read())


def _lines_of(content: bytes) -> str:
    return content.decode().replace("\r\n", "\n").replace("\r", "\n")


@contextlib.contextmanager
def started(cwd: Path, *args: object, forks: bool = True, **options: object) -> Iterator[Process]:
    """A run in a process group of its own; what is left of it is killed at the end."""
    given = command(*args, **options)
    with (cwd / "output.txt").open("ab") as output:
        line = given if forks else spawning(given)
        process = start(cwd, line, os.environ, output, output)
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def kill_session(leader: int) -> None:
    """Kill all processes of the session that `leader` leads, and wait until none lives."""

    def is_over() -> bool:
        living = session_of(leader)  # again and again: a process may just have started another
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    wait_until(is_over)


def session_of(leader: int) -> list[int]:
    """The living processes of the session that `leader` leads or led."""
    collected = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, session, threads = fields[0], int(fields[3]), int(fields[17])
        # A dead process whose other threads still end holds its files and locks.
        if session == leader and (state != "Z" or threads > 1):
            collected.append(int(stat.parent.name))
    return collected


def kill_repeatedly(
    cwd: Path, given: Mapping[str, Any], endpoint: FakeEndpoint, calls: Iterable[int]
) -> None:
    """Kill the process group of a run after each of these numbers of further calls.

    The endpoint holds its other replies until then, so that no run ends before.
    """
    for more in calls:
        with started(cwd, **given) as process:
            enough = endpoint.journal()["requests"] + more
            endpoint.answer(enough)
            _wait_for_calls(process, endpoint, enough)
            assert process.poll() is None, "it ended before it was killed"
            os.killpg(process.pid, signal.SIGKILL)
            _wait_for_end(process.pid)
    endpoint.answer(None)


def _wait_for_calls(process: Process, endpoint: FakeEndpoint, enough: int) -> None:
    wait_until(lambda: process.poll() is not None or endpoint.journal()["requests"] >= enough)


def _wait_for_end(session: int) -> None:
    wait_until(lambda: not session_of(session))


def workers_of(parent: int) -> list[int]:
    """The worker processes of a run: children forked by it, or with the spawn entry point."""
    collected = []
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
            collected.append(pid)
    return collected


def wait_until(condition: Any, *, timeout_s: float = PATIENCE_S) -> None:
    """Poll until `condition()` holds; the time is a limit for a broken test, not a measure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a JSONL file, without their checksums; fails on any that is not whole JSON."""
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(strip_checksum(line)) for line in content.splitlines()]


def records(cwd: Path, run_name: str = "r") -> list[dict[str, Any]]:
    """The records of a run, in the order written."""
    return lines(cwd / "trajectories" / run_name / "records.jsonl")


def records_by_id(
    cwd: Path, run_name: str = "r", *, may_repeat: bool = False
) -> dict[str, dict[str, Any]]:
    """The records of a run, sorted by id, the last of each id.

    Fails if two have the same id, unless they `may_repeat`, as after an edit of a row.
    """
    written = records(cwd, run_name)
    by_id = {record["id"]: record for record in sorted(written, key=lambda record: record["id"])}
    assert may_repeat or len(by_id) == len(written)
    return by_id


def sorted_records(cwd: Path, run_name: str = "r") -> list[dict[str, Any]]:
    """The records of a run, sorted by id; fails if two have the same id."""
    return [*records_by_id(cwd, run_name).values()]


def summary(cwd: Path, run_name: str = "r") -> dict[str, Any]:
    """The content of the summary of a run."""
    path = cwd / "trajectories" / run_name / "summary.json"
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


def ids(path: Path) -> Sequence[str]:
    return [line["id"] for line in lines(path)]
