"""Model and tools of a conversation in a worker: they wait until earlier replies are on disk, and
make no model call once the worker is stopping."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent.models.model import Completion, Model, Request
from agent.setup import Home
from runs.errors import Stopped
from toolsets.context import ToolContext
from toolsets.tool import Tool, ToolResult
from toolsets.toolbox import Toolbox

Kept = Callable[[], Awaitable[None]] | None
"""Waits until the replies so far are on disk; None where they are at once."""


class Stops(Protocol):
    """Whether the worker is stopping, and how a task makes it stop."""

    is_stopping: bool

    def halt(self, message: str) -> None:
        """Stop the whole run with this message."""
        ...

    def say(self, message: str) -> None:
        """Show a message to the user, if no worker has shown it before."""
        ...


class StoppableModel:
    """Makes no call before earlier replies are on disk, or once the worker is stopping."""

    def __init__(self, stops: Stops, model: Model, kept: Kept) -> None:
        self._stops = stops
        self._model = model
        self._kept = kept

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `Stopped`."""
        if self._kept is not None:
            await self._kept()
        if self._stops.is_stopping:
            raise Stopped
        return await self._model.complete(request)

    async def close(self) -> None:
        """See `Model.close`."""
        await self._model.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableHome(Home):
    """A home whose tools wait until the reply that calls them is on disk."""

    kept: Kept

    def _box(self, tools: Sequence[Tool]) -> Toolbox:
        if self.kept is None:
            return Toolbox(tools, self.context, call_timeout_s=self.call_timeout_s)
        return _Toolbox(tools, self.context, self.call_timeout_s, self.kept)


class _Toolbox(Toolbox):
    def __init__(
        self,
        tools: Sequence[Tool],
        context: ToolContext,
        call_timeout_s: float,
        kept: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(tools, context, call_timeout_s=call_timeout_s)
        self._kept = kept

    async def call(
        self,
        name: str,
        arguments: str,
        *,
        conversation: Sequence[Mapping[str, Any]] = (),
        user_reply: str | None = None,
        others: Sequence[str] = (),
    ) -> ToolResult:
        await self._kept()
        return await super().call(
            name, arguments, conversation=conversation, user_reply=user_reply, others=others
        )
