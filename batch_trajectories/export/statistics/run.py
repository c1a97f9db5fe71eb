"""Computes the statistics of a run from its records, for people and programs.

Some numbers of each record are kept in arrays of machine numbers, so percentiles are exact and a
million records take some tens of megabytes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_trajectories.basics.text import plural
from batch_trajectories.engine.run_totals import (
    describe_dollars,
    known_usd,
    read_spending,
    spent_by_judges,
)
from batch_trajectories.export.conversation.own_work import (
    AuthoredWork,
    user_tool_names,
    users_with_calls,
)
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.rewards import why_not_passed
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import tool_names
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.export.statistics import agreement, cache_use
from batch_trajectories.export.statistics import rewards as reward_statistics
from batch_trajectories.export.statistics.agreement import Agreement
from batch_trajectories.export.statistics.cache_use import PriceOf, compute_cached_share
from batch_trajectories.export.statistics.counts import Statistics, reason_lines
from batch_trajectories.export.statistics.health import Health, health_as_text
from batch_trajectories.export.statistics.observations import compute_observation_share
from batch_trajectories.export.statistics.rewards import RewardStatistics
from batch_trajectories.records.checks import Checks, describe, judge_record
from batch_trajectories.records.failures import NO_LIMIT, stored_failures
from batch_trajectories.records.reader import RecordPart, process_records
from batch_trajectories.records.record_types import Record, ToolRun

if TYPE_CHECKING:
    from batch_trajectories.engine.stopping import StoppingRule

_SHARES = (0.5, 0.9, 0.99)


_AMOUNTS = [
    "turns",
    "tool_calls",
    "input_tokens",
    "output_tokens",
    "cached_percent",
    "observation_percent",
    "cost_usd",
    "model_seconds",
]
"""Numbers of each record whose mean and percentiles are shown."""


def _floats() -> array[float]:
    return array("f")


def _add_seconds(
    seconds: dict[str, array[float]], calls: Iterable[ToolRun], offered: frozenset[str]
) -> None:
    for call in calls:
        # There can be any number of invented names.
        if call.name in offered and call.duration_s is not None:
            seconds[call.name].append(call.duration_s)


class RunStatistics:
    """All statistics of a run: `Statistics`, rewards, health, labels, and spreads of numbers."""

    def __init__(
        self,
        *,
        style: Style,
        samples: int = 1,
        rule: StoppingRule | None = None,
        left_out: Collection[str] | None = None,
    ) -> None:
        """`style` is that of the run and decides which conversations are kept.

        `samples` is the number of conversations per prompt. `left_out` are the ids of completed
        conversations that are not kept; None: found out by parsing them.
        """
        self._left_out = left_out
        self._rewards = RewardStatistics(samples, rule)
        self.health = Health(samples)
        self._agreement = Agreement()
        self._style = style
        self._statistics = Statistics()
        self._spreads = {name: array("d") for name in _AMOUNTS}
        self._tool_seconds: dict[str, array[float]] = defaultdict(_floats)
        self._user_tool_seconds: dict[str, array[float]] = defaultdict(_floats)
        self._records = 0
        self._kept = 0
        self._kept_with_cost = 0
        self._cost_of_kept = 0.0
        self._cost = 0.0
        self._unknown_costs = 0

    def add(self, records: Sequence[Record]) -> None:
        """Count records."""
        given = [(record, AuthoredWork(record)) for record in records]
        # Done first: reading a conversation counts its replies on the way.
        kept = [self._is_kept(record, authored) for record, authored in given]
        for record, authored in given:
            self._statistics.add(record, authored)
        for record, authored in given:
            self._rewards.add(record)
            self._agreement.add(record)
            self.health.add(record, authored)
        for (record, authored), is_kept in zip(given, kept, strict=True):
            self._add_amounts(record, authored, is_kept=is_kept)
        self._records += len(records)

    def _add_amounts(self, record: Record, authored: AuthoredWork, *, is_kept: bool) -> None:
        usage = record.usage or {}
        turns, calls = authored.turns, record.own_tool_calls
        cached, observed = compute_cached_share(record), compute_observation_share(record)
        amounts = {
            "turns": len(turns),
            "tool_calls": len(calls),
            "input_tokens": usage.get("input_tokens"),
            "output_tokens": usage.get("output_tokens"),
            "cached_percent": None if cached is None else 100 * cached,
            "observation_percent": None if observed is None else 100 * observed,
            "cost_usd": record.cost_usd,
            "model_seconds": sum([turn.duration_s for turn in turns]) if turns else None,
        }
        for name, amount in amounts.items():
            if amount is not None:
                self._spreads[name].append(amount)
        _add_seconds(self._tool_seconds, calls, tool_names(record.tools))
        if record.inner and (users := users_with_calls(record)):
            offered = user_tool_names(record)
            for user in users:
                _add_seconds(self._user_tool_seconds, user.tool_calls, offered)
        cost = record.cost_usd
        self._unknown_costs += cost is None
        self._cost += cost or 0.0
        if is_kept:
            self._kept += 1
            if cost is not None:
                self._kept_with_cost += 1
                self._cost_of_kept += cost

    def merge(self, other: RunStatistics) -> None:
        """Add the records of `other`, which come later."""
        self._statistics.merge(other._statistics)
        self._rewards.merge(other._rewards)
        self._agreement.merge(other._agreement)
        self.health.merge(other.health)
        for ours, theirs in (
            (self._spreads, other._spreads),
            (self._tool_seconds, other._tool_seconds),
            (self._user_tool_seconds, other._user_tool_seconds),
        ):
            for name, numbers in theirs.items():
                ours[name].extend(numbers)
        self._records += other._records
        self._kept += other._kept
        self._kept_with_cost += other._kept_with_cost
        self._cost_of_kept += other._cost_of_kept
        self._cost += other._cost
        self._unknown_costs += other._unknown_costs

    def _is_kept(self, record: Record, authored: AuthoredWork) -> bool:
        if record.status != "completed":
            return False
        if self._left_out is not None:
            return record.id not in self._left_out
        if self._style.require_passed and why_not_passed(judge_record(record)) is not None:
            return False
        try:
            conversation = read_conversation(record, authored)
            self._style.tolerance.refuse(conversation.flaws)
        except Rejected:
            return False
        if not self._style.require_reasoning:
            return True
        return any(turn.reasoning for turn in conversation.own_turns)

    def to_json(self, price_of: PriceOf | None = None) -> dict[str, Any]:
        """The statistics as `stats --json` has them. A cost of which nothing is known is None.

        `price_of` is for the cost of tokens that caches missed.
        """
        counted = self._statistics.to_json()
        users = counted["user_tools"]["tools"] if "user_tools" in counted else []
        for tools, seconds in (
            (counted["tools"], self._tool_seconds),
            (users, self._user_tool_seconds),
        ):
            for tool in tools:
                tool["seconds"] = _spread(seconds.get(tool["tool"], array("f")))
        return {
            **counted,
            "records": self._records,
            "kept": self._kept,
            "rewards": self._rewards.to_json(),
            "health": self.health.to_json(price_of),
            "caches": self.health.caches.to_json(price_of),
            **self._agreement.to_json(),
            "cost_usd": {
                "known_total": known_usd(self._cost, self._unknown_costs),
                "records_of_unknown_cost": self._unknown_costs,
                # All costs, divided by the conversations that are kept.
                "per_kept": self._cost / self._kept if self._kept and self._cost else None,
                "of_kept_mean": self._cost_of_kept / self._kept_with_cost
                if self._kept_with_cost
                else None,
            },
            "per_record": {name: _spread(n) for name, n in self._spreads.items() if n},
        }


def compute_statistics(
    run_dir: Path,
    *,
    style: Style,
    max_attempts: int = NO_LIMIT,
    samples: int = 1,
    rule: StoppingRule | None = None,
    left_out: Collection[str] | None = None,
    price_of: PriceOf | None = None,
) -> dict[str, Any]:
    """The statistics of a run, over the last record of each task. Raises `EnvironmentStop`.

    `max_attempts` is that of the run, for the total cost. `samples` is the number of conversations
    per prompt, with `rule` the maximum. For `style` and `left_out` see `RunStatistics`, for
    `price_of` its `to_json`.
    """

    def count(some: RecordPart) -> RunStatistics:
        counted = RunStatistics(style=style, samples=samples, rule=rule, left_out=left_out)
        for records in some.few:
            counted.add(records)
        return counted

    statistics, *others = process_records(run_dir, count, doing="statistics")
    for other in others:
        statistics.merge(other)
    statistics.health.add_failures(stored_failures(run_dir))
    spent, judges = read_spending(run_dir, max_attempts), spent_by_judges(run_dir)
    figures = statistics.to_json(price_of)
    figures["cost_usd"] |= {
        "spent_in_all": spent.known_usd,
        "spent_unknown": spent.unknown,
        "judges": judges.known_usd,
        "judges_unknown": judges.unknown,
    }
    return figures


def as_text(figures: Mapping[str, Any], shares: Mapping[str, float]) -> Iterator[str]:
    """Format the statistics as tables; `shares` are the wanted shares of toolsets, in percent."""
    statuses = ", ".join(f"{name} {count:,}" for name, count in figures["rows"].items())
    kept = f"kept for training {figures['kept']:,}"
    yield f"{plural(figures['records'], 'task')} ended: {statuses or 'none'}; {kept}"
    if text := describe(Checks(**figures["checks"])):
        yield text
    if "labels" in figures:
        yield from agreement.as_text(figures["labels"])
    yield from health_as_text(figures["health"])
    yield from _reasoning(figures["reasoning"])
    yield from _costs(figures)
    yield from cache_use.as_text(figures["caches"])
    if lines := list(reward_statistics.as_text(figures["rewards"])):
        yield ""
        yield from lines
    if failed := figures.get("failed_scores"):
        yield f"{plural(failed, 'score')} failed; `show RUN ID` has the reason of each"
        yield from reason_lines(figures["failed_score_reasons"])
    yield ""
    head = ("mean", "p50", "p90", "p99", "max")
    yield f"{'per task':<20}" + "".join(f"{name:>14}" for name in head)
    for name, spread in figures["per_record"].items():
        yield f"{name:<20}" + _numbers(spread)
    yield from _tools(figures["tools"])
    if (users := figures.get("user_tools")) is not None:
        yield from _tools(users["tools"], title="tool of the user")
        errors = ", ".join(f"{kind} {count:,}" for kind, count in users["tool_errors"].items())
        failed = f"; failures of its calls: {errors}" if errors else ""
        yield f"in {plural(users['rows'], 'conversation')} the simulated user called tools{failed}"
    yield from _toolsets(figures["toolsets"], shares)


def _reasoning(reasoning: Mapping[str, Any]) -> Iterator[str]:
    if turns := reasoning["assistant_turns"]:
        share = 100 * reasoning["with_reasoning"] / turns
        hidden = reasoning.get("hidden", 0)
        text = f", hidden by the API in {100 * hidden / turns:.1f}%" if hidden else ""
        yield f"reasoning in {share:.1f}% of {turns:,} turns{text}"


def _costs(figures: Mapping[str, Any]) -> Iterator[str]:
    cost = figures["cost_usd"]
    known = describe_dollars(cost["known_total"], cost["records_of_unknown_cost"], "tasks")
    spent = describe_dollars(cost["spent_in_all"], cost["spent_unknown"], "records and replies")
    per_kept = cost["per_kept"]
    each = "" if per_kept is None else f", ${per_kept:.4f} per conversation kept for training"
    yield f"cost of these tasks {known}{each}; spent in total {spent}"
    if cost["judges"] or cost["judges_unknown"]:
        yield f"judges {describe_dollars(cost['judges'], cost['judges_unknown'], 'replies')}"


def _tools(tools: Sequence[Mapping[str, Any]], *, title: str = "tool") -> Iterator[str]:
    if not tools:
        return
    yield ""
    columns = ("calls", "failures", "failed %", "p50 s", "p99 s")
    called = [tool for tool in tools if tool["count"]]
    if called:
        yield f"{title:<24}" + "".join(f"{name:>12}" for name in columns)
    for tool in called:
        yield (
            f"{tool['tool']:<24}{tool['count']:>12,}{tool['failure']:>12,}"
            f"{tool['failure_rate']:>12g}"
            + "".join(f"{_number(tool['seconds'][key]):>12}" for key in ("p50", "p99"))
        )
    if never := [tool["tool"] for tool in tools if not tool["count"]]:
        whose = "" if title == "tool" else f"{title}: "
        yield f"{whose}offered, but never called: {', '.join(never)}"


def _toolsets(toolsets: Sequence[Mapping[str, Any]], shares: Mapping[str, float]) -> Iterator[str]:
    offered = {one["toolset"]: one["percent"] for one in toolsets}
    if names := sorted({*shares, *offered}):
        yield ""
        yield f"{'toolset':<24}{'asked %':>12}{'offered %':>12}"
        for name in names:
            yield f"{name:<24}{_number(shares.get(name)):>12}{_number(offered.get(name)):>12}"


def _spread(numbers: array[float]) -> dict[str, float | None]:
    if not numbers:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    ordered = sorted(numbers)
    last = len(ordered) - 1
    percentiles = {f"p{share * 100:g}": ordered[round(share * last)] for share in _SHARES}
    return {"mean": sum(ordered) / len(ordered), **percentiles, "max": ordered[last]}


def _numbers(spread: Mapping[str, float | None]) -> str:
    return "".join(f"{_number(number):>14}" for number in spread.values())


def _number(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
