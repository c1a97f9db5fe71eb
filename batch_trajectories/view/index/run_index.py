"""The index of one run, kept up to date while somebody looks at it.

A small piece that is missing is made here, and so is the first one, to have something to show; more
is made by another process, in processes of its own, and can be used part by part.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from batch_trajectories.basics.console import hide_progress
from batch_trajectories.basics.errors import RunDirError, RunError, RunLocked
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.view.index.parts import (
    Origin,
    extend,
    find_origin,
    make_cache,
    missing_in,
    parts_in,
    remove_old,
    split_ranges,
)
from batch_trajectories.view.index.table import Table, count_selected

_HERE_BYTES = 1 << 20
"""Bytes of records that are indexed sooner than a process is started."""
_SAID_CHARS = 2000


class Maker:
    """A process that makes parts of an index, or other facts of a run."""

    def __init__(self, what: str, run_dir: Path) -> None:
        """`what` is an argument of `batch_trajectories.view.index.making`."""
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as it
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "batch_trajectories.view.index.making",
                what,
                str(run_dir.resolve()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
        )

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def problem(self) -> str | None:
        """The reason why the process failed; None if it did not."""
        if self._process.returncode in (0, None):
            return None
        size = self._said.seek(0, 2)
        self._said.seek(max(0, size - _SAID_CHARS))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with {self._process.returncode}"

    def stop(self) -> None:
        """End it; what it has made stays."""
        if not self.is_over():
            self._process.terminate()
            self._process.wait()
        self._said.close()


def run_maker(what: str, *run_dirs: Path) -> bytes:
    """Run another process to its end, and return its output. Raises `RunDirError`."""
    module = "batch_trajectories.view.index.making"
    paths = [str(path.resolve()) for path in run_dirs]
    command = [sys.executable, "-m", module, what, *paths]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise RunDirError(lines[-1] if lines else f"{what} ended with {ended.returncode}")
    return ended.stdout


class RunIndex:
    """The rows of one run as a table; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.table = Table([])
        self.is_complete = False
        self.error: str | None = None
        self.of_bytes = 0
        self._lock = threading.Lock()
        self._shown: Origin | None = None
        self._maker: Maker | None = None
        self._failed_at: tuple[Origin | None, int] | None = None

    @property
    def version(self) -> str:
        """A text that changes with the rows."""
        name = "" if self._shown is None else self._shown.name
        return f"{name}-{self.table.bytes:x}"

    def to_json(self) -> dict[str, Any]:
        """See the API's `Index`."""
        return {
            "rows": count_selected(self.table.counting),
            "bytes": self.table.bytes,
            "of_bytes": self.of_bytes,
            "is_complete": self.is_complete,
            "error": self.error,
            "unreadable": self.table.unreadable,
        }

    def refresh(self) -> Table:
        """Bring the table up to date as far as that takes no time, and return it.

        Raises `RunDirError` if the run is gone. `State.open` refuses files that are not plain.
        """
        with self._lock:
            origin = find_origin(self.run_dir)
            if origin is None:
                self.table, self._shown, self.is_complete = Table([]), None, True
                return self.table
            if self._maker is not None and self._maker.is_over():
                self.error = self._maker.problem()
                if self.error is not None:
                    self._failed_at = (origin, self.of_bytes)
                self._maker.stop()
                self._maker = None
            cache = make_cache(self.run_dir)
            self._bring(cache, origin)
            shown = self._choose(cache, origin)
            directory = cache / shown.name
            parts = parts_in(directory)
            if parts != self.table.parts or shown != self._shown:
                self.table = Table(parts, self.table if shown == self._shown else None)
                if shown != self._shown and self._shown is not None:
                    remove_old(cache, shown)
                self._shown = shown
            return self.table

    def _bring(self, cache: Path, origin: Origin) -> None:
        """Make what is missing, or have it made."""
        records = self.run_dir / RECORDS_FILE
        self.of_bytes = records.stat().st_size
        missing = missing_in(parts_in(cache / origin.name), self.of_bytes)
        ranges = split_ranges(records, missing)
        self.is_complete = not ranges
        if not ranges or self._maker is not None or self._failed_at == (origin, self.of_bytes):
            return
        self._failed_at = self.error = None
        is_small = sum(end - begin for begin, end in ranges) <= _HERE_BYTES
        is_first = missing == [(0, self.of_bytes)]
        if is_small or is_first:
            upto = (
                self.of_bytes if is_small else split_ranges(records, ranges[:1], _HERE_BYTES)[0][1]
            )
            self._make(cache, origin, upto)
        if not is_small and self.error is None:
            self._maker = Maker("rows", self.run_dir)

    def _make(self, cache: Path, origin: Origin, upto: int) -> None:
        try:
            with hide_progress():
                extend(self.run_dir, cache, origin, upto=upto)
            self.is_complete, self.error = upto == self.of_bytes, None
        except RunLocked:
            pass  # another process is at it
        except (RunError, OSError) as error:
            self.error, self._failed_at = str(error), (origin, self.of_bytes)

    def _choose(self, cache: Path, origin: Origin) -> Origin:
        """Choose the index to show: an earlier one while a new one is made for new scores alone."""
        before = self._shown
        if before is None or before == origin or self.is_complete:
            return origin
        is_same = (before.device, before.inode) == (origin.device, origin.inode)
        return before if is_same and (cache / before.name).is_dir() else origin

    def close(self) -> None:
        """End the process that makes parts."""
        with self._lock:
            if self._maker is not None:
                self._maker.stop()
                self._maker = None
