"""The base of all sandboxes that last for a whole task.

A program of ours runs inside (`toolsets.sandbox.inside`) and holds the task's shell and
interpreter. The whole sandbox is ended if it breaks the protocol, does not answer by a call's
deadline, or the caller is cancelled. The next call starts another sandbox and says so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import re
import resource
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno, has_memory
from batch_trajectories.basics.text import output_text
from toolsets.sandbox.base import (
    ExecResult,
    Extras,
    Limits,
    Sandbox,
    SandboxError,
    SandboxSettings,
    SessionKind,
)
from toolsets.sandbox.cgroup import Group, make_group, refusals_here
from toolsets.sandbox.channel import Channel, Gone, Launch, Reply, decode_output
from toolsets.sandbox.fork_servers import FORK_SERVERS, SandboxTemplate
from toolsets.sandbox.inside.boot import BOOT
from toolsets.sandbox.programs import program
from toolsets.workspace.workspace import Workspace

_REPLY_GRACE_S = 10.0
"""Time for the server's reply after a call's time limit; longer than all graces of the server."""
_FILES_TIMEOUT_S = 60.0
# EAGAIN from fork() as shells, C programs and Python print it. Any program can print the same, so a
# match only makes us count processes.
_FORK_REFUSED = re.compile(r"Resource temporarily unavailable|can't start new thread|Cannot fork")
_FULL_SHARE = 0.9
"""Share of the process limit that counts as reached: some processes may have ended since."""
_MAX_CODE_CHARS = 8 << 20
_MAP_FACTOR = 4
"""An installed program may map so many times the memory that it may use."""
# Runtimes with garbage collectors map far more than they use. Their use is limited all the same.

Result = TypeVar("Result")


class ServedSandbox(Sandbox):
    """A sandbox around one workspace, from its first call until it is stopped."""

    @classmethod
    def create(
        cls,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        extras: Extras | None = None,
    ) -> Self:
        """See `Sandbox`."""
        if (problem := cls.problem(settings)) is not None:
            raise SandboxError(problem)
        return cls(workspace, limits, extras)

    def __init__(self, workspace: Workspace, limits: Limits, extras: Extras | None = None) -> None:
        self._workspace = workspace
        self._limits = limits
        self._extras = extras
        self._lock = asyncio.Lock()
        self._channel: Channel | None = None
        self._kernel_channel: Channel | None = None
        """The channel whose server has the program of the interpreter."""
        self._is_stopped = False
        self._uses_fork_servers = False
        self._calls = 0
        self._known_sessions: set[SessionKind] = set()
        self._open_sessions: set[SessionKind] = set()
        self._lost: dict[SessionKind, str] = {}
        """Sessions whose state is lost, with the reason; the next call of a session removes it."""

    @abstractmethod
    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """Return how to start `argv` in the sandbox; the server uses its standard input and output.

        `argv` starts `python3` of this machine. The launched process must end when its children
        have ended, and must end them when it is killed. Resources that `launch` puts on `stack`
        are released when the server has answered.
        """

    def template(self) -> SandboxTemplate | None:
        """Return what a fork server needs; None for a kind of sandbox that can only be launched."""
        return None

    @property
    def is_continued(self) -> bool:
        """Whether commands of an earlier sandbox may be why this one does not start."""
        return False

    @property
    def keeps_its_size(self) -> bool:
        """Whether the size at the first start does not count, because it is the image's."""
        return False

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """The command line that starts before the first command and runs beside all commands."""
        return ()

    @property
    def measured(self) -> str:
        """The directory, as seen inside, whose size counts as the size of the workspace."""
        return self.home

    @property
    def max_processes(self) -> int | None:
        """The limit on processes that the server sets inside the sandbox; None: it sets none."""
        return None

    def group(self) -> Group | None:
        """Make the control group for limits that the sandbox itself does not set.

        Returns None if the sandbox sets all limits, or if no group can be made.
        """
        if self.limits_itself:
            return None
        processes = None if self.max_processes else self._limits.processes
        return make_group(processes, self._limits.memory_mb, self._limits.cpus)

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """See `Sandbox`."""
        if not argv:
            raise SandboxError("there is no command to run")
        argv = [_sendable(argument) for argument in argv]
        request = {"kind": "command", "argv": argv, "stdin": base64.b64encode(stdin).decode()}
        return await self._call(request, timeout_s)

    async def run(
        self,
        session: SessionKind,
        code: str,
        *,
        timeout_s: float | None = None,
        output_file: str | None = None,
    ) -> ExecResult:
        """See `Sandbox`."""
        request = {
            "kind": session,
            "code": _sendable(code) if session == "shell" else _encodable(code),
            "output_file": output_file,
            "max_chars": self._limits.output_bytes,
        }
        if len(code) > _MAX_CODE_CHARS:
            raise SandboxError("the code is too long; write it to a file and run that")
        return await self._call(request, timeout_s, session)

    async def ask_files(self, request: dict[str, Any]) -> Reply:
        """Make a request about the files inside; see `inside.file_requests`."""
        return await self._exchange(
            {"kind": "files", **request}, _FILES_TIMEOUT_S, lambda reply, _: reply
        )

    async def ask_command(self, request: dict[str, Any], *, timeout_s: float) -> Reply:
        """Run a command with files that are written before and read after it.

        Keys: `argv`; `cwd` and `env`; `put` and `read`, the requests of `inside.file_requests` for
        these files. If the command fails, nothing is read.
        """
        whole = {"kind": "command", "stdin": "", **request}
        return await self._exchange(whole, timeout_s, lambda reply, _: reply)

    async def stop(self) -> None:
        """See `Sandbox`."""
        self._is_stopped = True
        channel, self._channel = self._channel, None
        uses_fork_servers, self._uses_fork_servers = self._uses_fork_servers, False
        try:
            if channel is not None:
                await channel.close()
        finally:
            if uses_fork_servers:
                await FORK_SERVERS.close()

    async def _call(
        self, request: dict[str, Any], asked_s: float | None, session: SessionKind | None = None
    ) -> ExecResult:
        def result(reply: Reply, duration_s: float) -> ExecResult:
            result = self._result(reply, session, duration_s)
            if _is_user_full(result.stdout, result.stderr):
                raise HostError(f"a command could not run: {describe_errno(errno.EAGAIN)}")
            return result

        return await self._exchange(request, asked_s, result, session)

    async def _exchange(
        self,
        request: dict[str, Any],
        asked_s: float | None,
        read: Callable[[Reply, float], Result],
        session: SessionKind | None = None,
    ) -> Result:
        """Ask the server; return what `read` makes of the reply and of its duration in seconds."""
        timeout_s = self._limits.command_timeout_s(asked_s)
        async with self._lock:
            begun = time.monotonic()
            channel = await self._start()
            self._calls += 1
            if session == "python" and self.has_own_python and self._kernel_channel is not channel:
                self._kernel_channel = channel
                request["program"] = program("kernel")
            request |= {"id": self._calls, "timeout_s": timeout_s}
            before = self._count_refusals(channel)
            try:
                try:
                    reply = await channel.ask(request, timeout_s + _REPLY_GRACE_S)
                except (Gone, TimeoutError):
                    self._check_refusals(channel, before)
                    raise
                self._check_refusals(channel, before)
                if reply.stopped == "memory":
                    raise Gone(self._out_of_memory())
                if reply.refused == errno.EAGAIN:
                    if not self._is_at_its_limit(channel, reply):
                        raise HostError(f"cannot start a command: {describe_errno(errno.EAGAIN)}")
                    # At its limit a task could not even stop a process, so it starts again.
                    raise Gone("ran too many processes and was ended")
                return read(reply, time.monotonic() - begun)
            except HostError:
                await self.end_server("was ended by a failure of the machine")
                raise
            except (Gone, TimeoutError) as error:
                why = str(error) if isinstance(error, Gone) else "did not react and was ended"
                await self.end_server(why, besides=session)
                raise SandboxError(
                    f"the sandbox {why}, with all that ran in it; the next call starts a new one"
                ) from error
            except asyncio.CancelledError:
                # The command must not run on, and only the server inside knows its processes.
                await self.end_server("was ended with a call that was cut off")
                raise

    def _count_refusals(self, channel: Channel) -> int:
        """Count refused processes and memory, here and in the sandbox."""
        return refusals_here() + (channel.group.refusals() if channel.group is not None else 0)

    def _check_refusals(self, channel: Channel, before: int) -> None:
        """Find whose limit it was, if the system refused processes or memory during a call.

        Raises `Gone` if the task has used up its memory, and `HostError` for limits of the machine.
        """
        if self._count_refusals(channel) == before:
            return
        group = channel.group
        if group is not None and group.was_out_of_memory():
            raise Gone(self._out_of_memory())
        if group is None or not group.was_full():
            # The output of a command that met such a refusal is no result.
            raise HostError(
                "processes or memory were refused during a call, by the limits of this machine or "
                "container; raise them (pids, memory), or run fewer conversations at a time "
                "(--batch_size, --num_workers)"
            )

    def _is_at_its_limit(self, channel: Channel, reply: Reply) -> bool:
        """Whether the task's own limit on processes refused a process, and not the machine's."""
        if channel.group is not None and channel.group.was_full():
            return True
        # Some processes may have ended since. A full machine leaves a task far fewer.
        return reply.processes >= 0.75 * self._limits.processes

    def _out_of_memory(self) -> str:
        return f"used more memory than its limit of {self._limits.memory_mb} MB and was ended"

    async def end_server(self, why: str, besides: SessionKind | None = None) -> None:
        """End all that runs; the next call starts anew, and says why the sessions are lost.

        `why` continues "the sandbox". `besides` is a session whose call says so itself.
        """
        channel, self._channel = self._channel, None
        self._lost |= dict.fromkeys(self._open_sessions - {besides}, f"the sandbox {why}")
        self._open_sessions.clear()
        if channel is not None:
            await channel.close()

    async def _start(self) -> Channel:
        if self._is_stopped:
            raise SandboxError("the sandbox of this task was stopped")
        if self._channel is not None:
            return self._channel
        self._workspace.make()
        limits = self._limits
        rlimits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": limits.file_mb << 20,
            # Limits the data segment: some runtimes reserve far more address space than they use.
            "RLIMIT_DATA": limits.memory_mb * (1 if self._extras is None else _MAP_FACTOR) << 20,
        }
        if self.max_processes is not None:
            rlimits["RLIMIT_NPROC"] = self.max_processes
        terms = {
            "home": self.home,
            "is_image": self.has_own_python,
            "measured": self.measured,
            "start_dir": self._workspace.start_dir,
            "output_bytes": limits.output_bytes,
            "workspace_mb": limits.workspace_mb,
            "rlimits": rlimits,
            "baseline": self._workspace.baseline() if self.keeps_its_size else 0,
            "entrypoint": self.entrypoint,
        }
        group = self.group()
        is_limited = self.limits_itself or (group is not None and group.limits_memory)
        terms["memory_mb"] = 0 if is_limited else limits.memory_mb
        try:
            begun = await self._fork(terms, group) or await self._launch(terms, group)
        except BaseException as error:
            if group is not None:
                await group.close()
            if isinstance(error, SandboxError) and not (self._calls or self.is_continued):
                # No command of the task has run yet, so the machine failed and not the task.
                raise HostError(str(error)) from error
            raise
        self._channel, reply = begun
        if terms["baseline"] is None:
            self._workspace.keep_baseline(reply.size)
        return self._channel

    async def _fork(
        self, terms: Mapping[str, Any], group: Group | None
    ) -> tuple[Channel, Reply] | None:
        """Start the sandbox by a fork server; None if there is none for this kind of sandbox."""
        if (template := self.template()) is None:
            return None
        if not self._uses_fork_servers:
            self._uses_fork_servers = True
            FORK_SERVERS.open()
        servers = FORK_SERVERS.shared()
        return await servers.fork(template, terms, group, output_bytes=self._limits.output_bytes)

    async def _launch(self, terms: Mapping[str, Any], group: Group | None) -> tuple[Channel, Reply]:
        channel = Channel(group, output_bytes=self._limits.output_bytes)
        with ExitStack() as stack:
            channel.launch(self.launch(["python3", "-I", "-S", "-c", BOOT, "0"], stack))
            return channel, await channel.begin(terms, program("server"))

    def _result(self, reply: Reply, session: SessionKind | None, duration_s: float) -> ExecResult:
        if reply.refused is not None:
            raise _refusal(reply.refused)
        out, err = (
            decode_output(output, self._limits.output_bytes)
            for output in (reply.stdout, reply.stderr)
        )
        is_first = session is not None and session not in self._known_sessions
        lost = None
        if session is not None:
            self._known_sessions.add(session)
            lost = self._lost.pop(session, None)
            if reply.ended:
                self._open_sessions.discard(session)
            else:
                self._open_sessions.add(session)
        return ExecResult(
            exit_code=reply.exit_code,
            stdout=output_text(*out),
            stderr=output_text(*err),
            timed_out=reply.stopped == "time",
            truncated=any(total > len(head) + len(tail) for head, tail, total in (out, err)),
            duration_s=duration_s,
            full_mb=reply.full_mb,
            was_filling=reply.stopped == "space",
            value=reply.value,
            plots=reply.plots,
            last_pid=reply.last_pid,
            ended=reply.ended,
            lost=lost,
            is_first=is_first,
            running=reply.running,
        )


def _sendable(argument: str) -> str:
    if "\0" in argument:
        raise SandboxError("a command cannot contain a NUL character")
    return _encodable(argument)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _refusal(number: int) -> Exception:
    if number in HOST_ERRNOS and (number != errno.ENOMEM or not has_memory()):
        return HostError(f"cannot start a command: {describe_errno(number)}")
    if number == errno.E2BIG:
        return SandboxError("the command is too long; write it to a file and run that")
    return SandboxError(f"the command could not be started: {os.strerror(number)}")


def _is_user_full(*outputs: str) -> bool:
    """Whether a command says that it got no process, and this user really is at its limit."""
    if not any(map(_FORK_REFUSED.search, outputs)):
        return False
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.getuid() == 0:  # the limit does not hold root
        return False
    return _count_tasks(os.getuid()) >= _FULL_SHARE * limit


def _count_tasks(user: int) -> int:
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            status = (path / "status").read_text()
            if int(status.partition("\nUid:")[2].split()[0]) == user:
                total += int(status.partition("\nThreads:")[2].split()[0])
    return total
