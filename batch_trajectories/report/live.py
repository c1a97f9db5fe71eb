"""The full-screen view of a run, drawn by a separate process.

The process reads the run directory, like `status`, so it does not slow the run. It restores the
terminal when the run closes the connection or dies.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import RunError
from batch_trajectories.basics.process import hide_environment
from batch_trajectories.report.formatting import plain
from batch_trajectories.report.status import Status, look, sections

if TYPE_CHECKING:
    from rich.console import Group


_EVERY_S = 1.0
_PAUSE_PER_WORK = 9
"""Pause this many times as long as an update took: use at most a tenth of a core."""

_OTHER_LINES = 28
"""Approximate number of lines without the conversations in flight."""

_MIN_IN_FLIGHT, _MAX_IN_FLIGHT = 3, 40


def draw_until_closed(connection: Connection, run_dir: Path) -> None:
    """Draw the status of `run_dir` on standard error until the connection is closed."""
    from rich.console import Console
    from rich.live import Live

    hide_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run stops in good order, then closes it
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    with suppress(OSError):
        os.nice(5)
    console = Console(file=sys.stderr, highlight=False)
    try:
        stored = StoredRun(run_dir)
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                began = time.monotonic()
                status = look(stored)
                screen.update(_drawn(status, height=console.height), refresh=True)
                took_s = time.monotonic() - began
                if connection.poll(max(_EVERY_S, _PAUSE_PER_WORK * took_s)):
                    return
    except (RunError, OSError) as error:
        say(f"--live has ended: {error}; the run continues")


def _drawn(status: Status, *, height: int) -> Group:
    """The sections of the status, with lines cut at the edge of the screen."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.rule import Rule
    from rich.text import Text

    shown = min(max(_MIN_IN_FLIGHT, height - _OTHER_LINES), _MAX_IN_FLIGHT)
    head, *parts = sections(status, in_flight_shown=shown)
    drawn: list[Rule | Text | Padding] = [Text(plain(head[0]), style="bold", no_wrap=True)]
    totals = status.totals
    if totals.total:
        ended = totals.done + totals.failed + totals.discarded
        bar = ProgressBar(total=totals.total, completed=ended)
        drawn.append(Padding(bar, 0))  # a bar alone does not end its line
    drawn += [Text(plain(line), no_wrap=False) for line in head[1:]]
    for title, *lines in parts:
        drawn.append(Rule(Text(plain(title)), align="left", style="dim"))
        drawn += [Text(plain(line), no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*drawn)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


_LEAVES_WITHIN_S = 10.0
_LEAVE_SCREEN = "\x1b[?1049l\x1b[?25h"
"""The alternate screen off, the cursor on."""


def check_live() -> None:
    """Raise `ConfigError` if the package that draws the view is not installed."""
    from batch_trajectories.basics.errors import missing_extra

    if find_spec("rich") is None:
        raise missing_extra("--live", "live")


@contextmanager
def live_view(run_dir: Path) -> Iterator[Callable[[str], object] | None]:
    """Show the run in `run_dir` full-screen inside a `with` block.

    Yields a function that takes messages for the user; they are printed at the end. Yields None,
    and shows nothing, if standard error is not a terminal.
    """
    import multiprocessing

    from batch_trajectories.engine.local_workers import (
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
