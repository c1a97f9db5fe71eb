"""The tests that every sandbox passes, for those who write one.

    SANDBOX=NAME python -m pytest --pyargs batch_trajectories.sandbox_conformance

SANDBOX_IMAGE, SANDBOX_ENGINE and SANDBOX_RUNTIME are `--docker_image`, `--container_engine` and
`--container_runtime` of a sandbox that needs them. A test of what a sandbox does not claim, as one
that is not isolated, is skipped and says so.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from toolsets.sandbox import Engine
from toolsets.sandbox.base import (
    ExecResult,
    Limits,
    Sandbox,
    SandboxError,
    SandboxSettings,
)
from toolsets.sandbox.cgroup import make_group
from toolsets.sandbox.factory import find_sandbox_class, make_sandbox, sandbox_problem
from toolsets.workspace.workspace import Workspace

PATIENCE_S = 60.0
"""The longest wait for anything; only what is broken takes as long."""

WRITE_BEATS = "while :; do echo x >> beat; sleep 0.01; done"
"""A command whose process shows in the workspace that it lives."""
_STILL_S = 0.3
_WAIT_BEAT = "until [ -s beat ]; do sleep 0.01; done"
_CANARY = "canary-7f3a"

Result = TypeVar("Result")


class Box:
    """The sandboxes of one workspace."""

    def __init__(self, name: str, root: Path, settings: SandboxSettings | None = None) -> None:
        self.name = name
        self.settings = settings or SandboxSettings()
        self.kind = find_sandbox_class(name)
        self.workspace = Workspace(root)
        self.root = root
        self.beat = root / "beat"

    def make(self, limits: Limits | None = None) -> Sandbox:
        """A sandbox, to be stopped in the event loop that uses it."""
        limits = limits or Limits(timeout_s=20)
        return make_sandbox(self.name, self.workspace, limits, self.settings)

    def use(
        self,
        act: Callable[[Sandbox], Coroutine[Any, Any, Result]],
        limits: Limits | None = None,
    ) -> Result:
        """Give a sandbox to `act`, and stop it."""

        async def use() -> Result:
            sandbox = self.make(limits)
            try:
                return await act(sandbox)
            finally:
                await sandbox.stop()

        return asyncio.run(use())

    def run(
        self,
        *argv: str,
        limits: Limits | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run one command in a sandbox of its own."""
        return self.use(lambda one: one.exec(argv, timeout_s=timeout_s, stdin=stdin), limits)

    def sh(self, script: str, limits: Limits | None = None) -> ExecResult:
        """Run a script in a sandbox of its own."""
        return self.run("sh", "-c", script, limits=limits)

    def process_command(self, act: str) -> list[str]:
        """The command of another process that does `act`, code about a `box` like this one."""
        source = f"""
import asyncio, pathlib
from batch_trajectories.sandbox_conformance import Box
from toolsets.sandbox.base import SandboxSettings
box = Box({self.name!r}, pathlib.Path({str(self.root)!r}), {self.settings!r})
{act}
"""
        return [sys.executable, "-c", source]

    def is_still(self) -> bool:
        """Wait until nothing writes to `beat` any more."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            before = self.beat.stat().st_size
            time.sleep(_STILL_S)
            if self.beat.stat().st_size == before:
                return True
        return False


def cut_off(call: Callable[[float], Result], has_begun: Callable[[Result], bool]) -> Result:
    """The result of `call(timeout_s)` if its command is cut off after it has begun.

    A command that has not begun in time, as on a loaded machine, gets more time.
    """
    for timeout_s in (0.4, 4.0, 20.0):
        result = call(timeout_s)
        if has_begun(result):
            break
    return result


@pytest.fixture
def name() -> str:
    """The name of the sandbox."""
    if (name := os.environ.get("SANDBOX")) is None:
        pytest.fail("set the variable SANDBOX to the name of the sandbox")
    return name


@pytest.fixture
def box(name: str, tmp_path: Path) -> Box:
    """The sandboxes of this test."""
    settings = SandboxSettings(
        image=os.environ.get("SANDBOX_IMAGE"),
        engine=cast("Engine", os.environ.get("SANDBOX_ENGINE", "docker")),
        runtime=os.environ.get("SANDBOX_RUNTIME"),
    )
    if problem := sandbox_problem(name, settings):
        pytest.fail(problem)
    return Box(name, tmp_path / "ws", settings)


@pytest.fixture
def isolated(box: Box) -> Box:
    """A sandbox that claims to isolate; else the test is skipped."""
    if not box.kind.is_isolated:
        pytest.skip(f"sandbox {box.name} does not claim to isolate (is_isolated)")
    return box


class TestCommands:
    """Commands, each apart from all others."""

    def test_one_sees_its_workspace_and_input_and_no_secret(
        self, box: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("API_KEY", _CANARY)
        script = "pwd; echo $HOME; cat; env; echo err >&2; echo x > out"
        result = box.run("sh", "-c", script, stdin="hé\n".encode())
        home = box.make().home
        assert result.stdout.startswith(f"{home}\n{home}\nhé\n")
        assert (result.exit_code, result.stderr) == (0, "err\n")
        assert (result.timed_out, result.truncated) == (False, False)
        assert _CANARY not in result.stdout
        assert (box.root / "out").read_text() == "x\n"
        assert box.run("cat").stdout == "", "input is empty by default"

    def test_exit_codes_are_those_of_a_shell(self, box: Box) -> None:
        async def codes(one: Sandbox) -> list[ExecResult]:
            commands = [["sh", "-c", "exit 3"], ["sh", "-c", "kill -9 $$"]]
            commands += [["no-such-program"], ["/usr"]]
            return [await one.exec(argv) for argv in commands]

        exited, killed, missing, directory = box.use(codes)
        assert (exited.exit_code, killed.exit_code) == (3, 137)
        assert missing.exit_code == 127
        assert "no-such-program" in missing.stderr
        assert directory.exit_code == 126

    def test_those_that_cannot_be_started_say_so(self, box: Box) -> None:
        for argv, message in (
            (["a\0b"], "NUL"),
            ([], "no command"),
            (["echo", "x" * 3_000_000], ""),
        ):
            with pytest.raises(SandboxError, match=message or "too long"):
                box.run(*argv)

    def test_files_go_in_and_out(self, box: Box) -> None:
        """Files keep their bytes and modes, and this user can remove them."""
        box.workspace.make()
        (box.root / "in").write_bytes(bytes(range(256)))
        result = box.sh("mkdir -p d && cp in d/out && chmod 755 d/out && rm in")
        assert (result.exit_code, result.stderr) == (0, "")
        assert (box.root / "d/out").read_bytes() == bytes(range(256))
        assert (box.root / "d/out").stat().st_mode & 0o777 == 0o755
        assert not (box.root / "in").exists()
        box.workspace.remove()
        assert not box.root.exists()

    def test_an_output_flood_takes_limited_memory(self, box: Box) -> None:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood = "head -c 50000000 /dev/zero"
        result = box.sh(f"echo first; {flood}; echo; echo last; {flood} >&2")
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        assert (result.exit_code, result.truncated) == (0, True)
        assert result.stdout.startswith("first\n")
        assert result.stdout.endswith("last\n")
        assert "bytes cut ...]" in result.stdout
        assert "\0" not in result.stdout
        assert len(result.stdout) < 70_000
        assert len(result.stderr) < 70_000
        assert grown_kib < 20_000


class TestLimits:
    """The limits of a command."""

    def test_memory_of_a_process(self, box: Box) -> None:
        """A process that asks for more fails, or the sandbox is ended and says why."""
        hog = "x = bytearray(600 << 20); x[::4096] = b'1' * len(x[::4096]); print('got it')"
        try:
            result = box.run("python3", "-c", hog, limits=Limits(memory_mb=256))
        except SandboxError as error:
            said, has_failed = str(error), "use more memory than its limit" in str(error)
        else:
            said, has_failed = result.stdout, result.exit_code != 0
        assert has_failed
        assert "got it" not in said

    def test_the_size_of_a_file(self, box: Box) -> None:
        result = box.sh("head -c 5000000 /dev/zero > big", Limits(file_mb=2))
        assert result.exit_code != 0
        assert (box.root / "big").stat().st_size == 2 << 20

    def test_the_size_of_the_workspace(self, box: Box) -> None:
        fill = "i=0; while :; do i=$((i+1)); head -c 2000000 /dev/zero > f$i; sleep 0.05; done"
        result = box.sh(fill, Limits(timeout_s=60, workspace_mb=20))
        assert result.was_filling
        assert result.full_mb is not None
        assert result.full_mb > 20

    def test_the_number_of_processes(self, box: Box) -> None:
        """A command that starts more fails, or the sandbox is ended; the next call works again."""
        if not box.kind.limits_itself:
            if (group := make_group(30, 512)) is None:
                pytest.skip("no control groups can be made here")
            asyncio.run(group.close())
        bomb = "import os, time\nfor n in range(999):\n    if os.fork() == 0: time.sleep(1000)"

        async def act(one: Sandbox) -> int:
            try:
                result = await one.exec(["python3", "-c", f"{bomb}\nprint('all')"])
            except SandboxError:
                pass
            else:
                assert result.exit_code != 0
                assert "all" not in result.stdout
            return (await one.exec(["true"])).exit_code or 0

        assert box.use(act, Limits(timeout_s=60, processes=99)) == 0

    def test_all_of_a_command_dies_at_its_deadline(self, box: Box) -> None:
        """The command ignores signals, and has children in sessions of their own."""
        children = (
            f"(setsid sh -c '{WRITE_BEATS}' &) ; (nohup sh -c '{WRITE_BEATS}' >/dev/null 2>&1 &)"
        )
        script = f"trap '' TERM INT HUP; echo up; {children}; {WRITE_BEATS}"
        result = cut_off(
            lambda timeout_s: box.run("sh", "-c", script, timeout_s=timeout_s),
            lambda _: box.beat.exists(),
        )
        assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "up\n")
        assert box.is_still()

    def test_a_call_may_not_ask_for_more_time_than_the_limit(self, box: Box) -> None:
        assert box.run("sleep", "30", limits=Limits(timeout_s=0.3), timeout_s=60).timed_out


class TestEnds:
    """Nothing outlives what it belongs to."""

    def test_a_child_ends_with_its_command_and_does_not_hold_up_the_result(self, box: Box) -> None:
        """Whether it keeps the pipe open or has made itself a daemon."""
        children = f"( {WRITE_BEATS} ) & setsid nohup sh -c '{WRITE_BEATS}' >/dev/null 2>&1 &"

        async def act(one: Sandbox) -> ExecResult:
            result = await one.exec(["sh", "-c", f"{children} {_WAIT_BEAT}; echo done"])
            assert await asyncio.to_thread(box.is_still)
            return result

        result = box.use(act)
        assert (result.exit_code, result.stdout) == (0, "done\n")

    def test_cancelling_the_caller_kills_the_command(self, box: Box) -> None:
        async def act(one: Sandbox) -> None:
            task = asyncio.create_task(one.exec(["sh", "-c", f"( {WRITE_BEATS} ) & wait"]))
            while not box.beat.exists():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(box.is_still)

        box.use(act)

    def test_stopping_ends_all_that_runs(self, box: Box) -> None:
        async def act(one: Sandbox) -> None:
            await one.run("shell", f"(setsid sh -c '{WRITE_BEATS}' &); {_WAIT_BEAT}")

        box.use(act)
        assert box.is_still()

    def test_stopping_is_possible_at_any_time(self, box: Box) -> None:
        box.use(lambda one: one.stop())
        assert not box.root.exists(), "a sandbox starts with its first call"

    def test_commands_die_with_a_worker_that_is_killed(self, box: Box) -> None:
        act = (
            f"async def main(): await box.make().run('shell', {WRITE_BEATS!r})\nasyncio.run(main())"
        )
        process = subprocess.Popen(box.process_command(act), env=_child_environment())
        give_up = time.monotonic() + PATIENCE_S
        while not box.beat.exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert box.is_still()


class TestSessions:
    """A task's shell and interpreter."""

    def test_a_shell_keeps_directory_variables_and_functions(self, box: Box) -> None:
        async def act(one: Sandbox) -> tuple[ExecResult, ExecResult]:
            first = await one.run("shell", "mkdir d; cd d; X=1; export Y=2; f() { echo f$1; }")
            return first, await one.run("shell", 'basename "$PWD"; echo $X; sh -c "echo $Y"; f 3')

        first, second = box.use(act)
        assert (first.is_first, second.is_first) == (True, False)
        assert (second.exit_code, second.stdout) == (0, "d\n1\n2\nf3\n")

    def test_an_interpreter_keeps_its_names_and_shows_values(self, box: Box) -> None:
        async def act(one: Sandbox) -> list[ExecResult]:
            return [await one.run("python", code) for code in ("x = 41; print('out')", "x + 1")]

        first, second = box.use(act)
        assert (first.stdout, first.value) == ("out\n", None)
        assert second.value == "42"

    def test_a_session_that_ended_is_replaced(self, box: Box) -> None:
        async def act(one: Sandbox) -> list[ExecResult]:
            return [await one.run("shell", code) for code in ("X=1; exit 3", "echo .$X.")]

        ended, after = box.use(act)
        assert (ended.exit_code, ended.ended) == (3, True)
        assert (after.exit_code, after.stdout) == (0, "..\n")

    def test_the_background_prints_into_a_file_and_runs_on(self, box: Box) -> None:
        async def act(one: Sandbox) -> None:
            file = f"{one.home}/log"
            await one.run("shell", f"echo up; {WRITE_BEATS}", output_file=file)
            assert (await one.run("shell", f"{_WAIT_BEAT}; cat log")).stdout == "up\n"

        box.use(act)
        assert box.is_still()

    def test_a_workspace_outlasts_its_sandboxes(self, box: Box) -> None:
        assert box.sh("echo kept > file").exit_code == 0
        assert box.sh("cat file").stdout == "kept\n"


class TestIsolation:
    """The files, processes and networks that a command cannot reach."""

    def test_no_file_of_this_machine_is_shown_or_written(
        self, isolated: Box, tmp_path: Path
    ) -> None:
        (tmp_path / "key.txt").write_text(_CANARY)
        script = (
            f"cat {tmp_path}/key.txt /proc/*/environ; cat ../key.txt; echo x > {tmp_path}/new; "
            "echo x > /usr/new; echo x > /etc/new; ls -A /root /home"
        )
        result = isolated.sh(script)
        assert _CANARY not in result.stdout
        assert result.stdout.count("new") == 0
        assert not (tmp_path / "new").exists()
        assert not Path("/usr/new").exists()
        assert not Path("/etc/new").exists()

    def test_no_secret_of_this_process_is_readable(
        self, isolated: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("API_KEY", _CANARY)
        act = "print(box.sh('echo seen; cat /proc/*/environ /proc/*/cmdline').stdout)"
        done = subprocess.run(
            isolated.process_command(act), env=_child_environment(), capture_output=True, check=True
        )
        assert b"seen" in done.stdout
        assert _CANARY.encode() not in done.stdout

    def test_there_is_no_network_unless_it_is_given(self, isolated: Box) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
            closed = isolated.run("python3", "-c", code)
        assert closed.exit_code != 0
        assert "in\n" not in closed.stdout
        assert isolated.sh("tail -n +2 /proc/net/route").stdout == "", "a route leads outside"
        assert isolated.sh("true", Limits(network=True)).exit_code == 0

    def test_sandboxes_do_not_see_each_other(self, isolated: Box, tmp_path: Path) -> None:
        other = Box(isolated.name, tmp_path / "other", isolated.settings)
        leave = (
            "echo secret > /tmp/mark; echo secret > mark; "
            "python3 -c \"import socket, time; s = socket.create_server(('127.0.0.1', 4711)); "
            "open('up', 'w').write('x'); time.sleep(77777)\" & until [ -s up ]; do sleep 0.01; done"
        )
        look = (
            "cat /tmp/mark mark ../*/mark; grep -l 77777 /proc/[0-9]*/cmdline; "
            "python3 -c \"import socket; print(socket.socket().connect_ex(('127.0.0.1', 4711)))\""
        )

        async def act() -> tuple[ExecResult, ExecResult]:
            one, two = isolated.make(), other.make()
            try:
                await one.run("shell", leave)
                return await two.run("shell", look), await one.run("shell", look)
            finally:
                await asyncio.gather(one.stop(), two.stop())

        outside, inside = asyncio.run(act())
        assert "secret" not in outside.stdout
        assert "cmdline" not in outside.stdout
        assert outside.stdout.strip() not in ("", "0")
        assert "secret" in inside.stdout
        assert inside.stdout.endswith("\n0\n")

    def test_it_gives_no_privileges(self, isolated: Box) -> None:
        script = "mount -t tmpfs none /tmp && echo open; chroot / true && echo open; true"
        assert "open" not in isolated.sh(script).stdout


def _child_environment() -> dict[str, str]:
    """The environment for another process that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
