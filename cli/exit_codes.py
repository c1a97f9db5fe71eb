"""How commands end: with a message and an exit code for every case."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from runs.process.console import say

if TYPE_CHECKING:
    from runs.run import Outcome
    from runs.totals.accounts import Accounts

SIGNALLED = 128
"""Added to the number of the signal that stopped a run, as shells do."""

DEFECT = 70
"""A defect of this program (EX_SOFTWARE of sysexits.h)."""


def end(outcome: Outcome, accounts: Accounts, *, is_all: bool = True) -> NoReturn:
    """The exit code of a start, and why it is not 0; `is_all` is whether it was to do all tasks."""
    if outcome.is_out_of_budget:
        fail(
            f"stopped: {outcome.stopped_by}\nNothing that was finished is lost; raise it and run "
            "the same command again to go on.",
            3,
        )
    if (reason := outcome.stopped_by) is not None:
        # What a disk refused says so itself.
        if "run the same command again" not in reason:
            reason += "\nNothing that was finished is lost; mend it and run the same command again."
        fail(f"stopped: {reason}", 4)
    if outcome.signal is not None and (accounts.pending or accounts.to_retry):
        fail(interrupted(outcome.signal), SIGNALLED + outcome.signal)
    if accounts.pending and is_all:
        fail(
            f"{accounts.pending:,} tasks have no record although the run has come to its end: "
            "records.jsonl or the dataset was changed while it went on. Run the same command "
            "again: it sets aside what is unreadable and does these tasks.",
            4,
        )
    sys.exit(1 if accounts.failed else 0)


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Every way out has its message and its exit code; only a defect shows a traceback."""
    from runs.errors import EnvironmentStop, RunError
    from toolsets.errors import machine_failure

    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    except RunError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        words = "nothing that was finished is lost; mend that and run the same command again"
        fail(f"{machine_failure(error) or error}; {words}", EnvironmentStop.exit_code)
    except KeyboardInterrupt:
        first = received[0] if received else int(signal.SIGINT)
        fail(interrupted(first), SIGNALLED + first)
    except Exception as error:
        if (lack := machine_failure(error)) is not None:
            words = "nothing that was finished is lost; run the same command again after that"
            fail(f"{lack}; {words}", EnvironmentStop.exit_code)
        trace = traceback.format_exc()
        fail(f"{trace}a defect of the program; nothing that was finished is lost", DEFECT)


def interrupted(number: int) -> str:
    name = signal.Signals(number).name
    return f"interrupted by {name}; nothing is lost: run the same command again to go on"


def fail(message: str, exit_code: int) -> NoReturn:
    say(f"error: {message}")
    sys.exit(exit_code)
