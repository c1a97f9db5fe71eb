"""What one task may touch: its workspace, and the sandbox that runs commands beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolsets.net.web_settings import WebSettings
from toolsets.sandbox.base import Sandbox
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import Workspace

_log = logging.getLogger(__name__)


class Held(Protocol):
    """What a tool keeps from call to call."""

    async def close(self) -> None:
        """Release it."""


class SharedBrowser(Protocol):
    """A browser that the conversations of a process share; see `toolsets.browser.process`."""

    def open(self) -> None:
        """Count one more user."""

    async def close(self) -> None:
        """Count one user less; the last one stops the browser."""

    async def chromium(self) -> Any:
        """The running browser, started if there is none. Raises `ToolError`."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context every tool function gets as its first argument."""

    workspace: Workspace
    """The files of the task; its directory is made when a tool first needs it."""
    sandbox: Sandbox | None = None
    """Runs commands; None where no tool that runs commands is enabled."""
    web: WebSettings | None = None
    """What the web tools work with; None means the defaults, without a cache."""
    browsers: SharedBrowser | None = None
    """The browser that tasks share; None where the task is to have one of its own."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """The live messages of the conversation, while a call runs; not to be changed."""
    user_reply: str | None = None
    """What the user said, where the tool had asked for input and is called again with it."""
    held: dict[str, Held] = field(default_factory=dict)
    """What tools opened for this task, by a name of their own; closed with the space."""

    resumed: bool = False
    """The conversation goes on after what ran its commands before had ended, as after a crash or
    with the next prompt of a session: files are kept, shells and interpreters are new."""

    @property
    def home(self) -> str:
        """The path of the workspace as the model knows it."""
        if self.sandbox is not None:
            return self.sandbox.home
        return self.workspace.aliases[0] if self.workspace.aliases else str(self.workspace.root)

    def during(
        self, conversation: Sequence[Mapping[str, Any]], user_reply: str | None
    ) -> ToolContext:
        """The context of one call: `dataclasses.replace` would take longer than many a tool."""
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
        """Stop what is held and the sandbox, and remove the workspace if asked; may be repeated.

        What cannot be removed is logged and left, since the task itself is done.
        """
        import asyncio  # here, because who only asks for help has no use for it

        self.workspace.close()
        try:
            while self.held:
                await self.held.popitem()[1].close()
            if self.sandbox is not None:
                await self.sandbox.stop()
        finally:
            if remove:
                await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        try:
            remove_tree(self.workspace.root)
        except OSError as error:
            _log.warning("workspace %s was not removed: %s", self.workspace.root, error)
