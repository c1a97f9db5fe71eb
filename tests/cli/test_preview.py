"""What a dry run shows of a run and its first prompt, and what a slip must not remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.row_conversation import count_unused_turns
from batch_trajectories.dataset.scan import scan
from tests.helpers.running import SCRIPTED, lines, run, write_rows

ROWS = [{"id": f"p{n}", "prompt": f"Say {n}", "script": [{"content": "y"}]} for n in range(8)]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A directory with a finished run of eight rows."""
    write_rows(tmp_path / "p.jsonl", *ROWS)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    return tmp_path


def training(directory: Path) -> int:
    return len(lines(directory / "trajectories" / "r.jsonl"))


class TestNarrowing:
    @pytest.mark.parametrize("dry", [("--dry_run",), pytest.param((), marks=pytest.mark.slow)])
    def test_max_samples_below_the_finished_tasks_is_refused(
        self, finished: Path, dry: tuple[str, ...]
    ) -> None:
        refused = run(finished, *dry, **SCRIPTED, max_samples=2)
        assert refused.returncode == 2
        assert "--max_samples=2 leaves out 6 of the 8 finished tasks" in refused.stderr
        assert "leave max_samples out" in refused.stderr
        assert "--accept_config_change=max_samples" in refused.stderr
        assert training(finished) == 8
        assert run(finished, **SCRIPTED).returncode == 0

    @pytest.mark.slow
    def test_fewer_samples_than_finished_are_refused(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "p.jsonl", *ROWS)
        assert run(tmp_path, **SCRIPTED, num_samples=3).returncode == 0
        refused = run(tmp_path, **SCRIPTED, num_samples=2)
        assert "--num_samples=2 leaves out 8 of the 24 finished" in refused.stderr
        assert "leave num_samples at 3" in refused.stderr
        assert training(tmp_path) == 24

    @pytest.mark.slow
    def test_a_smaller_dataset_is_accepted_once(self, finished: Path) -> None:
        wanted: dict[str, Any] = {**SCRIPTED, "max_samples": 5}
        accepted = run(finished, **wanted, accept_config_change="max_samples")
        assert accepted.returncode == 0, accepted.stderr
        assert training(finished) == 5
        assert run(finished, **wanted).returncode == 0
        assert run(finished, "export", "r").returncode == 0
        # What is left counts anew.
        less = run(finished, **{**wanted, "max_samples": 4})
        assert "leaves out 1 of the 5 finished tasks of this run, such as 'p4'" in less.stderr
        assert run(finished, **SCRIPTED).returncode == 0
        assert training(finished) == 8

    @pytest.mark.slow
    def test_max_samples_above_the_finished_tasks_is_accepted(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "p.jsonl", *ROWS)
        assert run(tmp_path, **SCRIPTED, max_samples=3).returncode == 0
        assert run(tmp_path, **SCRIPTED, max_samples=5).returncode == 0
        assert training(tmp_path) == 5

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "others",
        [
            ROWS[:7],
            ROWS[2:4],
            [{**row, "id": f"other{n}"} for n, row in enumerate(ROWS)],
            [*ROWS[1:], {**ROWS[0], "id": "new"}],
        ],
        ids=["cut", "part", "replaced", "one replaced"],
    )
    def test_a_dataset_without_finished_rows_is_refused(
        self, finished: Path, others: list[Any]
    ) -> None:
        write_rows(finished / "p.jsonl", *others)
        gone = sorted({str(row["id"]) for row in ROWS} - {row["id"] for row in others})
        for refused in (run(finished, **SCRIPTED), run(finished, "export", "r")):
            assert refused.returncode == 2
            assert f"{len(gone)} of the 8 finished tasks of this run" in refused.stderr
            assert f"such as {gone[0]!r}" in refused.stderr
            assert "--accept_config_change=dataset_file" in refused.stderr
        assert training(finished) == 8

    @pytest.mark.parametrize("command", [("verify", "r", "--repair"), ("merge", "r", "--into=m")])
    def test_no_other_command_leaves_finished_rows_out(
        self, finished: Path, command: tuple[str, ...]
    ) -> None:
        write_rows(finished / "p.jsonl", *ROWS[:7])
        refused = run(finished, *command)
        assert refused.returncode == 2
        assert "1 of the 8 finished tasks of this run" in refused.stderr
        assert training(finished) == 8
        assert not (finished / "trajectories" / "m").exists()

    @pytest.mark.slow
    def test_rows_that_were_left_out_once_may_stay_out(self, finished: Path) -> None:
        accept = {**SCRIPTED, "accept_config_change": "dataset_file"}
        write_rows(finished / "p.jsonl", *ROWS[2:])
        assert run(finished, **accept).returncode == 0
        assert run(finished, **SCRIPTED).returncode == 0
        assert run(finished, "export", "r", "--format=openai").returncode == 0
        assert run(finished, "verify", "r", "--repair").returncode == 0
        assert run(finished, "merge", "r", "--into=m").returncode == 0
        assert training(finished) == 6
        write_rows(finished / "p.jsonl", *ROWS[3:])
        assert "1 of the 6 finished tasks" in run(finished, **SCRIPTED).stderr
        write_rows(finished / "p.jsonl", *ROWS)
        assert run(finished, **SCRIPTED).returncode == 0
        assert training(finished) == 8
        write_rows(finished / "p.jsonl", *ROWS[2:])
        again = run(finished, "export", "r", "--format=openai")
        assert "2 of the 8 finished tasks" in again.stderr, "they were restored, and left again"

    @pytest.mark.parametrize(
        ("before", "after", "hint"),
        [
            ("id", "number", "or has `id` another name now?"),
            ("number", "nr", "or have rows without `id` changed?"),
        ],
    )
    def test_a_column_of_another_name_is_asked_about(
        self, tmp_path: Path, before: str, after: str, hint: str
    ) -> None:
        for name in (before, after):
            rows = [{name if key == "id" else key: row[key] for key in row} for row in ROWS]
            write_rows(tmp_path / "p.jsonl", *rows)
            told = run(tmp_path, **SCRIPTED)
        assert (told.returncode, hint in told.stderr) == (2, True)

    @pytest.mark.slow
    def test_an_unknown_last_dataset_hides_nothing(self, finished: Path) -> None:
        (finished / "trajectories" / "r" / "dataset.idx").unlink()
        write_rows(finished / "p.jsonl", *ROWS[:7])
        assert "1 of the 8 finished tasks" in run(finished, **SCRIPTED).stderr

    @pytest.mark.slow
    def test_edited_added_and_failed_rows_are_no_loss(self, tmp_path: Path) -> None:
        reads = {"name": "read_file", "arguments": {"path": "x"}}
        failing = {"id": "fails", "prompt": "x", "script": [{"tool_calls": [reads]}]}
        write_rows(tmp_path / "p.jsonl", *ROWS, failing)
        given = {**SCRIPTED, "num_samples": 2}
        assert run(tmp_path, **given).returncode == 1
        edited = {**ROWS[0], "prompt": "Say it otherwise"}
        added = {**ROWS[0], "id": "added"}
        write_rows(tmp_path / "p.jsonl", edited, *ROWS[1:], added)
        assert run(tmp_path, **given).returncode == 0
        assert training(tmp_path) == 18

    @pytest.mark.slow
    def test_a_fresh_run_may_have_fewer_rows(self, finished: Path) -> None:
        seen = run(finished, "--dry_run", "--fresh", **SCRIPTED, max_samples=2)
        assert "moves trajectories/r aside" in seen.stdout
        assert run(finished, "--fresh", **SCRIPTED, max_samples=2).returncode == 0
        assert training(finished) == 2


class TestDryRun:
    def test_it_shows_what_of_an_existing_run_is_done_pending_new_and_gone(
        self, tmp_path: Path
    ) -> None:
        reads = {"name": "read_file", "arguments": {"path": "x"}}
        failing = {"id": "bad", "prompt": "x", "script": [{"tool_calls": [reads]}]}
        write_rows(tmp_path / "p.jsonl", *ROWS, failing)
        assert run(tmp_path, **SCRIPTED).returncode == 1
        new = {"id": "new", "prompt": "z", "script": [{"content": "y"}]}
        write_rows(tmp_path / "p.jsonl", *ROWS[3:], failing, new)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        accepted = {**SCRIPTED, "accept_config_change": "dataset_file"}
        seen = run(tmp_path, "--dry_run", **accepted)
        assert seen.returncode == 0, seen.stderr
        assert "on disk    5 tasks done; spent so far: $0.0000" in seen.stdout
        tried = "2 tasks: 1 failed, to be retried, 1 new since the last start"
        assert f"to do      {tried}" in seen.stdout
        assert "removed    3 finished tasks no longer part of the run" in seen.stdout
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    def test_it_shows_what_calls_cost_and_what_may_be_spent(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "p.jsonl", {"prompt": "x"})
        given: dict[str, Any] = {
            "run_name": "r",
            "dataset_file": "p.jsonl",
            "enabled_toolsets": "file",
        }
        key = {"OPENAI_API_KEY": "k"}
        known = run(tmp_path, "--dry_run", **given, model="openai:gpt-4o", env=key).stdout
        assert "known prices: $2.5 in and $10 out per million tokens ($1.25 cache read)" in known
        assert "\nbudget     none (--max_run_cost_usd sets one)\n" in known
        options: dict[str, Any] = {
            "model": "nobody-knows-it",
            "base_url": "http://127.0.0.1:9",
            "max_run_tokens": 20_000,
            "max_tokens": 100,
        }
        unknown = run(tmp_path, "--dry_run", **given, **options).stdout
        assert "price unknown (--prices=" in unknown
        assert "\nbudget     20,000 tokens\n" in unknown

    def test_it_warns_of_answers_that_nothing_is_compared_with(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [{**row, "expected": "y"} for row in ROWS[:3]]
        rows[0]["agent_options"] = {"check_expected": True}
        write_rows(tmp_path / "p.jsonl", *rows)
        warned = run(tmp_path, "--dry_run", **SCRIPTED).stderr
        assert (
            "2 rows with a column `expected`, which is only recorded: without --check_expected no "
            "answer is compared with it"
        ) in warned
        for decision in ("--check_expected", "--no_check_expected"):
            assert "expected" not in run(tmp_path, "--dry_run", decision, **SCRIPTED).stderr
        rows[1]["agent_options"] = {"check_expected": False}
        write_rows(tmp_path / "p.jsonl", *rows)
        warned = run(tmp_path, "--dry_run", **SCRIPTED).stderr
        assert "1 row with a column `expected`, which is only recorded" in warned

    @pytest.mark.slow
    def test_it_refuses_what_the_start_would(self, finished: Path) -> None:
        for option in ("--dry_run", "--on_bad_row=skip"):
            refused = run(finished, option, **SCRIPTED, temperature=0.5)
            assert refused.returncode == 2
            assert "temperature: the run has None, now 0.5" in refused.stderr

    def test_it_refuses_a_place_that_is_no_directory(self, tmp_path: Path) -> None:
        (tmp_path / "p.json").write_text(json.dumps(ROWS))
        write_rows(tmp_path / "p.jsonl", *ROWS)
        for dataset in ("p.json", "p.jsonl"):
            options = {**SCRIPTED, "dataset_file": dataset, "output_dir": "p.jsonl"}
            refused = run(tmp_path, "--dry_run", **options)
            assert refused.returncode == 2
            assert "p.jsonl/r: cannot use this run directory: p.jsonl is not a" in refused.stderr

    def test_it_shows_the_first_prompt_as_the_model_gets_it(self, tmp_path: Path) -> None:
        turns = ("user", "first"), ("assistant", "no"), ("user", "second"), ("user", "third")
        row = {
            "id": "a",
            "messages": [{"role": role, "content": text} for role, text in turns],
            "script": [{"content": "y"}],
        }
        write_rows(tmp_path / "p.jsonl", row, ROWS[0])
        flags = ("--dry_run", "--state_max_turns")
        seen = run(tmp_path, *flags, **SCRIPTED, system_prompt="Be\x1b brief.")
        assert seen.returncode == 0, seen.stderr
        assert "first      a, as sent to the model:\n  system: Be  brief." in seen.stdout
        assert "20" in seen.stdout.partition("system: ")[2].partition("  user: ")[0]
        assert "  user: first\n  tools offered: " in seen.stdout
        assert "read_file" in seen.stdout.partition("tools offered: ")[2]
        assert "1 row with further messages of the user, 2 in all, which are not" in seen.stderr
        assert not (tmp_path / "trajectories").exists()
        react = run(tmp_path, "--dry_run", **SCRIPTED, text_protocol="react")
        assert "Action:" in react.stdout
        assert "tools offered: none" in react.stdout

    @pytest.mark.parametrize(
        ("columns", "unused"),
        [
            ({"prompt": "x", "messages": [{"role": "user", "content": "y"}] * 2}, 0),
            ({"messages": [{"role": "user", "content": "y"}]}, 0),
            ({"messages": [{"role": "user"}, {"role": "assistant"}]}, 0),
            ({"conversations": [{"from": "human"}, {"from": "gpt"}, {"from": "human"}]}, 1),
            ({"messages": json.dumps([{"role": "user"}] * 3)}, 2),
            ({"messages": [{"role": "user"}, 3, None]}, 0),
        ],
    )
    def test_turns_that_are_not_sent_are_counted(self, columns: Any, unused: int) -> None:
        assert count_unused_turns(columns) == unused

    def test_a_start_names_columns_that_are_no_part_of_the_conversation(
        self, tmp_path: Path
    ) -> None:
        """The start warns before any call, and in run.log."""
        user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "y"}
        tool = {"type": "function", "function": {"name": "add"}}
        shared = {"script": [{"content": "y"}], "tools": [tool]}
        rows: list[dict[str, Any]] = [
            {"id": "a", "messages": [user, answer], "model": "other", **shared},
            {"id": "b", "messages": [user, answer, user, answer, user], **shared},
            {
                "id": "c",
                "messages": json.dumps([user, user]),
                **shared,
                "tools": json.dumps([tool]),
            },
            {"id": "d", "prompt": "Hi", **shared, "tools": ["add"]},
        ]
        write_rows(tmp_path / "p.jsonl", *rows)
        unused = (
            "p.jsonl: 2 rows with further messages of the user, 3 in all, which are not sent (the "
            "first: line 2)"
        )
        tools = "p.jsonl: 3 rows with definitions of tools in the column `tools`, which are not"
        model = "p.jsonl: 1 row with a column `model`, which counts only with --models"
        log = tmp_path / "trajectories" / "r" / "run.log"
        for dry in (("--dry_run",), ()):
            done = run(tmp_path, *dry, **SCRIPTED)
            assert done.returncode == 0, done.stderr
            for message in (unused, tools, model):
                assert done.stderr.count(f"warning: {message}") == 1
                assert dry or log.read_text().count(message) == 1
        assert "--tools" in log.read_text()
        dataset = {**SCRIPTED, "dataset_file": "p.json", "run_name": "s"}
        (tmp_path / "p.jsonl").rename(tmp_path / "p.json")
        renamed = run(tmp_path, "--dry_run", "--columns=note=id", **dataset)
        assert "first: row 2)" in renamed.stderr, "the lines are those of a copy"

    def test_a_start_names_chats_that_are_sent_as_text(self, tmp_path: Path) -> None:
        chat = json.dumps([{"role": "user", "content": "Hi"}])
        script = [{"content": "y"}]
        rows = [{"c": text, "script": script} for text in (chat, f" {chat}", "[1]", "[x", chat[1:])]
        write_rows(tmp_path / "p.jsonl", *rows)
        done = run(tmp_path, "--dry_run", "--columns=prompt=c", **SCRIPTED)
        assert "p.jsonl: 2 rows whose `prompt` is the JSON text of chat messages" in done.stderr
        read = run(tmp_path, "--dry_run", "--columns=messages=c", **SCRIPTED)
        assert "JSON text of chat messages, which" not in read.stderr
        assert "  user: Hi\n" in read.stdout

    def test_a_model_of_the_row_is_not_ignored_by_a_run_with_several(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "p.jsonl", {"prompt": "x", "model": "a"})
        one, several = RowRules(), RowRules(models=frozenset({"a", "b"}))
        assert scan(path, max_samples=None, rules=one).asked == {"model": 1}
        assert scan(path, max_samples=None, rules=several).asked == {}
