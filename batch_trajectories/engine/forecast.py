"""Forecast the cost and time of a whole run from a random sample of its tasks."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, BinaryIO, NamedTuple

from batch_trajectories.basics.text import plural
from batch_trajectories.config.endpoints import EndpointLimits
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.run_totals import RunTotals
from batch_trajectories.records.failures import load_failed_attempts
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.reader import open_records, read_record
from batch_trajectories.records.records import load_index

_CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    expected: float
    low: float
    high: float

    def raise_minimum(self, least: float) -> Estimate:
        """The estimate with `least` as lower limit of each figure."""
        return Estimate(max(self.expected, least), max(self.low, least), max(self.high, least))


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast for all tasks of a run, including those that have ended."""

    tasks: int
    """All tasks; with `--until_passed` those that are known so far (see `tasks_in_all`)."""
    pilot: int
    """Tasks of the sample that have ended."""
    pilot_failed: int
    conversations: int
    """Assumed number of conversations in flight."""
    dollars: Estimate | None
    """None if the cost of some conversation of the sample is unknown."""
    input_tokens: Estimate | None
    output_tokens: Estimate | None
    hours: Estimate
    """Hours of the remaining work."""
    failure_percent: Estimate
    prompts: int | None = None
    """With `--until_passed` the number of all prompts, from which the sample is taken; else
    None."""
    tasks_in_all: Estimate | None = None
    passed: Estimate | None = None
    """Conversations that pass, in all."""

    def to_json(self) -> dict[str, Any]:
        """The values for estimate.json."""
        later = ("prompts", "tasks_in_all", "passed")
        return {k: v for k, v in asdict(self).items() if v is not None or k not in later}


def sample_tasks(
    scan: Scan, *, count: int, seed: int, by_prompt: bool = False
) -> list[list[bytes]]:
    """The keys of `count` random tasks, each in a list: the same for the same file and seed.

    `by_prompt`: of `count` random prompts, each a list with the keys of all its samples.
    """
    samples = scan.num_samples if by_prompt else 1

    def draw(number: int) -> bytes:
        seeded = f"{seed}/pilot/".encode() + scan.key(number)
        return hashlib.blake2b(seeded, digest_size=8).digest()

    firsts = heapq.nsmallest(count, range(0, scan.tasks, samples), key=draw)
    return [[scan.key(first + sample) for sample in range(samples)] for first in firsts]


def forecast(
    run_dir: Path,
    totals: RunTotals,
    sample: Iterable[Sequence[bytes]],
    *,
    conversations: int,
    limits: Mapping[str, EndpointLimits],
    seed: int,
) -> Forecast | None:
    """Forecast the whole run from the tasks of `sample` that have ended; None if none has.

    Each item of `sample` has the keys of a random task, or, with `--until_passed`, of all samples
    of a random prompt. Hours assume that the endpoints answer `conversations` at a time as fast as
    they answered the sample.
    """
    entries = load_index(run_dir)
    units = [
        finished
        for keys in sorted(map(list, sample))
        if (finished := {key: entry for key in keys if (entry := entries.get(key)) is not None})
    ]
    failed_before = load_failed_attempts(run_dir).keys()
    unfinished = sum(key in failed_before and key not in entries for keys in sample for key in keys)
    if not units:
        return None
    ended = [entry for unit in units for entry in unit.values()]
    failed = unfinished + sum(entry.status == "failed" for entry in ended)
    left = totals.pending + totals.to_retry
    if totals.open_prompts is not None:
        left = totals.open_prompts
    durations = _durations(run_dir, units)
    draw = random.Random(seed)

    def estimate_run(number: Callable[[IndexEntry], float | None], spent: float) -> Estimate | None:
        known = []
        for unit in units:
            numbers = [_known_figure(entry, number(entry)) for entry in unit.values()]
            if None in numbers:
                return None
            known.append(math.fsum(filter(None, numbers)))
        return _total(known, left, draw, so_far=spent)

    in_flight = min(conversations, max(left, 1))
    if limits:
        in_flight = min(in_flight, sum(limit.ceiling for limit in limits.values()))
    # Seconds per conversation by each possible bottleneck: its duration, requests, tokens.
    by_bottleneck = [[duration.seconds / in_flight for duration in durations]]
    if rpm := _rate(limit.rpm for limit in limits.values()):
        by_bottleneck.append([60 * duration.calls / rpm for duration in durations])
    if tpm := _rate(limit.tpm for limit in limits.values()):
        tokens = (
            sum((entry.input_tokens or 0) + (entry.output_tokens or 0) for entry in unit.values())
            for unit in units
        )
        by_bottleneck.append([60 * count / tpm for count in tokens])
    slowest = max(by_bottleneck, key=fmean)
    hours = _total([seconds / 3600 for seconds in slowest], left, draw, so_far=0.0)
    if left:
        hours = hours.raise_minimum(fmean(duration.seconds for duration in durations) / 3600)
    ended_count = len(ended) + unfinished
    known_tasks = totals.total - totals.discarded
    return Forecast(
        tasks=known_tasks,
        pilot=ended_count,
        pilot_failed=failed,
        conversations=in_flight,
        dollars=estimate_run(lambda entry: entry.cost_usd, totals.cost_usd or 0.0),
        input_tokens=estimate_run(lambda entry: entry.input_tokens, totals.input_tokens),
        output_tokens=estimate_run(lambda entry: entry.output_tokens, totals.output_tokens),
        hours=hours,
        failure_percent=_share(failed, ended_count),
        **(_forecast_samples(totals, units, left, draw) if totals.open_prompts is not None else {}),
    )


def _forecast_samples(
    totals: RunTotals, units: Sequence[Mapping[bytes, IndexEntry]], left: int, draw: random.Random
) -> dict[str, Any]:
    """The open questions of `--until_passed`: how many tasks there will be, and how many pass."""
    tasks = [float(len(unit)) for unit in units]
    passed = [float(sum(entry.passed is True for entry in unit.values())) for unit in units]
    return {
        "prompts": totals.prompts - totals.discarded // totals.samples,
        "tasks_in_all": _total(tasks, left, draw, so_far=sum(totals.statuses.values())),
        "passed": _total(passed, left, draw, so_far=totals.checks.passed),
    }


def as_table(made: Forecast) -> str:
    """The forecast for a person."""
    rows = [
        ("dollars", made.dollars, _form_of_dollars(made.dollars)),
        ("tokens in", made.input_tokens, "{:,.0f}"),
        ("tokens out", made.output_tokens, "{:,.0f}"),
        ("time left", *_time_left(made.hours)),
        ("failures %", made.failure_percent, "{:.1f}"),
    ]
    what, drawn = plural(made.tasks, "task"), f"{made.pilot:,}"
    if made.prompts is not None:
        what, drawn = plural(made.prompts, "prompt"), plural(made.pilot, "task")
    lines = [
        f"forecast for {what} from a random pilot of {drawn} ({made.pilot_failed:,} failed), "
        "with 95 % intervals"
    ]
    if made.tasks_in_all is not None and made.passed is not None:
        rows[:0] = [
            ("tasks", made.tasks_in_all, "{:,.0f}"),
            ("passed", made.passed, "{:,.0f}"),
        ]
    for name, figure, form in rows:
        if figure is None:
            lines.append(f"  {name:<11} unknown: some tasks have no price or no token counts")
            continue
        interval = f"({form.format(figure.low)} to {form.format(figure.high)})"
        lines.append(f"  {name:<11}{form.format(figure.expected):>16}   {interval}")
    lines.append(
        "the time assumes that the endpoint answers "
        f"{plural(made.conversations, 'conversation')} at a time as fast as in the pilot, "
        "without retries"
    )
    return "\n".join(lines)


def _form_of_dollars(dollars: Estimate | None) -> str:
    """Cents, or four digits below a dollar."""
    return "{:,.2f}" if dollars is None or dollars.expected >= 1 else "{:,.4f}"


def _time_left(hours: Estimate) -> tuple[Estimate, str]:
    """The remaining time in the largest unit that it fills, and the format of that unit."""
    per_hour, unit = next(
        (item for item in ((1, "h"), (60, "min")) if hours.expected * item[0] >= 1), (3600, "s")
    )
    figures = (per_hour * hour for hour in (hours.expected, hours.low, hours.high))
    return Estimate(*figures), f"{{:,.1f}} {unit}"


class _Duration(NamedTuple):
    seconds: float
    """Seconds in model and tool calls, without the time between starts."""
    calls: int


def _durations(run_dir: Path, units: Iterable[Mapping[bytes, IndexEntry]]) -> list[_Duration]:
    """The sum over the conversations of each unit."""
    with open_records(run_dir) as records:
        parts = [[_duration(records, *item) for item in unit.items()] for unit in units]
    return [_Duration(*map(sum, zip(*of_unit, strict=True))) for of_unit in parts]


def _duration(records: BinaryIO, key: bytes, entry: IndexEntry) -> _Duration:
    record = read_record(records, entry.offset, entry.length, key)
    slowest: dict[int, float] = {}
    for call in record.own_tool_calls:
        slowest[call.turn] = max(slowest.get(call.turn, 0.0), call.duration_s or 0.0)
    in_replies = sum(turn.duration_s for turn in record.own_turns)
    return _Duration(in_replies + sum(slowest.values()), record.api_calls)


def _rate(rates: Iterable[float | None]) -> float | None:
    """The rate of all endpoints together; None if one has no limit."""
    every = list(rates)
    known = [rate for rate in every if rate is not None]
    return sum(known) if known and len(known) == len(every) else None


def _known_figure(entry: IndexEntry, number: float | None) -> float | None:
    """The figure of a conversation; 0 if it had no reply."""
    return number if entry.has_replies else 0.0


def _total(known: Sequence[float], left: int, draw: random.Random, *, so_far: float) -> Estimate:
    """The sum over all tasks: `so_far`, and the sample's mean for each remaining task.

    The interval is a bootstrap over the sample, which assumes no distribution: costs have long
    tails.
    """
    means = sorted(fmean(draw.choices(known, k=len(known))) for _ in range(_RESAMPLES))
    tail = math.floor((1 - _CONFIDENCE) / 2 * _RESAMPLES)
    figures = (fmean(known), means[tail], means[-1 - tail])
    return Estimate(*(so_far + left * mean for mean in figures))


def _share(count: int, of: int) -> Estimate:
    """A share in percent with Wilson's interval, which is valid for small counts and 0, too."""
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    share = count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    spread = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return Estimate(100 * share, 100 * max(0.0, middle - spread), 100 * min(1.0, middle + spread))
