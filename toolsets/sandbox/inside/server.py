"""The server of one sandbox: it holds the task's shell and interpreter and limits each call.

Requests and replies are frames on the former standard input and output: four bytes of length, then
JSON. The server handles one request at a time. The host checks every reply, because commands run as
the same user as this process; the most they can forge is the result of their own task. If the host
ends, the server ends with all processes of the task.
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

from toolsets.sandbox.inside.boot import BOOT, LENGTH, make_frame
from toolsets.sandbox.inside.file_requests import FileRequests
from toolsets.sandbox.inside.job import Job
from toolsets.sandbox.inside.processes import (
    HAS_PROC,
    all_descendants,
    count_tasks,
    descendants,
    find_started,
    hold_descendants,
    measure_memory,
    measure_size,
    ticks,
)
from toolsets.sandbox.inside.shells import CONTROL, SH_CONTROL, background_code, find_shell

_CHUNK_BYTES = 1 << 16
_INTERRUPT_GRACE_S = 2.0
_KILL_GRACE_S = 2.0
_CHECK_S = 1.0
_MEMORY_CHECK_S = 0.1
_FULL_CHECK_S = 0.2
_BRIEFLY_S = 0.005
_IDLE_CHECK_S = 10.0
_ENTRYPOINT_S = 5.0
_ENTRYPOINT_COMMAND = ["sh", "-c", "echo >&7; exec 7>&-; while :; do sleep 86400; done"]
"""The command of an image's entrypoint: it reports on `SH_CONTROL` that it runs, and stays."""
_PROGRAMS = {"shell": "sh", "python": "python3"}
_STREAMS = {1: "stdout", 2: "stderr"}


class Server:
    """Answers one request after the other; between them it reads the output of background jobs."""

    def __init__(self, requests: int, replies: int, begin: dict[str, Any] | None) -> None:
        """`begin` holds the terms; None: the first request holds them."""
        self._requests, self._replies = requests, replies
        self._inbox = b""
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._jobs: dict[str, Job] = {}
        self._size_bytes = 0
        self._size_due = self._memory_due = 0.0
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
        """0 if something else limits the memory."""
        self._home = begin["home"]
        self._measured = begin["measured"]
        self._files = FileRequests(self._home)
        self._start_dir = begin["start_dir"]
        if begin["is_image"]:
            # Commands of an earlier sandbox may have removed the directory. If it cannot be made,
            # each call reports that.
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
        """The bytes of the workspace that do not count, as an image had them; None: measure now."""
        if self._baseline is None:
            self._baseline = measure_size(self._measured)
        if begin["entrypoint"]:
            self._start_entrypoint(begin["entrypoint"])

    def _start_entrypoint(self, entrypoint: list[str]) -> None:
        """Start an image's entrypoint, as engines do, and wait until it runs its command.

        An entrypoint that is a service runs no command: it gets a few seconds. If the entrypoint
        fails, commands run without it.
        """
        give_up = time.monotonic() + _ENTRYPOINT_S
        with contextlib.suppress(OSError):
            os.chdir(self._home)
            job = self._add(
                "entrypoint", Job(self, [*entrypoint, *_ENTRYPOINT_COMMAND], control_at=SH_CONTROL)
            )
            while job.status is None and job.exit_code is None and time.monotonic() < give_up:
                self._handle_events(max(0.0, give_up - time.monotonic()))
        self._last_tick = ticks()

    def serve(self) -> None:
        """Answer requests until the host ends; then end this process and its descendants."""
        self._reply({"id": 0, "size": self._baseline})
        while True:
            reply = self._answer(self._next_request())
            self._last_tick = ticks()
            self._reply(reply)

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `fd` is ready."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, and close it."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)
        os.close(fd)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        kind = request["kind"]
        reply: dict[str, Any] = {"id": request["id"]}
        if kind == "files":
            return {**reply, **self._files.answer(request)}
        if "put" in request and (failed := self._files.answer({**request["put"], "op": "put"})):
            return {**reply, **failed}
        since = ticks()
        # Ticks are coarse: processes that an earlier call started in this tick are not this call's.
        self._before = set(all_descendants()) if since == self._last_tick else set()
        try:
            job = self._start_job(request)
        except (FileNotFoundError, PermissionError) as error:
            name = request["argv"][0] if kind == "command" else _PROGRAMS[kind]
            if error.filename is not None and error.filename in (self._home, request.get("cwd")):
                name = error.filename
            message = f"{name}: {error.strerror}\n".encode()
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return {**reply, "exit_code": code, "stderr": [_encode(message), "", len(message)]}
        except OSError as error:
            return {**reply, "refused": error.errno, "processes": count_tasks()}
        stopped = self._await_end(job, time.monotonic() + request["timeout_s"])
        if stopped == "memory":
            # Processes of earlier calls may hold the memory, so the host ends the whole sandbox.
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
            reply.update(_parse_status(kind, job.status))
        if job.exit_code is not None and stopped is None:
            reply["exit_code"] = job.exit_code
        outputs = job.take_output()
        if reply.get("ended"):
            self._jobs.pop(kind, None)
            job.close()
            if kind == "command":
                self._kill(since)
        if kind != "command" and HAS_PROC:
            reply["running"] = reply.pop("threads", 0) + self._count_running()
        if (full_mb := self._full_mb()) is not None:
            reply["full_mb"] = full_mb
        for fd, output in outputs.items():
            reply[_STREAMS[fd]] = [*map(_encode, output.head_and_tail()), output.total]
        if "read" in request and reply.get("exit_code") == 0:
            reply |= self._files.answer({**request["read"], "op": "read"})
        return reply

    def _count_running(self) -> int:
        """Count the processes that run on, besides those of the sessions."""
        own = {job.pid for job in self._jobs.values()}
        if set(all_descendants()) <= own:
            return 0
        self._handle_events(_BRIEFLY_S)  # the last process of a command may be about to end
        return sum(pid not in own for pid, _ in descendants())

    def _start_job(self, request: dict[str, Any]) -> Job:
        """Start the process for a request, unless it runs, and send it the code."""
        kind = request["kind"]
        if kind == "command":
            os.chdir(request.get("cwd", self._home))
            stdin = _make_file(binascii.a2b_base64(request["stdin"]))
            variables = request.get("env", {})
            return self._add(kind, Job(self, request["argv"], stdin=stdin, variables=variables))
        if (job := self._jobs.get(kind)) is None:
            os.chdir(self._home)
            with contextlib.suppress(OSError):  # else stay in the workspace
                os.chdir(self._start_dir)
        code = request["code"]
        # The interpreter's program for an image's own Python: sent once, because it is long.
        self._program = request.get("program", self._program)
        if kind == "python":
            if job is None:
                job = self._add(kind, self._start_interpreter(request["max_chars"]))
            job.send(make_frame(code))
            return job
        shell = find_shell()
        if job is None:
            job = self._add(kind, Job(self, shell.argv, control_at=shell.control))
        if request["output_file"] is not None:
            code = background_code(code, request["output_file"])
        job.send(shell.encode(code))
        return job

    def _start_interpreter(self, max_chars: int) -> Job:
        if self._program is not None:
            argv = [_PROGRAMS["python"], "-c", BOOT, str(CONTROL), str(max_chars)]
            job = Job(self, argv, control_at=CONTROL)
            job.send(make_frame(self._program))
            return job
        # Only here, since many tasks run no Python.
        from toolsets.sandbox.inside.kernel import run_cells

        return Job(self, partial(run_cells, CONTROL, max_chars), control_at=CONTROL)

    def _add(self, kind: str, job: Job) -> Job:
        self._jobs[kind] = job
        return job

    def _await_end(self, job: Job, deadline: float) -> str | None:
        """Wait until the job has answered or ended; return why it must be stopped, or None."""
        # If the workspace is full already, stop a call soon that adds to it, but none that removes.
        if self._full_mb() is not None:
            self._size_due = time.monotonic() + _FULL_CHECK_S
        job.await_answer(max(0.0, min(_BRIEFLY_S, deadline - time.monotonic())))
        while job.status is None and job.exit_code is None:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= self._size_due:
                before = self._size_bytes
                self._measure_size()
                if self._size_bytes > max(before, self._max_bytes):
                    return "space"
            if self._max_memory and now >= self._memory_due and self._exceeds_memory():
                return "memory"
            next_look = self._memory_due if self._max_memory else deadline
            self._handle_events(
                max(0.0, min(deadline, self._size_due, next_look) - time.monotonic())
            )
        return None

    def _interrupt(self, job: Job, since: int) -> None:
        """Interrupt the interpreter's cell, and kill the processes that the cell started."""
        give_up = time.monotonic() + _INTERRUPT_GRACE_S
        while job.status is None and job.exit_code is None and time.monotonic() < give_up:
            # Repeatedly: code that ignores the signal for a moment would lose it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGINT)
            self._kill(since, spare=job)
            self._handle_events(0.1)

    def _kill(self, since: int, job: Job | None = None, spare: Job | None = None) -> None:
        """Kill `job` and processes that were started at `since` or later, but not `spare`.

        New children of older processes stay, such as a server's child for a connection.
        """
        # Stop all of them before any is killed: else they could start others meanwhile.
        seen: set[int] = set()
        give_up = time.monotonic() + _KILL_GRACE_S
        while time.monotonic() < give_up:
            pids = set(find_started(since, self._before, self._sessions()))
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
                self._handle_events(0.005)

    def _sessions(self) -> set[int]:
        """Return the processes that run requests; their new children belong to a request."""
        return {job.pid for kind, job in self._jobs.items() if kind != "entrypoint"}

    def _handle_events(self, timeout_s: float | None) -> None:
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
            self._handle_events(max(0.0, check - time.monotonic()) if self._jobs else None)
            if time.monotonic() >= check:
                self._check_idle()
                check = max(time.monotonic() + _IDLE_CHECK_S, self._size_due)

    def _check_idle(self) -> None:
        """Kill background processes if the workspace is full or they take too much memory."""
        own = {job.pid for job in self._jobs.values()}
        background = [pid for pid, _ in descendants() if pid not in own]
        if background:
            self._measure_size()
        is_greedy = bool(background and self._max_memory and self._exceeds_memory())
        for pid in background if is_greedy or self._full_mb() is not None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _exceeds_memory(self) -> bool:
        begun = time.monotonic()
        taken = measure_memory(self._max_memory)
        now = time.monotonic()
        # Measuring takes at most a fiftieth of the time, but happens at least once a second.
        self._memory_due = now + max(_MEMORY_CHECK_S, min(50 * (now - begun), _CHECK_S))
        return bool(taken > self._max_memory)

    def _measure_size(self) -> None:
        begun = time.monotonic()
        self._size_bytes = measure_size(self._measured) - self._baseline
        now = time.monotonic()
        # A large workspace is looked at less often, to take at most a twentieth of the time.
        self._size_due = now + max(_CHECK_S, 20 * (now - begun))

    def _full_mb(self) -> int | None:
        """Return the size of the workspace if it is over its limit, else None."""
        if self._size_bytes > self._max_bytes or time.monotonic() >= self._size_due:
            self._measure_size()
        return self._size_bytes >> 20 if self._size_bytes > self._max_bytes else None

    def _reply(self, reply: dict[str, Any]) -> None:
        view = memoryview(make_frame(json.dumps(reply)))
        try:
            while view:
                view = view[os.write(self._replies, view) :]
        except OSError:
            self._end()

    def _end(self) -> NoReturn:
        if os.getpid() != 1:  # the end of process 1 ends all others
            self._before = set()
            self._kill(0)
            # Wait for each child here: the next parent may not wait for children.
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        os._exit(0)


def _make_file(content: bytes) -> int:
    """Return the descriptor of an unnamed file with this content; -1 if it is empty."""
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


def _encode(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()


def _parse_status(kind: str, status: bytes) -> dict[str, Any]:
    """Return what a session reports of a call. Any process in the session can forge it."""
    try:
        if kind == "python":
            report = json.loads(status)
            reply = {name: report[name] for name in ("exit_code", "value", "plots")}
            reply["threads"] = int(report["threads"])
            return reply
        exit_code, last = status.split()
        return {"exit_code": int(exit_code), "last_pid": int(last)}
    except (ValueError, KeyError, TypeError):
        return {"exit_code": None}


def main(
    terms: dict[str, Any] | None = None, introduce: Callable[[int], object] = lambda _: None
) -> None:
    """Serve on standard input and output, which commands do not get.

    A forked process has its terms already; `introduce` is called when it can serve.
    """
    hold_descendants()
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # Commands can send SIGINT, and process 1 gets only signals that it has a handler for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(requests, replies, terms)
    introduce(replies)
    os.dup2(null, 2)  # errors of the start have been reported by now
    server.serve()
