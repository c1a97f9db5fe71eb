"""How good a conversation was found to be, from whatever judged it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def reward_of(record: Mapping[str, Any]) -> float | None:
    """The reward of a record, None where nothing judged it.

    The number of its check; else 1.0 or 0.0 for a check that passed or not; else the same for an
    answer that was compared with the row's `expected`. A conversation that was to be compared
    and ended at a bound before it was has no reward: it was not judged.
    """
    check = record.get("check")
    if isinstance(check, dict):
        reward = check.get("reward")
        if isinstance(reward, int | float) and math.isfinite(reward):
            return float(reward)
        if isinstance(check.get("passed"), bool):
            return float(check["passed"])
    return _by_expected_answer(record)


def passed(record: Mapping[str, Any], *, threshold: float) -> bool | None:
    """Whether a record passed: what its check says, else whether its reward reaches `threshold`."""
    check = record.get("check")
    if isinstance(check, dict) and isinstance(check.get("passed"), bool):
        return bool(check["passed"])
    reward = reward_of(record)
    return None if reward is None else reward >= threshold


def _by_expected_answer(record: Mapping[str, Any]) -> float | None:
    options = record.get("options") or {}
    if not options.get("check_expected") or record["row"].get("expected") is None:
        return None
    if record["status"] == "completed":
        return 1.0
    told = any(note.get("reason") == "expected" for note in record.get("notes") or ())
    was_compared = told or (record.get("status_reason") or "").startswith("not the expected")
    return 0.0 if record["status"] == "errors" and was_compared else None
