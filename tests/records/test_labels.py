"""Labels that people give, and what reads them: recipes, masks, pairs, statistics, comparisons."""

from __future__ import annotations

import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.cli.label import label
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import Labels, append_label, label_change, score_key
from tests.helpers.exporting import call_record, judged_record, make_run, rejects, rows
from tests.helpers.running import lines, run


def records_of(source: Source) -> dict[str, Record]:
    return {record.id: record for record in stored_records(source.run_dir)}


def say(source: Source, id: str, who: str = "ann", **said: Any) -> None:
    record = records_of(source)[id]
    append_label(source.run_dir, score_key(record), id, who, label_change(said))


def test_the_last_line_of_each_reviewer_counts_for_each_key(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    say(source, "t0", verdict="reject", note="too short")
    say(source, "t0", "bob", verdict="keep")
    say(source, "t0", verdict="keep", no_loss=[1])
    say(source, "t0", note=None)
    (record,) = stored_records(source.run_dir)
    given = [(one.who, one.verdict, one.no_loss, one.note) for one in record.labels]
    assert given == [("ann", "keep", [1], None), ("bob", "keep", None, None)]
    assert len(lines(source.run_dir / "labels.jsonl")) == 4, "nothing is overwritten"
    assert "labels" not in record.as_dict(), "the record itself stays as it was"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({}, "decides nothing"),
        ({"verdict": "maybe"}, "verdict"),
        ({"no_loss": [0]}, "numbered from 1"),
        ({"note": "x" * 10_001}, "10,000 characters"),
        ({"mood": "good"}, "mood"),
    ],
)
def test_what_is_no_decision_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        label_change(said)


def _write_many(run_dir: Path, who: str) -> None:
    for number in range(100):
        append_label(run_dir, "ab", "t0", who, label_change({"note": f"{who} {number}"}))


def test_two_reviewers_at_once_lose_nothing(tmp_path: Path) -> None:
    context = get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, who)) for who in ("ann", "bob")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    said = [line["note"] for line in lines(tmp_path / "labels.jsonl")]
    for who in ("ann", "bob"):
        assert [note for note in said if who in note] == [f"{who} {n}" for n in range(100)]


def test_labels_that_are_read_while_they_are_counted_disturb_nobody(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record(), call_record(), call_record())
    say(source, "t0", verdict="keep")
    say(source, "t1", verdict="keep")
    labels = Labels(source.run_dir)
    counting, verdicts = labels.by_record(), labels.verdicts()
    next(counting), next(verdicts)
    say(source, "t2", verdict="reject")
    labels.read_new_lines()
    assert (len([*counting]), len([*verdicts])) == (1, 1)
    assert len([*labels.by_record()]) == 3


def test_a_torn_line_of_a_killed_writer_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text('{"record": "ab", "who"')
    append_label(tmp_path, "ab", "t0", "ann", label_change({"verdict": "keep"}))
    assert dict(Labels(tmp_path).verdicts()) == {"t0": "keep"}
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["labels.jsonl.0.torn"]


def test_a_damaged_line_is_named_and_repaired(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    say(source, "t0", verdict="keep")
    path = source.run_dir / "labels.jsonl"
    path.write_bytes(path.read_bytes().replace(b"keep", b"keeq"))
    with pytest.raises(RunDirError, match=r"labels.jsonl:1: not a label"):
        records_of(source)
    done = run(tmp_path, "verify", source.run_dir)
    assert "labels.jsonl:1: not a label" in done.stdout
    run(tmp_path, "verify", source.run_dir, "--repair")
    assert records_of(source)["t0"].labels == ()


def test_filters_take_what_people_keep(tmp_path: Path) -> None:
    source = make_run(tmp_path, *(call_record(f"Answer {n}.") for n in range(5)))
    say(source, "t0", verdict="keep")
    say(source, "t1", verdict="reject")
    say(source, "t2", verdict="fix")
    say(source, "t3", verdict="keep")
    say(source, "t3", "bob", verdict="reject")
    kept = rows(source, "openai", filters={"label": "keep"})
    assert [row["id"] for row in kept] == ["t0"]
    why = rejects(source, formats="openai", filters={"label": "not_rejected"})
    assert why == {"t1": "label", "t3": "label"}


def test_a_mask_takes_the_loss_of_turns_that_people_mark(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    say(source, "t0", no_loss=[1, 9])
    (row,) = rows(source, "openai", mask={"label": True})
    assert json.loads(row["metadata"])["masked"] == [{"turn": 1, "reasons": ["label"]}]


def test_dpo_has_exactly_the_pairs_that_people_prefer(tmp_path: Path) -> None:
    """Whatever the rewards, which the samples need not have; where two differ, none."""
    given = [call_record(f"Answer {n}.") for n in range(3)]
    contested = [
        judged_record(1.0, "Right."),
        judged_record(0.0, "Wrong."),
        judged_record(0.5, "So so."),
    ]
    source = make_run(tmp_path, *given, *contested, samples=3)
    records = records_of(source)

    def prefer(better: str, worse: str, who: str = "ann") -> None:
        say(source, better, who, over={worse: score_key(records[worse])})

    prefer("t0#s1", "t0")
    prefer("t1#s1", "t1#s2")
    prefer("t1#s2", "t1#s1", "bob")
    made = rows(source, "dpo", preference={"by": "label"})
    (pair,) = made
    assert pair["chosen"][-1]["content"].endswith("Answer 1.")
    assert pair["rejected"][-1]["content"].endswith("Answer 0.")


def test_kto_takes_verdicts(tmp_path: Path) -> None:
    source = make_run(tmp_path, *(call_record(f"Answer {n}.") for n in range(3)))
    say(source, "t0", verdict="keep")
    say(source, "t1", verdict="reject")
    made = rows(source, "kto", preference={"by": "label"})
    assert [(row["id"], row["label"]) for row in made] == [("t0", True), ("t1", False)]


def test_agreement_is_measured(tmp_path: Path) -> None:
    """Of two reviewers, 6 of 8 the same: kappa is (0.75 - 0.5) / 0.5; and with the check."""
    source = make_run(tmp_path, *(judged_record(n % 2, f"Answer {n}.") for n in range(8)))
    for n in range(8):
        say(source, f"t{n}", verdict="keep" if n < 4 else "reject")
        say(source, f"t{n}", "bob", verdict="keep" if n in (0, 1, 2, 7) else "reject")
    done = run(tmp_path, "stats", source.run_dir, "--json")
    labels = json.loads(done.stdout)["labels"]
    assert labels["verdicts"] == {"disputed": 2, "keep": 3, "reject": 3}
    by_pair = {tuple(one.pop("between")): one for one in labels["agreement"]}
    assert by_pair["ann", "bob"] == {"records": 8, "same": 0.75, "kappa": 0.5}
    assert by_pair["ann", "check"] == {"records": 8, "same": 0.5, "kappa": 0.0}
    text = run(tmp_path, "stats", source.run_dir).stdout
    assert "ann and bob: the same verdict for 75.0% of 8, Cohen's kappa 0.50" in text


def test_the_command_labels_and_compare_shows_it(tmp_path: Path) -> None:
    first = make_run(tmp_path, call_record("One."), call_record("Two."), samples=2)
    make_run(tmp_path, call_record("One."), call_record("Two."), samples=2, name="s")
    options: dict[str, Any] = {"output_dir": tmp_path, "who": "ann"}
    run(tmp_path, "label", "r", "t0#s1", verdict="keep", no_loss="1,2", over="t0", **options)
    run(tmp_path, "label", "s", "t0#s1", verdict="reject", **options)
    (given,) = records_of(first)["t0#s1"].labels
    assert (given.verdict, given.no_loss, list(given.over or {})) == ("keep", [1, 2], ["t0"])
    done = run(tmp_path, "compare", "r", "s", output_dir=tmp_path)
    text = done.stdout + done.stderr
    assert "labelled otherwise: 1: t0#s1 (keep -> reject)" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"no_loss": "x"}, "--no_loss: give numbers of turns"),
        ({"no_loss": "1,99"}, "--no_loss: t0 has 2 turns, and no turn 99"),
        ({"verdict": "keep", "who": " "}, "--who: give a name"),
    ],
)
def test_the_command_refuses_what_no_reader_could_follow(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    source = make_run(tmp_path, call_record())
    done = CliRunner().invoke(
        label, [str(source.run_dir), "t0", *(f"--{k}={v}" for k, v in options.items())]
    )
    assert done.exit_code == 2
    assert problem in done.stderr
    assert not (source.run_dir / "labels.jsonl").exists()
