"""`--until_passed` and the cascade of models: what runs does not depend on when samples end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import scan
from batch_trajectories.engine.stopping import (
    NOT_PASSED,
    PASSED,
    RUNNING,
    UNJUDGED,
    UNKNOWN,
    ModelBudgets,
    Opening,
    StoppingRule,
    chance_where_stopped,
    sample_outcome,
    stopping_rule,
)
from batch_trajectories.export.statistics.rewards import RewardStatistics
from tests.helpers.exporting import judged_record
from tests.helpers.running import write_prompts
from tests.helpers.stored import to_record

CASCADE = StoppingRule(1, 0, ("small", "middle", "large"), 2)
RULES = [
    StoppingRule(1),
    StoppingRule(2),
    StoppingRule(4),
    StoppingRule(2, 1),
    StoppingRule(1, 3),
    CASCADE,
    CASCADE._replace(passed=3),
    CASCADE._replace(passed=2, failed=1, escalate_after=3),
]
SAMPLES = 8


def endings(seed: int) -> dict[tuple[int, str | None], bool | None]:
    """How each sample of a prompt ends with each model."""
    draw = random.Random(seed)
    rate = draw.betavariate(0.8, 0.8)
    models = (None, *CASCADE.models)
    return {
        (sample, model): draw.choices((True, False, None), (rate, 0.9 * (1 - rate), 0.1))[0]
        for sample in range(SAMPLES)
        for model in models
    }


def one_by_one(
    rule: StoppingRule, ends: dict[tuple[int, str | None], bool | None]
) -> dict[int, str | None]:
    """The models of the samples of a prompt whose samples run one after the other."""
    passed = failed = missed = 0
    ran: dict[int, str | None] = {}
    for sample in range(SAMPLES):
        if passed >= rule.passed and failed >= rule.failed:
            break
        level = min(missed // rule.escalate_after, len(rule.models) - 1) if rule.models else 0
        ran[sample] = model = rule.models[level] if rule.models else None
        ended = ends[sample, model]
        passed, failed = passed + (ended is True), failed + (ended is False)
        missed += ended is not True
    return ran


@pytest.mark.parametrize("rule", RULES)
def test_the_samples_are_those_of_a_run_one_by_one_whatever_ends_first_and_is_killed(
    rule: StoppingRule,
) -> None:
    for seed in range(150):
        ends, draw = endings(seed), random.Random(seed)
        outcomes = bytearray(SAMPLES)
        ran: dict[int, str | None] = {}
        while samples_to_run := rule.samples_to_run(outcomes):
            for sample in samples_to_run:
                if outcomes[sample] == UNKNOWN:
                    model = rule.sample_model(outcomes, sample)
                    assert ran.setdefault(sample, model) == model
                    outcomes[sample] = RUNNING
            if draw.random() < 0.2:  # a kill: some of what was in flight has left no trace
                for sample in samples_to_run:
                    outcomes[sample] = draw.choice((UNKNOWN, RUNNING))
                continue
            sample = draw.choice([n for n, outcome in enumerate(outcomes) if outcome == RUNNING])
            outcomes[sample] = sample_outcome(ends[sample, ran[sample]])
        assert ran == one_by_one(rule, ends)


def test_an_unknown_cost_counts_in_the_budget_of_a_model(tmp_path: Path) -> None:
    """As the dearest known one, in whatever order they end; else as the whole budget."""
    (tmp_path / "records.jsonl").touch()
    for costs in ([0.5, None, 2.0], [None, 2.0, 0.5]):
        for budget, allowed in ((4.6, True), (4.5, False)):
            budgets = ModelBudgets({"large": budget}, tmp_path)
            for cost in costs:
                budgets.add("large", cost)
            assert budgets.allows("large", 1) is allowed
            assert budgets.allows("small", 1)
    said = budgets.problem() or ""
    assert "large has cost $2.5000 and 1 conversation of unknown cost of $4.5" in said
    unknown = ModelBudgets({"large": 100.0}, tmp_path)
    assert unknown.allows("large", 1)
    unknown.add("large", None)
    assert not unknown.allows("large", 1)


def test_as_many_run_at_once_as_are_needed_in_any_case() -> None:
    assert StoppingRule(2, 1).samples_to_run(bytes(8)) == [0, 1, 2]
    assert StoppingRule(2).samples_to_run(bytes([PASSED, UNKNOWN, UNKNOWN])) == [1]
    assert StoppingRule(2).samples_to_run(bytes([PASSED, NOT_PASSED, PASSED, UNKNOWN])) == []
    assert CASCADE._replace(passed=3).samples_to_run(bytes(8)) == [0, 1], (
        "who gets the third is open"
    )


def test_another_number_that_must_pass_keeps_what_has_begun() -> None:
    begun = bytes([PASSED, RUNNING, RUNNING, UNKNOWN])
    assert StoppingRule(1).samples_to_run(begun) == [1, 2]
    assert StoppingRule(4).samples_to_run(begun) == [1, 2, 3]


def test_a_lost_record_is_run_again_though_enough_have_passed() -> None:
    assert StoppingRule(1).samples_to_run(bytes([UNKNOWN, PASSED, UNKNOWN])) == [0]


def test_a_failed_sample_keeps_its_place_until_its_attempts_are_used_up() -> None:
    rule = StoppingRule(1)
    assert rule.samples_to_run(bytes([RUNNING, UNKNOWN])) == [0]
    assert rule.samples_to_run(bytes([UNJUDGED, UNKNOWN])) == [1]


def test_samples_are_opened_when_others_end(tmp_path: Path) -> None:
    rows = scan(write_prompts(tmp_path / "p.jsonl", 2), max_samples=None, num_samples=4)
    outcomes = bytearray(rows.tasks)
    opening = Opening(CASCADE._replace(escalate_after=1), rows, outcomes, only=None)
    first, second = opening.begin([0, 4])
    assert (first.id, first.model, second.id) == ("p0000", "small", "p0001")
    (third,) = opening.end(first.key, passed=False, cost_usd=None)
    assert (third.id, third.sample, third.model) == ("p0000#s1", 1, "middle")
    assert third.key == rows.key(1)
    assert opening.end(third.key, passed=True, cost_usd=None) == []
    assert opening.end(second.key, passed=True, cost_usd=None) == []
    assert list(outcomes) == [NOT_PASSED, PASSED, UNKNOWN, UNKNOWN, PASSED, *[UNKNOWN] * 3]


def test_only_the_tasks_of_a_start_are_opened(tmp_path: Path) -> None:
    rows = scan(write_prompts(tmp_path / "p.jsonl", 1), max_samples=None, num_samples=4)
    opening = Opening(StoppingRule(1), rows, bytearray(4), only={rows.key(0)})
    (task,) = opening.begin([0])
    assert opening.end(task.key, passed=False, cost_usd=None) == []


def paths(rule: StoppingRule, samples: int) -> Iterator[tuple[int, int, int]]:
    """Each way in which a prompt can end: passed, failed, and how many orders lead there."""
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for _ in range(samples):
        further: dict[tuple[int, int], int] = {}
        for (passed, failed), count in ways.items():
            if passed >= rule.passed and failed >= rule.failed:
                yield passed, failed, count
                continue
            for step in ((passed + 1, failed), (passed, failed + 1)):
                further[step] = further.get(step, 0) + count
        ways = further
    yield from ((passed, failed, count) for (passed, failed), count in ways.items())


@pytest.mark.parametrize("rule", [StoppingRule(*counts) for counts in ((1,), (2,), (3,), (2, 2))])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_pass_at_k_has_the_right_mean_over_all_ways_to_end(rule: StoppingRule, rate: float) -> None:
    for k in range(1, SAMPLES + 1):
        mean = 0.0
        for passed, failed, count in paths(rule, SAMPLES):
            share = chance_where_stopped(passed + failed, passed, k, rule)
            if share is None:
                share = 1 - comb(failed, k) / comb(passed + failed, k)  # a fixed number of samples
            mean += count * rate**passed * (1 - rate) ** failed * share
        assert mean == pytest.approx(1 - (1 - rate) ** k)


def test_the_chance_is_marked_as_corrected_in_statistics() -> None:
    figures = RewardStatistics(4, StoppingRule(1))
    for prompt, rewards in enumerate(([1.0], [0.0, 1.0], [0.0] * 4)):
        for reward in rewards:
            figures.add(to_record({**judged_record(reward, "a"), "prompt_id": f"p{prompt}"}))
    counted = figures.to_json()
    assert counted["pass_at"] == {"1": 33.33, "2": 66.67, "4": 66.67}
    assert counted["stopped_at"] == [1, 0]


def config(**given: Any) -> RunConfig:
    return load_config(None, {"dataset_file": "p.jsonl", "run_name": "r", **given})


def test_a_cascade_has_defaults_for_its_samples() -> None:
    models = ["openai:a", "openai/b", "openai:c"]
    given = config(models=models, escalate_after="2")
    assert (given.num_samples, given.until_passed) == (6, 1)
    assert stopping_rule(given) == StoppingRule(1, 0, ("openai:a", "openai:b", "openai:c"), 2)
    again = config(**given.to_json())
    assert again == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ["a", "b"]}, "needs escalate_after"),
        ({"model": "a", "escalate_after": 2}, "a list in this order"),
        ({"models": {"a": 1, "b": 1}, "escalate_after": 2}, "a list in this order"),
        ({"models": ["a", "a"], "escalate_after": 2}, "named twice"),
        ({"models": ["a", "b"], "escalate_after": 2, "num_samples": 2}, "give 4 or more"),
        ({"model": "a", "until_passed": 3, "num_samples": 2}, "give 3 or more"),
        ({"model": "a", "until_passed": 2, "also_failed": 1, "num_samples": 2}, "3 or more"),
        ({"model": "a", "also_failed": 1, "num_samples": 2}, "needs until_passed"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**given)


def test_what_has_ended_is_never_run_and_what_runs_is_kept() -> None:
    every = product((UNKNOWN, RUNNING, PASSED, NOT_PASSED), repeat=4)
    for outcomes, rule in product(every, RULES):
        samples_to_run = rule.samples_to_run(bytes(outcomes))
        assert all(outcomes[sample] in (UNKNOWN, RUNNING) for sample in samples_to_run)
        assert {n for n, outcome in enumerate(outcomes) if outcome == RUNNING} <= {*samples_to_run}
