"""`--live`: the full-screen view beside a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from batch_trajectories.basics.console import say

_LEAVES_WITHIN_S = 10.0
_LEAVE_SCREEN = "\x1b[?1049l\x1b[?25h"
"""The alternate screen off, the cursor on."""


def check_live() -> None:
    """Raise `ConfigError` if the package that draws the view is not installed."""
    from batch_trajectories.basics.errors import missing

    if find_spec("rich") is None:
        raise missing("--live", "live")


@contextmanager
def live_view(run_dir: Path) -> Iterator[Callable[[str], object] | None]:
    """Show the run in `run_dir` full-screen inside a `with` block.

    Yields a function that takes messages for the user; they are printed at the end. Yields None,
    and shows nothing, if standard error is not a terminal.
    """
    import multiprocessing

    from batch_trajectories.report.live import draw_until_closed
    from batch_trajectories.runs.executors.local import (
        start_tracker_without_secrets,
        start_without_main,
    )

    if not sys.stderr.isatty():
        say("--live needs a terminal; showing plain lines instead")
        yield None
        return
    start_tracker_without_secrets()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=draw_until_closed, args=(receiver, run_dir), name="live")
    start_without_main(process)
    receiver.close()
    messages: list[str] = []
    try:
        yield messages.append
    finally:
        sender.close()
        process.join(_LEAVES_WITHIN_S)
        if process.exitcode != 0:
            process.kill()
            process.join()
            with suppress(OSError):
                sys.stderr.write(_LEAVE_SCREEN)
                sys.stderr.flush()
        for message in messages:
            say(message)
