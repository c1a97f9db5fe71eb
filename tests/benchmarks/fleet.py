"""How long a run will take, and what limits it: a simulation by discrete events.

    python -m tests.benchmarks.fleet --prompts=1000000 --turns=10 --latency_s=8 \\
        --machines=10 --workers=8 --agents=128 [--split] [--capacity=5000] [--usd_per_call=0.01]

An agent asks, waits for the endpoint, runs its tools, asks again; its record goes to the driver,
which then assigns it the next task. Queues form at the CPU of each worker, at the endpoint (calls
in flight, requests per minute) and at the driver (CPU, one sync for all that waits). A run that is
too long to simulate whole is simulated until it is steady, and the rest is counted at that rate.

`tests.benchmarks.fleet_check` compares it with runs.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, replace

import click

_SIMULATED_PER_AGENT = 8
"""Conversations per agent in flight after which a run counts as steady."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What one step takes; the defaults were measured, see docs/scale.md."""

    call_s: float = 0.00045
    """CPU of a worker for a model call and its tool call, at the first turn."""
    turn_s: float = 0.000001
    """What each earlier turn of the conversation adds to it."""
    delay_s: float = 0.004
    """What a call takes beside its CPU and the endpoint: wake-ups, and what others compute."""
    record_s: float = 0.00022
    """CPU of the driver for a record."""
    sync_s: float = 0.0009
    """A sync of the records."""
    row_s: float = 0.000016
    """CPU for a row of the dataset before the first task."""
    start_s: float = 1.0
    """From the command to the first call, but for the rows."""
    export_s: float = 0.00043
    """CPU for a record at the end of the run: export and accounts."""
    record_bytes: float = 2465.0
    """A record, but for its turns."""
    turn_bytes: float = 1520.0
    """What a turn adds to a record; the journal holds about the same until the task has ended."""
    neighbour_s: float = 0.0
    """CPU per call of what else shares the cores: an endpoint on the same machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A run and what it runs on."""

    prompts: int
    turns: int = 5
    latency_s: float = 1.0
    spread: float = 0.0
    """Spread of the latency (sigma of its logarithm)."""
    tool_s: float = 0.0
    machines: int = 1
    workers: int = 1
    """Per machine."""
    agents: int = 64
    """In flight per worker."""
    cores: int = 64
    """Per machine."""
    is_split: bool = False
    """Each machine runs a shard with a driver of its own."""
    capacity: int | None = None
    """Calls that the endpoint answers at a time; more wait."""
    rpm: float | None = None
    start_in_flight: int = 64
    usd_per_call: float = 0.0

    @property
    def conversations(self) -> int:
        """In flight, over all machines."""
        return self.machines * self.workers * self.agents


@dataclass(frozen=True, slots=True)
class Prediction:
    """How a run goes."""

    working_s: float
    """From the first call to the last reply."""
    wall_s: float
    """From the command to its end: with start, scan and export."""
    calls: int
    in_flight: float
    """Calls at the endpoint, on average."""
    worker_load: float
    """CPU of the busiest worker over the time."""
    driver_load: float
    driver_bytes_s: float
    """Records that one driver writes, per second."""
    disk_bytes: float
    """Records of all drivers at the end."""
    workspaces: int
    """Directories at a time, on one machine."""
    usd: float
    limited_by: str

    def describe(self) -> str:
        """A line per figure."""
        return "\n".join(
            (
                f"wall time        {_time(self.wall_s)}, of them {_time(self.working_s)} of work",
                f"calls            {self.calls:,}, {self.calls / self.working_s:,.0f} per second",
                f"in flight        {self.in_flight:,.0f} calls on average",
                f"busiest worker   {self.worker_load:.1%} of a core",
                f"driver           {self.driver_load:.1%} of a core, "
                f"{self.driver_bytes_s / 1e6:,.2f} MB/s of records",
                f"disk             {self.disk_bytes / 1e9:,.1f} GB of records, "
                f"{self.workspaces:,} workspaces at a time per machine",
                f"cost             ${self.usd:,.2f}",
                f"limited by       {self.limited_by}",
            )
        )


def predict(fleet: Fleet, constants: Constants | None = None, *, seed: int = 0) -> Prediction:
    """Simulate a run. Of shards the largest one is simulated, with its part of the endpoint."""
    constants = constants or Constants()
    drivers = fleet.machines if fleet.is_split else 1
    rows = math.ceil(fleet.prompts / drivers)
    if drivers > 1:
        # The largest of so many parts that a hash makes.
        spread = math.sqrt(2 * rows * math.log(drivers))
        rows = min(fleet.prompts, math.ceil(rows + spread))
    part = replace(
        fleet,
        prompts=rows,
        machines=fleet.machines // drivers,
        capacity=fleet.capacity and max(1, fleet.capacity // drivers),
        rpm=fleet.rpm and fleet.rpm / drivers,
        is_split=False,
    )
    steady = _SIMULATED_PER_AGENT * part.conversations
    simulated = replace(part, prompts=min(part.prompts, steady))
    run = _Run(simulated, constants, random.Random(seed))
    run.play()
    working_s = run.last_reply_at + (part.prompts - simulated.prompts) / run.rate()
    around_s = constants.start_s + constants.row_s * fleet.prompts + constants.export_s * rows
    size = constants.record_bytes + constants.turn_bytes * fleet.turns
    calls = fleet.prompts * fleet.turns
    in_flight = run.waited_s / run.ended_at * drivers
    return Prediction(
        working_s=working_s,
        wall_s=working_s + around_s,
        calls=calls,
        in_flight=in_flight,
        worker_load=max(run.worker_busy_s) / run.ended_at,
        driver_load=run.driver_busy_s / run.ended_at,
        driver_bytes_s=size * rows / working_s,
        disk_bytes=size * fleet.prompts,
        workspaces=min(fleet.workers * fleet.agents, rows),
        usd=calls * fleet.usd_per_call,
        limited_by=_limit(fleet, run, in_flight),
    )


def _limit(fleet: Fleet, run: _Run, in_flight: float) -> str:
    loads = {
        "the driver's CPU": run.driver_busy_s / run.ended_at,
        "the workers' CPU": statistics.fmean(run.worker_busy_s) / run.ended_at,
        "what the endpoint answers at a time": in_flight / fleet.capacity if fleet.capacity else 0,
        "requests per minute": run.calls / run.ended_at * 60 / run.rpm if run.rpm else 0,
    }
    worst = max(loads, key=lambda name: loads[name])
    if loads[worst] > 0.85:
        return worst
    return "the endpoint's latency: more agents in flight would be faster"


class _Run:
    """One driver and its workers, from the first call to the last record."""

    def __init__(self, fleet: Fleet, constants: Constants, draw: random.Random) -> None:
        self._fleet, self._constants, self._draw = fleet, constants, draw
        workers = fleet.machines * fleet.workers
        # Where all that computes at a time is more than the cores of a machine, it shares them.
        beside_s = constants.neighbour_s + constants.record_s / fleet.turns / fleet.machines
        demand = fleet.workers * (1 + beside_s / constants.call_s)
        self._stretch = max(1.0, demand / fleet.cores)
        self._free_at = [0.0] * workers
        self.worker_busy_s = [0.0] * workers
        self.driver_busy_s = 0.0
        self.waited_s = 0.0
        """Sum over all calls of their time at the endpoint."""
        self.calls = 0
        self.rpm = fleet.rpm
        self.last_reply_at = 0.0
        self.ended_at = 0.0
        self._left = fleet.prompts
        self._turn = [0] * (workers * fleet.agents)
        self._events: list[tuple[float, int, str, int]] = []
        self._sequence = 0
        self._limit = float(min(fleet.start_in_flight, fleet.conversations))
        self._ceiling = min(fleet.capacity or fleet.conversations, fleet.conversations)
        self._at_endpoint = 0
        self._waiting: deque[int] = deque()
        self._next_slot = 0.0
        self._records: list[int] = []
        self._driver_is_busy = False
        self._record_times: list[float] = []

    def play(self) -> None:
        """Run all events."""
        for agent in range(min(len(self._turn), self._left)):
            self._begin(0.0, self._spread_out(agent))
        handlers = {
            "asks": self._ask,
            "replied": self._reply,
            "read": self._read,
            "tools done": self._go_on,
            "ended": self._end,
            "synced": self._sync,
        }
        while self._events:
            now, _, kind, agent = heapq.heappop(self._events)
            self.ended_at = now
            handlers[kind](now, agent)

    def rate(self) -> float:
        """Conversations per second in the middle of the run."""
        times = self._record_times
        first, last = len(times) // 4, len(times) * 3 // 4
        took = times[last] - times[first]
        return (last - first) / took if took else len(times) / self.ended_at

    def _spread_out(self, number: int) -> int:
        """Tasks are dealt to the worker with the most room: to one after the other."""
        workers = len(self._free_at)
        return number % workers * self._fleet.agents + number // workers

    def _at(self, time_s: float, kind: str, agent: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, kind, agent))

    def _begin(self, now: float, agent: int) -> None:
        if self._left:
            self._left -= 1
            self._turn[agent] = 1
            self._compute(now, agent, "asks")

    def _compute(self, now: float, agent: int, then: str) -> None:
        """Half of a call's CPU goes into asking, half into what comes of the reply."""
        worker = agent // self._fleet.agents
        cost = self._constants.call_s + self._constants.turn_s * (self._turn[agent] - 1)
        busy_s = cost / 2 * self._stretch
        self.worker_busy_s[worker] += busy_s
        self._free_at[worker] = max(now, self._free_at[worker]) + busy_s
        self._at(self._free_at[worker], then, agent)

    def _ask(self, now: float, agent: int) -> None:
        if self._at_endpoint < min(int(self._limit), self._ceiling):
            self._send(now, agent)
        else:
            self._waiting.append(agent)

    def _send(self, now: float, agent: int) -> None:
        self._at_endpoint += 1
        self.calls += 1
        sent_at = now
        if self.rpm is not None:
            sent_at = self._next_slot = max(now, self._next_slot + 60 / self.rpm)
        latency_s = self._fleet.latency_s
        if self._fleet.spread:
            # With this median the mean is the latency.
            median = math.log(latency_s) - self._fleet.spread**2 / 2
            latency_s = self._draw.lognormvariate(median, self._fleet.spread)
        self.waited_s += latency_s
        self._at(sent_at + latency_s + self._constants.delay_s, "replied", agent)

    def _reply(self, now: float, agent: int) -> None:
        self._at_endpoint -= 1
        self.last_reply_at = now
        if self._waiting:
            self._limit = min(self._limit + 1, float(self._ceiling))
        while self._waiting and self._at_endpoint < min(int(self._limit), self._ceiling):
            self._send(now, self._waiting.popleft())
        self._compute(now, agent, "read")

    def _read(self, now: float, agent: int) -> None:
        if self._turn[agent] == self._fleet.turns:
            self._end(now, agent)
            return
        self._turn[agent] += 1
        if self._fleet.tool_s:
            self._at(now + self._fleet.tool_s, "tools done", agent)
        else:
            self._go_on(now, agent)

    def _go_on(self, now: float, agent: int) -> None:
        self._compute(now, agent, "asks")

    def _end(self, now: float, agent: int) -> None:
        self._records.append(agent)
        if not self._driver_is_busy:
            self._take_in(now)

    def _take_in(self, now: float) -> None:
        """The driver writes all records that have come, and syncs once."""
        self._driver_is_busy = True
        self._batch, self._records = self._records, []
        busy_s = self._constants.record_s * len(self._batch)
        self.driver_busy_s += busy_s
        self._at(now + busy_s + self._constants.sync_s, "synced", 0)

    def _sync(self, now: float, _: int) -> None:
        self._driver_is_busy = False
        self._record_times += [now] * len(self._batch)
        for agent in self._batch:
            self._begin(now, agent)
        if self._records:
            self._take_in(now)


@click.command(context_settings={"max_content_width": 100})
@click.option("--prompts", type=int, required=True)
@click.option("--turns", default=5, show_default=True, help="Model calls per conversation.")
@click.option("--latency_s", default=1.0, show_default=True, help="Mean time of a call.")
@click.option("--spread", default=0.5, show_default=True, help="Sigma of the latency's logarithm.")
@click.option("--tool_s", default=0.0, show_default=True, help="Time of a turn's tools.")
@click.option("--machines", default=1, show_default=True)
@click.option("--workers", default=4, show_default=True, help="Per machine.")
@click.option("--agents", default=64, show_default=True, help="In flight per worker.")
@click.option("--cores", default=8, show_default=True, help="Per machine.")
@click.option("--split", "is_split", is_flag=True, help="A shard per machine, not one driver.")
@click.option("--capacity", type=int, help="Calls that the endpoint answers at a time.")
@click.option("--rpm", type=float, help="Requests per minute.")
@click.option("--usd_per_call", default=0.0, show_default=True)
def main(**given: float | int | bool | None) -> None:
    """Say how long a run takes, what it costs, and what limits it."""
    click.echo(predict(Fleet(**given)).describe())  # type: ignore[arg-type]


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


if __name__ == "__main__":
    main()
