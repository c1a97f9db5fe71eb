"""The failures of a run by class, each with an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs.store.checksum import DamagedLine, read_object


def errors_seen(run_dir: Path) -> list[dict[str, Any]]:
    """Failed attempts and worker deaths by class, the most frequent first; writes nothing.

    Keys: `class`, `count`, and of the last one `id`, `message` and `at` (epoch seconds). Counted
    over all attempts, also of tasks that succeeded afterwards.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        file = (run_dir / "failures.jsonl").open("rb")
    except FileNotFoundError:
        return []
    with file:
        for text in file:
            line = _attempt(text)
            if line is None:
                continue
            count = found[line["class"]]["count"] + 1 if line["class"] in found else 1
            example = {key: line.get(key) for key in ("class", "id", "message", "at")}
            found[line["class"]] = example | {"count": count}
    return sorted(found.values(), key=lambda error: (-error["count"], error["class"]))


def _attempt(text: bytes) -> dict[str, Any] | None:
    """A line about an attempt; one that is torn only explains and is passed over."""
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    if line.get("kind") not in ("attempt", "death"):
        return None
    is_whole = all(isinstance(line.get(key), str) for key in ("class", "id", "message"))
    return line if is_whole else None
