"""A record that somebody edited and sealed again: every command names its file, line and field."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.format_names import format_names
from batch_trajectories.maintenance.fork import write_forks
from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.records import UnreadableRecord
from batch_trajectories.report.page.writer import write_report
from tests.helpers.exporting import export_to_dataset
from tests.helpers.running import SCRIPTED, run, write_rows

DELETED = object()

EDITS: dict[str, tuple[Any, str]] = {
    "turns.0.duration_s": ("x", "`turns[0].duration_s`: expected `int | float`, got `str`"),
    "turns.1": (None, "`turns[1]`: expected `object`, got `null`"),
    "turns.0.usage": ([], "`turns[0].usage`: expected `object | null`, got `array`"),
    "usage.input_tokens": ("many", "`usage.input_tokens`: expected `int | null`, got `str`"),
    "messages.1.tool_calls": ({"id": 1}, "`messages[1].tool_calls`: expected `array`"),
    "messages.3.tool_call_id": (DELETED, "`messages[3]`: object missing required field"),
    "messages.3.details": ("x", "`messages[3].details`: expected `object`, got `str`"),
    "messages.1.role": ("robot", "`messages[1].role`: invalid enum value 'robot'"),
    "messages.1.content": (["text"], "`messages[1].content`: expected `str`, got `array`"),
    "tool_calls": ([{"turn": 1}], "`tool_calls[0]`: object missing required field `call`"),
    "tools.0.function": (None, "`tools[0].function`: expected `object`, got `null`"),
    "row": ([], "`row`: expected `object`, got `array`"),
    "resumes": ([{"interrupted": "c1"}], "`resumes[0].interrupted`: expected `array`"),
    "scores": ([{"source": "a:b"}], "`scores[0]`: object missing required field"),
    "check": ({"rewards": {"a": "1"}}, "`check.rewards[...]`: expected `int | float`, got `str`"),
    "sample": ("first", "`sample`: expected `int`, got `str`"),
    "options": (True, "`options`: expected `object | null`, got `bool`"),
    "status_reason": (DELETED, "object missing required field `status_reason`"),
}

UNREAD = ("messages.3.details", "tool_calls", "status_reason")
"""Fields that rows do not need; the report does."""

SCRIPT = [
    {"tool_calls": [{"name": "read_file", "arguments": {"path": f"{n}.txt"}} for n in range(2)]},
    {"content": "Done."},
]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A run of three tasks."""
    folder = tmp_path_factory.mktemp("whole")
    row = {"prompt": "Look.", "script": SCRIPT, "pad": "x" * 800}
    write_rows(folder / "p.jsonl", *({"id": f"t{n}", **row} for n in range(3)))
    given = {**SCRIPTED, "dataset_file": folder / "p.jsonl"}
    done = run(folder, **given, output_dir=".", concurrency=1)
    assert done.returncode == 0, done.stderr
    return Source(folder / "r", StoredRun(folder / "r").scan, 1)


def edit_copy(whole_run: Source, folder: Path, place: str, *, keeps_size: bool = True) -> Source:
    """A copy of the run with one field of its second record changed as `EDITS` says.

    If the size of the line stays, the index stays valid.
    """
    run_dir = folder / "r"
    shutil.copytree(whole_run.run_dir, run_dir)
    lines = (run_dir / "records.jsonl").read_bytes().splitlines(keepends=True)
    record = orjson.loads(lines[1])
    del record["crc32"]
    *parents, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    holder = record
    for key in parents:
        holder = holder[key]
    if EDITS[place][0] is DELETED:
        del holder[last]
    else:
        holder[last] = EDITS[place][0]
    if keeps_size and place != "row":
        longer = len(add_checksum(orjson.dumps(record))) - len(lines[1])
        record["row"]["pad"] = "x" * (800 - longer)
    lines[1] = add_checksum(orjson.dumps(record))
    (run_dir / "records.jsonl").write_bytes(b"".join(lines))
    return Source(run_dir, whole_run.scan, whole_run.num_samples)


def expected_problem(place: str) -> str:
    return f"records.jsonl:2: the record ('t1') is unreadable: {EDITS[place][1]}"


@pytest.mark.parametrize("place", [place for place in EDITS if place not in UNREAD])
def test_an_edited_field_is_named_by_each_format(
    tmp_path: Path, whole_run: Source, place: str
) -> None:
    source = edit_copy(whole_run, tmp_path, place)
    for name in format_names():
        with pytest.raises(UnreadableRecord, match=re.escape(expected_problem(place))):
            export_to_dataset(source, formats=name)


@pytest.mark.parametrize("place", EDITS)
def test_an_edited_field_is_named_by_the_report(
    tmp_path: Path, whole_run: Source, place: str
) -> None:
    source = edit_copy(whole_run, tmp_path, place)
    with pytest.raises(UnreadableRecord, match=re.escape(expected_problem(place))):
        write_report(StoredRun(source.run_dir))


@pytest.mark.parametrize("keeps_size", [True, False])
@pytest.mark.parametrize("place", ["turns.0.duration_s", "messages.1.content", "tools.0.function"])
def test_an_edited_field_is_named_by_each_command(
    tmp_path: Path, whole_run: Source, place: str, keeps_size: bool
) -> None:
    edit_copy(whole_run, tmp_path, place, keeps_size=keeps_size)
    branches = ("--at_turn=1", "--n=1", "--run_name=f", "--enabled_toolsets=none")
    for command, *options in (
        ("export",),
        ("report",),
        ("show", "t1"),
        ("stats",),
        ("fork", *branches),
    ):
        done = run(tmp_path, command, "r", *options, output_dir=".")
        assert done.returncode == 4, (command, done.stderr)
        assert expected_problem(place) in done.stderr, (command, done.stderr)


ODD = {
    "row": ({}, "its row cannot be used: no `prompt` field"),
    "messages": ([], "its record lacks messages of its turns"),
    "messages.0": (DELETED, "its record lacks messages of its turns"),
    "options": (None, ""),
    "messages.2.is_error": (DELETED, ""),
}
"""Edits that leave a record readable, and why it cannot be forked then."""


@pytest.mark.parametrize("place", ODD)
def test_a_record_that_does_not_fit_is_left_out_of_branches(
    tmp_path: Path, whole_run: Source, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setitem(EDITS, place, ODD[place])
    stored = StoredRun(edit_copy(whole_run, tmp_path, place, keeps_size=False).run_dir)
    forked = write_forks(
        tmp_path / "f.jsonl",
        stored.records(),
        run="r",
        turn=1,
        rules=stored.config.row_rules("scripted"),
        fresh=False,
    )
    assert forked.rows == (2 if ODD[place][1] else 3)
    assert ODD[place][1] in " ".join(forked.left_out)


def test_verify_sets_an_edited_record_aside(tmp_path: Path, whole_run: Source) -> None:
    place = "turns.0.duration_s"
    source = edit_copy(whole_run, tmp_path, place)
    done = run(tmp_path, "verify", "r", output_dir=".")
    assert done.returncode == 6
    message = f"records.jsonl:2: not a complete record (id 't1'; {EDITS[place][1]}): it is lost"
    assert message in done.stdout + done.stderr
    run(tmp_path, "verify", "r", "--repair", output_dir=".")
    assert (source.run_dir / "records.jsonl").read_bytes().count(b"\n") == 2
    export_to_dataset(source, formats="openai")
