"""How asyncio watches child processes."""

from __future__ import annotations

import asyncio
import os
import sys


def use_pidfd_watcher() -> None:
    """Let Python 3.11 watch child processes without a thread for each.

    Does nothing in later versions, which do so themselves, or if the system has no pidfd. Call it
    before the event loop starts.
    """
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
