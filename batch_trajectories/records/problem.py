"""A problem that `verify` finds in a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["unreadable", "contradiction", "derived", "leftover"]
"""unreadable: damaged data; contradiction: data that disagree about a task; derived: a file that
does not match the files that it is made from; leftover: a file that is no longer needed."""


class Problem(NamedTuple):
    """A problem, and where it is."""

    kind: Kind
    file: Path
    line: int | None
    """The number of the line, from 1; None for the whole file."""
    message: str

    def describe(self) -> str:
        """One line for a person."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """The problem as `--json` shows it."""
        return {**self._asdict(), "file": str(self.file)}
