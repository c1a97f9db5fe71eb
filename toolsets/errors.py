"""What can go wrong with a tool: by its own fault, or by that of the machine."""

from __future__ import annotations

import errno


class ToolError(Exception):
    """A failure whose message the model should see as it is."""


class HostError(Exception):
    """The machine failed, not the tool: its disk is full or failing, or it ran out of handles.

    No result: what it says must not become part of a conversation.
    """


HOST_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    }
)
"""What `HostError` stands for, as error numbers of the system."""
