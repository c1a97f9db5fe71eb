"""The tools of one task, called with the names and argument texts that a model writes.

Every mistake of the model and every failure of a tool becomes a result that the model can read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.call_timeouts import CallTimeouts
from batch_trajectories.basics.errors import HostError, ToolError, has_memory, machine_failure
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.context import ToolContext
from toolsets.function_threads import LateCall, call_in_thread
from toolsets.tool import MAX_RESULT_CHARS, ArgumentsError, Tool, ToolResult, as_result

_MAX_MESSAGE_CHARS = 2000


class Toolbox:
    """The enabled tools of one task, and their context."""

    def __init__(
        self,
        tools: Sequence[Tool],
        context: ToolContext,
        *,
        call_timeout_s: float = 300,
        before_call: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`before_call` is awaited before each call."""
        self._tools = {tool.name: tool for tool in sorted(tools, key=lambda tool: tool.name)}
        if len(self._tools) != len(tools):
            raise ValueError("two tools have the same name")
        self._context = context
        self._timeouts = CallTimeouts(call_timeout_s)
        self._before_call = before_call
        self.late_calls: list[Future[ToolResult]] = []
        """Calls that exceeded their time limit; those that are not done still run in threads."""

    @property
    def names(self) -> list[str]:
        """The names of the tools, sorted."""
        return list(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form, sorted by name."""
        return [tool.schema for tool in self._tools.values()]

    def is_idempotent(self, name: str) -> bool:
        """Whether a call may be repeated. True for an unknown tool, as its call does nothing."""
        tool = self._tools.get(name)
        return tool is None or tool.idempotent

    def is_sequential(self, name: str) -> bool:
        """Whether a call must not run at the same time as other calls of its turn."""
        tool = self._tools.get(name)
        return tool is not None and tool.sequential

    async def call(
        self,
        name: str,
        arguments: str,
        *,
        conversation: Sequence[Mapping[str, Any]] = (),
        user_reply: str | None = None,
        others: Sequence[str] = (),
        begin: Callable[[], None] | None = None,
    ) -> ToolResult:
        """Call a tool; every failure of the tool is a result.

        The tool finds `conversation` and `user_reply` in its context. `others` are further names
        that the model can call. `begin` is called just before the tool's function, in the same
        thread; its exceptions are passed on.

        Raises `HostError` if the machine failed, and `CancelledError` if the caller is cancelled. A
        `MemoryError` is a result while memory is left: one value was too large. A sync tool that
        exceeds its time limit keeps its thread until it returns; see `call_in_thread`.
        """
        if self._before_call is not None:
            await self._before_call()
        tool = self._tools.get(name)
        if tool is None:
            available = ", ".join(sorted({*self._tools, *others})) or "none"
            shown = clip(name, max_chars=_MAX_MESSAGE_CHARS)
            text = f"Error: Tool '{shown}' not found. Available: {available}"
            return self._make_failure(text, "unknown_tool")
        try:
            parsed = tool.parse_arguments(arguments)
        except ArgumentsError as error:
            message = clip(str(error), max_chars=_MAX_MESSAGE_CHARS)
            takes = ", ".join(tool.parameters.get("properties", {})) or "none"
            text = f"Error: invalid arguments for {name}: {message}\nArguments it takes: {takes}"
            return self._make_failure(text, "invalid_arguments")
        context = self._context.copy_for_call(conversation, user_reply)
        if not tool.is_async:
            run = partial(self._run_sync, tool, context, parsed, begin)
            if tool.quick:
                return run()
            try:
                return await call_in_thread(run, timeout_s=self._timeouts.timeout_s)
            except LateCall as error:
                self.late_calls.append(error.future)
                return self._timeout_result(tool)
        if begin is not None:
            begin()
        deadline = self._timeouts.begin()
        try:
            async with deadline:
                result = await self._run(tool, context, parsed)
        except TimeoutError:
            result = self._timeout_result(tool)
        finally:
            self._timeouts.end(deadline)
        # The tool may have caught the cancellation by the deadline.
        return self._timeout_result(tool) if deadline.expired() else result

    async def close(self, *, remove_workspace: bool) -> None:
        """Close the context of the task; may be repeated."""
        self._timeouts.close()
        await self._context.close(remove=remove_workspace)

    async def _run(self, tool: Tool, context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        before = cancellations()
        try:
            result = _tidy(as_result(await _invoke(tool, context, arguments)))
        except (GeneratorExit, HostError):
            raise
        except BaseException as error:
            result = self._error_result(tool, error)
        # A CancelledError that the tool raised itself is its failure. A cancellation from outside
        # is passed on, even if the tool caught it.
        if cancellations() > before:
            raise asyncio.CancelledError
        return result

    def _run_sync(
        self,
        tool: Tool,
        context: ToolContext,
        arguments: dict[str, Any],
        begin: Callable[[], None] | None,
    ) -> ToolResult:
        if begin is not None:
            begin()
        # Caught in the thread: a future cannot pass on every exception.
        try:
            return _tidy(as_result(_invoke(tool, context, arguments)))
        except HostError:
            raise
        except BaseException as error:
            return self._error_result(tool, error)

    def _error_result(self, tool: Tool, error: BaseException) -> ToolResult:
        host_failure = machine_failure(error)
        if host_failure is not None and not (isinstance(error, MemoryError) and has_memory()):
            raise HostError(f"{tool.name}: {host_failure}") from error
        kind = type(error).__name__
        try:
            message = str(error).strip() or kind
        except Exception:
            message = kind
        message = message.replace(str(self._context.workspace.root), self._context.home)
        text = f"Error executing {tool.name}: {clip(message, max_chars=_MAX_MESSAGE_CHARS)}"
        failure = "tool_error" if isinstance(error, ToolError) else "exception"
        return self._make_failure(text, failure, exception=kind)

    def _timeout_result(self, tool: Tool) -> ToolResult:
        text = f"Error executing {tool.name}: no result within {self._timeouts.timeout_s:g} s"
        return self._make_failure(text, "timeout")

    def _make_failure(self, text: str, failure: str, **facts: str) -> ToolResult:
        return ToolResult(valid_utf8(text), is_error=True, details={"failure": failure, **facts})


def _invoke(tool: Tool, context: ToolContext, arguments: Mapping[str, Any]) -> Any:
    return tool.function(*((context,) if tool.takes_context else ()), **arguments)


def cancellations() -> int:
    """Return how often the running task was cancelled."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _tidy(result: ToolResult) -> ToolResult:
    """Return the result with content and details that a record can store."""
    content = clip(valid_utf8(str(result.content)), max_chars=MAX_RESULT_CHARS)
    if result.is_error and "error" not in content.lower():
        # The OpenAI dialect has no error flag: the text itself must say that it is an error.
        content = f"Tool error: {content}"
    details = dict(result.details)
    try:
        written = exact_json.dumps(details) if details else b""
        is_whole = b"null" not in written or exact_json.infinite_number_in(details) is None
    except (TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        details = {"details": clip(valid_utf8(repr(details)), max_chars=_MAX_MESSAGE_CHARS)}
    return ToolResult(content, is_error=bool(result.is_error), details=details)
