"""What a whole run will take, judged by a random sample of its tasks that has been run."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from runs.amounts import EndpointLimits
from runs.dataset.scan import Scan, tasks
from runs.store.failures import load_failed_attempts
from runs.store.index import own_work
from runs.store.reader import open_records, read_record
from runs.store.records import IndexEntry, load_index
from runs.totals.accounts import Accounts

_CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the interval in which it lies in 95 of 100 cases."""

    expected: float
    low: float
    high: float

    def at_least(self, least: float) -> Estimate:
        """This, with nothing below `least`."""
        return Estimate(max(self.expected, least), max(self.low, least), max(self.high, least))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What all tasks of a run take together, those that have ended included."""

    tasks: int
    pilot: int
    """Tasks of the sample that have ended."""
    pilot_failed: int
    conversations: int
    """How many the forecast takes to be in flight at a time."""
    dollars: Estimate | None
    """None where what some conversation of the sample cost is unknown."""
    input_tokens: Estimate | None
    output_tokens: Estimate | None
    hours: Estimate
    """Of what is left to do."""
    failure_percent: Estimate

    def to_json(self) -> dict[str, Any]:
        """For estimate.json."""
        return asdict(self)


def sample_tasks(scan: Scan, *, num_samples: int, count: int, seed: int) -> frozenset[bytes]:
    """The keys of `count` tasks drawn at random: the same ones for the same file and seed."""

    def lot(key: bytes) -> bytes:
        return hashlib.blake2b(f"{seed}/pilot/".encode() + key, digest_size=8).digest()

    keys = (task.key for task in tasks(scan, num_samples=num_samples))
    return frozenset(heapq.nsmallest(count, keys, key=lot))


def forecast(
    run_dir: Path,
    accounts: Accounts,
    sample: Collection[bytes],
    *,
    conversations: int,
    bounds: Mapping[str, EndpointLimits],
    seed: int,
) -> Forecast | None:
    """Judge the whole run by the tasks of `sample` that have ended; None where none has.

    Hours hold if the endpoints answer `conversations` at a time as fast as they answered the
    sample: that it is so, only the run itself can show.
    """
    entries = load_index(run_dir)
    found = {key: entry for key in sorted(sample) if (entry := entries.get(key)) is not None}
    ended = list(found.values())
    failed_before = load_failed_attempts(run_dir).keys()
    unfinished = sum(key in failed_before and key not in entries for key in sample)
    failed = unfinished + sum(entry.status == "failed" for entry in ended)
    if not ended:
        return None
    left = accounts.pending + accounts.to_retry
    seconds = _durations(run_dir, found)
    draw = random.Random(seed)

    def of_all(numbers: Sequence[float | None], spent: float) -> Estimate | None:
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        return _total(known, left, draw, so_far=spent)

    in_flight = min(conversations, max(left, 1))
    if bounds:
        in_flight = min(in_flight, sum(one.ceiling for one in bounds.values()))
    # What bounds the run: how long its conversations take, or what may be asked per minute.
    bound_by = [[one.seconds / in_flight for one in seconds]]
    if rpm := _rate(one.rpm for one in bounds.values()):
        bound_by.append([60 * one.calls / rpm for one in seconds])
    if tpm := _rate(one.tpm for one in bounds.values()):
        tokens = ((entry.input_tokens or 0) + (entry.output_tokens or 0) for entry in ended)
        bound_by.append([60 * count / tpm for count in tokens])
    slowest = max(bound_by, key=fmean)
    hours = _total([second / 3600 for second in slowest], left, draw, so_far=0.0)
    if left:
        hours = hours.at_least(fmean(one.seconds for one in seconds) / 3600)
    ended_count = len(ended) + unfinished
    return Forecast(
        tasks=accounts.total - accounts.discarded,
        pilot=ended_count,
        pilot_failed=failed,
        conversations=in_flight,
        dollars=of_all([_known(e, e.cost_usd) for e in ended], accounts.cost_usd),
        input_tokens=of_all([_known(e, e.input_tokens) for e in ended], accounts.input_tokens),
        output_tokens=of_all([_known(e, e.output_tokens) for e in ended], accounts.output_tokens),
        hours=hours,
        failure_percent=_share(failed, ended_count),
    )


def as_table(found: Forecast) -> str:
    """The forecast for a person."""
    rows = [
        ("dollars", found.dollars, "{:,.2f}"),
        ("tokens in", found.input_tokens, "{:,.0f}"),
        ("tokens out", found.output_tokens, "{:,.0f}"),
        ("hours left", found.hours, "{:,.2f}"),
        ("failures %", found.failure_percent, "{:.1f}"),
    ]
    lines = [
        f"forecast for {found.tasks:,} tasks from a random sample of {found.pilot:,} "
        f"({found.pilot_failed:,} failed), with 95 % intervals"
    ]
    for name, figure, form in rows:
        if figure is None:
            lines.append(f"  {name:<11} unknown: some tasks have no price or no token counts")
            continue
        interval = f"({form.format(figure.low)} to {form.format(figure.high)})"
        lines.append(f"  {name:<11}{form.format(figure.expected):>16}   {interval}")
    lines.append(
        f"hours assume that the endpoint answers {found.conversations:,} conversations at a time "
        "as fast as the sample, without retries"
    )
    return "\n".join(lines)


class _Duration(NamedTuple):
    seconds: float
    """In replies and tools, without the time between two starts."""
    calls: int


def _durations(run_dir: Path, entries: Mapping[bytes, IndexEntry]) -> list[_Duration]:
    durations = []
    with open_records(run_dir) as records:
        for key, entry in entries.items():
            record = read_record(records, entry.offset, entry.length, key).record
            slowest: dict[int, float] = {}
            turns, calls = own_work(record)
            for call in calls:
                slowest[call["turn"]] = max(slowest.get(call["turn"], 0.0), call["duration_s"])
            in_replies = sum(turn["duration_s"] for turn in turns)
            durations.append(_Duration(in_replies + sum(slowest.values()), record["api_calls"]))
    return durations


def _rate(rates: Iterable[float | None]) -> float | None:
    """What may be asked of all endpoints per minute; None where one has no bound."""
    known = list(rates)
    bounded = [rate for rate in known if rate is not None]
    return sum(bounded) if bounded and len(bounded) == len(known) else None


def _known(entry: IndexEntry, number: float | None) -> float | None:
    """A conversation without any reply has cost nothing."""
    return number if entry.turns else 0.0


def _total(known: Sequence[float], left: int, draw: random.Random, *, so_far: float) -> Estimate:
    """The sum over all tasks: what is known of it, and for the rest the sample's mean.

    The interval comes from means of samples drawn from the sample again (the bootstrap), which
    asks nothing of how the figures are spread: costs have long tails.
    """
    means = sorted(fmean(draw.choices(known, k=len(known))) for _ in range(_RESAMPLES))
    tail = math.floor((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    figures = (fmean(known), means[tail], means[-1 - tail])
    return Estimate(*(so_far + left * mean for mean in figures))


def _share(count: int, of: int) -> Estimate:
    """A share in percent, with Wilson's interval, which also holds for few and for none."""
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    share = count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    spread = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return Estimate(100 * share, 100 * max(0.0, middle - spread), 100 * min(1.0, middle + spread))
