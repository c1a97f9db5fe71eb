"""The server of one sandbox: it holds the task's shell and interpreter and limits each call.

Requests and replies are frames on what was its standard input and output: four bytes of length,
then JSON. It does one thing at a time. The host checks every reply, since commands run as the same
user as this process; what they could forge at worst is the result of their own task.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from toolsets.sandbox.inside.boot import BOOT, LENGTH, framed
from toolsets.sandbox.inside.file_requests import FileRequests
from toolsets.sandbox.inside.job import Job
from toolsets.sandbox.inside.processes import (
    HAS_PROC,
    beneath,
    count_tasks,
    descendants,
    hold_descendants,
    memory_of,
    size_of,
    started_since,
    ticks,
)
from toolsets.sandbox.inside.shells import CONTROL, SH_CONTROL, found_shell, in_background

_CHUNK_BYTES = 1 << 16
_INTERRUPT_GRACE_S = 2.0
_KILL_GRACE_S = 2.0
_CHECK_S = 1.0
_MEMORY_CHECK_S = 0.1
_FULL_CHECK_S = 0.2
_BRIEFLY_S = 0.005
_IDLE_CHECK_S = 10.0
_ENTRYPOINT_S = 5.0
_ENTERED = ["sh", "-c", "echo >&7; exec 7>&-; while :; do sleep 86400; done"]
"""The command of an image's entrypoint: it says on `SH_CONTROL` that it runs, and stays."""
_PROGRAMS = {"shell": "sh", "python": "python3"}
_STREAMS = {1: "stdout", 2: "stderr"}


class Server:
    """The loop: one request after the other, and in between the output of background jobs."""

    def __init__(self, requests: int, replies: int, begin: dict[str, Any] | None) -> None:
        """`begin` are the terms, which are otherwise the first request."""
        self._requests, self._replies = requests, replies
        self._inbox = b""
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._jobs: dict[str, Job] = {}
        self._size_bytes = 0
        self._due = self._memory_due = 0.0
        self._before: set[int] = set()
        self._last_tick = 0
        self._program: str | None = None
        wakeup, wake = os.pipe()
        for fd in (wakeup, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(wakeup, select.POLLIN, lambda: self._reap(wakeup))
        self.watch(requests, select.POLLIN, self._receive)
        begin = begin or self._next_request()
        self.output_bytes = begin["output_bytes"]
        self._max_bytes = begin["workspace_mb"] << 20
        self._max_memory = begin["memory_mb"] << 20
        """0 where something else limits it."""
        self._home = begin["home"]
        self._measured = begin["measured"]
        self._files = FileRequests(self._home)
        self._start_dir = begin["start_dir"]
        if begin["is_image"]:
            # Commands of an earlier sandbox may have removed it, which each call then says.
            with contextlib.suppress(OSError):
                os.makedirs(self._home, exist_ok=True)
        else:
            os.chdir(self._home)
        for name, wanted in begin["rlimits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (limit, limit))
        self._baseline = begin["baseline"]
        """The bytes that do not count: those of an image; None: those that are there now."""
        if self._baseline is None:
            self._baseline = size_of(self._measured)
        if begin["entrypoint"]:
            self._enter(begin["entrypoint"])

    def _enter(self, entrypoint: list[str]) -> None:
        """Start an image's entrypoint, as engines do, and wait for it to run its command.

        One that runs no command, as services do not, gets some time. If it fails, commands run
        without what it would have started.
        """
        give_up = time.monotonic() + _ENTRYPOINT_S
        with contextlib.suppress(OSError):
            os.chdir(self._home)
            job = self._add(
                "entrypoint", Job(self, [*entrypoint, *_ENTERED], control_at=SH_CONTROL)
            )
            while job.status is None and job.exit_code is None and time.monotonic() < give_up:
                self._pump(max(0.0, give_up - time.monotonic()))
        self._last_tick = ticks()

    def serve(self) -> None:
        """Answer requests until the host is gone, which ends this process and all its own."""
        self._reply({"id": 0, "size": self._baseline})
        while True:
            reply = self._answer(self._next_request())
            self._last_tick = ticks()
            self._reply(reply)

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        """Have `handler` called whenever there is something to do for `fd`."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Watch `fd` no longer, and close it."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)
        os.close(fd)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        kind = request["kind"]
        reply: dict[str, Any] = {"id": request["id"]}
        if kind == "files":
            return reply | self._files.answer(request)
        since = ticks()
        # Ticks are coarse: what an earlier call started in this one is not this call's.
        self._before = set(beneath()) if since == self._last_tick else set()
        try:
            job = self._begin(request)
        except (FileNotFoundError, PermissionError) as error:
            name = request["argv"][0] if kind == "command" else _PROGRAMS[kind]
            if error.filename == self._home:
                name = self._home
            said = f"{name}: {error.strerror}\n".encode()
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return {**reply, "exit_code": code, "stderr": [_encoded(said), "", len(said)]}
        except OSError as error:
            return {**reply, "refused": error.errno, "processes": count_tasks()}
        stopped = self._await_end(job, time.monotonic() + request["timeout_s"])
        if stopped == "memory":
            # What holds it need not be of this call, so the host ends all there is.
            return {**reply, "stopped": stopped}
        if stopped is not None:
            reply["stopped"] = stopped
            if kind == "python":
                self._interrupt(job, since)
        if job.status is None:
            if job.exit_code is None:
                self._kill(since, job)
            reply["ended"] = True
        elif stopped is None:
            reply.update(_parsed(kind, job.status))
        if job.exit_code is not None and stopped is None:
            reply["exit_code"] = job.exit_code
        outputs = job.take_output()
        if reply.get("ended"):
            self._jobs.pop(kind, None)
            job.close()
            if kind == "command":
                self._kill(since)
        if kind != "command" and HAS_PROC:
            reply["running"] = reply.pop("threads", 0) + self._running()
        if (full_mb := self._full_mb()) is not None:
            reply["full_mb"] = full_mb
        for fd, output in outputs.items():
            reply[_STREAMS[fd]] = [*map(_encoded, output.kept()), output.total]
        return reply

    def _running(self) -> int:
        """How many processes run on, besides those of the sessions."""
        own = {job.pid for job in self._jobs.values()}
        if set(beneath()) <= own:
            return 0
        self._pump(_BRIEFLY_S)  # the last of a command may be about to end
        return sum(pid not in own for pid, _ in descendants())

    def _begin(self, request: dict[str, Any]) -> Job:
        """Start what the request needs that is not there, and send it what is to be run."""
        kind = request["kind"]
        if kind == "command":
            os.chdir(self._home)
            stdin = _file_with(binascii.a2b_base64(request["stdin"]))
            return self._add(kind, Job(self, request["argv"], stdin=stdin))
        if (job := self._jobs.get(kind)) is None:
            os.chdir(self._home)
            with contextlib.suppress(OSError):  # where a command removed it, the workspace will do
                os.chdir(self._start_dir)
        code = request["code"]
        # Of an image's own Python; sent once, since it is long.
        self._program = request.get("program", self._program)
        if kind == "python":
            if job is None:
                job = self._add(kind, self._interpreter(request["max_chars"]))
            job.send(framed(code))
            return job
        shell = found_shell()
        if job is None:
            job = self._add(kind, Job(self, shell.argv, control_at=shell.control))
        if request["output_file"] is not None:
            code = in_background(code, request["output_file"])
        job.send(shell.encode(code))
        return job

    def _interpreter(self, max_chars: int) -> Job:
        if self._program is not None:
            argv = [_PROGRAMS["python"], "-c", BOOT, str(CONTROL), str(max_chars)]
            job = Job(self, argv, control_at=CONTROL)
            job.send(framed(self._program))
            return job
        # Only here, since many tasks run no Python.
        from toolsets.sandbox.inside.kernel import run_cells

        return Job(self, partial(run_cells, CONTROL, max_chars), control_at=CONTROL)

    def _add(self, kind: str, job: Job) -> Job:
        self._jobs[kind] = job
        return job

    def _await_end(self, job: Job, deadline: float) -> str | None:
        """Wait until the job has answered or ended; return why it has to be stopped, if it has."""
        # Full already: what makes it fuller is stopped at once, what removes files is not.
        if self._full_mb() is not None:
            self._due = time.monotonic() + _FULL_CHECK_S
        job.await_answer(max(0.0, min(_BRIEFLY_S, deadline - time.monotonic())))
        while job.status is None and job.exit_code is None:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= self._due:
                before = self._size_bytes
                self._measure()
                if self._size_bytes > max(before, self._max_bytes):
                    return "space"
            if self._max_memory and now >= self._memory_due and self._takes_too_much():
                return "memory"
            next_look = self._memory_due if self._max_memory else deadline
            self._pump(max(0.0, min(deadline, self._due, next_look) - time.monotonic()))
        return None

    def _interrupt(self, job: Job, since: int) -> None:
        """Have the interpreter give up its cell, and all that the cell waits for."""
        give_up = time.monotonic() + _INTERRUPT_GRACE_S
        while job.status is None and job.exit_code is None and time.monotonic() < give_up:
            # Again and again, since the signal is lost on code that just then ignores it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGINT)
            self._kill(since, spare=job)
            self._pump(0.1)

    def _kill(self, since: int, job: Job | None = None, spare: Job | None = None) -> None:
        """Kill what was started from `since` on and `job`, but not `spare`.

        What runs since before may start others, as a server does for each connection: they stay.
        All are stopped before any is killed, so that they cannot start others meanwhile.
        """
        seen: set[int] = set()
        give_up = time.monotonic() + _KILL_GRACE_S
        while time.monotonic() < give_up:
            pids = set(started_since(since, self._before, self._sessions()))
            if job is not None and job.exit_code is None:
                pids.add(job.pid)
            if spare is not None:
                pids.discard(spare.pid)
            if not pids:
                return
            fresh = pids - seen
            seen |= fresh
            for pid in fresh or pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
                    if not HAS_PROC:
                        os.killpg(pid, signal.SIGKILL)
            if not fresh:
                self._pump(0.005)

    def _sessions(self) -> set[int]:
        """What runs requests, and all of whose processes are those of a request."""
        return {job.pid for kind, job in self._jobs.items() if kind != "entrypoint"}

    def _pump(self, timeout_s: float | None) -> None:
        """Wait for an event, and handle it."""
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd in self._handlers:
                self._handlers[fd]()

    def _reap(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, _CHUNK_BYTES)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for job in self._jobs.values():
                    if job.pid == pid:
                        signalled = os.WIFSIGNALED(status)
                        job.exit_code = (
                            128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
                        )

    def _receive(self) -> None:
        chunk = os.read(self._requests, _CHUNK_BYTES)
        if not chunk:
            self._end()
        self._inbox += chunk

    def _next_request(self) -> dict[str, Any]:
        check = time.monotonic() + _IDLE_CHECK_S
        while True:
            if len(self._inbox) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._inbox)[0]
                if len(self._inbox) >= end:
                    request: dict[str, Any] = json.loads(self._inbox[LENGTH.size : end])
                    self._inbox = self._inbox[end:]
                    return request
            self._pump(max(0.0, check - time.monotonic()) if self._jobs else None)
            if time.monotonic() >= check:
                self._check_idle()
                check = max(time.monotonic() + _IDLE_CHECK_S, self._due)

    def _check_idle(self) -> None:
        """End what runs in the background if it has filled the workspace, or takes the memory."""
        own = {job.pid for job in self._jobs.values()}
        background = [pid for pid, _ in descendants() if pid not in own]
        if background:
            self._measure()
        is_greedy = bool(background and self._max_memory and self._takes_too_much())
        for pid in background if is_greedy or self._full_mb() is not None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _takes_too_much(self) -> bool:
        begun = time.monotonic()
        taken = memory_of(self._max_memory)
        now = time.monotonic()
        # An exact sum takes longer, where there is much; but then there is little time, too.
        self._memory_due = now + max(_MEMORY_CHECK_S, min(50 * (now - begun), _CHECK_S))
        return bool(taken > self._max_memory)

    def _measure(self) -> None:
        begun = time.monotonic()
        self._size_bytes = size_of(self._measured) - self._baseline
        now = time.monotonic()
        # A large workspace is looked at less often, to take at most a twentieth of the time.
        self._due = now + max(_CHECK_S, 20 * (now - begun))

    def _full_mb(self) -> int | None:
        """The size of the workspace if it is over its limit, measured again where that is due."""
        if self._size_bytes > self._max_bytes or time.monotonic() >= self._due:
            self._measure()
        return self._size_bytes >> 20 if self._size_bytes > self._max_bytes else None

    def _reply(self, reply: dict[str, Any]) -> None:
        view = memoryview(framed(json.dumps(reply)))
        try:
            while view:
                view = view[os.write(self._replies, view) :]
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        if os.getpid() != 1:  # whose end is that of all
            self._before = set()
            self._kill(0)
            # A child that is not waited for here is left to a process that may wait for none.
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        os._exit(0)


def _file_with(content: bytes) -> int:
    """A descriptor of an unnamed file; -1 for an empty one."""
    if not content:
        return -1
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("stdin")
    else:
        import tempfile

        file, path = tempfile.mkstemp()
        os.unlink(path)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _encoded(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()


def _parsed(kind: str, status: bytes) -> dict[str, Any]:
    """What the loop of a session said of a call; anyone in the session could have said it."""
    try:
        if kind == "python":
            said = json.loads(status)
            threads = int(said["threads"])
            return {name: said[name] for name in ("exit_code", "value", "plots")} | {
                "threads": threads
            }
        exit_code, last = status.split()
        return {"exit_code": int(exit_code), "last_pid": int(last)}
    except (ValueError, KeyError, TypeError):
        return {"exit_code": None}


def main(
    terms: dict[str, Any] | None = None, introduce: Callable[[int], object] = lambda _: None
) -> None:
    """Serve on what was standard input and output, which commands do not get.

    A process that was forked has its terms, and introduces itself when it can serve.
    """
    hold_descendants()
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # Commands can send it, and process 1 gets only signals that it has a handler for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(requests, replies, terms)
    introduce(replies)
    os.dup2(null, 2)  # which has said by now why it cannot begin
    server.serve()
