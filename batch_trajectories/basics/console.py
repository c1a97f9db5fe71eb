"""Output for the user: results on standard output, messages on standard error.

A closed terminal or missing streams, as in a daemon, do not stop a run.
"""

from __future__ import annotations

import contextlib
import os
import sys


def say(message: str) -> None:
    """Print a line on standard error."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def show(result: str) -> None:
    """Print a result on standard output; escape characters that its encoding lacks."""
    try:
        try:
            print(result, flush=True)
        except UnicodeEncodeError as error:
            escaped = result.encode(error.encoding, "backslashreplace")
            print(escaped.decode(error.encoding), flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            say(f"error: cannot write the result: {error.strerror or error}")
        # Else the interpreter would try to write its buffer again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_missing_streams() -> None:
    """Replace standard streams that the caller closed, because libraries expect them."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as above
