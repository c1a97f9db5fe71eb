"""`--live`: the full-screen view beside a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from runs.process.console import say

_LEAVES_WITHIN_S = 10.0
_LEAVE_SCREEN = "\x1b[?1049l\x1b[?25h"
"""The alternate screen off, the cursor on."""


def check_live() -> None:
    """Raise `ConfigError` where the package is missing that draws the view."""
    from runs.errors import missing

    if find_spec("rich") is None:
        raise missing("--live", "live")


@contextmanager
def live_view(run_dir: Path) -> Iterator[Callable[[str], object] | None]:
    """Show the run in `run_dir` on the whole screen inside a `with` block.

    Gives what takes the messages for the user meanwhile; they are printed when the screen is free
    again. Gives None, and shows nothing, where standard error is no terminal.
    """
    import multiprocessing

    from report.live import draw_until_told
    from runs.executors.local import start_tracker_without_secrets, start_without_main

    if not sys.stderr.isatty():
        say("--live needs a terminal; showing plain lines instead")
        yield None
        return
    start_tracker_without_secrets()
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=draw_until_told, args=(theirs, run_dir), name="live")
    start_without_main(process)
    theirs.close()
    messages: list[str] = []
    try:
        yield messages.append
    finally:
        ours.close()
        process.join(_LEAVES_WITHIN_S)
        if process.exitcode != 0:
            process.kill()
            process.join()
            with suppress(OSError):
                sys.stderr.write(_LEAVE_SCREEN)
                sys.stderr.flush()
        for message in messages:
            say(message)
