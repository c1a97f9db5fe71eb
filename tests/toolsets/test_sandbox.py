"""Sandboxes bound what a command may use, and bwrap also what it may reach."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from batch_trajectories.basics.text import output_text
from tests.running import PATIENCE_S, ROOT, wait_until
from toolsets.sandbox import SANDBOXES
from toolsets.sandbox.base import ExecResult, Limits, SandboxError
from toolsets.sandbox.bwrap import end_orphans, launch
from toolsets.sandbox.factory import make_sandbox, sandbox_problem
from toolsets.sandbox.inside.outputs import HeadTail
from toolsets.sandbox.inside.processes import descendants
from toolsets.workspace.workspace import Workspace

BWRAP_PROBLEM = sandbox_problem("bwrap")
needs_bwrap = pytest.mark.skipif(BWRAP_PROBLEM is not None, reason=str(BWRAP_PROBLEM))
BOTH = pytest.mark.parametrize("name", [pytest.param("bwrap", marks=needs_bwrap), "local"])

KEEP_ALIVE = "exec 9>alive; touch started; exec sleep 1000"
UNTIL_STARTED = "until [ -e started ]; do sleep 0.01; done"

Result = TypeVar("Result")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "ws")


@pytest.fixture
def alive(workspace: Workspace) -> Iterator[int]:
    """The reading end of a FIFO in the workspace, which shows whether a writer is left."""
    workspace.make()
    os.mkfifo(workspace.root / "alive")
    descriptor = os.open(workspace.root / "alive", os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def has_no_writer(descriptor: int) -> bool:
    """Wait until no writer is left."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(PATIENCE_S * 1000))


def cut_off(call: Callable[[float], Result], has_begun: Callable[[Result], bool]) -> Result:
    """What `call(timeout_s)` gives where its command is cut off after it has begun.

    A command that has not begun in time, as on a loaded machine, gets more time.
    """
    for timeout_s in (0.4, 4.0, 20.0):
        result = call(timeout_s)
        if has_begun(result):
            break
    return result


def run(
    name: str,
    workspace: Workspace,
    *argv: str,
    limits: Limits | None = None,
    timeout_s: float | None = None,
    stdin: bytes = b"",
) -> ExecResult:
    async def once() -> ExecResult:
        sandbox = make_sandbox(name, workspace, limits or Limits(timeout_s=20))
        try:
            return await sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin)
        finally:
            await sandbox.stop()

    return asyncio.run(once())


def sh(name: str, workspace: Workspace, script: str, limits: Limits | None = None) -> ExecResult:
    return run(name, workspace, "sh", "-c", script, limits=limits)


@BOTH
def test_a_command_sees_its_workspace_input_and_little_else(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "canary-7f3a")
    script = "pwd; echo $HOME; cat; env; echo x > out"
    result = run(name, workspace, "sh", "-c", script, stdin="hé\n".encode())
    home = make_sandbox(name, workspace, Limits()).home
    assert result.stdout.startswith(f"{home}\n{home}\nhé\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not result.timed_out
    assert not result.truncated
    assert "canary-7f3a" not in result.stdout
    assert (workspace.root / "out").read_text() == "x\n"


@BOTH
def test_input_is_empty_by_default(name: str, workspace: Workspace) -> None:
    assert run(name, workspace, "cat").stdout == ""


@BOTH
def test_exit_codes_are_those_of_a_shell(name: str, workspace: Workspace) -> None:
    assert sh(name, workspace, "exit 3").exit_code == 3
    assert sh(name, workspace, "kill -9 $$").exit_code == 137
    missing = run(name, workspace, "no-such-program")
    assert missing.exit_code == 127
    assert "no-such-program" in missing.stderr
    assert run(name, workspace, "/usr").exit_code == 126


@BOTH
def test_commands_that_cannot_be_started_say_so(name: str, workspace: Workspace) -> None:
    with pytest.raises(SandboxError, match="NUL"):
        run(name, workspace, "a\0b")
    with pytest.raises(SandboxError, match="no command"):
        run(name, workspace)
    with pytest.raises(SandboxError, match="too long"):
        run(name, workspace, "echo", "x" * 3_000_000)


@BOTH
def test_python_of_this_process_runs_in_the_sandbox(name: str, workspace: Workspace) -> None:
    result = run(name, workspace, "python3", "-c", "import sys, ssl, sqlite3; print(sys.version)")
    assert result.stdout.strip() == sys.version


@BOTH
def test_memory_of_a_process_is_limited(name: str, workspace: Workspace) -> None:
    hog = "x = bytearray(600 << 20); x[::4096] = b'1' * len(x[::4096]); print('got it')"
    result = run(name, workspace, "python3", "-c", hog, limits=Limits(memory_mb=256))
    assert "MemoryError" in result.stderr
    assert "got it" not in result.stdout


@BOTH
def test_the_size_of_a_file_is_limited(name: str, workspace: Workspace) -> None:
    result = sh(name, workspace, "head -c 5000000 /dev/zero > big", Limits(file_mb=2))
    assert result.exit_code != 0
    assert (workspace.root / "big").stat().st_size == 2 << 20


@BOTH
def test_an_output_flood_takes_limited_memory(name: str, workspace: Workspace) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    script = (
        "echo first; head -c 200000000 /dev/zero; echo; echo last; head -c 100000 /dev/zero >&2"
    )
    result = sh(name, workspace, script)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert "bytes cut ...]" in result.stdout
    assert "\0" not in result.stdout
    assert len(result.stdout) < 70_000
    assert len(result.stderr) < 70_000
    assert grown_kib < 20_000


@BOTH
def test_a_command_that_ignores_sigterm_dies_at_its_deadline(
    name: str, workspace: Workspace, alive: int
) -> None:
    script = f"trap '' TERM INT HUP; echo up; {KEEP_ALIVE}"
    result = cut_off(
        lambda timeout_s: run(name, workspace, "sh", "-c", script, timeout_s=timeout_s),
        lambda _: (workspace.root / "started").exists(),
    )
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == "up\n"
    assert (workspace.root / "started").exists()
    assert has_no_writer(alive)


@BOTH
def test_a_command_may_not_outlast_the_limit_by_asking(name: str, workspace: Workspace) -> None:
    result = run(name, workspace, "sleep", "5", limits=Limits(timeout_s=0.3), timeout_s=60)
    assert result.timed_out


@BOTH
def test_a_child_that_keeps_the_pipe_open_does_not_hold_up_the_result(
    name: str, workspace: Workspace, alive: int
) -> None:
    result = sh(name, workspace, f"( {KEEP_ALIVE} ) & {UNTIL_STARTED}; echo done")
    assert result.stdout == "done\n"
    assert result.exit_code == 0
    assert has_no_writer(alive)


@BOTH
def test_no_process_is_left_that_daemonised(name: str, workspace: Workspace, alive: int) -> None:
    script = f"setsid nohup sh -c '{KEEP_ALIVE}' >/dev/null 2>&1 & {UNTIL_STARTED}"
    assert sh(name, workspace, script).exit_code == 0
    assert has_no_writer(alive)


@BOTH
def test_cancelling_the_caller_kills_the_command(
    name: str, workspace: Workspace, alive: int
) -> None:
    async def cancelled() -> None:
        sandbox = make_sandbox(name, workspace, Limits())
        task = asyncio.create_task(sandbox.exec(["sh", "-c", f"{KEEP_ALIVE} & wait"]))
        while not (workspace.root / "started").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(has_no_writer, alive)
        await sandbox.stop()

    asyncio.run(cancelled())


@BOTH
def test_commands_die_with_a_worker_that_is_killed(
    name: str, workspace: Workspace, alive: int
) -> None:
    worker = f"""
import asyncio, pathlib
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace
sandbox = make_sandbox({name!r}, Workspace(pathlib.Path({str(workspace.root)!r})), Limits())
asyncio.run(sandbox.exec(["sh", "-c", {f"( {KEEP_ALIVE} ) & wait"!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", worker], cwd=ROOT)
    wait_until((workspace.root / "started").exists)
    process.kill()
    process.wait()
    assert has_no_writer(alive)


@needs_bwrap
def test_bwrap_reaches_no_network(workspace: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('in')"
        closed = run("bwrap", workspace, "python3", "-c", code)
        opened = run("bwrap", workspace, "python3", "-c", code, limits=Limits(network=True))
    assert "refused" in closed.stderr.lower()
    assert opened.stdout == "in\n"


@needs_bwrap
def test_bwrap_shows_no_secret_of_the_worker(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's environment counts, as what bwrap got before it cleared it for the command."""
    monkeypatch.setenv("API_KEY", "canary-7f3a")
    (tmp_path / "key.txt").write_text("canary-7f3a")
    script = f"env; cat /proc/*/environ; cat {tmp_path}/key.txt; ls -A /root /home /etc; hostname"
    worker = "import sys; from tests.toolsets.test_sandbox import probe; probe(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", worker, str(workspace.root), script],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    seen = json.loads(done.stdout)
    assert "PATH=" in seen["stdout"]
    assert "canary" not in seen["stdout"] + seen["stderr"]
    assert "shadow" not in seen["stdout"]
    assert socket.gethostname() not in seen["stdout"].split()


def probe(root: str, script: str) -> None:
    """Print what a command in a sandbox printed; run in a process that inherits a secret."""
    result = sh("bwrap", Workspace(Path(root)), script)
    print(json.dumps({"stdout": result.stdout, "stderr": result.stderr}))


@needs_bwrap
def test_bwrap_gives_no_privileges(workspace: Workspace) -> None:
    script = (
        "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status; unshare -U true; "
        "mount -t tmpfs none /tmp; chroot / true"
    )
    result = sh("bwrap", workspace, script)
    lines = result.stdout.split("\n")
    assert lines[0] == "1000"
    assert [line.split()[1] for line in lines[1:4]] == ["0" * 16, "0" * 16, "1"]
    assert result.exit_code != 0
    for word in ("unshare failed", "mount:", "chroot:"):
        assert word in result.stderr


@needs_bwrap
def test_bwrap_limits_everything_writable_outside_the_workspace(workspace: Workspace) -> None:
    script = (
        "for f in /x /dev/x /etc/x /usr/x /var/x /srv/x; do touch $f && echo wrote $f; done; "
        "for d in /tmp /dev/shm /var/tmp; do "
        "head -c 9000000 /dev/zero > $d/fill || echo full $d; done; "
        "echo > /dev/null && echo null"
    )
    result = sh("bwrap", workspace, script, Limits(tmp_mb=4))
    assert result.stdout.split("\n")[:-1] == ["full /tmp", "full /dev/shm", "full /var/tmp", "null"]


@needs_bwrap
def test_bwrap_forks_do_not_outlive_the_command(workspace: Workspace, alive: int) -> None:
    script = (
        "exec 9>alive; i=0; while [ $i -lt 120 ]; do (setsid sleep 1000 &) ; i=$((i+1)); done; "
        "touch started; sleep 1000"
    )
    result = cut_off(
        lambda timeout_s: run("bwrap", workspace, "sh", "-c", script, timeout_s=timeout_s),
        lambda _: (workspace.root / "started").exists(),
    )
    assert result.timed_out
    assert (workspace.root / "started").exists()
    assert has_no_writer(alive)


@needs_bwrap
def test_what_is_left_of_a_killed_start_is_ended(workspace: Workspace) -> None:
    """Until it has asked for a signal, nothing ends the child of a bwrap that is killed."""
    workspace.make()
    said, says = os.pipe()
    blocked, blocks = os.pipe()
    with ExitStack() as stack:
        held = ["--info-fd", str(says), "--userns-block-fd", str(blocked)]
        start = launch(["true"], stack, False, held, str(workspace.root))
        argv, fds = start.argv, (*start.pass_fds, says, blocked)
        bwrap = subprocess.Popen(argv, env=start.env, cwd=start.cwd, pass_fds=fds)
    try:
        first = os.pidfd_open(int(re.findall(rb"\d+", os.read(said, 1 << 16))[0]))
        end_orphans()
        assert not is_readable(first, 0), "its bwrap lives"
    finally:
        bwrap.kill()
        bwrap.wait()
    assert not is_readable(first, 0), "nothing has ended it"
    end_orphans()
    assert is_readable(first, PATIENCE_S)
    for fd in (said, says, blocked, blocks, first):
        os.close(fd)


def is_readable(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


@needs_bwrap
def test_a_hard_link_cannot_cross_the_edge_of_the_sandbox(workspace: Workspace) -> None:
    assert "cross-device" in sh("bwrap", workspace, "ln /usr/bin/env stolen").stderr.lower()


def test_a_missing_sandbox_is_refused_and_nothing_else_taken(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = sandbox_problem("bwrap")
    assert problem is not None
    assert "install bubblewrap" in problem
    with pytest.raises(SandboxError, match="install bubblewrap"):
        make_sandbox("bwrap", workspace, Limits())


def test_a_sandbox_that_cannot_start_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "uid map" in str(sandbox_problem("bwrap"))
    with pytest.raises(SandboxError, match="user namespaces"):
        make_sandbox("bwrap", workspace, Limits())


NEW_NAMESPACES = ["unshare", "--pid", "--mount", "--fork", "--kill-child"]
can_unshare = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NEW_NAMESPACES, "true"], capture_output=True, check=False).returncode != 0,
    reason="no namespaces of its own without root",
)


@can_unshare
@pytest.mark.parametrize(
    ("proc", "words"),
    [
        ("true", "/proc shows the processes of another PID namespace"),
        ("umount -l /proc", "/proc is not mounted"),
        ("mount -t proc proc /proc", "None"),
    ],
)
@BOTH
def test_a_proc_that_does_not_fit_is_named(name: str, proc: str, words: str) -> None:
    """bwrap would hang there, and `local` could end the processes of others."""
    say = "import sys, toolsets.sandbox.factory as f; print(f.sandbox_problem(sys.argv[1]))"
    done = subprocess.run(
        [*NEW_NAMESPACES, "sh", "-c", f'{proc} && exec "$@"', "-", sys.executable, "-c", say, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_an_unknown_sandbox_is_refused_by_name(workspace: Workspace) -> None:
    assert sandbox_problem("local") is None
    with pytest.raises(SandboxError, match=r"'podman'; known: bwrap, docker, local"):
        make_sandbox("podman", workspace, Limits())
    assert set(SANDBOXES) == {"bwrap", "docker", "local"}


@BOTH
def test_stopping_is_possible_at_any_time(name: str, workspace: Workspace) -> None:
    async def stops() -> None:
        sandbox = make_sandbox(name, workspace, Limits())
        await sandbox.stop()
        await sandbox.stop()

    asyncio.run(stops())
    assert not workspace.root.exists()


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_output_is_cut_between_characters_and_counted_exactly(chunk: int) -> None:
    raw = ("é日𝄞" * 40).encode()
    kept = HeadTail(101)
    for start in range(0, len(raw), chunk):
        kept.feed(raw[start : start + chunk])
    head, mark, tail = output_text(*kept.kept(), kept.total).split("\n")
    cut_bytes = int(mark.split()[1])
    assert "\ufffd" not in head + tail
    assert len(head.encode()) + len(tail.encode()) + cut_bytes == len(raw)


def test_output_within_the_limit_is_whole() -> None:
    kept = HeadTail(10)
    for piece in (b"01234", b"567", b"\xff\0"):
        kept.feed(piece)
    assert output_text(*kept.kept(), kept.total) == "01234567\ufffd\ufffd"


def test_commands_take_no_threads_of_the_worker(workspace: Workspace) -> None:
    async def threads() -> int:
        sandbox = make_sandbox("local", workspace, Limits())
        assert (await sandbox.exec(["sh", "-c", "exit 7"])).exit_code == 7
        await sandbox.stop()
        return threading.active_count()

    before = threading.active_count()
    assert asyncio.run(threads()) == before


def test_children_of_every_thread_are_found() -> None:
    found: list[int] = []
    done = threading.Event()

    def start() -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            found.append(child.pid)
            started.set()
            done.wait()

    started = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    try:
        assert found[0] in {pid for pid, _ in descendants()}
    finally:
        done.set()
        thread.join()
