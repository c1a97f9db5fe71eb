"""One thing that is wrong in a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["unreadable", "contradiction", "derived", "leftover"]
"""unreadable: bytes that say nothing; contradiction: two truths about one task; derived: a file
that is made from others and does not fit them; leftover: what nobody needs any more."""


class Problem(NamedTuple):
    """What `verify` found, and where."""

    kind: Kind
    file: Path
    line: int | None
    """From 1; None where the file as a whole is meant."""
    message: str

    def describe(self) -> str:
        """One line for a person."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**self._asdict(), "file": str(self.file)}
