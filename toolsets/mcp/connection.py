"""A connection to one MCP server, by the official SDK: started late, restarted with patience."""

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

from toolsets.errors import HostError, ToolError, machine_failure, machine_failure_in
from toolsets.mcp.mcp_settings import WORKSPACE, ListedTool, McpServer
from toolsets.sandbox.inside.outputs import HeadTail
from toolsets.text import output_text

_log = logging.getLogger(__name__)

_INHERITED = ("PATH", "HOME", "LANG")
_LONGEST_PAUSE_S = 30.0
_STOP_S = 10.0
_STDERR_BYTES = 4096
_MAX_PAGES = 100
_MAX_GARBAGE = 100
_LATE_IN_A_ROW = 3
_CONNECTION_CLOSED = -32000


class ServerError(ToolError):
    """A server died, or is gone for good."""


class StartError(ServerError):
    """A server did not start. The message quotes it, so it is for the user and no model."""


class Link:
    """One server for one worker or one conversation. Used in one event loop."""

    def __init__(
        self, name: str, server: McpServer, *, starts: asyncio.Semaphore, workspace: Path | None
    ) -> None:
        """`starts` bounds how many servers start at a time; `workspace` is that of the task."""
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

        Raises `ToolError` for what the server refuses, and `ServerError` where it is dead; the
        next call then starts it again.
        """
        try:
            connection = await self._connected()
        except StartError as error:
            _log.warning("mcp: %s", error)
            raise ServerError(f"the server {self._name!r} could not be started again") from error
        garbage = connection.garbage
        try:
            result = await connection.client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            # A deadline, mostly. One that speaks garbage, or never answers, will not get better.
            connection.late += 1
            if connection.garbage > garbage or connection.late >= _LATE_IN_A_ROW:
                connection.is_broken = True
            raise
        except Exception as error:
            if _is_an_answer(error):
                connection.late = 0
                raise ToolError(_describe(error)) from error
            connection.is_dead = True
            if not connection.is_broken:
                connection.is_broken = True
                words = connection.last_words()
                _log.warning("mcp server %s died: %s%s", self._name, _describe(error), words)
            raise ServerError(f"the server {self._name!r} died during the call") from error
        connection.late = 0
        return result

    async def list_tools(self) -> tuple[ListedTool, ...]:
        """The tools that the server offers; raises `StartError`, or what the SDK raises."""
        connection = await self._connected()
        tools = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await connection.client.list_tools(cursor=cursor)
            tools += [_listed(tool) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tuple(tools)
        msg = f"the server {self._name!r} lists tools without end"
        raise StartError(msg)

    async def close(self) -> None:
        """Stop the server."""
        self._let_go()
        if self._ending:
            await asyncio.wait(self._ending)

    def _let_go(self) -> None:
        """Stop the server in a task of its own: whoever needs another one need not wait."""
        connection, self._connection = self._connection, None
        if connection is not None:
            ending = asyncio.create_task(connection.stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _connected(self) -> _Connection:
        """The living connection, made if there is none."""
        async with self._lock:
            if self._connection is not None:
                if not self._connection.is_broken:
                    return self._connection
                self._deaths += 1
                self._let_go()
            if self._deaths > self._server.max_restarts:
                msg = (
                    f"the server {self._name!r} is gone: it died {self._deaths} times; "
                    "its tools cannot be used any more"
                )
                raise ServerError(msg)
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
    """A running server. A task of its own opens and closes it, as the SDK's scopes demand."""

    client: Any

    def __init__(self, name: str, server: McpServer, workspace: Path | None) -> None:
        self._name = name
        self._server = server
        self._workspace = workspace
        self._stderr = _Stderr()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_broken = False
        """It is not to be used any more."""
        self.is_dead = False
        """The server has closed the connection."""
        self.late = 0
        """Calls in a row that did not end in time."""
        self.garbage = 0
        """Messages that were none of the protocol."""

    async def start(self) -> None:
        """Start the server; raises `StartError`, or `HostError` where the machine failed."""
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
                raise StartError(self._said(why)) from error
            raise

    async def stop(self) -> None:
        """Stop the server: it is asked to end, and killed if it does not, or is broken."""
        self._stop.set()
        if self.is_broken and not self.is_dead:
            self._kill()
        if self._task is not None:
            done, _ = await asyncio.wait({self._task}, timeout=_STOP_S)
            if not done:
                self._kill()
                await asyncio.wait({self._task}, timeout=_STOP_S)

    def _kill(self) -> None:
        """Kill the server and its children; only as long as it is not known to be dead."""
        if self._stderr.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._stderr.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of what the server said on its standard error, in brackets, or ""."""
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
                ready.set_exception(self._failed_start(error))
            elif not isinstance(error, Exception):
                raise
            else:
                _log.info("mcp server %s ended: %s", self._name, _describe(error))

    def _failed_start(self, error: BaseException) -> Exception:
        first = _first(error)
        if isinstance(first, StartError):
            return first
        if (words := machine_failure(first)) is not None:
            return HostError(f"mcp server {self._name!r}: {words}")
        said = self._said(f"did not start: {_describe(error)}")
        if (words := machine_failure_in(said)) is not None:
            return HostError(words)
        return StartError(said)

    def _said(self, what: str) -> str:
        return f"the server {self._name!r} {what}{self.last_words()}"

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client

        async def on_message(message: Any) -> None:
            if isinstance(message, Exception):
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
            header: _variable(name, self._name) for header, name in self._server.headers_env.items()
        }
        # What bounds a call is the deadline of the tool.
        timeout = httpx2.Timeout(30.0, read=None)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        return streamable_http_client(str(self._server.url), http_client=http)

    async def _stdio(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        # Every line that is no message is reported there with a traceback; we count them.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {name: _variable(name, self._name) for name in self._server.env_from}
        environment |= {name: self._put_in(text) for name, text in self._server.env.items()}
        launcher = Path(__file__).with_name("mcp_launcher.py")
        parameters = StdioServerParameters(
            command=sys.executable,
            args=[
                *("-I", "-S", str(launcher), str(os.getpid()), ",".join(environment)),
                *map(self._put_in, self._server.argv),
            ],
            env=environment,
            cwd=None if self._server.cwd is None else self._put_in(self._server.cwd),
        )
        stderr = await stack.enter_async_context(self._stderr)
        return stdio_client(parameters, errlog=stderr)

    def _put_in(self, text: str) -> str:
        return text.replace(WORKSPACE, str(self._workspace))


class _Stderr(asyncio.Protocol):
    """The standard error of a server: read to its end, and the last of it kept.

    Its first line, which the launcher writes, is the process id.
    """

    def __init__(self) -> None:
        self._first = b""
        self._kept = HeadTail(_STDERR_BYTES)
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
            self._first += data
            line, end, data = self._first.partition(b"\n")
            if not end:
                return
            self.pid = int(line)
        self._kept.feed(data)

    def text(self) -> str:
        return output_text(*self._kept.kept(), self._kept.total)


def _variable(name: str, server: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise StartError(f"the server {server!r} wants the environment variable {name}; set it")
    return value


def _listed(tool: Any) -> ListedTool:
    hints = tool.annotations
    is_read_only = bool(hints and hints.read_only_hint)
    return ListedTool(
        name=tool.name,
        description=tool.description or tool.title or "",
        input_schema=tool.input_schema,
        is_read_only=is_read_only,
        is_idempotent=is_read_only or bool(hints and hints.idempotent_hint),
    )


def _is_an_answer(error: Exception) -> bool:
    """Whether an error is what a living server said, rather than that it is dead."""
    from mcp import MCPError

    if isinstance(error, MCPError):
        return bool(error.code != _CONNECTION_CLOSED)
    # The SDK's own check of a result against the schema that the server promised.
    return isinstance(error, RuntimeError)


def _first(error: BaseException) -> BaseException:
    """The error inside the groups that task groups put around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    first = _first(error)
    return " ".join(str(first).split()) or type(first).__name__
