"""A connection to one MCP server, over the official SDK: started at first use, restarted.

If this process ends or crashes, `mcp_launcher` ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import (
    HostError,
    ToolError,
    machine_failure,
    machine_failure_in,
)
from batch_trajectories.basics.text import output_text
from toolsets.mcp.mcp_settings import WORKSPACE, ListedTool, McpServer, expand
from toolsets.sandbox.inside.outputs import HeadTail

_log = logging.getLogger(__name__)

_INHERITED = ("PATH", "HOME", "LANG")
_LONGEST_PAUSE_S = 30.0
_STOP_S = 10.0
_STDERR_BYTES = 4096
_MAX_PAGES = 100
_MAX_GARBAGE = 100
_LATE_IN_A_ROW = 3
_CONNECTION_CLOSED = -32000
_TOO_DEEP = "recursion limit exceeded"
"""A part of the error message of the SDK's parser."""


class ServerError(ToolError):
    """A server died, or died too often to be restarted."""


class StartError(ServerError):
    """A server did not start. The message quotes its output: for the user, not for the model."""


class Link:
    """One server for one worker or one conversation. Use it in one event loop."""

    def __init__(
        self, name: str, server: McpServer, *, starts: asyncio.Semaphore, workspace: Path | None
    ) -> None:
        """`starts` limits how many servers start at once; `workspace` is the task's, or None."""
        self._name = name
        self._server = server
        self._starts = starts
        self._workspace = workspace
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._deaths = 0

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return the SDK's result.

        Raises `ToolError` for an error that the server reports, and `ServerError` if the server
        is dead; the next call then starts it again.
        """
        try:
            connection = await self._connect()
        except StartError as error:
            _log.warning("An MCP server could not be started again: %s", error)
            raise ServerError(f"the server {self._name!r} could not be started again") from error
        garbage = connection.garbage
        try:
            result = await connection.client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            # Usually the call's deadline. Replace a server that sends garbage or never answers.
            connection.late += 1
            if connection.garbage > garbage or connection.late >= _LATE_IN_A_ROW:
                connection.is_broken = True
            raise
        except Exception as error:
            if _is_answer(error):
                connection.late = 0
                raise ToolError(_describe(error)) from error
            connection.is_dead = True
            if not connection.is_broken:
                connection.is_broken = True
                stderr = connection.last_stderr()
                _log.warning(
                    "The MCP server %s died, and the next call starts it again: %s%s",
                    self._name,
                    _describe(error),
                    stderr,
                )
            what = "sent JSON that is nested too deeply" if connection.is_too_deep else "died"
            raise ServerError(f"the server {self._name!r} {what} during the call") from error
        connection.late = 0
        return result

    async def list_tools(self) -> tuple[ListedTool, ...]:
        """Return the tools of the server; raises `StartError`, or what the SDK raises."""
        connection = await self._connect()
        tools = []
        cursor = None
        for _ in range(_MAX_PAGES):
            try:
                page = await connection.client.list_tools(cursor=cursor)
            except Exception as error:
                if not connection.is_too_deep:
                    raise
                raise StartError(
                    f"the server {self._name!r} lists a tool whose schema is nested too deeply to "
                    "be read (about 200 levels of JSON); have it list a flatter one, or leave the "
                    "server out"
                ) from error
            tools += [_read_listed(tool) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tuple(tools)
        raise StartError(f"the server {self._name!r} lists tools without end")

    async def close(self) -> None:
        """Stop the server."""
        self._stop_in_background()
        if self._ending:
            await asyncio.wait(self._ending)

    def _stop_in_background(self) -> None:
        """Stop the server in a separate task: a restart need not wait for it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            ending = asyncio.create_task(connection.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _connect(self) -> _Connection:
        """Return the open connection; start the server if there is none."""
        async with self._lock:
            if self._connection is not None:
                if not self._connection.is_broken:
                    return self._connection
                self._deaths += 1
                self._stop_in_background()
            if self._deaths > self._server.max_restarts:
                raise ServerError(
                    f"the server {self._name!r} is gone: it died {self._deaths} times; "
                    "its tools cannot be used any more"
                )
            if self._deaths:
                pause_s = self._server.restart_pause_s * 2 ** (self._deaths - 1)
                await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
            async with self._starts:
                connection = _Connection(self._name, self._server, self._workspace)
                try:
                    await connection.start()
                except StartError:
                    self._deaths += 1
                    raise
            self._connection = connection
            return connection


class _Connection:
    """A running server. One task opens and closes it, because the SDK's cancel scopes need that."""

    client: Any

    def __init__(self, name: str, server: McpServer, workspace: Path | None) -> None:
        self._name = name
        self._server = server
        self._workspace = workspace
        self._stderr = _Stderr()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_broken = False
        """Whether the connection must not be used again."""
        self.is_dead = False
        """Whether the server has closed the connection."""
        self.is_too_deep = False
        """The server has sent a message that is nested too deeply to be read."""
        self.late = 0
        """Calls in a row that did not end in time."""
        self.garbage = 0
        """Messages that do not follow the protocol."""

    async def start(self) -> None:
        """Start the server; raises `StartError`, or `HostError` if the machine failed."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                await ready
        except (TimeoutError, asyncio.CancelledError) as error:
            self.is_broken = True
            self._kill()
            self._task.cancel()
            await self.stop()
            if isinstance(error, TimeoutError):
                why = f"did not start within {self._server.start_timeout_s:g} s"
                raise StartError(self._append_stderr(why)) from error
            raise

    async def stop(self) -> None:
        """Stop the server: close the connection; kill it if it is broken or does not end."""
        self._stop.set()
        if self.is_broken and not self.is_dead:
            self._kill()
        if self._task is not None:
            done, _ = await asyncio.wait({self._task}, timeout=_STOP_S)
            if not done:
                self._kill()
                await asyncio.wait({self._task}, timeout=_STOP_S)

    def _kill(self) -> None:
        """Kill the server and its children. Do not call it for a dead server."""
        if self._stderr.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._stderr.pid, signal.SIGKILL)

    def last_stderr(self) -> str:
        """Return the last line of the server's standard error, in brackets, or ""."""
        lines = self._stderr.text().strip().splitlines()
        return f" ({lines[-1].strip()[-300:]})" if lines else ""

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self.client = await self._open(stack)
                if not ready.done():
                    ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(self._start_error(error))
            elif not isinstance(error, Exception):
                raise
            else:
                _log.info("The MCP server %s ended: %s", self._name, _describe(error))

    def _start_error(self, error: BaseException) -> Exception:
        first = _first_error(error)
        if isinstance(first, StartError):
            return first
        if (failure := machine_failure(first)) is not None:
            return HostError(f"mcp server {self._name!r}: {failure}")
        message = self._append_stderr(f"did not start: {_describe(error)}")
        if (failure := machine_failure_in(message)) is not None:
            return HostError(failure)
        return StartError(message)

    def _append_stderr(self, what: str) -> str:
        return f"the server {self._name!r} {what}{self.last_stderr()}"

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client

        async def on_message(message: Any) -> None:
            if isinstance(message, Exception):
                if _TOO_DEEP in str(message):
                    # It may have been the answer to a call, which would then wait for ever.
                    self.is_broken = self.is_too_deep = True
                    self._kill()
                    self._stop.set()
                self.garbage += 1
                if self.garbage == _MAX_GARBAGE:
                    self.is_broken = True
                    self._kill()

        transport = await (self._http(stack) if self._server.url else self._stdio(stack))
        client = Client(transport, message_handler=on_message, cache=None)
        return await stack.enter_async_context(client)

    async def _http(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {
            header: _require(name, self._name) for header, name in self._server.headers_env.items()
        }
        headers |= {name: self._expand(text) for name, text in self._server.headers.items()}
        # The tool's deadline limits a call.
        timeout = httpx2.Timeout(30.0, read=None)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        url = str(self._server.url)
        url = self._expand(url) if self._server.expands else url
        return streamable_http_client(url, http_client=http)

    async def _stdio(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        # The SDK logs a traceback for every line that is not a message; we count them instead.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {name: _require(name, self._name) for name in self._server.env_from}
        environment |= {name: self._fill_workspace(text) for name, text in self._server.env.items()}
        launcher = Path(__file__).with_name("mcp_launcher.py")
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[
                "-I",
                "-S",
                str(launcher),
                str(os.getpid()),
                ",".join(environment),
                *map(self._fill_workspace, self._server.argv),
            ],
            env=environment,
            cwd=None if self._server.cwd is None else self._fill_workspace(self._server.cwd),
        )
        stderr = await stack.enter_async_context(self._stderr)
        return stdio_client(parameters, errlog=stderr)

    def _fill_workspace(self, text: str) -> str:
        text = self._expand(text) if self._server.expands else text
        return text.replace(WORKSPACE, str(self._workspace))

    def _expand(self, text: str) -> str:
        return expand(text, lambda name: _require(name, self._name), os.environ)


class _Stderr(asyncio.Protocol):
    """Reads the standard error of a server, and keeps its beginning and end.

    The launcher writes the process id as the first line.
    """

    def __init__(self) -> None:
        self._first_error = b""
        self._output = HeadTail(_STDERR_BYTES)
        self.pid: int | None = None

    async def __aenter__(self) -> Any:
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: self, os.fdopen(reading, "rb", buffering=0)
        )
        self._writing = os.fdopen(writing, "wb", buffering=0)
        return self._writing

    async def __aexit__(self, *_: object) -> None:
        self._writing.close()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self.pid is None:
            self._first_error += data
            line, end, data = self._first_error.partition(b"\n")
            if not end:
                return
            self.pid = int(line)
        self._output.feed(data)

    def text(self) -> str:
        return output_text(*self._output.head_and_tail(), self._output.total)


def _require(name: str, server: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise StartError(f"the server {server!r} needs the environment variable {name}; set it")
    return value


def _read_listed(tool: Any) -> ListedTool:
    hints = tool.annotations
    is_read_only = bool(hints and hints.read_only_hint)
    return ListedTool(
        name=tool.name,
        description=tool.description or tool.title or "",
        input_schema=tool.input_schema,
        is_read_only=is_read_only,
        is_idempotent=is_read_only or bool(hints and hints.idempotent_hint),
    )


def _is_answer(error: Exception) -> bool:
    """Whether a living server reported the error; else the server is dead."""
    from mcp import MCPError

    if isinstance(error, MCPError):
        return bool(error.code != _CONNECTION_CLOSED)
    # The SDK checks results against the schema that the server announced.
    return isinstance(error, RuntimeError)


def _first_error(error: BaseException) -> BaseException:
    """Return the first error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    first = _first_error(error)
    return " ".join(str(first).split()) or type(first).__name__
