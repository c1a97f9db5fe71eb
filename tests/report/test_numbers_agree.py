"""Every screen that counts a run gives the same numbers, whatever the run is like."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.api.results import write_results
from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.export.statistics.funnel import format_funnel
from batch_trajectories.report.comparison import as_text, compare
from batch_trajectories.report.facts import make_table_row
from batch_trajectories.view.index.facts import make_facts
from batch_trajectories.view.runs import Places, run_json
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import lines

ENDINGS: dict[str, dict[str, Any]] = {
    "completed": {},
    "at a limit": {"status": "max_turns"},
    "wrong answer": {
        "status": "wrong_answer",
        "options": {"check_expected": True},
        "row": {"prompt": "Go.", "expected": "7"},
    },
    "failed": {
        "status": "failed",
        "error": {"class": "server_error", "message": "500"},
    },
    "passed a check": {"check": {"passed": True, "reward": 1.0}},
    "failed a check": {"check": {"passed": False, "reward": 0.0}},
    "a check without result": {"check": {"passed": None, "reward": None, "error": "timed out"}},
    "scored high": {"check": {"passed": None, "reward": 0.9}},
    "scored low": {"check": {"passed": None, "reward": 0.1}},
    "of known cost": {"cost_usd": 0.25},
    "with tokens": {"usage": {"input_tokens": 10, "output_tokens": 4}},
}


def kinds() -> list[tuple[str, list[str], int, int]]:
    """Names of runs, each with its endings, samples per prompt and pending prompts."""
    alone = [(name, [name] * 4, 1, 0) for name in ENDINGS]
    mixed = []
    draw = random.Random(50)
    for number in range(40 - len(alone)):
        samples = draw.choice([1, 1, 2, 3])
        names = [draw.choice([*ENDINGS]) for _ in range(samples * draw.randint(1, 5))]
        mixed.append((f"mixed {number}", names, samples, draw.choice([0, 0, 2])))
    return [*alone, *mixed]


@pytest.mark.parametrize(
    ("endings", "samples", "pending"),
    [
        pytest.param(*rest, id=name, marks=() if place % 4 == 0 else pytest.mark.slow)
        for place, (name, *rest) in enumerate(kinds())
    ],
)
def test_all_screens_count_a_run_alike(
    tmp_path: Path, endings: list[str], samples: int, pending: int
) -> None:
    records = [call_record(f"A{n}", **ENDINGS[ending]) for n, ending in enumerate(endings)]
    source = make_run(tmp_path, *records, samples=samples, pending=pending)
    stored = StoredRun(source.run_dir)
    totals = write_results(stored.path, stored.scan, stored.config)
    checks = totals.checks

    summary = orjson.loads((stored.path / "summary.json").read_bytes())
    assert totals.to_json().items() <= summary.items()
    assert stored.totals() == totals

    statistics = stored.statistics()
    assert statistics["rows"] == totals.statuses
    assert statistics["checks"] == summary["checks"]

    rows = [make_table_row(record) for record in stored.last_records()]
    table = stored.to_arrow().to_pylist()
    for verdict, count in ((True, checks.passed), (False, checks.failed)):
        assert sum(row["passed"] is verdict for row in rows) == count
        assert sum(row["passed"] is verdict for row in table) == count
    assert sum(row["cost_usd"] is None for row in rows) == totals.cost_unknown
    known = [row["cost_usd"] for row in rows if row["cost_usd"] is not None]
    assert totals.cost_usd == (pytest.approx(sum(known)) if known else None)

    (place,) = Places([str(stored.path)]).runs()
    listed = run_json(place)
    assert (listed["passed"], listed["checked"]) == (checks.passed, checks.passed + checks.failed)
    if checks.pass_rate is not None:
        rate = round(100 * listed["passed"] / listed["checked"], 2)
        assert rate == checks.pass_rate == round(100 * listed["pass_rate"], 2)
    assert [listed[name] for name in ("tasks", "done", "failed", "pending")] == [
        totals.total - totals.discarded,
        totals.done,
        totals.failed,
        totals.pending,
    ]

    compared = compare(stored, stored)
    assert compared["runs"][0]["checks"] == summary["checks"]
    told = f"{checks.passed} of {checks.passed + checks.failed} ("
    assert (told in as_text(compared)) == (checks.pass_rate is not None)

    funnel = stored.funnel()
    steps = {step["name"]: step for step in funnel["steps"]}
    after = {"rows": None, "tasks": "completed", "completed": "passed", "passed": None}
    for name, step in steps.items():
        if (following := after[name]) in steps:
            assert step["count"] - sum(step["lost"].values()) == steps[following]["count"]
    training = lines(tmp_path / "r.jsonl")
    (export,) = funnel["exports"]
    assert export["rows"] == len(training) == listed["training_rows"]
    assert export["tasks"] - sum(export["lost"].values()) == export["used"]
    counted = f" {len(training)}  {'row' if len(training) == 1 else 'rows'} of hermes"
    assert counted in "\n".join(format_funnel(funnel))

    make_facts(stored.path, tmp_path)
    facts = orjson.loads((tmp_path / "facts.json").read_bytes())["facts"]
    assert facts["funnel"] == orjson.loads(orjson.dumps(funnel))
    assert facts["spent"]["unknown"] == totals.spent_unknown
