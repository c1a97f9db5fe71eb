"""The context of a task's tools: its workspace, its sandbox, and resources that stay open."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from batch_trajectories.basics.errors import ToolError, machine_failure
from toolsets.sandbox.base import Sandbox
from toolsets.workspace.files import Files

if TYPE_CHECKING:
    from toolsets.net.web_settings import WebSettings

_log = logging.getLogger(__name__)


class Held(Protocol):
    """A resource that a tool keeps open from call to call."""

    async def close(self) -> None:
        """Release it."""


class SharedBrowser(Held, Protocol):
    """A browser that the conversations of a process share; see `toolsets.browser.process`.

    The last user that closes it stops the browser.
    """

    def open(self) -> None:
        """Count one more user."""

    async def chromium(self) -> Any:
        """Return the running browser; start it if there is none. Raises `ToolError`."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The files, sandbox and settings of a task: the first argument of a tool function."""

    workspace: Files
    """The files of the task. The directory is created when a tool first needs it."""
    sandbox: Sandbox | None = None
    """The sandbox that runs commands; None if no enabled tool runs commands."""
    web: WebSettings | None = None
    """Settings of the web tools; None: the defaults, without a cache."""
    browsers: SharedBrowser | None = None
    """The browser that tasks share; None: the task starts its own."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """The live messages of the conversation while a call runs; do not change them."""
    user_reply: str | None = None
    """The user's reply, if the tool asked for input and is called again with it."""
    held: dict[str, Held] = field(default_factory=dict)
    """Resources that tools opened for this task, by a name that the tool chooses."""

    resumed: bool = False
    """Whether the sandbox is not the one of earlier calls: the conversation was resumed after a
    crash or continues with the next prompt of a session. Files are kept; shells and interpreters
    are new."""

    @property
    def home(self) -> str:
        """The path of the workspace that the model sees."""
        if self.sandbox is not None:
            return self.sandbox.home
        return self.workspace.home

    def copy_for_call(
        self, conversation: Sequence[Mapping[str, Any]], user_reply: str | None
    ) -> ToolContext:
        """Return the context of one call."""
        # `dataclasses.replace` would take longer than many a tool.
        return ToolContext(
            workspace=self.workspace,
            sandbox=self.sandbox,
            web=self.web,
            browsers=self.browsers,
            conversation=conversation,
            user_reply=user_reply,
            held=self.held,
            resumed=self.resumed,
        )

    async def close(self, *, remove: bool) -> None:
        """Release all resources, stop the sandbox, and `remove` the workspace; may be repeated.

        If a step fails, the other steps are done nevertheless. A resource that cannot be released,
        or a workspace that cannot be removed, is only logged, because the task itself is done.
        Raises the sandbox's errors, and failures of the machine.
        """
        from batch_trajectories.basics.closing import close_all  # imports asyncio, which is slow

        self.workspace.close()
        closings: list[Callable[[], Awaitable[object]]] = []
        while self.held:
            closings.append(partial(self._release, *self.held.popitem()))
        if self.sandbox is not None:
            closings.append(self.sandbox.stop)
        if remove:
            closings.append(self._remove)
        await close_all(*closings)

    async def _release(self, name: str, resource: Held) -> None:
        try:
            await resource.close()
        except Exception as error:
            if machine_failure(error) is not None:
                raise
            _log.warning("A tool did not release what it holds as %r.", name, exc_info=error)

    async def _remove(self) -> None:
        import asyncio

        await asyncio.to_thread(self._remove_now)

    def _remove_now(self) -> None:
        try:
            self.workspace.remove()
        except (OSError, ToolError) as error:
            _log.warning("The workspace %s was not removed: %s", self.workspace.root, error)
