"""A run as data: its records as tables of Arrow, pandas and datasets."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batch_trajectories import open_run
from batch_trajectories.api import tables
from batch_trajectories.api.tables import TABLES, TableName
from batch_trajectories.records.records import UnreadableRecord
from batch_trajectories.records.scores import score_key
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, judged_record, make_run
from tests.helpers.running import command, write_rows

FAILED = record_of(user(), status="failed", error={"class": "ModelError", "message": "gone"})


def rows_of(folder: Path, table: TableName, *records: Any, **given: Any) -> list[dict[str, Any]]:
    source = make_run(folder, *records, **given)
    found: list[dict[str, Any]] = open_run(source.run_dir).to_arrow(table).to_pylist()
    return found


def test_a_task_has_its_ending_amounts_and_judgement(tmp_path: Path) -> None:
    usage = {"input_tokens": 10, "output_tokens": 5}
    check = {"passed": True, "reward": 0.75}
    run = {"turn": 1, "call": 0, "name": "a", "is_error": True, "started_at": 1, "duration_s": 1}
    first, second = rows_of(
        tmp_path,
        "tasks",
        call_record(usage=usage, cost_usd=1, check=check, finished_at=2.5, tool_calls=[run]),
        FAILED,
    )
    assert (first["id"], first["turns"]) == ("t0", 2)
    assert (first["tool_calls"], first["tool_errors"]) == (1, 1)
    assert (first["input_tokens"], first["reasoning_tokens"]) == (10, None)
    assert (first["cost_usd"], first["passed"], first["reward"]) == (1.0, True, 0.75)
    assert first["finished_at"] == datetime.fromtimestamp(2.5, UTC)
    assert (second["status"], second["error_class"], second["error"]) == (
        "failed",
        "ModelError",
        "gone",
    )
    assert (second["passed"], second["started_at"]) == (None, None)


def test_turns_have_the_texts_of_their_messages(tmp_path: Path) -> None:
    """A branch has turns of its parent, a prompt those of nobody."""
    given = record_of(user(), assistant("Given."), user(), assistant("Own.", reasoning="Hm."))
    del given["turns"][0]
    inherited = record_of(user(), assistant("Parent."), user(), assistant("Own."))
    inherited["turns"][0]["inherited"] = True
    found = rows_of(tmp_path, "turns", given, inherited)
    assert [(row["id"], row["content"], row["reasoning"], row["inherited"]) for row in found] == [
        ("t0", "Own.", "Hm.", False),
        ("t1", "Parent.", None, True),
        ("t1", "Own.", None, False),
    ]


def test_calls_have_arguments_results_and_times(tmp_path: Path) -> None:
    record = record_of(
        user(),
        assistant("", call('{"a": 1}', id="x"), call("{", id="y")),
        result("one", id="x"),
        result("no", id="y", is_error=True),
        assistant("Done."),
    )
    times = {"started_at": 3, "duration_s": 0.5}
    record["tool_calls"] = [
        {"turn": 1, "call": 0, "name": "a", "is_error": False, **times},
        {"turn": 1, "call": 1, "name": "a", "is_error": True, **times},
    ]
    found = rows_of(tmp_path, "calls", record)
    assert [
        (row["call_id"], row["arguments"], row["result"], row["is_error"]) for row in found
    ] == [
        ("x", '{"a": 1}', "one", False),
        ("y", "{", "no", True),
    ]
    assert found[0]["duration_s"] == 0.5


def test_scores_are_those_of_the_check_and_of_later_judges(tmp_path: Path) -> None:
    source = make_run(tmp_path, judged_record(1.0, "A"), call_record("B"))
    record = open_run(source.run_dir).find("t1")
    line = {"source": "judge", "version": "1", "error": None, "rewards": {"style": 0.5}, "at": 4}
    write_rows(source.run_dir / "scores.jsonl", {**line, "record": score_key(record), "id": "t1"})
    stored = open_run(source.run_dir)
    found = stored.to_arrow("scores").to_pylist()
    assert [(row["id"], row["source"], row["name"], row["reward"]) for row in found] == [
        ("t0", "check", "reward", 1.0),
        ("t1", "judge", "style", 0.5),
    ]
    assert [row["reward"] for row in stored.to_arrow().to_pylist()] == [1.0, 0.5]


def test_an_expected_answer_is_a_judgement(tmp_path: Path) -> None:
    given = call_record(options={"check_expected": True})
    (row,) = rows_of(tmp_path, "tasks", given, prompts=[{"expected": "Done."}])
    assert (row["passed"], row["reward"]) == (True, 1.0)


@pytest.mark.parametrize("name", TABLES)
def test_columns_have_the_same_types_with_and_without_rows(tmp_path: Path, name: TableName) -> None:
    full = open_run(make_run(tmp_path, judged_record(1.0, "A"), name="full").run_dir)
    empty = open_run(make_run(tmp_path, pending=1, name="empty").run_dir)
    assert full.to_arrow(name).schema == empty.to_arrow(name).schema
    assert full.to_arrow(name).num_rows > 0 == empty.to_arrow(name).num_rows
    frame = full.to_pandas(name)
    assert str(frame.dtypes.iloc[0]) == "string[pyarrow]"
    assert full.to_dataset(name).num_rows == len(frame)


def test_batches_together_are_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(make_run(tmp_path, *(judged_record(1.0, str(n)) for n in range(5))).run_dir)
    whole = run.to_arrow()
    monkeypatch.setattr(tables, "_BATCH_BYTES", 1)
    batches = [*run.batches()]
    assert len(batches) == 5
    assert pa.Table.from_batches(batches).unify_dictionaries().to_pylist() == whole.to_pylist()


def test_only_the_last_record_of_a_task_counts(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record("Old."), call_record("Other."))
    path = source.run_dir / "records.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    first["messages"][-1]["content"] = "New."
    with path.open("a") as file:
        file.write(json.dumps(first) + "\n")
    texts = [row["content"] for row in open_run(source.run_dir).to_arrow("turns").to_pylist()]
    assert texts == ["Looking.", "Other.", "Looking.", "New."]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record("A"), call_record("B"))
    run = open_run(source.run_dir)
    run.to_arrow()
    path = source.run_dir / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"attempt": 1', b'"attempt":"1'))
    with pytest.raises(UnreadableRecord, match=r"records\.jsonl:1"):
        run.to_arrow()


def test_an_unknown_table_is_named(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path, call_record()).run_dir)
    with pytest.raises(ValueError, match="no table is named 'turn'; did you mean 'turns'"):
        run.to_arrow("turn")  # type: ignore[arg-type]


def test_the_repr_tells_of_the_records(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path, call_record(), FAILED, call_record("B"), pending=1).run_dir)
    assert "2 completed, 1 failed" in repr(run)


def test_statistics_have_the_same_keys_and_types_in_every_run(tmp_path: Path) -> None:
    """What scripts read of `stats`: empty runs lack none, and no list becomes an object."""
    figures = open_run(make_run(tmp_path, judged_record(1.0, "A"), FAILED).run_dir).statistics()
    without = open_run(make_run(tmp_path, pending=1, name="empty").run_dir).statistics()
    for key, value in without.items():
        assert type(value) is type(figures[key]), key
    assert without.keys() >= {"records", "kept", "cost_usd", "per_record", "rewards", "health"}


def test_stats_take_a_format(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, judged_record(1.0, "A")).run_dir
    shown = subprocess.run(
        command("stats", run_dir, "--format=json"), capture_output=True, text=True, check=True
    )
    assert json.loads(shown.stdout)["records"] == 1
