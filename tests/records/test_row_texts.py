"""Long texts of a row that its conversation repeats: stored once, and read as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import open_run
from batch_trajectories.basics import exact_json
from batch_trajectories.records.files import DamagedLine, add_checksum
from batch_trajectories.records.record_types import Record, decode_record
from tests.helpers.builders import assistant, user
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.helpers.stored import ROW_FORMATS, complete, row_in, to_record

LONG, OTHER = "long " * 1000, "other " * 1000
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
SHOWN = {**user("See."), "provider_blocks": {"api": "openai_chat", "blocks": [PICTURE]}}

ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a prompt": ({"id": "p", "prompt": LONG, "note": OTHER}, [user(LONG)]),
    "messages": (
        {"messages": [{"role": "system", "content": OTHER}, user(LONG)], "n": 2**70},
        [{"role": "system", "content": OTHER}, user(LONG)],
    ),
    "a picture": ({"prompt": [{"role": "user", "content": [PICTURE]}]}, [SHOWN]),
}


def old_record(record: dict[str, Any]) -> Record:
    """The record as earlier versions stored it."""
    return decode_record(add_checksum(exact_json.dumps(complete(record))))


def make_record(name: str) -> dict[str, Any]:
    row, opening = ROWS[name]
    return complete({"row": row, "messages": [*opening, assistant("Done.")], "turns": [{}]})


@pytest.mark.parametrize("name", ROWS)
def test_a_text_is_stored_once_and_read_as_if_it_were_stored_twice(name: str) -> None:
    record = make_record(name)
    ours, before = to_record(record), old_record(record)
    assert len(ours.line) < len(before.line) - 4900
    assert ours.row == record["row"]
    assert ours.as_dict() == before.as_dict() == record
    assert ours.whole_line() == before.whole_line()
    assert json.loads(ours.splice({"tools": b"1"})) == json.loads(before.splice({"tools": b"1"}))


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_rows_of_all_formats_are_the_same(format: str) -> None:
    record = make_record("a prompt")
    assert row_in(format, to_record(record)) == row_in(format, old_record(record))


def test_a_record_without_long_texts_is_stored_as_before() -> None:
    record = complete({"row": {"prompt": "short"}, "messages": [user("short")]})
    assert to_record(record).line == old_record(record).line


@pytest.mark.parametrize("place", [[9, "content"], [0, "nothing"], ["x"]])
def test_a_reference_to_no_place_is_damage(place: list[Any]) -> None:
    record = make_record("a prompt") | {"row_texts": [[["prompt"], place]]}
    with pytest.raises(DamagedLine, match="`row_texts` names a place that does not exist"):
        old_record(record)


@pytest.mark.slow
def test_a_run_of_long_prompts_is_verified_merged_and_exported(tmp_path: Path) -> None:
    """Its records hold each prompt once."""
    rows = [{"id": f"p{n}", "prompt": str(n) * 10**6, "script": [{"content": "y"}]} for n in (1, 2)]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **{**SCRIPTED, "run_name": "r", "dataset_file": "p.jsonl"}).returncode == 0
    found = tmp_path / "trajectories" / "r"
    assert (found / "records.jsonl").stat().st_size < 2.1 * 10**6
    assert [record["row"] for record in open_run(found).records()] == rows
    assert run(tmp_path, "verify", "r").returncode == 0
    assert run(tmp_path, "merge", "r", into="m", dataset_file="p.jsonl").returncode == 0
    assert run(tmp_path, "export", "m", format="raw").returncode == 0
    raw = lines(tmp_path / "trajectories/m/exports/dataset/raw/train.jsonl")
    assert [record["row"] for record in raw] == rows
    assert "row_texts" not in raw[0]
