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
from batch_trajectories.config.stop_rules import LEAST, Sign, StopRule

NO_REASON = ("completed", "wrong_answer")
"""Endings that are no sign if many share them; `no_pass` tells of wrong answers."""

_ALIKE = 0.9
"""From this share on, endings for one same reason are a sign."""


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
    offers_tools: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    """Other conversations than those of `NO_REASON`, by status or failure class."""
    looked_at: int = 0
    """Ended conversations for which it is known whether they give a training row."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Those that give none, by reason."""


class SignSeen(NamedTuple):
    """A sign that a run gives nothing to train on, with the numbers that show it."""

    sign: Sign
    found: int
    """Conversations that show the sign."""
    of: int
    """Conversations that could."""
    text: str
    """The sign for a person, with what to do."""

    def to_json(self) -> dict[str, str | int]:
        """For the summary, `status --json` and the page."""
        return self._asdict()


def offers_tools(config: RunConfig) -> bool:
    """Whether conversations of this run can call tools; for agents of the user's own: False.

    Some of those call tools in plain text, which no count includes.
    """
    if config.agent is not None:
        return False
    return config.enabled_toolsets != ("none",) or bool(config.tools) or bool(config.mcp)


def find_signs(outcomes: EndingCounts) -> list[SignSeen]:
    """The signs that hold now, the gravest first."""
    seen = {sign.sign: sign for sign in _measure(outcomes) if _is_grave(sign)}
    if "failed" in seen:  # it names the most frequent reason as well
        seen.pop("same_ending", None)
    return [*seen.values()]


def broken_rule(outcomes: EndingCounts, rules: Sequence[StopRule]) -> SignSeen | None:
    """The sign for which a run with these rules stops now; None if it goes on."""
    measured = {sign.sign: sign for sign in _measure(outcomes)}
    for rule in rules:
        if (seen := measured.get(rule.sign)) is None:
            continue
        if rule.count is not None and seen.found == seen.of >= rule.count:
            return seen
        if rule.share is not None and seen.of >= LEAST and seen.found >= rule.share * seen.of:
            return seen
    return None


def _is_grave(seen: SignSeen) -> bool:
    least = _ALIKE if seen.sign in ("same_ending", "failed") else 1.0
    return seen.of >= LEAST and seen.found >= least * seen.of


def _measure(outcomes: EndingCounts) -> Iterator[SignSeen]:
    """Every sign with its numbers, whether it holds or not, the gravest first."""
    ended = plural(outcomes.ended, "conversation")
    text = f"{outcomes.failed:,} of {ended} failed{_most(outcomes.reasons)}"
    yield SignSeen("failed", outcomes.failed, outcomes.ended, text)
    for reason, count in outcomes.reasons.most_common(1):
        text = f"{count:,} of {ended} ended as {reason}"
        yield SignSeen("same_ending", count, outcomes.ended, text)
    text = (
        f"none of {plural(outcomes.judged, 'judged conversation')} passed: read some of them "
        "(`view` or `show`), and what passes (`--dry_run`)"
    )
    yield SignSeen("no_pass", 0 if outcomes.passed else outcomes.judged, outcomes.judged, text)
    rejected = outcomes.rejected.total()
    text = (
        f"{rejected:,} of {plural(outcomes.looked_at, 'conversation')} give no training row"
        f"{_most(outcomes.rejected)}"
    )
    yield SignSeen("rejected", rejected, outcomes.looked_at, text)
    if outcomes.offers_tools:
        found = 0 if outcomes.tool_calls else outcomes.ended
        text = (
            f"none of {ended} called a tool, though tools are offered "
            "(--enabled_toolsets=none offers none)"
        )
        yield SignSeen("no_call", found, outcomes.ended, text)


def _most(reasons: Counter[str]) -> str:
    """The most frequent reason as an addition to a sentence; "" without any."""
    for reason, count in reasons.most_common(1):
        return f", {'all' if count == reasons.total() else 'most'} as {reason}"
    return ""
