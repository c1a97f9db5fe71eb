"""The rows of an export, read as anyone would."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def rows(directory: Path, name: str = "openai") -> Iterator[dict[str, Any]]:
    """The rows of a format, of all splits."""
    for path in sorted((directory / name).glob("*.jsonl")):
        with path.open(encoding="utf-8", newline="\n") as lines:
            yield from map(json.loads, lines)


def training_page() -> str:
    """The page for trainers, whose settings and code are tried as they stand there."""
    return _PAGE.read_text(encoding="utf-8")


def not_checked(why: str) -> NoReturn:
    """End a check that cannot run, as a failure."""
    sys.exit(f"not checked: {why}")
