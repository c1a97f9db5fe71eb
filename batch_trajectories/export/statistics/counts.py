"""Counts records: tool calls and their failures, reasoning, endings, tokens.

Every record of an export counts, also a rejected one. Records are not kept, so memory grows only
with the number of tools. A call failed if its result is marked as an error; no text is interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

from agent.messages.message import MAX_TOKEN_COUNT
from batch_trajectories.basics.text import mask_values, one_line_excerpt
from batch_trajectories.export.conversation.own_work import (
    AuthoredWork,
    WorkCounts,
    failure_kind,
    tool_stats,
    user_tool_names,
    users_with_calls,
)
from batch_trajectories.export.conversation.turns import tool_names
from batch_trajectories.records.checks import UNCHECKED, CheckSums, judge_record
from batch_trajectories.records.record_types import InnerRecord, Record

# Counts of many things, one by one.

K = TypeVar("K")


class KeyCounts(dict[K, int]):
    """Counts by key; the count of a missing key is 0.

    Takes half the time of a `Counter`.
    """

    def __missing__(self, key: K) -> int:
        return 0

    def merge(self, other: Mapping[K, int]) -> None:
        """Add the counts of `other`."""
        for key, count in other.items():
            self[key] += count

    def total(self) -> int:
        """The sum of all counts."""
        return sum(self.values())


# Reasons of failures are counted without the values in which they differ.

_MAX_KIND_CHARS = 90
"""Reasons are the same if they are as far as this, without their values."""
_MAX_EXCERPT_CHARS = 200
_MAX_LISTED = 10
_MAX_REASONS = 1000
_OTHER = "other reasons"


class Reasons:
    """Counts reasons that differ only in numbers and names as one; keeps a limited number of texts.

    Each is named by one reason of its kind, the first in the order of the alphabet.
    """

    def __init__(self, about: str = "") -> None:
        """`about` is put before each reason."""
        self._about = about
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        """An excerpt of the reason that names each kind."""
        self._varied: set[str] = set()
        """The kinds of which several reasons were counted."""

    def add(self, reason: str) -> None:
        """Count a reason."""
        plain = "".join(c if c.isprintable() else " " for c in reason)
        kind = mask_values(" ".join(plain.split()), "…")[:_MAX_KIND_CHARS]
        self._count(kind, 1, one_line_excerpt(plain, max_chars=_MAX_EXCERPT_CHARS))

    def merge(self, other: Reasons) -> None:
        """Add the counts of `other`."""
        for kind, count in other._counts.items():
            self._count(kind, count, other._first[kind])
        self._varied.update(other._varied & self._first.keys())

    def to_json(self) -> dict[str, int]:
        """The counts by reason, the most frequent first; rare reasons are summed up at the end."""
        known = ((kind, count) for kind, count in self._counts.items() if kind != _OTHER)
        ordered = sorted(known, key=lambda item: (-item[1], item[0]))
        shown: Counter[str] = Counter()
        for kind, count in islice(ordered, _MAX_LISTED):
            similar = ", and similar" if kind in self._varied else ""
            shown[f"{self._about}{self._first[kind]}{similar}"] += count
        if rest := self._counts.total() - shown.total():
            shown[f"{self._about}{_OTHER}"] = rest
        return dict(shown)

    def _count(self, kind: str, count: int, reason: str) -> None:
        if kind not in self._counts and len(self._counts) >= _MAX_REASONS:
            kind = reason = _OTHER
        if (first := self._first.setdefault(kind, reason)) != reason:
            self._first[kind] = min(first, reason)  # parallel calls end in any order
            self._varied.add(kind)
        self._counts[kind] += count


def reason_lines(reasons: Mapping[str, int]) -> Iterator[str]:
    """Format counts of reasons as lines."""
    return (f"  {count:>9,}  {reason}" for reason, count in reasons.items())


_TOKENS = (
    "input_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
)


class ToolCounts:
    """Counts of calls by tool, and of failures by kind."""

    def __init__(self) -> None:
        self._offered: set[str] = set()
        self._calls: KeyCounts[str] = KeyCounts()
        self._successes: KeyCounts[str] = KeyCounts()
        self._failures: KeyCounts[str] = KeyCounts()
        self._errors: KeyCounts[str] = KeyCounts()

    def add(
        self, offered: frozenset[str], tools: Iterable[Mapping[str, Any]], failures: Iterable[str]
    ) -> None:
        """Count the calls of one conversation.

        `offered` are the names of the tools on offer, `tools` the counts of `tool_stats`, and
        `failures` the kinds of the failures.
        """
        if not offered <= self._offered:
            self._offered |= offered
        for stats in tools:
            # Invented names are errors, not tools; there can be any number of them.
            if (name := stats["tool"]) in offered:
                self._calls[name] += stats["count"]
                self._successes[name] += stats["success"]
                self._failures[name] += stats["failure"]
        for kind in failures:
            self._errors[kind] += 1

    def merge(self, other: ToolCounts) -> None:
        """Add the counts of `other`."""
        self._offered |= other._offered
        self._calls.merge(other._calls)
        self._successes.merge(other._successes)
        self._failures.merge(other._failures)
        self._errors.merge(other._errors)

    def to_json(self) -> dict[str, Any]:
        """`tools` (a list by name) and `tool_errors` (by kind of failure)."""
        return {
            "tools": [self._tool(name) for name in sorted(self._offered)],
            "tool_errors": dict(sorted(self._errors.items())),
        }

    def _tool(self, name: str) -> dict[str, Any]:
        success, failure = self._successes[name], self._failures[name]
        return {
            "tool": name,
            "count": self._calls[name],
            "success": success,
            "failure": failure,
            "success_rate": _percent(success, success + failure),
            "failure_rate": _percent(failure, success + failure),
        }


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


class Statistics:
    """The statistics of the records added so far."""

    def __init__(self) -> None:
        self._tools = ToolCounts()
        self._user_tools = ToolCounts()
        self._rows_with_user_calls = 0
        self._replies = 0
        self._with_reasoning = 0
        self._hidden_reasoning = 0
        self._rows_with_reasoning = 0
        self._statuses: KeyCounts[str] = KeyCounts()
        self._toolsets: KeyCounts[str] = KeyCounts()
        self._checks = CheckSums()
        self._failed_scores = Reasons()
        self._turns = 0
        self._turns_with_token_ids = 0
        self._most_turns = 0
        self._tokens: KeyCounts[str] = KeyCounts()
        self._first_started_at: float | None = None
        self._last_ended_at: float | None = None

    def add(self, record: Record, authored: AuthoredWork) -> None:
        """Count one record; of its messages only those of `own`."""
        turns, counts = len(authored.turns), authored.counts
        self._statuses[record.status] += 1
        judgement = judge_record(record)
        if judgement is not UNCHECKED:
            failed = judgement.error is not None
            self._checks.add(judgement.verdict, judgement.reward, check_failed=failed)
        for score in record.scores or ():
            if score.error is not None:
                self._failed_scores.add(f"{score.source}: {score.error}")
        for toolset in record.toolsets:
            self._toolsets[toolset] += 1
        self._turns += turns
        self._turns_with_token_ids += counts.with_token_ids
        if turns > self._most_turns:
            self._most_turns = turns
        self._tools.add(tool_names(record.tools), counts.tools, counts.failures)
        self._add_replies(counts)
        if record.inner and (users := users_with_calls(record)):
            self._add_users(record, users)
        self._add_times(counts.started_at, counts.ended_at)
        counted: Mapping[str, Any] = record.usage or {}
        tokens = self._tokens
        for key, count in counted.items():
            if count and count < MAX_TOKEN_COUNT:
                tokens[key] += count

    def merge(self, other: Statistics) -> None:
        """Add the records of `other`."""
        for name, theirs in vars(other).items():
            ours = getattr(self, name)
            if isinstance(ours, KeyCounts | Reasons | CheckSums | ToolCounts):
                ours.merge(theirs)
            elif isinstance(ours, int) and name != "_most_turns":
                setattr(self, name, ours + theirs)
        self._most_turns = max(self._most_turns, other._most_turns)
        self._add_times(other._first_started_at, other._last_ended_at)

    def to_json(self) -> dict[str, Any]:
        """The content of statistics.json.

        - `tools`: rates are percentages of the calls that have a result
        - `user_tools`: `rows` (conversations whose simulated user called tools), `tools` and
          `tool_errors` of these calls, which count nowhere else; absent without any
        - `reasoning.hidden`: turns whose reasoning the API hides; absent without any
        - `checks`: the fields of `records.checks.Checks`
        - `failed_scores`: number of failed reward functions, and `failed_score_reasons`; absent
          without any
        - `token_ids`: turns with and without token ids; absent if no turn has them
        - `tokens`: of all paid calls, as far as the endpoint reports them; `cache_hit_rate` is the
          percentage of input tokens that came from a prompt cache
        """
        rows = self._statuses.total()
        first, last = self._first_started_at, self._last_ended_at
        return {
            "schema_version": 1,
            **self._tools.to_json(),
            **self._calls_of_users(),
            "reasoning": {
                "assistant_turns": self._replies,
                "with_reasoning": self._with_reasoning,
                "without_reasoning": self._replies - self._with_reasoning,
                **({"hidden": self._hidden_reasoning} if self._hidden_reasoning else {}),
                "rows_with_any": self._rows_with_reasoning,
            },
            "rows": dict(sorted(self._statuses.items())),
            "checks": asdict(self._checks.sums()),
            **self._failures_of_scores(),
            "toolsets": [
                {"toolset": name, "rows": count, "percent": _percent(count, rows)}
                for name, count in sorted(self._toolsets.items())
            ],
            "turns_per_row": {
                "mean": round(self._turns / rows, 2) if rows else None,
                "max": self._most_turns if rows else None,
            },
            **self._token_ids(),
            "tokens": {
                **{key: self._tokens[key] for key in _TOKENS},
                "cache_hit_rate": _percent(
                    self._tokens["cache_read_tokens"], self._tokens["input_tokens"]
                ),
            },
            "duration_s": {
                "first_started_at": first,
                "last_ended_at": last,
                "wall": None if first is None or last is None else last - first,
            },
        }

    def _failures_of_scores(self) -> dict[str, Any]:
        reasons = self._failed_scores.to_json()
        counts = {"failed_scores": sum(reasons.values()), "failed_score_reasons": reasons}
        return counts if reasons else {}

    def _token_ids(self) -> dict[str, Any]:
        having = self._turns_with_token_ids
        counts = {"turns_with": having, "turns_without": self._turns - having}
        return {"token_ids": counts} if having else {}

    def _calls_of_users(self) -> dict[str, Any]:
        if not (rows := self._rows_with_user_calls):
            return {}
        return {"user_tools": {"rows": rows, **self._user_tools.to_json()}}

    def _add_users(self, record: Record, users: Sequence[InnerRecord]) -> None:
        self._rows_with_user_calls += 1
        for user in users:
            results = (message for message in user.messages if message.is_error)
            self._user_tools.add(
                user_tool_names(record),
                tool_stats(user.messages),
                [failure_kind(result.details) for result in results],
            )

    def _add_replies(self, counts: WorkCounts) -> None:
        self._replies += counts.replies
        self._with_reasoning += counts.with_reasoning
        self._hidden_reasoning += counts.hidden
        self._rows_with_reasoning += counts.with_reasoning > 0

    def _add_times(self, started_at: float | None, ended_at: float | None) -> None:
        if started_at is None or ended_at is None:
            return
        if self._first_started_at is None or started_at < self._first_started_at:
            self._first_started_at = started_at
        if self._last_ended_at is None or ended_at > self._last_ended_at:
            self._last_ended_at = ended_at
