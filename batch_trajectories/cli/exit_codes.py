"""The exit code and the error message of every way in which a command ends."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import (
    SIGNALLED,
    RunError,
    interruption_message,
    lost_directory,
    stop_on_machine_failure,
)

if TYPE_CHECKING:
    from batch_trajectories.api.start import RunEnd

PROBLEMS = 6
"""`verify`, or a health check that `stats --fail_on` names, found problems."""

BUG = 70
"""A bug in this program (EX_SOFTWARE of sysexits.h)."""


def end(ended: RunEnd) -> NoReturn:
    """Exit with the exit code of a start, after printing its reason."""
    if ended.reason is not None:
        fail(ended.reason, ended.exit_code)
    sys.exit(ended.exit_code)


@contextmanager
def errors_as_exit_codes(*, on_interrupt: str | None = None) -> Iterator[None]:
    """Turn exceptions into a message and an exit code; only bugs show a traceback.

    `on_interrupt` is what an interrupt says where it is the usual end; None: it is an error.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        with stop_on_machine_failure():
            yield
    except RunError as error:
        message = str(error)
        if (lost := lost_directory()) is not None and lost not in message:
            message += f" ({lost})"
        fail(message, error.exit_code)
    except KeyboardInterrupt:
        first = received[0] if received else int(signal.SIGINT)
        if on_interrupt is not None:
            say(on_interrupt)
            sys.exit(SIGNALLED + first)
        fail(interruption_message(first), SIGNALLED + first)
    except Exception:
        trace = traceback.format_exc()
        fail(f"{trace}a bug in this program; finished work is safe", BUG)


def fail(message: str, exit_code: int) -> NoReturn:
    say(f"error: {message}")
    sys.exit(exit_code)
