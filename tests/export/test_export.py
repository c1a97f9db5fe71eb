"""The files of a run, from its records: what goes where, and the statistics of all of it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.dataset.scan import scan, tasks
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.statistics.counts import Statistics
from batch_trajectories.export.training_files import export_run, route_record
from tests.helpers.builders import (
    OFFERED,
    TEMP,
    assistant,
    call,
    ended_by,
    final,
    record_of,
    result,
    user,
)
from tests.helpers.running import ids, lines, write_rows
from tests.helpers.stored import complete, to_record


def failed_result(content: str = "no", *, id: str = "c1", kind: Any = None) -> dict[str, Any]:
    message = result(content, id=id, is_error=True)
    return message if kind is None else {**message, "details": {"failure": kind}}


def statistics_of(*records: dict[str, Any]) -> dict[str, Any]:
    statistics = Statistics()
    for record in records:
        kept = to_record(record)
        statistics.add(kept, AuthoredWork(kept))
    return statistics.to_json()


def export(folder: Path, *records: dict[str, Any], pending: int = 0, **options: Any) -> Path:
    """Export a run that holds `records`, one per row of its dataset; return its directory."""
    names = [f"t{n}" for n in range(len(records) + pending)]
    write_rows(folder / "p.jsonl", *({"id": name, "prompt": "Go."} for name in names))
    scanned = scan(folder / "p.jsonl", max_samples=None)
    run_dir = folder / "r"
    run_dir.mkdir(exist_ok=True)
    stored = [
        complete(record) | {"id": task.id, "input_digest": task.input_digest}
        for task, record in zip(tasks(scanned), records, strict=False)
    ]
    write_rows(run_dir / "records.jsonl", *stored)
    export_run(run_dir, scanned, num_samples=1, **options)
    return run_dir


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


PLAIN = record_of(user(), assistant("Hi."))
THOUGHT = record_of(user(), assistant("Hi.", reasoning="Hm."))
INLINE = record_of(user(), assistant("<think>Hm.</think>Hi."))
EARLY = record_of(user(), assistant("", call()), result("r"), status="max_turns")
FAILED = record_of(user(), status="failed", error={"class": "ModelError", "message": "gone"})
BROKEN = record_of(
    user(), assistant("", call("{")), failed_result(kind="invalid_arguments"), assistant("Hi.")
)


class TestRequireReasoning:
    def test_sends_completed_rows_without_any_to_the_rejects(self, tmp_path: Path) -> None:
        """Inline reasoning counts, and what ended early is not judged by it."""
        records = (PLAIN, THOUGHT, INLINE, EARLY, FAILED)
        run_dir = export(tmp_path, *records, style=Style(require_reasoning=True))
        assert ids(tmp_path / "r.jsonl") == ["t1", "t2"]
        assert ids(run_dir / "exports" / "partial.jsonl") == ["t3"]
        without, _ = lines(run_dir / "exports" / "rejects.jsonl")
        assert without == {
            "id": "t0",
            "status": "completed",
            "reason": "no_reasoning",
            "detail": "no turn of the model holds reasoning",
        }
        manifest = load(run_dir / "exports" / "manifest.json")
        assert manifest["rejected_by_reason"] == {"failed": 1, "no_reasoning": 1}
        assert ids(run_dir / "records.jsonl") == ["t0", "t1", "t2", "t3", "t4"]

    def test_is_off_by_default_and_takes_back_nothing(self, tmp_path: Path) -> None:
        """The record stays, so an export without the filter holds the row again."""
        export(tmp_path, PLAIN, style=Style(require_reasoning=True))
        assert ids(tmp_path / "r.jsonl") == []
        run_dir = export(tmp_path, PLAIN)
        assert ids(tmp_path / "r.jsonl") == ["t0"]
        assert lines(run_dir / "exports" / "rejects.jsonl") == []

    def test_one_turn_with_reasoning_is_enough(self) -> None:
        """`require_reasoning` is a filter of the export, off by default."""
        record = record_of(
            user(), assistant("", call(), reasoning="Hm."), result("r"), assistant("Hi.")
        )
        assert (
            route_record(to_record(record), style=Style(require_reasoning=True)).file == "training"
        )

    def test_a_row_that_breaks_a_rule_is_rejected_for_that(self) -> None:
        """Rows with invented tools are rejected with the reason, counted."""
        assert (
            route_record(to_record(BROKEN), style=Style(require_reasoning=True)).reason
            == "arguments_not_json"
        )


def test_endings_by_reserved_tools_go_to_their_files(tmp_path: Path) -> None:
    """An answer is for training; giving up is a partial row, and its words are kept."""
    reason = call('{"reason": "no network"}', id="f", name="cannot_complete")
    run_dir = export(
        tmp_path,
        ended_by(assistant("", final("14"))),
        ended_by(assistant("", reason), status="cannot_complete", status_reason="no network"),
        ended_by(assistant("", call("{}", id="f", name="final_answer"))),
    )
    assert ids(tmp_path / "r.jsonl") == ["t0"]
    (partial,) = lines(run_dir / "exports" / "partial.jsonl")
    assert json.loads(partial["metadata"])["status_reason"] == "no network"
    (reject,) = lines(run_dir / "exports" / "rejects.jsonl")
    assert reject["reason"] == "empty_value"


class TestStatisticsFile:
    def test_covers_all_records_whichever_file_they_go_to(self, tmp_path: Path) -> None:
        """At the end there are one training file and `statistics.json`."""
        records = (THOUGHT, EARLY, BROKEN, FAILED)
        run_dir = export(tmp_path, *records, pending=2)
        statistics = load(run_dir / "statistics.json")
        assert statistics.pop("tokens") == {
            "input_tokens": 40,
            "output_tokens": 0,
            "reasoning_tokens": 0,
            "cache_read_tokens": 0,
            "cache_write_tokens": 0,
            "cache_hit_rate": 0.0,
        }
        weather = {"toolset": "weather", "rows": 4, "percent": 100.0}
        assert statistics.pop("toolsets") == [weather]
        assert statistics == {
            "schema_version": 1,
            "tools": [
                {
                    "tool": "temp",
                    "count": 2,
                    "success": 1,
                    "failure": 1,
                    "success_rate": 50.0,
                    "failure_rate": 50.0,
                }
            ],
            "tool_errors": {"invalid_arguments": 1},
            "reasoning": {
                "assistant_turns": 4,
                "with_reasoning": 1,
                "without_reasoning": 3,
                "rows_with_any": 1,
            },
            "rows": {"completed": 2, "failed": 1, "max_turns": 1},
            "checks": {
                "checked": 0,
                "scored": 0,
                "passed": 0,
                "failed": 0,
                "pass_rate": None,
                "mean_reward": None,
                "check_failed": 0,
            },
            "turns_per_row": {"mean": 1.0, "max": 2},
            "duration_s": {"first_started_at": 1.5, "last_ended_at": 1.75, "wall": 0.25},
        }

    def test_changes_no_byte_of_the_other_files(self, tmp_path: Path) -> None:
        """The times of a run are in its statistics and in nothing that is trained on."""

        def exported(name: str, *, started_at: float) -> tuple[list[bytes], dict[str, Any]]:
            (tmp_path / name).mkdir()
            turns = [{**PLAIN["turns"][0], "started_at": started_at}]
            run_dir = export(tmp_path / name, PLAIN | {"turns": turns}, EARLY)
            files = [run_dir.parent / "r.jsonl", *sorted((run_dir / "exports").iterdir())]
            return [file.read_bytes() for file in files], load(run_dir / "statistics.json")

        early, early_statistics = exported("early", started_at=1.0)
        late, late_statistics = exported("late", started_at=99.0)
        assert early == late
        assert len(early) == 4
        assert early_statistics != late_statistics

    def test_is_there_before_the_first_record_too(self, tmp_path: Path) -> None:
        """Nothing is known of nothing, and no rate divides by it."""
        statistics = load(export(tmp_path, pending=1) / "statistics.json")
        assert statistics["tools"] == []
        assert statistics["rows"] == {}
        assert statistics["turns_per_row"] == {"mean": None, "max": None}
        assert set(statistics["duration_s"].values()) == {None}


class TestStatistics:
    def test_tokens_are_summed_with_the_share_of_the_cache(self) -> None:
        usage = {"input_tokens": 100, "cache_read_tokens": 75, "output_tokens": None}
        tokens = statistics_of(PLAIN | {"usage": usage}, PLAIN | {"usage": None})["tokens"]
        assert (tokens["input_tokens"], tokens["cache_hit_rate"]) == (100, 75.0)

    def test_every_tool_that_was_offered_is_listed(self) -> None:
        """An unused tool has rates of 0.0; tools of all records are merged."""
        other = {"function": {"name": "area"}}
        statistics = statistics_of(PLAIN, PLAIN | {"tools": [other]}, PLAIN | {"tools": []})
        unused = {"count": 0, "success": 0, "failure": 0, "success_rate": 0.0, "failure_rate": 0.0}
        assert statistics["tools"] == [{"tool": "area", **unused}, {"tool": "temp", **unused}]

    def test_rates_are_percentages_with_two_decimals_of_the_answered_calls(self) -> None:
        """A call whose turn broke off neither succeeded nor failed."""
        calls = [call(id=f"c{n}") for n in range(4)]
        results = [
            result("Error: it says", id="c0"),
            result("{}", id="c1"),
            failed_result("fine", id="c2"),
        ]
        (stats,) = statistics_of(
            record_of(user(), assistant("", *calls), *results, status="cancelled")
        )["tools"]
        assert (stats["count"], stats["success"], stats["failure"]) == (4, 2, 1)
        assert (stats["success_rate"], stats["failure_rate"]) == (66.67, 33.33)

    @pytest.mark.parametrize(
        ("text", "is_error"),
        [("Error: no such file", False), ('{"success": false}', False), ("all is well", True)],
    )
    def test_success_is_what_the_result_is_marked_as(self, text: str, is_error: bool) -> None:
        """No success is guessed from the text."""
        record = record_of(
            user(), assistant("", call()), result(text, is_error=is_error), assistant("Hi.")
        )
        (stats,) = statistics_of(record)["tools"]
        assert (stats["success"], stats["failure"]) == (int(not is_error), int(is_error))

    def test_errors_are_counted_by_kind(self) -> None:
        """Calls of invented tools count, too, though these are not listed."""
        kinds = ["timeout", "exception", "timeout", None, 7, "unknown_tool"]
        names = ["temp"] * 5 + ["tmep"]
        calls = [call(id=f"c{n}", name=name) for n, name in enumerate(names)]
        results = [failed_result(id=f"c{n}", kind=kind) for n, kind in enumerate(kinds)]
        fine = {**result("r", id="c9"), "details": {"failure": "timeout"}}
        statistics = statistics_of(
            record_of(
                user(),
                assistant("", *calls),
                *results,
                assistant("", call(id="c9")),
                fine,
                assistant("Hi."),
            )
        )
        assert statistics["tool_errors"] == {
            "exception": 1,
            "reported": 2,
            "timeout": 2,
            "unknown_tool": 1,
        }
        (stats,) = statistics["tools"]
        assert (stats["tool"], stats["count"], stats["failure"]) == ("temp", 6, 5)

    def test_reasoning_is_counted_wherever_the_model_put_it(self) -> None:
        """Reasoning counts apart or inline; a blank one or an unclosed tag is none."""
        turns = ["<think>\n\n</think>Hi.", "<think>Hm. Hi.", "See <think>a</think>.", "Hi."]
        blank = record_of(user(), *(assistant(text, reasoning=" \n") for text in turns))
        twice = record_of(user(), *[assistant("Hi.", reasoning="Hm.")] * 2)
        statistics = statistics_of(twice, INLINE, blank)["reasoning"]
        assert statistics == {
            "assistant_turns": 7,
            "with_reasoning": 3,
            "without_reasoning": 4,
            "rows_with_any": 2,
        }

    def test_the_turns_of_the_prompt_are_not_counted(self) -> None:
        """Turns that the prompt brings were not written by this run's model."""
        record = record_of(
            user(),
            assistant("", call(), reasoning="Hm."),
            failed_result(kind="timeout"),
            assistant("A"),
            user(),
            assistant("B"),
        )
        record["turns"] = record["turns"][2:]
        statistics = statistics_of(record, {**record, "turns": [], "status": "failed"})
        assert statistics["tools"][0]["count"] == 0
        assert statistics["tool_errors"] == {}
        assert statistics["reasoning"]["assistant_turns"] == 1
        assert statistics["reasoning"]["rows_with_any"] == 0

    def test_a_final_answer_counts_as_the_call_that_it_was(self) -> None:
        """A row has the final call as text; the statistics count it as a call."""
        statistics = statistics_of(ended_by(assistant("", final("14"))))
        assert {stats["tool"]: stats["count"] for stats in statistics["tools"]} == {
            "cannot_complete": 0,
            "final_answer": 1,
            "temp": 1,
        }

    def test_turns_and_times_span_all_rows(self) -> None:
        """The longest turn may not be the last one to begin."""

        def timed(*times: tuple[float, float]) -> dict[str, Any]:
            record = record_of(user(), *(assistant("Hi.") for _ in times))
            record["turns"] = [{"started_at": at, "duration_s": s} for at, s in times]
            return record

        statistics = statistics_of(timed((20.0, 1.0)), timed((10.0, 15.0), (22.0, 1.0)), FAILED)
        assert statistics["duration_s"] == {
            "first_started_at": 10.0,
            "last_ended_at": 25.0,
            "wall": 15.0,
        }
        assert statistics["turns_per_row"] == {"mean": 1.0, "max": 2}
        thirds = statistics_of(timed((1.0, 1.0)), timed((1.0, 1.0)), timed((1.0, 1.0), (2.0, 1.0)))
        assert thirds["turns_per_row"]["mean"] == 1.33

    def test_a_record_that_no_row_can_be_made_of_is_counted(self) -> None:
        """Stray results, blank content and empty calls are counted without an error."""
        odd = record_of(
            user(),
            result("r"),
            assistant(" "),
            assistant("", call(name="")),
            result("r"),
            result("r", id="c9"),
            status="errors",
        )
        statistics = statistics_of(odd)
        assert statistics["rows"] == {"errors": 1}
        assert statistics["reasoning"]["assistant_turns"] == 2
        assert statistics["tools"][0]["count"] == 0

    def test_memory_does_not_grow_with_the_records(self) -> None:
        """Neither contents nor the names that models invent are kept."""

        def size(count: int) -> int:
            statistics = Statistics()
            for n in range(count):
                invented = call(name=f"tool_{n}", id=f"call_{n}")
                record = record_of(
                    user(f"Question {n}"),
                    assistant("", invented),
                    failed_result(id=f"call_{n}", kind="unknown_tool"),
                    assistant(f"Answer {n}"),
                    tools=[TEMP, *OFFERED],
                )
                kept = to_record(record)
                statistics.add(kept, AuthoredWork(kept))
            return len(pickle.dumps(statistics))

        assert size(1000) - size(10) < 50
