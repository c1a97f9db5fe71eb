"""How worker processes watch the processes that they start."""

from __future__ import annotations

import asyncio
import os
import sys


def use_pidfd_watcher() -> None:
    """Have Python 3.11 notice the end of processes without a thread for each.

    Later versions do so by themselves; there, and where the system has no pidfd, this does
    nothing. Call it before the event loop starts.
    """
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
