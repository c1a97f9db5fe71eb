"""Which conversations can be judged again, and what readers see of it; without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.audit.audited import make_config_without_model
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.kept_dataset import DatasetSnapshot
from batch_trajectories.dataset.scan import scan
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.reader import open_index, stored_records
from batch_trajectories.records.record_types import CheckResult, Record, Score
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.scores import CHECK, later_check_keys, score_key
from batch_trajectories.records.tasks import task_key
from batch_trajectories.scoring.rechecks import Judging, LeftOut, NewRows, Rechecks
from batch_trajectories.scoring.score_file import NewScore, open_scores
from tests.helpers.running import write_rows
from tests.helpers.stored import to_record

ROW = {"prompt": "Repair it.", "check": "true"}
WHOLE: dict[str, Any] = {"patch": "", "truncated": False}
PASSED = {"passed": True, "reward": 1.0}
FAILED = {"passed": False, "reward": 0.0, "exit_code": 1}


def config_of(**options: Any) -> RunConfig:
    given = RunConfig(dataset_file=Path("p.jsonl"), run_name="r", model="scripted", **options)
    return make_config_without_model(given)


IN_IMAGES: dict[str, Any] = {"workspace": "image", "images": Path("images"), "docker_image": "a:1"}


def ask(record: Record, rows: NewRows | None = None, **options: Any) -> Judging | LeftOut:
    """What is said of a record in the first place of its file."""
    from batch_trajectories.records.index import IndexEntry

    place = IndexEntry(
        offset=0,
        length=9,
        status="completed",
        attempt=1,
        turns=0,
        tool_calls=0,
        input_tokens=None,
        output_tokens=None,
        cost_usd=None,
        error_class=None,
        verdict=None,
        reward=None,
    )
    return Rechecks(config_of(**options), rows).decide(record, place, bytes(16))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"status": "failed"}, "failed"),
        ({"row": {"prompt": "p"}}, "no_check"),
        ({"row": {"prompt": "p", "check": 7}}, "bad_row"),
        ({"row": ROW}, "not_kept"),
        ({"row": ROW, "workspace": {"error": "its files have more than 1 MB"}}, "not_kept"),
        ({"row": ROW, "diff": {**WHOLE, "truncated": True}}, "cut_diff"),
        ({"row": ROW, "diff": {**WHOLE, "error": "no git"}}, "no_diff"),
        ({"row": ROW, "diff": WHOLE}, "only_diff"),
        (
            {
                "row": {"prompt": "p", "expected": "4"},
                "status": "max_turns",
                "options": {"check_expected": True},
            },
            "no_answer",
        ),
    ],
)
def test_what_cannot_be_judged_has_a_reason(parts: dict[str, Any], reason: str) -> None:
    found = ask(to_record(parts), **IN_IMAGES)
    assert isinstance(found, LeftOut)
    assert found.reason == reason


def test_a_workspace_is_made_of_the_diff_where_the_check_is_fresh() -> None:
    kept = {"row": ROW, "diff": WHOLE, "workspace": {"name": "0"}}
    for place, source in (("fresh", "diff"), ("same", "workspace")):
        found = ask(to_record(kept), **IN_IMAGES, check_in=place)
        assert isinstance(found, Judging)
        assert found.row is not None
        assert found.row["judged"]["from"] == source
    cut = to_record({**kept, "diff": {**WHOLE, "truncated": True}})
    found = ask(cut, **IN_IMAGES, check_in="fresh")
    assert isinstance(found, Judging)
    assert found.row is not None
    assert found.row["judged"]["from"] == "workspace"


def test_answers_are_compared() -> None:
    messages = [{"role": "assistant", "content": " FOUR "}]
    row = {"prompt": "2 + 2?", "expected": "four"}
    record = to_record({"row": row, "messages": messages, "options": {"check_expected": True}})
    found = ask(record)
    assert isinstance(found, Judging)
    assert found.row is None
    assert found.check == {"passed": True, "reward": 1.0, "answer": "FOUR"}


def test_a_verdict_of_the_same_check_is_not_given_twice() -> None:
    record = to_record({"row": ROW, "workspace": {"name": "0"}})
    first = ask(record)
    assert isinstance(first, Judging)

    def judged_by(version: str, check: dict[str, Any]) -> Record:
        score = Score(CHECK, version, None, None, check=check)
        record.scores = [score]
        return record

    assert ask(judged_by(first.version, PASSED)) == LeftOut("same")
    assert ask(judged_by("another", PASSED)) == first
    assert ask(judged_by(first.version, {"error": "it timed out"})) == first
    assert ask(judged_by(first.version, PASSED), command_timeout_s=7.0) != LeftOut("same")


def test_rows_are_found_by_id_and_without_one_by_the_prompt(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one", "check": "true"},
        {"prompt": "two", "check": "false"},
        {"prompt": "three", "check": "true"},
        {"prompt": "three", "check": "false"},
    ]
    path = write_rows(tmp_path / "new.jsonl", *rows)
    rules = config_of().row_rules("scripted")
    new = NewRows(scan(path, max_samples=None, rules=rules), DatasetSnapshot(path))

    def of(prompt_id: str, prompt: str) -> Any:
        return new.find_row(to_record({"prompt_id": prompt_id, "row": {"prompt": prompt}}))

    assert of("a", "another")["check"] == "true"
    assert of("row-0123456789abcdef", "two")["check"] == "false"
    assert of("row-0123456789abcdef", "three") == LeftOut("several_rows")
    assert of("row-0123456789abcdef", "four") == LeftOut("no_row")
    assert of("b", "two") == LeftOut("no_row")


def write_records(run_dir: Path, *records: Record) -> None:
    file = RecordFile(run_dir, run_dir / "quarantine")
    for record in records:
        file.add(record)
    file.sync()
    file.close()


def judge(run_dir: Path, record: Record, check: dict[str, Any]) -> None:
    """Append what `check` appends."""
    result = CheckResult(**{name: check.get(name) for name in ("passed", "reward", "error")})
    key = task_key(record.id, record.input_digest).hex()
    line = {"source": CHECK, "version": "v", "rewards": None, "error": None, "check": check}
    with open_scores(run_dir) as file:
        fields = {**line, "task": key, **later_check_keys(record, result)}
        file.append([NewScore(score_key(record), record.id, fields)])


def test_index_and_records_have_the_last_verdict(tmp_path: Path) -> None:
    first = to_record({"id": "a", "check": PASSED})
    other = to_record({"id": "b", "check": PASSED})
    write_records(tmp_path, first, other)
    judge(tmp_path, first, FAILED)
    judge(tmp_path, other, FAILED)
    judge(tmp_path, other, PASSED)
    with open_index(tmp_path) as (index, _):
        assert [entry.passed for _, entry in index.current_entries()] == [False, True]
    records = list(stored_records(tmp_path))
    assert [judge_record(record).passed for record in records] == [False, True]
    assert records[0].as_dict()["check"] == FAILED
    judge(tmp_path, first, {"error": "it timed out"})
    with open_index(tmp_path) as (index, _):
        assert [entry.check_failed for _, entry in index.current_entries()] == [True, False]
        assert next(index.current_entries())[1].reward is None


def test_a_record_that_came_later_has_its_own_verdict(tmp_path: Path) -> None:
    """The task was run again."""
    first = to_record({"id": "a", "check": PASSED})
    write_records(tmp_path, first)
    judge(tmp_path, first, FAILED)
    write_records(tmp_path, to_record({"id": "a", "check": PASSED, "finished_at": 7.5}))
    with open_index(tmp_path) as (index, _):
        assert [entry.passed for _, entry in index.current_entries()] == [True]
    assert [judge_record(record).passed for record in stored_records(tmp_path)] == [True]
