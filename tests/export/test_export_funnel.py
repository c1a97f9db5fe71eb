"""The funnel from rows to training rows: each step, and the reason of every loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.engine.run_totals import compute_totals
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.statistics.funnel import compute_funnel, format_funnel
from batch_trajectories.export.training_files import export_run
from batch_trajectories.records.failures import Failure, FailureFile
from batch_trajectories.report.page.writer import write_report
from tests.export.test_export_per_turn import two_questions
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import SCRIPTED, run, write_rows

FAILED = record_of(user(), status="failed", error={"class": "ModelError", "message": "gone"})
EARLY = record_of(
    user(), assistant("", call()), result("r"), status="max_turns", status_reason="3 turns"
)
FLAWED = record_of(user(), assistant("See </tool_call>."))
BAD_ROWS = '{"id": "x1"}\n[1]\n{"id": "x2"}\nnot JSON at 17\n'


def judged_record(answer: str, *, has_passed: bool) -> dict[str, Any]:
    return call_record(answer, check={"passed": has_passed, "reward": float(has_passed)})


def make_mixed_run(folder: Path) -> Source:
    """Seven rows with a record each, two without, and four bad rows."""
    source = make_run(
        folder,
        judged_record("A", has_passed=True),
        judged_record("B", has_passed=False),
        call_record("C"),
        call_record("C"),
        EARLY,
        FAILED,
        FLAWED,
        pending=2,
        more=BAD_ROWS,
    )
    (folder / "quarantine").mkdir()
    file = FailureFile(source.run_dir, folder / "quarantine")
    (seventh, _) = (task for task in StoredRun(source.run_dir).tasks() if task.id in ("t7", "t8"))
    file.append(
        Failure(
            id=seventh.id,
            input_digest=seventh.input_digest,
            attempt=1,
            error_class="Timeout",
            message="slow",
        )
    )
    file.close()
    return source


def funnel(source: Source) -> dict[str, Any]:
    return StoredRun(source.run_dir).funnel()


def export_both(source: Source, **recipe: Any) -> None:
    export_run(source.run_dir, source.scan, num_samples=source.num_samples)
    directory = source.run_dir / "exports" / "dataset"
    export_dataset(source, Recipe.model_validate(recipe), directory)


def test_each_step_says_what_was_lost_and_why(tmp_path: Path) -> None:
    source = make_mixed_run(tmp_path)
    steps = funnel(source)
    assert steps["steps"] == [
        {
            "name": "rows",
            "count": 13,
            "lost": {
                "bad row: no `prompt` field (fields: id)": 2,
                "bad row: not JSON: invalid literal, expected 'null': line 1 column 1 (char 0)": 1,
                "bad row: the line is an array; it must be a JSON object": 1,
            },
        },
        {
            "name": "tasks",
            "count": 9,
            "lost": {"failed: ModelError": 1, "failed: Timeout": 1, "max_turns": 1, "pending": 1},
        },
        {
            "name": "completed",
            "count": 5,
            "lost": {"neither checked nor scored": 3, "not_passed": 1},
        },
        {"name": "passed", "count": 1, "lost": {}},
    ]
    assert (steps["samples"], steps["exports"]) == (1, [])


def test_exports_are_told_with_what_their_manifests_counted(tmp_path: Path) -> None:
    source = make_mixed_run(tmp_path)
    export_both(source, formats="openai,dpo", filters={"require_passed": True})
    training, openai, dpo = funnel(source)["exports"]
    before = {"bad row": 4, "failed": 2, "pending": 1}
    assert training == {
        "format": "hermes",
        "path": "r.jsonl",
        "rows": 4,
        "used": 4,
        "tasks": 13,
        "lost": {**before, "ended early": 1, "marker_in_text": 1},
        "outdated": False,
    }
    assert (openai["rows"], openai["path"]) == (2, "exports/dataset/openai")
    assert openai["lost"] == {
        **before,
        "exact_duplicates": 1,
        "marker_in_text": 1,
        "require_passed": 1,
        "status": 1,
    }
    assert (dpo["format"], dpo["rows"], dpo["lost"]["no_reward"]) == ("dpo", 0, 1)


def test_an_export_is_outdated_once_more_conversations_have_ended(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record("A"), FAILED, pending=1)
    export_run(source.run_dir, source.scan, num_samples=1)
    assert not funnel(source)["exports"][0]["outdated"]
    lines = (source.run_dir / "records.jsonl").read_bytes().splitlines(keepends=True)
    again = {**json.loads(lines[0]), **{k: json.loads(lines[1])[k] for k in ("id", "input_digest")}}
    again.pop("crc32", None)
    with (source.run_dir / "records.jsonl").open("ab") as file:
        file.write(orjson.dumps(again) + b"\n")  # the failed one, tried again
    (source.run_dir / "records.idx").unlink(missing_ok=True)
    steps = funnel(source)
    assert steps["exports"][0]["outdated"]
    assert any("export again" in line for line in format_funnel(steps))


def test_stats_shows_the_funnel(tmp_path: Path) -> None:
    source = make_mixed_run(tmp_path)
    export_both(source, formats="openai")
    done = run(tmp_path, "stats", str(source.run_dir))
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "rows 13"
    for line in (
        "discarded 2 bad row: no `prompt` field (fields: id)",
        "tasks 9",
        "of these 1 failed: Timeout",
        "left out 1 pending",
        "of these 1 pending",
        "of these 1 max_turns",
        "completed 5",
        "of these 1 not_passed",
        "of these 3 neither checked nor scored",
        "passed 1",
        "exported 4 rows of hermes in r.jsonl, from 4 of 13 tasks",
        "left out 1 marker_in_text",
    ):
        assert line in lines, line
    done = run(tmp_path, "stats", str(source.run_dir), "--json")
    assert json.loads(done.stdout)["funnel"] == funnel(source)


def test_without_its_dataset_a_run_still_has_statistics(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    (tmp_path / "p.jsonl").unlink()
    done = run(tmp_path, "stats", str(source.run_dir))
    assert done.returncode == 0, done.stderr
    assert "from rows to training rows: " in done.stdout
    assert "p.jsonl" in done.stdout
    assert "1 task ended: completed 1" in done.stdout
    done = run(tmp_path, "stats", str(source.run_dir), "--json")
    assert json.loads(done.stdout)["funnel"] is None


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = make_run(tmp_path, call_record())
    export_run(source.run_dir, source.scan, num_samples=1)
    (source.run_dir / "exports" / "manifest.json").write_text("{")
    done = run(tmp_path, "stats", str(source.run_dir))
    assert done.returncode == 0, done.stderr
    assert "manifest.json: cannot read it" in done.stdout
    assert "export again" in done.stdout
    assert "1 task ended: completed 1" in done.stdout


def test_rows_per_turn_are_more_than_their_conversations(tmp_path: Path) -> None:
    source = make_run(tmp_path, two_questions(), call_record())
    export_both(source, formats="openai", per_turn=True)
    _, openai = funnel(source)["exports"]
    assert (openai["rows"], openai["used"], openai["lost"]) == (6, 2, {})


def test_an_export_of_copies_alone_is_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = make_run(tmp_path, call_record())
    export_both(source, formats="parquet")
    (_, copies) = funnel(source)["exports"]
    assert (copies["format"], copies["path"]) == ("openai", "exports/dataset/openai_parquet")


def test_the_report_holds_the_funnel_and_no_path(tmp_path: Path) -> None:
    script = [{"content": "Yes."}]
    rows = [{"id": f"p{n}", "prompt": f"Question {n}", "script": script} for n in range(3)]
    dataset = write_rows(tmp_path / "p.jsonl", *rows, [1])
    done = run(tmp_path, **SCRIPTED)
    assert done.returncode == 0, done.stderr
    stored = StoredRun(tmp_path / "trajectories" / "r")
    steps = _meta(stored)["funnel"]
    assert steps == stored.funnel()
    assert [step["count"] for step in steps["steps"]] == [4, 3, 3]
    assert steps["exports"][0]["rows"] == 3
    dataset.unlink()
    assert _meta(StoredRun(stored.path))["funnel"] is None


def _meta(stored: StoredRun) -> dict[str, Any]:
    page = write_report(stored).path.read_text()
    assert str(stored.path.parent.parent) not in page
    parsed: dict[str, Any] = json.loads(page.split('id="meta-data">')[1].split("</script>")[0])
    return parsed


def test_rare_reasons_of_bad_rows_are_counted_together(tmp_path: Path) -> None:
    reasons = "".join(
        f'{{"id": "b{n}", "prompt": {value}}}\n'
        for n, value in enumerate(["1", "[]", "{}", "null", "true"])
    )
    source = make_run(tmp_path, call_record(), more=reasons)
    (rows, *_) = funnel(source)["steps"]
    assert sum(rows["lost"].values()) == 5
    assert len(rows["lost"]) <= 11


@pytest.mark.parametrize("samples", [pytest.param(1, marks=pytest.mark.slow), 3])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_step_adds_up(
    tmp_path_factory: pytest.TempPathFactory, samples: int, data: st.DataObject
) -> None:
    kinds = [
        FAILED,
        EARLY,
        FLAWED,
        call_record("A"),
        judged_record("B", has_passed=True),
        judged_record("C", has_passed=False),
        two_questions(),
    ]
    records = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
    pending, bad = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    folder = tmp_path_factory.mktemp("funnel")
    source = make_run(folder, *records, samples=samples, pending=pending, more="[1]\n" * bad)
    export_both(source, formats="openai,llamafactory,kto,raw", filters={"require_passed": True})
    stored = StoredRun(source.run_dir)
    totals = compute_totals(source.run_dir, source.scan, stored.config)
    steps = compute_funnel(source.run_dir, source.scan, totals, {})
    rows, tasks, completed, *more = steps["steps"]
    assert (rows["count"] - sum(rows["lost"].values())) * samples == tasks["count"]
    assert tasks["count"] - sum(tasks["lost"].values()) == completed["count"]
    for reached in more:
        assert completed["count"] - sum(completed["lost"].values()) == reached["count"]
    assert len(steps["exports"]) == 5
    for export in steps["exports"]:
        assert export["tasks"] - sum(export["lost"].values()) == export["used"]
        assert not export["outdated"]
