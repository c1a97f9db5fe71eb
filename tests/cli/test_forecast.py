"""What a run will take, judged by a sample of it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from batch_trajectories.dataset.scan import scan, tasks
from batch_trajectories.engine.forecast import (
    Estimate,
    Forecast,
    _share,
    _total,
    as_table,
    sample_tasks,
)
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import lines, run, write_prompts, write_rows


class TestSample:
    def test_it_is_the_same_in_every_start_and_another_by_seed(self, tmp_path: Path) -> None:
        scanned = scan(write_prompts(tmp_path / "p.jsonl", 200), max_samples=None, num_samples=2)
        first = sample_tasks(scanned, count=30, seed=0)
        assert len(first) == 30
        assert first == sample_tasks(scanned, count=30, seed=0)
        assert first != sample_tasks(scanned, count=30, seed=1)

    def test_it_comes_from_all_over_the_file(self, tmp_path: Path) -> None:
        scanned = scan(write_prompts(tmp_path / "p.jsonl", 400), max_samples=None)
        drawn = sample_tasks(scanned, count=80, seed=0)
        places = [n for n, task in enumerate(tasks(scanned)) if [task.key] in drawn]
        quarters = [sum(n // 100 == quarter for n in places) for quarter in range(4)]
        assert min(quarters) > 8

    def test_a_small_file_is_drawn_whole(self, tmp_path: Path) -> None:
        scanned = scan(write_prompts(tmp_path / "p.jsonl", 5), max_samples=None)
        assert len(sample_tasks(scanned, count=30, seed=0)) == 5

    def test_of_prompts_it_has_all_samples(self, tmp_path: Path) -> None:
        scanned = scan(write_prompts(tmp_path / "p.jsonl", 50), max_samples=None, num_samples=3)
        drawn = sample_tasks(scanned, count=5, seed=0, by_prompt=True)
        firsts = [scanned.keys.index(keys[0]) // 16 for keys in drawn]
        assert all(first % 3 == 0 for first in firsts)
        assert drawn == [[*map(scanned.key, range(n, n + 3))] for n in firsts]


class TestIntervals:
    def test_shares_are_wilsons(self) -> None:
        """Reference values: Newcombe 1998, table I, method 3."""
        figure = _share(81, 263)
        assert figure.low == pytest.approx(25.53, abs=0.01)
        assert figure.high == pytest.approx(36.62, abs=0.01)
        none = _share(0, 20)
        assert (none.expected, none.low) == (0, 0)
        assert none.high == pytest.approx(16.11, abs=0.01)

    @pytest.mark.slow
    def test_they_hold_the_true_sum_about_as_often_as_they_say(self) -> None:
        draw, hits = Random(0), 0
        for n in range(200):
            everything = [draw.lognormvariate(0, 0.7) for _ in range(500)]
            figure = _total(draw.sample(everything, 40), 500, Random(n), so_far=0.0)
            hits += figure.low <= sum(everything) <= figure.high
        assert 170 <= hits <= 199

    def test_a_known_total_has_no_spread(self) -> None:
        figure = _total([1.0, 3.0], 0, Random(0), so_far=4.0)
        assert (figure.low, figure.expected, figure.high) == (4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1, "for 1 task from | answers 1 conversation at"),
        (2000, "for 2,000 tasks from | answers 2,000 conversations at"),
    ],
)
def test_counts_have_the_number_of_their_nouns(number: int, message: str) -> None:
    zero = Estimate(0, 0, 0)
    shown = as_table(
        Forecast(
            tasks=number,
            pilot=1,
            pilot_failed=0,
            conversations=number,
            dollars=zero,
            input_tokens=zero,
            output_tokens=zero,
            hours=zero,
            failure_percent=zero,
        )
    )
    assert all(part in shown for part in message.split("|"))


@pytest.mark.parametrize(
    ("hours", "message"),
    [
        ((3.0, 1.5, 4.25), "3.0 h   (1.5 h to 4.2 h)"),
        ((0.05, 0.01, 0.06), "3.0 min   (0.6 min to 3.6 min)"),
        ((0.0009, 0.0002, 0.001), "3.2 s   (0.7 s to 3.6 s)"),
    ],
)
def test_a_short_time_is_not_a_zero_of_hours(hours: tuple[float, ...], message: str) -> None:
    zero = Estimate(0, 0, 0)
    shown = as_table(
        Forecast(
            tasks=9,
            pilot=3,
            pilot_failed=0,
            conversations=9,
            dollars=Estimate(0.0013, 0.001, 0.002),
            input_tokens=zero,
            output_tokens=zero,
            hours=Estimate(*hours),
            failure_percent=zero,
        )
    )
    assert message in shown
    assert "0.0013   (0.0010 to 0.0020)" in shown


@pytest.mark.slow
def test_a_pilot_is_part_of_the_run_and_its_forecast_holds(tmp_path: Path) -> None:
    rows = [{"id": f"q{n}", "prompt": "x" * (n * 37 % 2900)} for n in range(1, 301)]
    write_rows(tmp_path / "p.jsonl", *rows)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "model": "openai:gpt-4o",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "enabled_toolsets": "none",
            "num_workers": 2,
            "batch_size": 8,
        }
        pilot = run(tmp_path, "estimate", "--pilot=60", **options)
        assert pilot.returncode == 0, pilot.stderr
        assert "forecast for 300 tasks from a random pilot of 60 (0 failed)" in pilot.stdout
        run_dir = tmp_path / "trajectories" / "r"
        assert len(lines(run_dir / "records.jsonl")) == 60
        parsed = orjson.loads((run_dir / "estimate.json").read_bytes())
        again = run(tmp_path, "estimate", "--pilot=60", **options)
        assert len(lines(run_dir / "records.jsonl")) == 60
        assert again.stdout.split("time left")[0] == pilot.stdout.split("time left")[0]

        whole = run(tmp_path, **options)
        assert whole.returncode == 0, whole.stderr
        assert endpoint.journal()["replies"] == 300
    summary = orjson.loads((run_dir / "summary.json").read_bytes())
    for key, true in (
        ("dollars", summary["cost_usd"]),
        ("input_tokens", summary["input_tokens"]),
        ("output_tokens", summary["output_tokens"]),
    ):
        assert parsed[key]["low"] <= true <= parsed[key]["high"], key
    assert parsed["hours"]["expected"] > 0
    assert parsed["failure_percent"]["expected"] == 0
    assert 3 < parsed["failure_percent"]["high"] < 8


@pytest.mark.slow
def test_unknown_costs_are_not_forecast(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 9)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        pilot = run(
            tmp_path,
            "estimate",
            "--pilot=3",
            dataset_file="p.jsonl",
            run_name="r",
            model="m",
            base_url=endpoint.openai_url,
            key_env="none",
            enabled_toolsets="none",
        )
    assert pilot.returncode == 0, pilot.stderr
    assert "dollars     unknown" in pilot.stdout
    assert orjson.loads((tmp_path / "trajectories/r/estimate.json").read_bytes())["dollars"] is None
