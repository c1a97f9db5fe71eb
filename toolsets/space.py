"""What one task may touch: its workspace, and the sandbox that runs commands beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolsets.execution import Sandbox
from toolsets.removal import remove_tree
from toolsets.workspace import Workspace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskSpace:
    """The context every tool function gets as its first argument."""

    workspace: Workspace
    """The files of the task; its directory is made when a tool first needs it."""
    sandbox: Sandbox | None = None
    """Runs commands; None where no tool that runs commands is enabled."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """The live messages of the conversation, while a call runs; not to be changed."""
    user_reply: str | None = None
    """What the user said, where the tool had asked for input and is called again with it."""

    resumed: bool = False
    """The conversation goes on after what ran its commands before had ended, as after a crash or
    with the next prompt of a session: files are kept, shells and interpreters are new."""

    @property
    def home(self) -> str:
        """The path of the workspace as the model knows it."""
        if self.sandbox is not None:
            return self.sandbox.home
        return self.workspace.aliases[0] if self.workspace.aliases else str(self.workspace.root)

    async def close(self, *, remove: bool) -> None:
        """Stop the sandbox and, if asked, remove the workspace; may be called again.

        What cannot be removed is logged and left, since the task itself is done.
        """
        self.workspace.close()
        try:
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
