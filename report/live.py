"""A run on the whole screen while it works, drawn by a process of its own.

That process reads the run directory, as `status` does, so the run is not held up by it. It leaves
the terminal as it was when it is told to, and when the run is gone, however that ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from api.stored_run import StoredRun
from report.status import Status, look, sections
from runs.errors import RunError
from runs.process.console import say
from runs.process.startup import hide_environment

if TYPE_CHECKING:
    from rich.console import Group

_EVERY_S = 1.0
_PAUSE_PER_WORK = 9
"""So many times as long as a look took nothing is done: a tenth of a core at most."""

_OTHER_LINES = 28
"""About how many lines there are beside the conversations in flight."""

_IN_FLIGHT_AT_LEAST, _IN_FLIGHT_AT_MOST = 3, 40


def draw_until_told(told: Connection, run_dir: Path) -> None:
    """Draw the status of `run_dir` on standard error until the other end of `told` is closed."""
    from rich.console import Console
    from rich.live import Live

    hide_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run stops in good order, and then tells
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
                found = look(stored)
                screen.update(_drawn(found, height=console.height), refresh=True)
                took_s = time.monotonic() - began
                if told.poll(max(_EVERY_S, _PAUSE_PER_WORK * took_s)):
                    return
    except (RunError, OSError) as error:
        say(f"--live shows no more: {error}; the run goes on")


def _drawn(found: Status, *, height: int) -> Group:
    """The sections of the status, each line cut at the edge of the screen."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.rule import Rule
    from rich.text import Text

    shown = min(max(_IN_FLIGHT_AT_LEAST, height - _OTHER_LINES), _IN_FLIGHT_AT_MOST)
    head, *parts = sections(found, in_flight_shown=shown)
    drawn: list[Rule | Text | Padding] = [Text(head[0], style="bold", no_wrap=True)]
    totals = found.totals
    if totals.total:
        ended = totals.done + totals.failed + totals.discarded
        bar = ProgressBar(total=totals.total, completed=ended)
        drawn.append(Padding(bar, 0))  # a bar alone does not end its line
    drawn += [Text(line, no_wrap=False) for line in head[1:]]
    for title, *lines in parts:
        drawn.append(Rule(Text(title), align="left", style="dim"))
        drawn += [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*drawn)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
