"""The simulation of fleets agrees with what queues must do, and its measuring works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.fleet import Constants, Fleet, predict
from tests.benchmarks.fleet_check import measure
from tests.benchmarks.throughput import Work

FREE = Constants(
    call_s=1e-9, delay_s=0, turn_s=0, record_s=1e-9, sync_s=1e-9, row_s=0, start_s=0, export_s=0
)
"""Nothing but the endpoint takes time."""


def test_latency_alone_works_in_waves() -> None:
    found = predict(Fleet(prompts=320, turns=5, latency_s=2.0, agents=64), FREE)
    assert found.working_s == pytest.approx(320 / 64 * 5 * 2.0, rel=1e-3)
    assert found.in_flight == pytest.approx(64, rel=1e-3)
    assert found.calls == 1600
    assert "latency" in found.limited_by


def test_tools_take_their_time_and_no_cpu() -> None:
    constants = replace(FREE, call_s=0.001)
    fleet = Fleet(prompts=640, turns=5, latency_s=2.0, tool_s=1.0, agents=64)
    found = predict(fleet, constants)
    assert found.working_s == pytest.approx(640 / 64 * (5 * 2.0 + 4 * 1.0), rel=0.01)


def test_a_busy_worker_limits_the_run_and_a_second_worker_halves_the_time() -> None:
    constants = Constants(delay_s=0, record_s=0, sync_s=0, turn_s=0, row_s=0)
    fleet = Fleet(prompts=2000, turns=5, latency_s=0.0, agents=32)
    one = predict(fleet, constants)
    two = predict(replace(fleet, workers=2), constants)
    assert one.working_s == pytest.approx(10_000 * constants.call_s, rel=0.02)
    assert one.limited_by == "the workers' CPU"
    assert two.working_s == pytest.approx(one.working_s / 2, rel=0.03)
    shared = predict(replace(fleet, workers=2, cores=1), constants)
    assert shared.working_s == pytest.approx(one.working_s, rel=0.03)


def test_an_endpoint_answers_so_many_at_a_time_or_per_minute() -> None:
    fleet = Fleet(prompts=1000, turns=4, latency_s=3.0, agents=500, spread=0.5)
    full = predict(replace(fleet, capacity=50), FREE)
    assert full.working_s == pytest.approx(4000 * 3.0 / 50, rel=0.08)
    assert full.limited_by == "what the endpoint answers at a time"
    limited = predict(replace(fleet, rpm=600.0), FREE)
    assert limited.working_s == pytest.approx(400, rel=0.05)
    assert limited.limited_by == "requests per minute"


def test_the_parent_limits_the_run_until_the_work_is_split() -> None:
    slow = Constants(record_s=0.01, sync_s=0.001, row_s=0, start_s=0, export_s=0)
    fleet = Fleet(prompts=20_000, turns=1, latency_s=0.5, machines=10, agents=64)
    one = predict(fleet, slow)
    assert one.limited_by == "the driver's CPU"
    assert one.working_s == pytest.approx(20_000 * 0.01, rel=0.05)
    split = predict(replace(fleet, is_split=True), slow)
    assert one.working_s / 11 < split.working_s < one.working_s / 5
    assert split.driver_bytes_s < one.driver_bytes_s


def test_the_part_that_is_not_simulated_runs_at_the_steady_rate() -> None:
    fleet = Fleet(prompts=1_000_000, turns=10, latency_s=5.0, agents=100, spread=0.5)
    found = predict(fleet, FREE)
    assert found.working_s == pytest.approx(1_000_000 * 10 * 5.0 / 100, rel=0.05)


def test_sums_are_of_all_machines() -> None:
    fleet = Fleet(prompts=1000, turns=5, machines=4, is_split=True, usd_per_call=0.01)
    found = predict(fleet, Constants(record_bytes=1000, turn_bytes=200))
    assert found.usd == pytest.approx(50)
    assert found.disk_bytes == 1000 * (1000 + 5 * 200)
    assert found.workspaces == 64
    assert found == predict(fleet, Constants(record_bytes=1000, turn_bytes=200))


@pytest.mark.slow
def test_a_real_run_is_measured() -> None:
    found = measure(Work(prompts=20, turns=3, latency_s=0.0, agents=8, workers=1))
    assert found.record_bytes > 1000
    assert found.start_s > 0
    assert 0 < found.driver_late_cpu_s < found.driver_cpu_s + 0.01
    assert found.workers_cpu_s > 0
