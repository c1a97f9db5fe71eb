"""Rewards in `stats`: figures that can be counted by hand."""

from __future__ import annotations

import json
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.statistics.rewards import MAX_NAMES, RewardStatistics, as_text
from tests.helpers.exporting import call_record, judged_record, make_run
from tests.helpers.running import run
from tests.helpers.stored import to_record

GROUPS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.25]]


def count(*rewards: list[float], samples: int = 4) -> dict[str, Any]:
    """The statistics of groups with these rewards."""
    figures = RewardStatistics(samples)
    for prompt, group in enumerate(rewards):
        for reward in group:
            figures.add(to_record({**judged_record(reward, "a"), "prompt_id": f"p{prompt}"}))
    return figures.to_json()


def test_spread_of_groups_and_of_all() -> None:
    (of_reward,) = count(*GROUPS)["by_name"].values()
    rewards = [reward for group in GROUPS for reward in group]
    stds = [statistics.stdev(group) for group in GROUPS]
    assert of_reward == {
        "records": 12,
        "mean": pytest.approx(statistics.mean(rewards), rel=1e-5),
        "std": pytest.approx(statistics.stdev(rewards), rel=1e-5),
        "groups": 3,
        "mean_group_std": pytest.approx(statistics.mean(stds), rel=1e-5),
        "equal_groups": 1,
    }


def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass() -> None:
    """Counted over all draws, for samples that are judged by hand."""
    counts = count(*GROUPS)["pass_at"]
    assert list(counts) == ["1", "2", "4"]
    for k, percent in counts.items():
        shares = []
        for group in GROUPS:
            draws = list(combinations([reward > 0.5 for reward in group], int(k)))
            shares.append(sum(map(any, draws)) / len(draws))
        assert percent == pytest.approx(100 * statistics.mean(shares), abs=0.005)


def test_a_prompt_with_fewer_samples_counts_for_what_it_has() -> None:
    counts = count([1.0, 0.0, 0.0], [1.0])
    assert counts["pass_at"] == {"1": 66.67, "2": 66.67, "3": 100.0}
    assert counts["by_name"]["reward"]["groups"] == 1


def test_many_samples_are_no_problem() -> None:
    assert count([0.0] * 3000 + [1.0], samples=3001)["pass_at"]["1"] == 0.03


def test_single_samples_make_no_groups() -> None:
    counts = count([1.0], [0.0], samples=1)
    assert counts["by_name"] == {"reward": {"records": 2, "mean": 0.5, "std": 0.707107}}
    assert counts["pass_at"] == {}


def test_rewards_of_turns_are_counted_apart_and_failed_scores_not_at_all() -> None:
    figures = RewardStatistics(1)
    score = {"source": "m:f", "version": "1", "error": None}
    figures.add(
        to_record(
            call_record(scores=[{**score, "rewards": {}, "turn_rewards": {"f": [1.0, None]}}])
        )
    )
    figures.add(
        to_record(call_record(scores=[{**score, "rewards": None, "error": "ValueError: no"}]))
    )
    assert figures.to_json() == {
        "by_name": {},
        "turns": {"f": {"turns": 1, "mean": 1.0, "std": None}},
        "pass_at": {},
    }


def test_any_number_of_names_takes_limited_memory() -> None:
    figures = RewardStatistics(1)
    for n in range(2 * MAX_NAMES):
        check = {"passed": True, "reward": 1.0, "rewards": {f"n{n}": 1.0}}
        figures.add(to_record(call_record(check=check)))
    assert len(figures.to_json()["by_name"]) == MAX_NAMES


def test_the_command_shows_them(tmp_path: Path) -> None:
    records = [judged_record(reward, "a") for group in GROUPS for reward in group]
    source = make_run(tmp_path, *records, samples=4)
    done = run(tmp_path, "stats", source.run_dir)
    assert done.returncode == 0, done.stderr
    expected = list(as_text(count(*GROUPS)))
    assert all(line in done.stdout.splitlines() for line in expected)
    assert expected[-1] == "pass@1 50%, pass@2 61.11%, pass@4 66.67%"
    parsed = json.loads(run(tmp_path, "stats", source.run_dir, "--json").stdout)
    assert parsed["rewards"] == count(*GROUPS)


def test_a_run_without_rewards_shows_nothing_of_them(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    assert "reward" not in run(tmp_path, "stats", source.run_dir).stdout
