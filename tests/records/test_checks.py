"""What a check says of a conversation is shown by all commands, and filtered by."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent.loop.answers import matches
from agent.options import AgentOptions
from batch_runner import main
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.export.statistics.rewards import RewardStatistics
from batch_trajectories.records.checks import Checks, CheckSums, describe, has_passed, judge_record
from batch_trajectories.records.index import MARK, Index, RowMaker, index_fields
from batch_trajectories.report.facts import make_table_row
from batch_trajectories.scoring.by_judge import load_prompt
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import assistant, call
from tests.helpers.exporting import (
    call_record,
    export_to_dataset,
    judged_record,
    make_run,
    rejects,
    rows,
)
from tests.helpers.playing import say
from tests.helpers.running import ROOT, SCRIPTED, lines, run, started, wait_until, write_rows
from tests.helpers.stored import to_record

ROWS: list[dict[str, Any]] = [
    {"id": "good", "check": "true"},
    {"id": "half", "check": "echo '{\"reward\": 0.5}'; false"},
    {"id": "bad", "check": "false"},
    {"id": "plain"},
]
CHECKS = {
    "checked": 3,
    "scored": 0,
    "passed": 1,
    "failed": 2,
    "pass_rate": 33.33,
    "mean_reward": 0.5,
    "check_failed": 0,
}
FAILED = {"passed": None, "reward": None, "error": "it timed out"}
"""The result of a check that failed itself."""
EXPECTED = [{"expected": "4"}]
"""The columns of a row whose answers are compared."""
TOLD = "checked 3: passed 1 (33.3%), did not pass 2; mean reward 0.5"


def write_dataset(cwd: Path) -> None:
    write_rows(cwd / "p.jsonl", *({"prompt": "x", "script": [say("done")], **row} for row in ROWS))


def start(cwd: Path, *args: object, **options: object) -> str:
    """Run the dataset with its checks; gives what was said at the end."""
    given = {**SCRIPTED, "sandbox": "local", **options}
    done = run(cwd, "--row_setup", *args, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of all rows."""
    cwd = tmp_path_factory.mktemp("checks")
    write_dataset(cwd)
    (cwd / "end.txt").write_text(start(cwd))
    return cwd


class TestSums:
    def test_are_of_what_was_checked(self) -> None:
        sums = CheckSums()
        assert (sums.sums(), describe(sums.sums())) == (
            Checks(checked=0, scored=0, passed=0, failed=0, pass_rate=None, mean_reward=None),
            "",
        )
        for verdict, reward in ((True, 1.0), (False, 0.25), (None, 0.25)):
            sums.add(verdict, reward)
        assert sums.sums() == Checks(
            checked=2, scored=1, passed=1, failed=2, pass_rate=33.33, mean_reward=0.5
        )
        assert describe(sums.sums()) == (
            "checked 2, scored 1: passed 1 (33.3%), did not pass 2; mean reward 0.5; a "
            "conversation without a check passes if its reward is 0.5 or more"
        )

    def test_leave_out_checks_that_failed_themselves(self) -> None:
        sums = CheckSums()
        sums.add(None, None, check_failed=True)
        told = "1 check gave no result (`check.error` says why)"
        assert describe(sums.sums()) == told
        sums.add(True, 1.0)
        sums.add(None, None)
        assert sums.sums() == Checks(
            checked=1,
            scored=0,
            passed=1,
            failed=0,
            pass_rate=100.0,
            mean_reward=1.0,
            check_failed=1,
        )
        assert describe(sums.sums()).endswith(f"mean reward 1; {told}")

    @pytest.mark.parametrize(
        ("verdict", "reward", "passed"),
        [
            (True, 0.1, True),
            (False, 0.9, False),
            (None, 0.5, True),
            (None, 0.49, False),
            (None, None, None),
        ],
    )
    def test_count_as_the_one_rule_says(
        self, verdict: bool | None, reward: float | None, passed: bool | None
    ) -> None:
        check = {"passed": verdict, "reward": reward}
        record = call_record(check=check, input_digest="d", tool_calls=[], cost_usd=None, attempt=1)
        fields = index_fields(to_record(record))
        index = Index(MARK + RowMaker().rows(fields, 0, 9))
        assert has_passed(verdict, reward) is judge_record(to_record(record)).passed is passed
        assert [index.entry(2).passed, *index.passed([2]), fields.passed] == [passed] * 3
        sums = CheckSums()
        sums.add(verdict, reward)
        counted = sums.sums()
        assert (counted.passed, counted.failed) == (passed is True, passed is False)

    @pytest.mark.parametrize("reward", [0.1, -3.0, 1e300, float("-inf"), 10**400, True, None])
    def test_any_reward_of_a_check_fits_the_index(self, reward: Any) -> None:
        record = call_record(check={"passed": False, "reward": reward}, attempt=1)
        record |= {"input_digest": "d", "tool_calls": [], "cost_usd": None}
        entry = Index(MARK + RowMaker().rows(index_fields(to_record(record)), 0, 9)).entry(2)
        assert entry.passed is False
        assert isinstance(entry.reward, float)

    @pytest.mark.parametrize("count", [None, -5, 0, 2**32, 2**43 + 5, 2**63, 2**200])
    def test_any_count_of_tokens_fits_the_index(self, count: int | None) -> None:
        record = call_record(usage={"input_tokens": count, "output_tokens": 7}, attempt=1)
        record |= {"input_digest": "d", "tool_calls": [], "cost_usd": None}
        entry = Index(MARK + RowMaker().rows(index_fields(to_record(record)), 0, 9)).entry(2)
        assert entry.input_tokens == (count if count in (0, 2**32, 2**43 + 5) else None)
        assert entry.output_tokens == 7


class TestARun:
    def test_says_at_its_end_what_the_checks_said(self, cwd: Path) -> None:
        told = (cwd / "end.txt").read_text().splitlines()
        assert TOLD in told
        assert (
            "2 completed conversations did not pass; --require_passed leaves them out "
            "of the training file"
        ) in told

    def test_keeps_it_in_its_files(self, cwd: Path) -> None:
        run_dir = cwd / "trajectories" / "r"
        summary = read(run_dir / "summary.json")
        assert summary["checks"] == read(run_dir / "statistics.json")["checks"] == CHECKS
        assert (summary["prompts_checked"], summary["prompts_passed"]) == (3, 1)

    @pytest.mark.slow
    def test_is_looked_at_with_it(self, cwd: Path) -> None:
        for command in ("status", "stats"):
            assert TOLD in run(cwd, command, "r").stdout.splitlines()
            assert json.loads(run(cwd, command, "r", "--json").stdout)["checks"] == CHECKS

    @pytest.mark.slow
    def test_is_compared_by_it(self, cwd: Path) -> None:
        other = [{**row, "check": "true"} if row["id"] == "bad" else row for row in ROWS]
        script = {"prompt": "x", "script": [say("done")]}
        write_rows(cwd / "q.jsonl", *({**script, **row} for row in other))
        start(cwd, dataset_file="q.jsonl", run_name="other")
        output = run(cwd, "compare", "r", "other").stdout
        assert re.search(r"^passed +1 of 3 \(33\.3%\) +2 of 3 \(66\.7%\)$", output, re.MULTILINE)
        assert re.search(r"^reward +0\.5 +0\.833333 +\+0\.3333$", output, re.MULTILINE)
        assert "passed only in the second: 1: bad" in output
        parsed = json.loads(run(cwd, "compare", "r", "other", "--json").stdout)
        assert parsed["runs"][0]["checks"] == CHECKS
        assert parsed["paired"]["reward"] == pytest.approx(1 / 3)
        assert parsed["judged_otherwise"] == [{"id": "bad", "from": False, "to": True}]

    @pytest.mark.slow
    def test_that_resumes_counts_earlier_checks(self, cwd: Path, tmp_path: Path) -> None:
        write_dataset(tmp_path)
        start(tmp_path, max_samples=2)
        assert TOLD in start(tmp_path).splitlines()

    @pytest.mark.slow
    def test_reports_them_while_it_runs(self, tmp_path: Path) -> None:
        """Those of earlier starts too."""
        waiting = {"id": "waits", "check": f"until test -e {tmp_path / 'go'}; do sleep 0.01; done"}
        script = {"prompt": "x", "script": [say("done")]}
        rows = [{**script, **row} for row in (*ROWS[:3], waiting)]
        write_rows(tmp_path / "p.jsonl", *rows)
        start(tmp_path, max_samples=2)
        progress = tmp_path / "trajectories" / "r" / "progress.json"

        def has_counted() -> bool:
            state = read(progress) if progress.exists() else {}
            return (state.get("passed"), state.get("checked")) == (1, 3)

        with started(tmp_path, "--row_setup", **{**SCRIPTED, "sandbox": "local"}) as process:
            wait_until(has_counted)
            assert "passed 1 of 3, failed" in run(tmp_path, "status", "r").stdout
            (tmp_path / "go").touch()
            assert process.wait() == 0

    @pytest.mark.slow
    def test_with_samples_says_how_many_prompts_passed(self, tmp_path: Path) -> None:
        """Like pass@k: one sample that passes is enough."""
        write_dataset(tmp_path)
        done = start(tmp_path, num_samples=2)
        assert (
            "checked 6: passed 2 (33.3%), did not pass 4; mean reward 0.5; 1 of 3 prompts " in done
        )
        summary = read(tmp_path / "trajectories" / "r" / "summary.json")
        assert (summary["prompts_checked"], summary["prompts_passed"]) == (3, 1)

    @pytest.mark.slow
    def test_without_checks_says_nothing_of_them(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
        assert "checked" not in start(tmp_path)


class TestScored:
    """Without a check, functions say what a conversation is worth, everywhere alike."""

    REWARD = "def grade(conversation, workspace, row):\n    return row['worth']\n"

    @pytest.fixture
    def scored(self, tmp_path: Path) -> Path:
        (tmp_path / "grade.py").write_text(self.REWARD)
        worth = {"a": 1, "b": 0.5, "c": 0.25, "d": 0}
        write_rows(
            tmp_path / "p.jsonl",
            *(
                {"id": id, "prompt": "x", "worth": w, "script": [say("y")]}
                for id, w in worth.items()
            ),
        )
        done = start(tmp_path, reward="grade.py:grade", num_samples=2)
        assert "scored 8: passed 4 (50.0%), did not pass 4" in done
        assert "without a check passes if its reward is 0.5 or more" in done
        assert "2 of 4 prompts passed at least once" in done
        assert "4 completed conversations did not pass" in done
        return tmp_path

    def test_is_told_alike(self, scored: Path) -> None:
        stats = json.loads(run(scored, "stats", "r", "--json").stdout)
        assert stats["checks"] == read(scored / "trajectories" / "r" / "summary.json")["checks"]
        assert (stats["checks"]["passed"], stats["checks"]["pass_rate"]) == (4, 50.0)
        assert stats["rewards"]["pass_at"]["1"] == 50.0
        output = run(scored, "stats", "r").stdout
        assert re.search(r"^passed +4$", output, re.MULTILINE)
        assert re.search(r"of these +4  not_passed$", output, re.MULTILINE)

    @pytest.mark.slow
    def test_is_forked_and_exported_alike(self, scored: Path) -> None:
        forked = run(scored, "fork", "r", "--not_passed", "--at_turn=1", "--n=1", run_name="b")
        assert re.search(r"^ +4 left out: passed$", forked.stdout + forked.stderr, re.MULTILINE)
        start(scored, "--require_passed", reward="grade.py:grade", num_samples=2)
        rows = lines(scored / "trajectories" / "r.jsonl")
        assert [row["id"].partition("#")[0] for row in rows] == ["a", "a", "b", "b"]


class TestWhatIsRequired:
    """Conversations that did not pass are left out where that is asked for, unchecked ones stay."""

    @pytest.mark.slow
    def test_of_the_training_file_of_a_run(self, tmp_path: Path) -> None:
        write_dataset(tmp_path)
        training = tmp_path / "trajectories" / "r.jsonl"
        start(tmp_path)
        assert len(lines(training)) == 4
        done = start(tmp_path, "--require_passed")
        assert "--require_passed leaves" not in done
        assert [row["id"] for row in lines(training)] == ["good", "plain"]
        exports = tmp_path / "trajectories" / "r" / "exports"
        left_out = {line["id"]: line["reason"] for line in lines(exports / "rejects.jsonl")}
        assert left_out == {"half": "not_passed", "bad": "not_passed"}
        assert json.loads(run(tmp_path, "stats", "r", "--json").stdout)["kept"] == 2
        assert run(tmp_path, "export", "r").returncode == 0
        assert len(lines(training)) == 2, "an export does what the run did last"

    def test_of_a_dataset(self, cwd: Path) -> None:
        done = run(cwd, "export", "r", "--require_passed", format="openai")
        assert done.returncode == 0, done.stderr
        dataset = cwd / "trajectories" / "r" / "exports" / "dataset"
        # What was asked and answered is the same in all rows, so one of them is left.
        assert [row["id"] for row in lines(dataset / "openai" / "train.jsonl")] == ["good"]
        left_out = {line["id"]: line["reason"] for line in lines(dataset / "rejects.jsonl")}
        assert left_out["half"] == left_out["bad"] == "require_passed"
        assert run(cwd, "export", "r", "--check").returncode == 0

    @pytest.mark.slow
    def test_can_be_combined_with_a_recipe(self, cwd: Path) -> None:
        (cwd / "recipe.yaml").write_text("filters: {exact_duplicates: false}\n")
        done = run(cwd, "export", "r", "--require_passed", recipe="recipe.yaml", output="d")
        assert done.returncode == 0, done.stderr
        assert [row["id"] for row in lines(cwd / "d" / "hermes" / "train.jsonl")] == [
            "good",
            "plain",
        ]

    def test_of_rows_to_imitate_and_not_of_pairs(self, tmp_path: Path) -> None:
        source = make_run(
            tmp_path,
            judged_record(1.0, "A"),
            judged_record(0.0, "B"),
            judged_record(None, "C"),
            samples=3,
        )
        required: Any = {"filters": {"require_passed": True}}
        assert [row["id"] for row in rows(source, "openai", **required)] == ["t0", "t0#s2"]
        both = {"formats": "openai,dpo", **required}
        assert rejects(source, **both)["t0#s1"] == "require_passed"
        (pair,) = rows(source, "dpo", **required)
        assert pair["rejected"][-1]["content"] == "B"


@pytest.mark.slow
def test_columns_without_the_option_are_named(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    for flags in (["--dry_run"], []):
        done = run(tmp_path, *flags, **SCRIPTED)
        assert done.returncode == 2, done.stderr
        assert "p.jsonl: its rows set up or judge their workspace: check (3 rows)" in done.stderr
        assert "--row_setup" in done.stderr
        assert "--no_row_setup" in done.stderr
    named = "p.jsonl: columns ignored without --row_setup: check (3 rows); see "
    # The last one reads what the start kept, and the run has begun without them.
    for flags in (["--dry_run", "--no_row_setup"], ["--no_row_setup"], ["--dry_run"]):
        done = run(tmp_path, *flags, **SCRIPTED)
        assert done.returncode == 0, done.stderr
        assert f"warning: {named}" in done.stderr
    assert (
        named not in run(tmp_path, "--dry_run", "--row_setup", **SCRIPTED, sandbox="local").stderr
    )


class TestTheReport:
    @pytest.mark.parametrize(
        ("changes", "passed", "reward", "flag"),
        [
            ({"check": {"passed": True, "reward": 1.0}}, True, 1.0, "passed"),
            ({"check": {"passed": False, "reward": 0.5}}, False, 0.5, "not passed"),
            ({"check": FAILED}, None, None, "check without result"),
            ({"check": None}, None, None, None),
            (
                {
                    "status": "errors",
                    "status_reason": "not the expected answer in 3 attempts",
                    "options": {"check_expected": True},
                    "row": {"prompt": "Go.", "expected": "7"},
                },
                False,
                0.0,
                "not passed",
            ),
        ],
    )
    def test_knows_of_each_row(
        self, changes: Any, passed: bool | None, reward: float | None, flag: str | None
    ) -> None:
        known: dict[str, Any] = {
            "check": None,
            "inner": [],
            "notes": [],
            "discarded": [],
            "resumes": [],
        }
        record = call_record(**(known | {"view_compacted": False, "tool_calls": []} | changes))
        record |= {"cost_usd": None, "finished_at": 1.0, "error": None}
        record.setdefault("status_reason", None)
        row = make_table_row(to_record(record))
        assert (row["passed"], row["reward"]) == (passed, reward)
        assert row["flags"] == [flag] * bool(flag)


class TestACheckThatFailedItself:
    """Its conversation is neither good nor bad, whoever asks."""

    def failed(self, answer: str, **more: Any) -> dict[str, Any]:
        return call_record(answer, check=FAILED, **more)

    def test_is_no_training_data_where_passing_is_asked_for(self, tmp_path: Path) -> None:
        source = make_run(
            tmp_path,
            judged_record(1.0, "A"),
            judged_record(0.0, "B"),
            self.failed("C"),
            self.failed("D"),
            samples=4,
        )
        required: Any = {"filters": {"require_passed": True}}
        assert [row["id"] for row in rows(source, "openai", **required)] == ["t0"]
        assert rejects(source, formats="openai", **required)["t0#s3"] == "check_failed"
        for wanted in ("judged", "failed"):
            left_out = rejects(source, formats="openai", filters={"require_passed": wanted})
            assert left_out["t0#s2"] == left_out["t0#s3"] == "check_failed"
        assert len(rows(source, "openai")) == 4

    def test_makes_no_pair_and_no_label(self, tmp_path: Path) -> None:
        score = {"source": "f", "version": "1", "error": None, "rewards": {"f": 0.0}}
        source = make_run(
            tmp_path,
            judged_record(1.0, "A"),
            self.failed("B"),
            self.failed("C", scores=[score]),
            samples=3,
        )
        assert rows(source, "dpo") == []
        assert [row["label"] for row in rows(source, "kto")] == [True]
        assert rejects(source, formats="kto") == {"t0#s1": "check_failed", "t0#s2": "check_failed"}
        assert [row["label"] for row in rows(source, "kto", reward_name="f")] == [False]

    def test_is_left_out_of_rates(self) -> None:
        statistics = RewardStatistics(2)
        for number, check in enumerate([{"passed": True, "reward": 1.0}, FAILED]):
            statistics.add(to_record(call_record(check=check, prompt_id="p", sample=number)))
        figures = statistics.to_json()
        assert figures["pass_at"] == {"1": 100.0}
        assert figures["by_name"]["reward"]["records"] == 1

    def test_is_not_stood_for_by_other_rewards_or_answers(self) -> None:
        score = {"source": "s", "version": None, "rewards": {"style": 0.7}, "error": None}
        assert judge_record(to_record(self.failed("A", scores=[score]))) == (
            None,
            None,
            "it timed out",
        )
        own = {"source": "s", "version": None, "rewards": {"reward": 0.7}, "error": None}
        assert judge_record(to_record(self.failed("A", scores=[own]))) == (None, 0.7, None)
        compared: Any = {"options": {"check_expected": True}, "row": {"expected": "A"}}
        assert judge_record(to_record(self.failed("A", **compared))).passed is None

    def test_has_its_place_in_the_index(self) -> None:
        record = self.failed("A", attempt=1)
        record |= {"input_digest": "d", "tool_calls": [], "cost_usd": None}
        entry = Index(MARK + RowMaker().rows(index_fields(to_record(record)), 0, 9)).entry(2)
        assert (entry.check_failed, entry.passed, entry.reward) == (True, None, None)


class TestWrongAnswers:
    """`--check_expected` with samples gives pairs and labels."""

    def documented(self) -> list[list[str]]:
        """The commands with which docs/export.md makes preferences."""
        text = (ROOT / "docs" / "export.md").read_text().split("**Preferences.**")[1]
        block = re.split(r"```(?:bash)?\n", text)[1]
        commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
        assert [command[:2] for command in commands] == [["python", "batch_runner.py"]] * 2
        return [command[2:] for command in commands]

    @pytest.mark.slow
    def test_the_documented_way_gives_them(self, tmp_path: Path) -> None:
        """Of two samples of each of three prompts one is right, but for the last prompt."""
        questions = {f"What is {n} + {n}?": str(2 * n) for n in (1, 2, 3)}
        dataset = [{"prompt": question, "expected": right} for question, right in questions.items()]
        write_rows(tmp_path / "prompts.jsonl", *dataset)
        begun: Counter[str] = Counter()

        def answer(path: str, body: JSON) -> tuple[int, JSON]:
            question = body["messages"][0]["content"]
            begun[question] += len(body["messages"]) == 1
            is_right = "3" not in question and begun[question] == 2
            said = questions[question] if is_right else f"No idea{'!' * len(bodies)}"
            choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            return 200, {"model": "m", "choices": [choice]}

        begin, export = self.documented()
        (tmp_path / "my.yaml").write_text("max_turns: 9\n")
        with answering(answer) as (url, bodies):
            given: dict[str, Any] = {
                "base_url": f"{url}/v1",
                "model": "m",
                "key_env": "none",
                "num_samples": 2,
            }
            bounds: dict[str, Any] = {
                "num_workers": 1,
                "concurrency": 1,
                "enabled_toolsets": "none",
            }
            done = run(tmp_path, *begin, **given, **bounds)
        assert done.returncode == 0, done.stderr
        assert "checked 6: passed 2 (33.3%), did not pass 4" in done.stdout
        done = run(tmp_path, *export)
        assert done.returncode == 0, done.stderr
        dataset_dir = tmp_path / "trajectories" / "samples" / "exports" / "dataset"
        pairs = lines(dataset_dir / "dpo" / "train.jsonl")
        assert [pair["chosen"][-1]["content"] for pair in pairs] == ["2", "4"]
        assert all("No idea" in pair["rejected"][-1]["content"] for pair in pairs)
        labels = [row["label"] for row in lines(dataset_dir / "kto" / "train.jsonl")]
        assert sorted(labels) == [False] * 4 + [True] * 2
        assert run(tmp_path, "export", "samples", "--check").returncode == 0

    @pytest.mark.parametrize(
        ("status", "given"),
        [(None, {"t0", "t0#s1"}), (["completed"], {"t0"}), (["any"], {"t0", "t0#s1", "t0#s2"})],
    )
    def test_a_status_that_is_named_holds_for_all_formats(
        self, tmp_path: Path, status: Any, given: set[str]
    ) -> None:
        stopped = wrong("Hm.", status_reason="5 errors", notes=[{"turn": 1, "reason": "expected"}])
        records = (right("Four."), wrong("Five."), stopped)
        source = make_run(tmp_path, *records, samples=3, prompts=EXPECTED)
        filters = {"exact_duplicates": False, **({} if status is None else {"status": status})}
        assert {row["id"] for row in rows(source, "kto", filters=filters)} == given
        imitated = {row["id"] for row in rows(source, "openai", filters=filters)}
        assert imitated == (given if status == ["any"] else {"t0"})

    def test_beside_pairs_formats_to_imitate_have_the_same_rows(self, tmp_path: Path) -> None:
        """What is wrong takes no place of what is right, neither as a sample nor as a likeness."""
        pytest.importorskip("rensa")
        answer = "It is the sum of two and two, which by all that is known to us makes"
        samples = (wrong(f"{answer} five."), right(f"{answer} four."))
        source = make_run(tmp_path, *samples, samples=2, prompts=EXPECTED)
        for filters in ({"near_duplicates": 0.5}, {"first_n": 1}, {"best_n": 1}):
            for formats in ("openai", "openai,dpo"):
                directory, _ = export_to_dataset(source, formats=formats, filters=filters)
                entries = lines(directory / "openai" / "train.jsonl")
                assert [row["id"] for row in entries] == ["t0#s1"]
            assert len(lines(directory / "dpo" / "train.jsonl")) == 1

    def test_an_answer_given_by_a_call_is_exported_as_text(self, tmp_path: Path) -> None:
        """A pair must differ by what was answered, not by how."""
        samples = (by_call(right("4"), "4"), by_call(wrong("5"), "5"))
        source = make_run(tmp_path, *samples, samples=2, prompts=EXPECTED)
        (pair,) = rows(source, "dpo")
        for side, answer in (("chosen", "4"), ("rejected", "5")):
            assert "tool_calls" not in pair[side][-1]
            assert pair[side][-1]["content"] == answer


ONLY_TARGET = {"target": "4", "expected": None}


class TestTarget:
    """The name of `expected` in datasets for inspect_ai."""

    def test_an_answer_is_compared_with_it(self) -> None:
        rules = RowRules(options=AgentOptions(check_expected=True))
        row = {"prompt": "2+2?", **ONLY_TARGET}
        assert rules.read(row).spec.expected == "4"
        assert rules.rollout_columns(row)["target"] == "4"
        with pytest.raises(ValueError, match="`target` must be text or a number"):
            rules.read({**row, "target": ["4", "four"]})

    @pytest.mark.parametrize("column", ["expected", "target"])
    @pytest.mark.parametrize("text", ["", " \n", "12 apples each. ####  ", "\\boxed{ }"])
    def test_a_row_without_an_answer_is_refused(self, column: str, text: str) -> None:
        """No conversation could ever pass."""
        row = {"prompt": "2+2?", column: text}
        with pytest.raises(ValueError, match=f"`{column}`: .* has no answer, which check_expected"):
            RowRules(options=AgentOptions(check_expected=True)).read(row)
        assert RowRules().read(row).spec.expected is None

    @pytest.mark.parametrize(
        ("match", "text", "why"),
        [
            ("number", "blue", "is no number"),
            ("number", "The answer is 12.", "is no number"),
            ("choice", "yes", "names none of the choices A to J"),
            ("choice", "2", "names none of the choices A to J"),
        ],
    )
    def test_a_row_whose_answer_the_rule_cannot_compare_is_refused(
        self, match: Any, text: str, why: str
    ) -> None:
        options = AgentOptions(check_expected=True, expected_match=match)
        with pytest.raises(ValueError, match=f"`expected`: '{text}' {why}"):
            RowRules(options=options).read({"prompt": "Which?", "expected": text})
        assert not matches("I do not know.", text, match)

    def test_an_exact_comparison_takes_any_text_but_blanks(self) -> None:
        options = AgentOptions(check_expected=True, expected_match="exact")
        rules = RowRules(options=options)
        assert rules.read({"prompt": "Underline.", "expected": "####"}).spec.expected == "####"
        with pytest.raises(ValueError, match="`expected`: '  ' has no answer"):
            rules.read({"prompt": "Underline.", "expected": "  "})

    def test_it_changes_nothing_beside_expected(self) -> None:
        rules = RowRules(options=AgentOptions(check_expected=True))
        row = {"prompt": "2+2?", "expected": "4", "target": "5"}
        assert rules.read(row).spec.expected == "4"
        assert "target" not in rules.rollout_columns(row)

    def test_records_are_judged_filtered_and_shown_by_it(self, tmp_path: Path) -> None:
        record = to_record(right("4", row=ONLY_TARGET))
        assert judge_record(record).passed is True
        assert "known to be right:\n<expected>\n4\n" in load_prompt(None).question(record)
        source = make_run(tmp_path, right("4"), right("5"), prompts=[ONLY_TARGET] * 2)
        filters = {"answer": {"match": "exact"}}
        assert rejects(source, formats="openai", filters=filters) == {"t1": "answer"}

    def test_trainers_get_it(self, tmp_path: Path) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        source = make_run(tmp_path, right("4"), prompts=[ONLY_TARGET])
        directory, _ = export_to_dataset(source, formats="prompts")
        (row,) = parquet.read_table(directory / "prompts" / "train.parquet").to_pylist()
        assert row["reward_model"]["ground_truth"] == "4"

    def test_look_says_so(self, tmp_path: Path) -> None:
        dataset = write_rows(tmp_path / "p.jsonl", {"prompt": "2+2?", "target": "4"})
        done = CliRunner().invoke(main, ["look", str(dataset)])
        assert re.search(r"target .*compared with the answer", done.output), done


def right(answer: str, **changes: Any) -> dict[str, Any]:
    """A record whose answer was the expected one."""
    return call_record(answer, options={"check_expected": True}, **changes)


def wrong(answer: str, **changes: Any) -> dict[str, Any]:
    """A record that ended because its answer was not the expected one."""
    given = {"status": "errors", "status_reason": "not the expected answer in 1 attempts"}
    return right(answer, **(given | changes))


def by_call(record: dict[str, Any], answer: str) -> dict[str, Any]:
    """The same record, its answer given by a call of `final_answer`."""
    tool_call = call(json.dumps({"answer": answer}), id="last", name="final_answer")
    told = {"role": "tool", "tool_call_id": "last", "content": "Noted."}
    messages = [*record["messages"][:-1], assistant("", tool_call), told]
    own = {"type": "function", "function": {"name": "final_answer", "parameters": {}}}
    return {**record, "messages": messages, "tools": [*record["tools"], own]}
