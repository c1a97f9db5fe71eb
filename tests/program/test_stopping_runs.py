"""Runs that give prompts samples until enough have passed, killed: their samples are the same."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.engine.stopping import StoppingRule
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import kill_repeatedly, lines, run, write_rows

PRICED = {"input": 1000, "output": 1000}
"""Dollars for a million tokens; a conversation here costs some cents."""

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES = 24, 6
RATES = {f"p{n:02}": n * 100 // PROMPTS for n in range(PROMPTS)}
GRADE = """\
import zlib

def grade(conversation, workspace, row):
    said = f"{conversation['id']} {conversation['model']}"
    return float(zlib.crc32(said.encode()) % 100 < row["rate"])
"""


def needed_samples(rule: StoppingRule) -> dict[str, str]:
    """The records of a run that makes one sample after the other: ids, and models."""
    made = {}
    for prompt, rate in RATES.items():
        passed = failed = 0
        for sample in range(SAMPLES):
            if passed >= rule.passed and failed >= rule.failed:
                break
            model = "openai:m"
            if rule.models:
                at = min(failed // rule.escalate_after, len(rule.models) - 1)
                model = f"openai:{rule.models[at]}"
            id = f"{prompt}#s{sample}" if sample else prompt
            good = zlib.crc32(f"{id} {model}".encode()) % 100 < rate
            passed, failed = passed + good, failed + (not good)
            made[id] = model
    return made


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (StoppingRule(2), {"until_passed": 2}),
        (StoppingRule(1, 1), {"until_passed": 1, "also_failed": 1}),
        (StoppingRule(1, 0, ("small", "large"), 2), {"escalate_after": 2}),
    ],
)
def test_kills_change_no_sample(
    tmp_path: Path, rule: StoppingRule, options: dict[str, Any]
) -> None:
    (tmp_path / "grade.py").write_text(GRADE)
    rows = [{"id": id, "prompt": f"Go, {id}.", "rate": rate} for id, rate in RATES.items()]
    write_rows(tmp_path / "p.jsonl", *rows)
    with FakeEndpoint(turns=1, latency_s=0.02, answers=0) as endpoint:
        given = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 2,
            "batch_size": 6,
            "num_samples": SAMPLES,
            "reward": "grade.py:grade",
            "enabled_toolsets": "none",
            **options,
        }
        models = [f"openai:{name}" for name in rule.models]
        given |= {"models": json.dumps(models)} if models else {"model": "openai:m"}
        kill_repeatedly(tmp_path, given, endpoint, [7, 11, 13, 17])
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "trajectories/r/records.jsonl")
    made = {record["id"]: record["model"] for record in records}
    assert made == needed_samples(rule)
    assert len(records) == len(made) < PROMPTS * SAMPLES
    assert run(tmp_path, "verify", "r").returncode == 0


def test_a_model_whose_budget_is_used_up_begins_nothing(tmp_path: Path) -> None:
    """The others go on; a higher budget continues, and the samples are those of any run."""
    rule = StoppingRule(1, 0, ("small", "large"), 2)
    (tmp_path / "grade.py").write_text(GRADE)
    rows = [{"id": id, "prompt": f"Go, {id}.", "rate": rate} for id, rate in RATES.items()]
    write_rows(tmp_path / "p.jsonl", *rows)
    of_large = sum(model == "openai:large" for model in needed_samples(rule).values())
    records = tmp_path / "trajectories/r/records.jsonl"

    def costs() -> list[float]:
        return [one["cost_usd"] for one in lines(records) if one["model"] == "openai:large"]

    with FakeEndpoint(turns=1, latency_s=0.02) as endpoint:
        given: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "num_workers": 2,
            "batch_size": 2,
            "num_samples": SAMPLES,
            "reward": "grade.py:grade",
            "enabled_toolsets": "none",
            "escalate_after": 2,
            "models": json.dumps(["openai:small", "openai:large"]),
            "prices": json.dumps({"small": PRICED, "large": PRICED}),
        }
        used_up = run(tmp_path, **given, model_budgets=json.dumps({"openai:large": 0.3}))
        assert used_up.returncode == 3, used_up.stderr
        assert "openai:large has cost $" in used_up.stderr
        most = max(costs())
        assert 0.3 <= sum(costs()) < 0.3 + 4 * most, "what was in flight may end"
        assert len(costs()) < of_large
        kept = {one["id"] for one in lines(records) if one["model"] == "openai:small"}
        assert kept == {id for id, model in needed_samples(rule).items() if model == "openai:small"}
        before = sum(costs())
        again = run(tmp_path, **given, model_budgets=json.dumps({"openai:large": before / 2}))
        assert again.returncode == 3, "what earlier starts have spent counts"
        assert sum(costs()) == before
        done = run(tmp_path, **given, model_budgets=json.dumps({"openai:large": 1000}))
        assert done.returncode == 0, done.stderr
    assert {one["id"]: one["model"] for one in lines(records)} == needed_samples(rule)


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({"openai:other": 1}, "openai:other' is no model"),
        ({"openai:large": 0}, "must be above 0"),
        ({"openai:large": 1}, "the price of model 'large' is unknown"),
    ],
)
def test_budgets_that_cannot_hold_are_refused(
    tmp_path: Path, budgets: dict[str, float], said: str
) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "p", "prompt": "Go."})
    given: dict[str, Any] = {"dataset_file": "p.jsonl", "run_name": "r", "key_env": "none"}
    given |= {"base_url": "http://127.0.0.1:9/v1", "escalate_after": 1}
    given["models"] = json.dumps(["openai:small", "openai:large"])
    refused = run(tmp_path, **given, model_budgets=json.dumps(budgets))
    assert refused.returncode == 2
    assert said in refused.stderr, refused.stderr
