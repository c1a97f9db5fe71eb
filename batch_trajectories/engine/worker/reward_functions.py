"""Reward functions of the user's, called in processes of their own.

A function that raises, ends its process or takes too long gives a score with `error`; it harms
neither the worker nor other conversations. A function that cannot be imported, and a failure of the
machine, stop the run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import ConfigError, HostError, ToolError
from toolsets.context import ToolContext
from toolsets.workspace.workspace import PathError

_MAX_PROCESSES = 4
_START_TIMEOUT_S = 300.0
"""Seconds for the imports of the function's module."""
_REPLY_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = 1000
"""Bytes of the output of a process that ended which a message shows."""
_MAX_REASON_BYTES = 100_000
"""Bytes of the output of a process that ended which the reason of a score keeps."""
_ROOT = str(Path(__file__).parents[3])
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from batch_trajectories.engine.worker.function_process import main; main()"
)


def check_functions(places: Sequence[str]) -> dict[str, str]:
    """Import each function in a process of its own; returns the versions.

    Raises `ConfigError` if one cannot be imported.
    """
    return {place: _read_version(place) for place in places}


def _read_version(place: str) -> str:
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                _command(place),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--reward: {place}: its import took more than {_START_TIMEOUT_S:g} s"
            ) from error
        output_end = _read_end(errors.fileno())
    if not done.stdout:
        raise ConfigError(
            f"--reward: {place}: its import ended the process ({_how(done.returncode)}){output_end}"
        )
    reply = orjson.loads(done.stdout)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return str(reply["version"])


class RewardFunctions:
    """The reward functions of a run, managed by this process."""

    def __init__(self, places: Sequence[str], *, timeout_s: float) -> None:
        self._functions = [_Function(place, timeout_s) for place in places]

    async def scores(
        self, record: Mapping[str, Any], workspace: Path | Inside | None
    ) -> list[dict[str, Any]]:
        """The scores of a record, in the order of the functions; see `records.checks`.

        `workspace` is its directory, or None if it is gone. Raises `HostError`.
        """
        inside = workspace if isinstance(workspace, Inside) else None
        found_in: dict[str, str | None] = {"workspace": None}
        if inside is not None:
            found_in["home"] = inside.home
        elif isinstance(workspace, Path) and workspace.is_dir():
            found_in["workspace"] = str(workspace.absolute())
        request = exact_json.dumps({"record": record, **found_in})
        return [await function.score(request, inside) for function in self._functions]

    async def close(self) -> None:
        """End all processes."""
        await close_all(*(function.close for function in self._functions))


class _Function:
    """One function, and the processes that wait for requests to it."""

    def __init__(self, place: str, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._idle: list[_Process] = []
        self._turn = asyncio.Semaphore(min(_MAX_PROCESSES, os.cpu_count() or 1))

    async def score(self, request: bytes, inside: Inside | None) -> dict[str, Any]:
        async with self._turn:
            process = self._idle.pop() if self._idle else await _Process.start(self._place)
            began = time.monotonic()
            try:
                reply = await asyncio.wait_for(process.ask(request, inside), self._timeout_s)
            except TimeoutError:
                await process.kill()
                message = f"it took more than {self._timeout_s:g} s (--reward_timeout_s)"
                reply = {"rewards": None, "error": message}
            except ConnectionError:
                reply = {"rewards": None, "error": await process.describe_end(_MAX_REASON_BYTES)}
            except BaseException:
                await process.kill()
                raise
            else:
                self._idle.append(process)
            if "machine" in reply:
                raise HostError(f"--reward={self._place}: {reply['machine']}")
            duration_s = round(time.monotonic() - began, 3)
            source = {"source": self._place, "version": process.version}
            return {**source, **reply, "duration_s": duration_s}

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await close_all(*(process.kill for process in idle))


class _Process:
    """A process that calls the function, one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, errors: int) -> None:
        self._process = process
        self._errors = errors
        self.version: str | None = None

    @classmethod
    async def start(cls, place: str) -> _Process:
        """Raises `HostError` if the function cannot be imported here."""
        with tempfile.TemporaryFile(buffering=0) as file:
            errors = os.dup(file.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(place),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                limit=_REPLY_BYTES,
            )
        except BaseException:
            os.close(errors)
            raise
        started = cls(process, errors)
        try:
            first = await asyncio.wait_for(started._read(), _START_TIMEOUT_S)
        except ConnectionError as error:
            raise HostError(f"--reward={place}: {await started.describe_end()}") from error
        except TimeoutError as error:
            await started.kill()
            raise HostError(
                f"--reward={place}: its import took more than {_START_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            await started.kill()
            raise
        if "error" in first:
            await started.kill()
            raise HostError(first["error"])
        started.version = first["version"]
        return started

    async def ask(self, request: bytes, inside: Inside | None) -> dict[str, Any]:
        """The reply to a request; before it, answers what the function asks about files inside.

        Raises `ConnectionError` if the process has ended, and `HostError`.
        """
        await self._send(request)
        while "files" in (reply := await self._read()):
            assert inside is not None, "without it the function has no such path"
            try:
                context = await inside.open()
            except ToolError as error:
                answered = {"error": str(error)}
            else:
                answered = await asyncio.to_thread(answer, context, reply["files"])
            await self._send(orjson.dumps(answered))
        return reply

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError
        reply: dict[str, Any] = orjson.loads(line)
        return reply

    async def describe_end(self, max_bytes: int = _MAX_MESSAGE_BYTES) -> str:
        """The end of the process, and the last bytes that it printed."""
        code = await self._process.wait()
        output_end = _read_end(self._errors, max_bytes)
        await self.kill()
        return f"it ended its process ({_how(code)}){output_end}"

    async def kill(self) -> None:
        """Kill the process and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


def _command(place: str) -> list[str]:
    return [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), place]


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _read_end(errors: int, max_bytes: int = _MAX_MESSAGE_BYTES) -> str:
    left_out = max(0, os.fstat(errors).st_size - max_bytes)
    text = os.pread(errors, max_bytes, left_out).decode(errors="replace").strip()
    mark = f"[... {left_out:,} bytes left out ...] " if left_out else ""
    return f": {mark}{text}" if text else ""


_MAX_FILE_BYTES = 32 << 20


class Inside(NamedTuple):
    """The workspace of a conversation that is inside an image."""

    home: str
    """Path of the workspace in the image."""
    open: Callable[[], Awaitable[ToolContext]]
    """Opens the workspace; its sandbox starts when it is first used. Raises `ToolError`."""


def answer(context: ToolContext, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `ImagePath`; waits, so call it in a thread. Raises `HostError`.

    `op` is "read" (`content`), "probe" (whether a file can be read), "listing" or "walk" (`names`).
    What failed is `missing` or `error`.
    """
    files, path = context.workspace, request["path"]
    try:
        match request["op"]:
            case "probe":
                files.read_bytes(path, 1)
                return {}
            case "read":
                content = files.read_bytes(path, _MAX_FILE_BYTES + 1)
                if len(content) > _MAX_FILE_BYTES:
                    return {"error": f"path {path!r} is larger than {_MAX_FILE_BYTES} bytes"}
                return {"content": base64.b64encode(content).decode()}
            case "listing":
                return {"names": [entry.path for entry in files.listing(path)]}
        return {"names": [entry.path for entry in files.walk(path)]}
    except PathError as error:
        return {"missing" if error.is_missing else "error": str(error)}
    except ToolError as error:
        return {"error": str(error)}
