"""Distributions: each task draws its toolsets, the same ones every time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.playing import say
from tests.helpers.running import lines, run, write_rows
from toolsets.catalog.distributions import (
    DISTRIBUTIONS,
    UnknownDistribution,
    draw_toolsets,
    load_distribution,
)
from toolsets.catalog.registry import TOOLSETS, UnknownToolset

SCRIPTED: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "model": "scripted",
    "sandbox": "local",
}


def test_shares_are_what_was_asked_for() -> None:
    """Each toolset is drawn by itself."""
    percents = {"file": 90, "terminal": 30, "python": 55.5}
    drawn = Counter(name for n in range(10_000) for name in draw_toolsets(percents, f"0/{n}"))
    none_drawn = 10_000 * 0.1 * 0.7 * 0.445  # then the likeliest is taken
    assert abs(drawn["file"] - (9_000 + none_drawn)) < 150
    assert abs(drawn["terminal"] - 3_000) < 150
    assert abs(drawn["python"] - 5_550) < 150


def test_where_none_is_drawn_the_likeliest_is_taken() -> None:
    rare = {"file": 0.001, "terminal": 0.002, "python": 0.001}
    assert {tuple(draw_toolsets(rare, f"{n}")) for n in range(100)} == {("terminal",)}


def test_a_draw_depends_on_the_seed_and_the_task_alone() -> None:
    """Not on the order of the toolsets, nor on what was drawn before."""
    percents = {"file": 50, "terminal": 50, "python": 50}
    turned = dict(reversed(percents.items()))
    draws = [draw_toolsets(percents, f"7/{n}") for n in range(200)]
    assert draws == [draw_toolsets(turned, f"7/{n}") for n in range(200)]
    assert draws != [draw_toolsets(percents, f"8/{n}") for n in range(200)]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{file: 0}", ValueError, "file: 0 is not a percentage"),
        ("{file: 101}", ValueError, "101 is not a percentage"),
        ("{file: yes}", ValueError, "True is not a percentage"),
        ("{flight: 50}", UnknownToolset, "unknown toolset 'flight'; known: browser, file"),
        ("[file]", UnknownDistribution, "maps toolsets to percentages"),
        ("{", UnknownDistribution, "mine.yaml:1:2: not YAML"),
        ("{file: 1, file: 2}", UnknownDistribution, "mine.yaml:1:11: not YAML: duplicate key"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, content: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(error, match=message):
        load_distribution(str(path))


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_met_within_one_percent_of_10_000_tasks(seed: int) -> None:
    percents = {"file": 100, "python": 30, "terminal": 70, "web": 5}
    counts = Counter(
        name for n in range(10_000) for name in draw_toolsets(percents, f"{seed}/task-{n}")
    )
    for name, percent in percents.items():
        assert abs(counts[name] / 100 - percent) < 1, name


def test_names_are_known_and_hold_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"^Unknown distribution 'nope'; known: all, balanced"):
        load_distribution("nope")
    for distribution in DISTRIBUTIONS.values():
        assert distribution.keys() <= TOOLSETS.keys()


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_offers_and_records_what_was_drawn(tmp_path: Path, workers: int) -> None:
    rows = [{"id": f"p{n}", "prompt": "x", "script": [say("done")]} for n in range(40)]
    write_rows(tmp_path / "p.jsonl", *rows)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"file": 60, "python": 40, "terminal": 50}))
    done = run(
        tmp_path,
        **SCRIPTED,
        num_workers=workers,
        distribution="mine.yaml",
        disabled_toolsets="terminal",
        seed=5,
    )
    assert done.returncode == 0, done.stderr
    for record in lines(tmp_path / "trajectories" / "r" / "records.jsonl"):
        drawn = draw_toolsets({"file": 60, "python": 40}, f"5/{record['id']}")
        assert record["toolsets"] == drawn
        offered = {tool["function"]["name"] for tool in record["tools"]}
        wanted = {tool.name for name in drawn for tool in TOOLSETS[name].tools}
        assert offered == wanted
    statistics = json.loads((tmp_path / "trajectories" / "r" / "statistics.json").read_text())
    assert {entry["toolset"] for entry in statistics["toolsets"]} == {"file", "python"}
    summary = json.loads((tmp_path / "trajectories" / "r" / "summary.json").read_text())
    shares = {one["toolset"]: one["asked_percent"] for one in summary["toolsets"]}
    assert shares == {"file": 60, "python": 40, "terminal": 50}
    percents = {one["toolset"]: one["percent"] for one in summary["toolsets"]}
    assert percents["file"] > 30
    assert percents["terminal"] == 0
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"file": 61, "python": 40}))
    changed = run(tmp_path, **SCRIPTED, distribution="mine.yaml", seed=5)
    assert changed.returncode == 2
    assert "distribution" in changed.stderr


def test_it_goes_in_the_place_of_enabled_toolsets(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
    both = run(tmp_path, **SCRIPTED, distribution="even", enabled_toolsets="file")
    assert both.returncode == 2
    assert "give one" in both.stderr
    assert "even           file 50%" in run(tmp_path, "distributions").stdout
