"""Signs that the conversations of a run give nothing to train on.

A run in which nothing passes, everything fails alike or every row is rejected would go on to spend
its budget. Each sign is worked out from counts, by one function for the progress of a run, its
status, its page and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.stop_rules import MIN_TASKS, Sign, StopRule

NO_REASON = ("completed", "wrong_answer")
"""Endings that are no sign if many share them; `no_pass` tells of wrong answers."""

_SAME_REASON_SHARE = 0.9
"""Minimum share of endings for one same reason that is a sign."""


@dataclass(slots=True, kw_only=True)
class EndingCounts:
    """Counts of conversations that have ended."""

    ended: int = 0
    """Records and failed attempts."""
    failed: int = 0
    judged: int = 0
    """Conversations that were checked or scored."""
    passed: int = 0
    tool_calls: int = 0
    """Calls in conversations that did not fail; those of failed attempts are unknown."""
    offers_tools: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    """Conversations whose ending is not in `NO_REASON`, by status or failure class."""
    looked_at: int = 0
    """Ended conversations for which it is known whether they give a training row."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Looked-at conversations that give no training row, by reason."""


class SignSeen(NamedTuple):
    """A sign that a run gives nothing to train on, with the numbers that show it."""

    sign: Sign
    found: int
    """The number of conversations that show the sign."""
    total: int
    """The number of conversations that could show the sign."""
    reason: str = ""
    """The reason that most of these conversations share; "" if the sign has none."""

    @property
    def text(self) -> str:
        """The sign for a person, with what to do."""
        share = f"{self.found:,} of {plural(self.total, 'conversation')}"
        reason = f", {self.reason}" if self.reason else ""
        match self.sign:
            case "failed":
                return f"{share} failed{reason}"
            case "same_ending":
                return f"{share} ended as {self.reason}: `errors RUN` says why"
            case "rejected":
                return f"{share} give no training row{reason}"
            case "no_pass":
                return (
                    f"none of {plural(self.total, 'judged conversation')} passed: read some of "
                    "them (`view` or `show`), and what passes (`--dry_run`)"
                )
            case "no_call":
                return (
                    f"none of {plural(self.total, 'conversation')} called a tool, though tools are "
                    "offered (--enabled_toolsets=none offers none)"
                )

    def to_json(self) -> dict[str, str | int]:
        """Return the sign as summary.json, `status --json` and the page have it."""
        return {"sign": self.sign, "found": self.found, "of": self.total, "text": self.text}


def offers_tools(config: RunConfig) -> bool:
    """Whether conversations of this run can call tools; for agents of the user's own: False.

    Some of those call tools in plain text, which no count includes.
    """
    if config.agent is not None:
        return False
    return config.enabled_toolsets != ("none",)


def find_signs(counts: EndingCounts) -> list[SignSeen]:
    """The signs that hold now, the gravest first."""
    seen = {one.sign: one for one in _measure(counts) if _is_grave(one)}
    if "failed" in seen:  # it names the most frequent reason as well
        seen.pop("same_ending", None)
    return [*seen.values()]


def broken_rule(counts: EndingCounts, rules: Sequence[StopRule]) -> SignSeen | None:
    """The sign for which a run with these rules stops now; None if it goes on."""
    if not rules:
        return None
    measured = {one.sign: one for one in _measure(counts)}
    for rule in rules:
        if (seen := measured.get(rule.sign)) is None:
            continue
        if rule.count is not None and seen.found == seen.total >= rule.count:
            return seen
        if (
            rule.share is not None
            and seen.total >= MIN_TASKS
            and seen.found >= rule.share * seen.total
        ):
            return seen
    return None


def _is_grave(seen: SignSeen) -> bool:
    least = _SAME_REASON_SHARE if seen.sign in ("same_ending", "failed") else 1.0
    return seen.total >= MIN_TASKS and seen.found >= least * seen.total


def _measure(counts: EndingCounts) -> Iterator[SignSeen]:
    """Measure every sign, also those that do not hold; the gravest comes first."""
    yield SignSeen("failed", counts.failed, counts.ended, _most_frequent(counts.reasons))
    for reason, count in counts.reasons.most_common(1):
        yield SignSeen("same_ending", count, counts.ended, reason)
    yield SignSeen("no_pass", 0 if counts.passed else counts.judged, counts.judged)
    rejected = counts.rejected.total()
    yield SignSeen("rejected", rejected, counts.looked_at, _most_frequent(counts.rejected))
    if counts.offers_tools:
        finished = counts.ended - counts.failed
        yield SignSeen("no_call", 0 if counts.tool_calls else finished, finished)


def _most_frequent(reasons: Counter[str]) -> str:
    """The most frequent reason, with how many share it; "" without any."""
    for reason, count in reasons.most_common(1):
        return f"{'all' if count == reasons.total() else 'most'} as {reason}"
    return ""
