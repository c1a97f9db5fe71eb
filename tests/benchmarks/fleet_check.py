"""Predictions of `tests.benchmarks.fleet`, compared with runs of the real command.

    python -m tests.benchmarks.fleet_check [--prompts=600]

Measures the constants on this machine by runs of the real command, then runs settings that the
constants were not taken from and prints prediction beside measurement.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from tests.benchmarks.fleet import Constants, Fleet, predict
from tests.benchmarks.throughput import Work, runner
from tests.fakes.quick_endpoint import QuickEndpoint, scripted_replies

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run of the real command took."""

    start_s: float
    working_s: float
    end_s: float
    """From the last reply to the end of the command."""
    workers_cpu_s: float
    endpoint_cpu_s: float
    driver_cpu_s: float
    driver_late_cpu_s: float
    """The driver's CPU before the first call and after the last reply."""
    record_bytes: float


def measure(work: Work) -> Measured:
    """Run the real command once. Raises `RuntimeError` where it failed."""
    replies = scripted_replies(work.turns)
    with (
        tempfile.TemporaryDirectory() as place,
        QuickEndpoint(replies, latency_s=work.latency_s) as endpoint,
    ):
        command = runner(work, endpoint.url, Path(place))
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cpu: dict[int, float] = {}
        seen: list[tuple[float, float]] = []
        while process.poll() is None:
            with suppress(OSError):  # any of them may end at any moment
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                for pid in (process.pid, *map(int, children.split())):
                    cpu[pid] = _cpu_of(pid)
            seen.append((time.monotonic(), cpu.get(process.pid, 0.0)))
            time.sleep(0.02)
        ended = time.monotonic()
        stats = endpoint.stats()
        if process.returncode or stats["requests"] != work.calls:
            raise RuntimeError(
                f"{work}: exit code {process.returncode} after {stats['requests']} requests"
            )
        size = (Path(place) / "r" / "records.jsonl").stat().st_size / work.prompts
    driver = cpu.pop(process.pid)
    first, last = stats["first_request_at"], stats["last_reply_at"]
    before = max((used for at, used in seen if at <= first), default=0.0)
    by_then = max((used for at, used in seen if at <= last), default=0.0)
    return Measured(
        start_s=first - began,
        working_s=last - first,
        end_s=ended - last,
        workers_cpu_s=sum(cpu.values()),
        endpoint_cpu_s=stats["cpu_s"],
        driver_cpu_s=driver,
        driver_late_cpu_s=before + driver - by_then,
        record_bytes=size,
    )


def _cpu_of(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / _TICKS


def measure_constants(prompts: int) -> Constants:
    """The constants of this machine, by the slopes between runs of different sizes."""
    few, many = (
        measure(Work(prompts=count, turns=5, latency_s=0.05, agents=64, workers=1))
        for count in (prompts // 4, prompts)
    )
    short, longer = (
        measure(Work(prompts=count, turns=20, latency_s=0.05, agents=64, workers=1))
        for count in (64, 64 + prompts // 2)
    )
    more = prompts - prompts // 4
    at_5 = (many.workers_cpu_s - few.workers_cpu_s) / (more * 5)
    at_20 = (longer.workers_cpu_s - short.workers_cpu_s) / (prompts // 2 * 20)
    turn_s = max(0.0, (at_20 - at_5) / 7.5)  # the mean call stands behind 2 turns, and behind 9.5
    own = [one.driver_cpu_s - one.driver_late_cpu_s for one in (few, many)]
    turn_bytes = (longer.record_bytes - few.record_bytes) / 15
    found = replace(
        Constants(),
        delay_s=0.0,
        call_s=at_5 - 2 * turn_s,
        turn_s=turn_s,
        record_s=(own[1] - own[0]) / more,
        sync_s=measure_sync(),
        start_s=few.start_s,
        export_s=max(0.0, (many.end_s - few.end_s) / more),
        record_bytes=few.record_bytes - 5 * turn_bytes,
        turn_bytes=turn_bytes,
        neighbour_s=(many.endpoint_cpu_s - few.endpoint_cpu_s) / (more * 5),
    )
    without = predict(Fleet(prompts=prompts, latency_s=0.05, cores=os.cpu_count() or 1), found)
    waves = prompts / 64 * 5
    return replace(found, delay_s=max(0.0, (many.working_s - without.working_s) / waves))


def measure_sync() -> float:
    """The median time of a sync after a small write, where temporary files lie."""
    times = []
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(50):
            os.write(file.fileno(), b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


CHECKED = (
    Work(prompts=0, turns=5, latency_s=0.2, agents=64, workers=1),
    Work(prompts=0, turns=10, latency_s=0.1, agents=128, workers=2),
    Work(prompts=0, turns=5, latency_s=0.0, agents=64, workers=1),
    Work(prompts=0, turns=30, latency_s=0.02, agents=64, workers=2),
)
"""Settings that the constants are not taken from."""


@click.command()
@click.option("--prompts", default=600, show_default=True)
def main(prompts: int) -> None:
    """Measure the constants, then print predictions beside measurements."""
    click.echo(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    constants = measure_constants(prompts)
    for name in Constants.__slots__:
        click.echo(f"{name:<13} {getattr(constants, name):.6g}")
    for work in CHECKED:
        work = replace(work, prompts=prompts)
        fleet = Fleet(
            prompts=prompts,
            turns=work.turns,
            latency_s=work.latency_s,
            workers=work.workers,
            agents=work.agents // work.workers,
            cores=os.cpu_count() or 1,
        )
        predicted, measured = predict(fleet, constants), measure(work)
        load = os.getloadavg()[0]
        driver = measured.driver_cpu_s - measured.driver_late_cpu_s
        click.echo(
            f"{work.turns} turns, {work.latency_s:g} s, {work.agents} agents, {work.workers} "
            f"workers: predicted {predicted.working_s:.2f} s, measured {measured.working_s:.2f} s "
            f"({measured.working_s / predicted.working_s:.2f} x); driver "
            f"{predicted.driver_load:.1%} of a core, measured {driver / measured.working_s:.1%}; "
            f"load {load:.1f}"
        )


if __name__ == "__main__":
    main()
