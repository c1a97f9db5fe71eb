"""Sandboxes bound what a command may use, and bwrap also what it may reach."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import output_text
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.sandbox_conformance import cut_off
from tests.helpers.running import PATIENCE_S, ROOT
from toolsets.sandbox import SANDBOXES
from toolsets.sandbox.base import ExecResult, Extras, Limits, SandboxError
from toolsets.sandbox.bwrap import end_orphans, launch
from toolsets.sandbox.factory import ENTRY_POINTS, find_sandbox_class, make_sandbox, sandbox_problem
from toolsets.sandbox.inside.outputs import HeadTail
from toolsets.sandbox.inside.processes import descendants
from toolsets.workspace.workspace import Workspace

BWRAP_PROBLEM = sandbox_problem("bwrap")
needs_bwrap = pytest.mark.skipif(BWRAP_PROBLEM is not None, reason=str(BWRAP_PROBLEM))
BOTH = pytest.mark.parametrize("name", [pytest.param("bwrap", marks=needs_bwrap), "local"])

KEEP_ALIVE = "exec 9>alive; touch started; exec sleep 1000"
UNTIL_STARTED = "until [ -e started ]; do sleep 0.01; done"


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
def test_python_of_this_process_runs_in_the_sandbox(name: str, workspace: Workspace) -> None:
    result = run(name, workspace, "python3", "-c", "import sys, ssl, sqlite3; print(sys.version)")
    assert result.stdout.strip() == sys.version


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
    ("proc", "message"),
    [
        ("true", "/proc shows the processes of another PID namespace"),
        pytest.param("umount -l /proc", "/proc is not mounted", marks=pytest.mark.slow),
        ("mount -t proc proc /proc", "None"),
    ],
)
@BOTH
def test_a_proc_that_does_not_fit_is_named(name: str, proc: str, message: str) -> None:
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
    assert message in done.stdout


PLUG_IN = """
from toolsets.sandbox.local import LocalSandbox
class Near(LocalSandbox):
    name = "near"
    takes_extras = False
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PLUG_IN, None),
        ("import missing_module", "cannot load near_by:Near of near-by 1.5: ModuleNotFoundError"),
        ("Near = 7", "near_by:Near of near-by 1.5 is no subclass of `Sandbox`"),
        (PLUG_IN.replace('"near"', '"other"'), "near_by:Near of near-by 1.5 has another `name`"),
        (
            "from toolsets.sandbox.served import ServedSandbox as Near",
            "near_by:Near of near-by 1.5 does not define home, launch",
        ),
    ],
)
def test_a_package_adds_a_sandbox(
    source: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "near_by-1.5.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: near-by\nVersion: 1.5\n")
    (described / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nnear = near_by:Near\n")
    (tmp_path / "near_by.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "near_by", raising=False)
    find_sandbox_class.cache_clear()
    try:
        problem = sandbox_problem("near")
        assert "(did you mean 'near'?)" in str(sandbox_problem("neer"))
        if message is None:
            assert problem is None
            assert make_sandbox("near", Workspace(tmp_path / "ws"), Limits()).name == "near"
            with pytest.raises(SandboxError, match="agents that are commands cannot run in it"):
                make_sandbox("near", Workspace(tmp_path / "ws"), Limits(), extras=Extras())
        else:
            assert message in str(problem)
    finally:
        find_sandbox_class.cache_clear()


def test_a_stored_run_whose_sandbox_is_not_installed_says_so(tmp_path: Path) -> None:
    """Its name is read from the run, where a start would have refused it."""
    (tmp_path / "p.jsonl").write_text("")
    config = RunConfig(run_name="r", dataset_file=tmp_path / "p.jsonl", model="m", sandbox="far")
    with pytest.raises(ConfigError, match="unknown sandbox 'far'; known: "):
        config.row_rules("scripted", is_priced=False, toolsets=())


def test_an_unknown_sandbox_is_refused_by_name(workspace: Workspace) -> None:
    assert sandbox_problem("local") is None
    with pytest.raises(SandboxError, match="'podman'; known: ") as refused:
        make_sandbox("podman", workspace, Limits())
    assert all(name in str(refused.value) for name in SANDBOXES)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_output_is_cut_between_characters_and_counted_exactly(chunk: int) -> None:
    raw = ("é日𝄞" * 40).encode()
    output = HeadTail(101)
    for start in range(0, len(raw), chunk):
        output.feed(raw[start : start + chunk])
    head, mark, tail = output_text(*output.head_and_tail(), output.total).split("\n")
    cut_bytes = int(mark.split()[1])
    assert "\ufffd" not in head + tail
    assert len(head.encode()) + len(tail.encode()) + cut_bytes == len(raw)


def test_output_within_the_limit_is_whole() -> None:
    output = HeadTail(10)
    for piece in (b"01234", b"567", b"\xff\0"):
        output.feed(piece)
    assert output_text(*output.head_and_tail(), output.total) == "01234567\ufffd\ufffd"


def test_commands_take_no_threads_of_the_worker(workspace: Workspace) -> None:
    async def threads() -> int:
        sandbox = make_sandbox("local", workspace, Limits())
        assert (await sandbox.exec(["sh", "-c", "exit 7"])).exit_code == 7
        await sandbox.stop()
        return threading.active_count()

    before = threading.active_count()
    assert asyncio.run(threads()) == before


def test_children_of_every_thread_are_found() -> None:
    collected: list[int] = []
    done = threading.Event()

    def start() -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            collected.append(child.pid)
            started.set()
            done.wait()

    started = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    try:
        assert collected[0] in {pid for pid, _ in descendants()}
    finally:
        done.set()
        thread.join()
