"""The command `stats`: figures that can be counted by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.statistics.funnel import compute_funnel
from batch_trajectories.export.statistics.observations import compute_observation_share
from batch_trajectories.export.statistics.run import compute_statistics
from batch_trajectories.export.training_files import read_left_out_ids
from tests.helpers.builders import assistant, record_of, user
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import ROOT, SCRIPTED, run, write_rows
from tests.helpers.stored import to_record


def record(turns: int, **changes: Any) -> dict[str, Any]:
    place = {"turn": 1, "call": 0, "started_at": 1.5}
    calls = [{**place, "name": "temp", "is_error": False, "duration_s": float(turns)}]
    reply = {"finish_reason": "stop", "usage": None, "started_at": 1.0, "duration_s": 0.5}
    replies = [reply] * turns
    return call_record(f"Done {turns}.", tool_calls=calls, turns=replies[:2], **changes)


def test_counts_what_records_hold(tmp_path: Path) -> None:
    records = [record(n, cost_usd=0.5 * n) for n in (2, 3, 4)]
    ended = record(9, status="max_turns", cost_usd=None)
    source = make_run(tmp_path, *records, ended, pending=2)
    done = run(tmp_path, "stats", str(source.run_dir), "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["records"], output["kept"]) == (4, 3)
    assert output["rows"] == {"completed": 3, "max_turns": 1}
    cost = output["cost_usd"]
    assert cost["known_total"] == pytest.approx(4.5)
    assert cost["per_kept"] == pytest.approx(1.5)
    assert cost["records_of_unknown_cost"] == 1
    (tool,) = output["tools"]
    assert tool["count"] == 4
    assert (tool["seconds"]["max"], tool["seconds"]["mean"]) == (9.0, 4.5)
    assert output["per_record"]["model_seconds"]["max"] == 1.0


def record_with_usage(*counts: tuple[int | None, int | None], **changes: Any) -> dict[str, Any]:
    """A record of turns with these tokens of input and output."""
    turns = [
        {
            "finish_reason": "stop",
            "usage": {"input_tokens": given, "output_tokens": made},
            "started_at": 1.0,
            "duration_s": 0.5,
        }
        for given, made in counts
    ]
    return call_record(turns=turns, **changes)


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ([(100, 20), (180, 20)], 0.3),  # 60 of 200
        ([(100, 20)], 0.0),
        ([(100, 20), (120, 5), (200, 50)], 0.3),  # 0 and 75 of 250
        ([(100, 20), (110, 20)], None),  # reasoning was not sent again
        ([(100, 20), (None, 20)], None),
        ([(0, 0)], None),
        ([], None),
    ],
)
def test_observations_are_what_the_input_grew_by(counts: Any, share: float | None) -> None:
    assert compute_observation_share(to_record(record_with_usage(*counts))) == share


def test_an_agent_that_is_a_command_has_no_share() -> None:
    agent = {"name": "codex", "version": "1", "exit_code": 0}
    assert compute_observation_share(to_record(record_with_usage((100, 20), agent=agent))) is None


def test_stats_has_the_share_of_observations(tmp_path: Path) -> None:
    known, unknown = (
        record_with_usage((100, 20), (180, 20)),
        record_with_usage((None, None), (None, None)),
    )
    source = make_run(tmp_path, known, unknown)
    output = json.loads(run(tmp_path, "stats", str(source.run_dir), "--json").stdout)
    assert output["per_record"]["observation_percent"]["mean"] == pytest.approx(30)
    text = run(tmp_path, "stats", str(source.run_dir)).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("observation_percent")]
    assert line.split()[1:] == ["30"] * 5


_TYPES: Mapping[str, tuple[Any, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "text": (str,),
    "boolean": (bool,),
    "object": (dict,),
}


def documented_types() -> dict[str, tuple[Any, ...]]:
    """The types of the keys in the table of the page; `...` at the end of optional ones."""
    page = (ROOT / "docs" / "report.md").read_text().partition("## `stats --json`")[2]
    known: dict[str, tuple[Any, ...]] = {}
    for line in page.splitlines():
        if line.startswith("`") and line.count(" | ") == 2:
            keys, kind, _ = line.split(" | ")
            types = _TYPES[kind.split(" ")[0].rstrip(",")]
            types += (type(None),) if "null" in kind else ()
            types += (Ellipsis,) if "optional" in kind else ()
            known |= dict.fromkeys(keys.replace("`", "").split(", "), types)
    return known


def leaves(value: Any, place: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each value that is no list or object, with its key as the page writes it."""
    if isinstance(value, list):
        for item in value:
            yield from leaves(item, f"{place}[]", known)
    elif isinstance(value, dict):
        any_name = any(key == f"{place}.*" or key.startswith(f"{place}.*.") for key in known)
        for name, item in value.items():
            below = f"{place}.*" if any_name else f"{place}.{name}".removeprefix(".")
            yield from leaves(item, below, known)
    else:
        yield place, value


def test_json_has_the_keys_and_types_of_the_page(tmp_path: Path) -> None:
    known = documented_types()
    judged = {"passed": True, "reward": 1.0, "rewards": {"style": 0.5}}
    turns = {"turn_rewards": {"by_turn": [0.5, 1.0]}}
    records = [record(2, model=f"m{n % 2}", check=judged | turns, cost_usd=0.5) for n in range(4)]
    source = make_run(tmp_path, *records, record(9, status="max_turns", cost_usd=None), samples=2)
    stored = StoredRun(source.run_dir)
    recipe = Recipe.model_validate(
        {"formats": "openai", "mask": {"turn_reward": {"by_turn": 0.75}}}
    )
    export_dataset(source, recipe, source.run_dir / "exports" / "dataset")
    found = dict(
        leaves(
            {
                **stored.statistics(),
                "funnel": compute_funnel(source.run_dir, source.scan, stored.totals(), {}),
            },
            "",
            known,
        )
    )
    for key, value in found.items():
        assert key in known, key
        assert type(value) in known[key], (key, value)
    always = {key for key, types in known.items() if types[-1] is not Ellipsis}
    assert always - {"funnel", "tool_errors.*"} <= found.keys()


def test_shows_a_table(tmp_path: Path) -> None:
    source = make_run(tmp_path, record(2, cost_usd=0.25))
    done = run(tmp_path, "stats", str(source.run_dir))
    assert done.returncode == 0, done.stderr
    assert "1 task ended: completed 1; kept for training 1" in done.stdout
    assert "$0.2500 per conversation kept for training" in done.stdout
    assert done.stdout.count("temp") == 1


def test_tools_that_were_never_called_are_named_apart(tmp_path: Path) -> None:
    uncalled = {**record(1), "tool_calls": []}
    uncalled["messages"] = [
        message for message in uncalled["messages"] if message["role"] in ("system", "user")
    ] + [assistant("Done.")]
    source = make_run(tmp_path, uncalled)
    told = run(tmp_path, "stats", str(source.run_dir)).stdout
    assert "offered, but never called: temp\n" in told
    assert told.count("temp") == 1


def test_of_a_missing_run_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "stats", "nothing")
    assert done.returncode == 2
    assert "no run here" in done.stderr or "nothing" in done.stderr


def test_of_a_task_with_several_records_the_last_one_counts(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record(), call_record())
    path = source.run_dir / "records.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[0])
    assert compute_statistics(source.run_dir, style=Style())["records"] == 2


def test_of_a_run_with_reasoning_only_the_rest_is_not_kept(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record(), record_of(user(), assistant("Yes.")))
    for require, kept in ((False, 2), (True, 1)):
        assert (
            compute_statistics(source.run_dir, style=Style(require_reasoning=require))["kept"]
            == kept
        )


def test_what_is_kept_is_known_from_an_export_only_while_that_is_current(tmp_path: Path) -> None:
    """The same as without an export; any change after it and it is computed again."""
    flies = [{"tool_calls": [{"name": "fly", "arguments": {}}]}, {"content": "done"}]
    scripts = [[{"content": "y"}], flies, [{"content": "z"}]]
    rows = [{"id": f"p{n}", "prompt": "x", "script": script} for n, script in enumerate(scripts)]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    assert read_left_out_ids(run_dir) == frozenset({"p1"})
    statistics = StoredRun(run_dir).statistics()
    assert statistics["kept"] == 2
    assert statistics == compute_statistics(run_dir, style=Style())
    assert compute_statistics(run_dir, style=Style(), left_out=["p0", "p1"])["kept"] == 1
    manifest = run_dir / "exports" / "manifest.json"
    for name in ("records.jsonl", "run.json", "exports/rejects.jsonl"):
        after = manifest.stat().st_mtime_ns
        os.utime(run_dir / name, ns=(after, after))
        assert read_left_out_ids(run_dir) is None
        os.utime(run_dir / name, ns=(0, 0))
        assert read_left_out_ids(run_dir) == frozenset({"p1"})
    for content in ("", "{}", '{"gone": 1}'):
        manifest.write_text(content)
        assert read_left_out_ids(run_dir) is None
    manifest.write_text('{"gone": 0}')
    (run_dir / "scores.jsonl").touch()
    assert read_left_out_ids(run_dir) is None
    assert StoredRun(run_dir).statistics()["kept"] == 2
