"""Words for the user: results on standard output, all else on standard error.

Whoever reads may have gone, and a daemon has no streams at all; neither stops a run.
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
    """Print a result on standard output; what that has no letters for is spelt out."""
    try:
        try:
            print(result, flush=True)
        except UnicodeEncodeError as error:
            spelt = result.encode(error.encoding, "backslashreplace")
            print(spelt.decode(error.encoding), flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            say(f"error: cannot write the result: {error.strerror or error}")
        # The interpreter would try once more to write what is buffered, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_missing_streams() -> None:
    """Give the standard streams that the caller closed a place to go: libraries expect them."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as above
