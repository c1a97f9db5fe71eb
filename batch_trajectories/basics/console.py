"""Output for the user: results on standard output, messages on standard error.

A closed terminal or missing streams, as in a daemon, do not stop a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from batch_trajectories.basics.text import escape_controls

if TYPE_CHECKING:
    from tqdm import tqdm


def say(message: str) -> None:
    """Print a line on standard error, with the control characters in it escaped."""
    with contextlib.suppress(OSError):
        print(escape_controls(message), file=sys.stderr, flush=True)


WARNING = "WARNING: "
"""The beginning of lines that are red on a terminal."""


def show(result: str) -> None:
    """Print a result on standard output; escape characters that cannot or must not be shown."""
    result = escape_controls(result)
    if WARNING in result and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        result = "\n".join(map(_color_text, result.split("\n")))
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


def _color_text(line: str) -> str:
    return f"\x1b[31m{line}\x1b[0m" if line.startswith(WARNING) else line


def show_json(value: Any) -> None:
    """Print a value as indented JSON on standard output."""
    import orjson

    show(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def open_missing_streams() -> None:
    """Replace standard streams that the caller closed, because libraries expect them."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as above


PLAIN_EVERY_S = 10.0
"""Seconds between two lines of progress in a log."""

_SILENT_S = 2.0
_DRAW_EVERY_S = 0.25
_WIDTH = 120

T = TypeVar("T")


class _Depth:
    """The number of works in progress inside each other, with blocks of `hide_progress`."""

    now = 0


class LongWork:
    """The progress of a work, shown once the work has taken two seconds.

    If one work contains another, only the outer one is shown.
    """

    def __init__(self, doing: str, *, total: int | None = None, unit: str = "records") -> None:
        """`doing` names the work, as `verify`; `unit` is the noun for what is counted, or `B`."""
        self._doing, self._total, self._unit = doing, total, unit
        self._done = 0
        self._began_at = time.monotonic()
        self._show_at = self._began_at + _SILENT_S
        self._is_shown = False
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> LongWork:
        self._is_shown = _Depth.now == 0
        _Depth.now += 1
        return self

    def __exit__(self, *_: object) -> None:
        _Depth.now -= 1
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Count so many more as done."""
        self._done += count
        if self._is_shown and time.monotonic() >= self._show_at:
            self._show()

    def reach(self, done: int) -> None:
        """Set how much is done in total."""
        self.advance(done - self._done)

    def _show(self) -> None:
        now = time.monotonic()
        with contextlib.suppress(OSError):  # the terminal may be gone
            if self._bar is None and is_interactive():
                self._bar = bar_class()(
                    desc=self._doing,
                    total=self._total,
                    unit=self._unit if self._unit == "B" else f" {self._unit}",
                    unit_scale=self._unit == "B",
                    leave=False,
                    file=sys.stderr,
                    mininterval=0.0,
                    **terminal_size(),
                )
                self._bar.start_t -= now - self._began_at
            if self._bar is not None:
                self._bar.update(self._done - self._bar.n)
                self._show_at = now + _DRAW_EVERY_S
                return
        say(self._line(now - self._began_at))
        self._show_at = now + PLAIN_EVERY_S

    def _line(self, seconds: float) -> str:
        done, unit = float(self._done), self._unit
        total = None if self._total is None else float(self._total)
        if unit == "B":
            done, unit = done / 1e6, "MB"
            total = None if total is None else total / 1e6
        if not total:
            return f"{self._doing}: {done:,.0f} {unit} in {seconds:.0f} s"
        left_s = seconds * (total / done - 1) if done else 0.0
        left = f", about {max(left_s, 0.0):.0f} s left" if done else ""
        return f"{self._doing}: {done:,.0f} of {total:,.0f} {unit} in {seconds:.0f} s{left}"


def track_progress(
    items: Iterable[T], doing: str, *, total: int | None = None, unit: str = "records"
) -> Iterator[T]:
    """Yield the items, and show how many were taken, as `LongWork` does."""
    with LongWork(doing, total=total, unit=unit) as work:
        for item in items:
            yield item
            work.advance()


@contextlib.contextmanager
def hide_progress() -> Iterator[None]:
    """Show no progress of long work inside a `with` block."""
    _Depth.now += 1
    try:
        yield
    finally:
        _Depth.now -= 1


def is_interactive() -> bool:
    """Whether standard error can redraw a line: it is a terminal, or belongs to a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or is_notebook())


def is_notebook() -> bool:
    """Whether this process serves a notebook, as tqdm finds it out."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", {})


def terminal_size() -> dict[str, Any]:
    """Arguments for tqdm with the size to draw.

    Some terminals report no size, and tqdm alone would then draw nothing.
    """
    if is_notebook():
        return {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if min(os.get_terminal_size(sys.stderr.fileno())) > 0:
            return {"dynamic_ncols": True}
    return {"ncols": _WIDTH, "nrows": 2}


def bar_class() -> type[tqdm[Any]]:
    """The class of tqdm for a terminal or a notebook, whichever this process has."""
    with warnings.catch_warnings():  # of notebooks without widgets, which get a plain line
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm  # imported only if something is shown
    tqdm.monitor_interval = 0  # its thread would keep this process from being forked
    return tqdm
