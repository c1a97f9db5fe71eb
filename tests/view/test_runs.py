"""What the list of runs and the top of a run say: from small files, and computed once."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.view.index.parts import find_cache
from batch_trajectories.view.runs import Places, RunPlace
from batch_trajectories.view.state import HealthKeeper
from tests.helpers.running import SCRIPTED, run, wait_until, write_rows
from tests.view.serving import Viewer, viewing

SAMPLES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `r`: 12 prompts with 3 samples each, of which 4 prompts pass."""
    cwd = tmp_path_factory.mktemp("runs")
    rows = [
        {
            "id": f"q{n}",
            "prompt": f"Say {n}",
            "expected": str(n),
            "script": [{"content": str(n if n < 4 else -1)}],
        }
        for n in range(12)
    ]
    write_rows(cwd / "p.jsonl", *rows)
    done = run(cwd, "--check_expected", **SCRIPTED, num_samples=SAMPLES)
    assert done.returncode == 0, done.stderr
    return cwd / "trajectories"


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Any:
    with viewing(folder) as viewer:
        yield viewer


def test_the_list_says_what_a_run_is_worth(viewer: Viewer) -> None:
    (found,) = viewer.get("/runs")["runs"]
    assert (found["rows"], found["samples"], found["dataset"]) == (12, SAMPLES, "p.jsonl")
    assert (found["passed"], found["checked"], found["training_rows"]) == (12, 36, 12)


def test_a_run_without_an_export_has_an_unknown_number_of_training_rows(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "r"
    shutil.copytree(folder / "r", copy)
    shutil.rmtree(copy / "exports")
    with viewing(tmp_path) as viewer:
        (found,) = viewer.get("/runs")["runs"]
    assert found["training_rows"] is None


def test_samples_of_a_prompt_follow_each_other(viewer: Viewer) -> None:
    """Also where a filter leaves some of them; how many passed counts all."""
    rows = viewer.get("/runs/r/rows", order="samples")["rows"]
    prompts = [row["prompt_id"] for row in rows]
    assert [row["sample"] for row in rows] == [0, 1, 2] * 12
    assert prompts == [one for one in dict.fromkeys(prompts) for _ in range(SAMPLES)]
    groups = {row["prompt_id"]: row["group"] for row in rows}
    assert groups["q0"] == {"samples": 3, "judged": 3, "passed": 3}
    assert groups["q7"] == {"samples": 3, "judged": 3, "passed": 0}
    some = viewer.get("/runs/r/rows", order="samples", q="q7#s2")["rows"]
    assert [row["group"]["samples"] for row in some] == [3]


def test_a_run_says_which_columns_it_has(viewer: Viewer) -> None:
    """No costs and tokens where all are 0, and no rewards where the verdict says them."""
    has = viewer.get("/runs/r")["choices"]["has"]
    assert {"answer", "expected"} <= set(has)
    assert not {"cost_usd", "input_tokens", "calls", "turns", "reward"} & set(has)


def test_charts_tell_who_passed(viewer: Viewer) -> None:
    times = viewer.get("/runs/r/charts")["over_time"]
    assert sum(times["heights"]) == 36
    assert (sum(times["passed"]), sum(times["failed"])) == (12, 24)


def made_index(run_dir: Path) -> Path | None:
    cache = find_cache(run_dir)
    path = None if cache is None else cache / "facts.json"
    return path if path is not None and path.exists() else None


def test_the_health_of_a_finished_run_is_computed_once_and_kept(
    folder: Path, tmp_path: Path
) -> None:
    """Without opening it; a later server finds it there."""
    copy = tmp_path / "runs" / "r"
    copy.parent.mkdir()
    shutil.copytree(folder / "r", copy)
    places = [*Places([str(copy.parent)]).runs()]
    assert made_index(copy) is None
    keeper = HealthKeeper()
    keeper.begin_next(places)
    wait_until(lambda: made_index(copy) is not None)
    path = made_index(copy)
    assert path is not None
    before = path.stat().st_mtime_ns
    wait_until(lambda: keeper_rests(keeper, places))
    keeper.close()
    later = HealthKeeper()
    assert keeper_rests(later, places)
    later.close()
    assert path.stat().st_mtime_ns == before
    with viewing(copy.parent) as viewer:
        (found,) = viewer.get("/runs")["runs"]
    assert [one["name"] for one in found["health"]][:1] == ["failing_prompts"]


def keeper_rests(keeper: HealthKeeper, places: list[RunPlace]) -> bool:
    keeper.begin_next(places)
    time.sleep(0.05)
    return keeper._maker is None


def test_a_run_that_works_is_not_checked(folder: Path, tmp_path: Path) -> None:
    """Its facts would be of a part; neither is one without records."""
    empty = tmp_path / "r"
    shutil.copytree(folder / "r", empty)
    (empty / "records.jsonl").write_bytes(b"")
    keeper = HealthKeeper()
    assert keeper_rests(keeper, [*Places([str(tmp_path)]).runs()])
    keeper.close()
