"""Checks that judge by reward files or by the tests that they ran."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.dataset.row_workspace import InsideColumns, Outcomes, read_row_setup
from batch_trajectories.dataset.rows_file import load_rows_file
from batch_trajectories.engine.worker.judging import MISSING, outcomes, run_check, wrong_outcomes
from tests.dataset.test_rows_files import ROWS
from tests.helpers.playing import say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

REWARDS = {"reward_file": ["out/reward.json", "reward.txt"]}


def judge(root: Path, check: dict[str, Any], *, turns: int | None = None) -> dict[str, Any]:
    """The result of a check of the files in `root`, in a real sandbox."""
    found = read_row_setup({"check": check}).check
    assert found is not None
    workspace = Workspace(root)

    async def open_as(user: str | None) -> ToolContext:
        return ToolContext(workspace, make_sandbox("local", workspace, Limits()))

    return asyncio.run(run_check(found, open_as, turns))


class TestRewardFiles:
    @pytest.mark.parametrize(
        ("command", "reward", "passed"),
        [
            ("echo 1 > reward.txt", 1.0, True),
            ("echo 0.25 > reward.txt; exit 0", 0.25, False),
            ("echo ' 1.0 ' > reward.txt; exit 3", 1.0, True),
            ("echo '{\"reward\": 1}' > out/reward.json; echo 0 > reward.txt", 1.0, True),
            ("echo '{\"accuracy\": 0.5}' > out/reward.json", 0.5, False),
            ('echo \'{"reward": 0, "speed": 7}\' > out/reward.json', 0.0, False),
            ("echo '{\"reward\": true}' > out/reward.json", 1.0, True),
            ('echo \'{"correct": 1, "style": 0.5}\' > out/reward.json', 1.0, True),
            ("echo true > out/reward.json", 1.0, True),
            ("echo 0.5 > out/reward.json", 0.5, False),
        ],
    )
    def test_the_first_that_was_written_holds_the_reward(
        self, tmp_path: Path, command: str, reward: float, passed: bool
    ) -> None:
        result = judge(tmp_path / "w", {"command": command, **REWARDS})
        assert (result["reward"], result["passed"]) == (reward, passed)
        if "speed" in command:
            assert result["rewards"] == {"reward": 0, "speed": 7}

    @pytest.mark.parametrize(
        ("content", "rewards", "by_turn"),
        [
            ({"reward": 0.5, "format": 1}, {"reward": 0.5, "format": 1}, {}),
            ({"accuracy": 0.5}, {"accuracy": 0.5}, {}),
            ({"reward": 1, "turn_rewards": [0, None]}, {"reward": 1}, {"reward": [0, None]}),
            ({"reward": 1, "format": [0, 1]}, {"reward": 1}, {"format": [0, 1]}),
        ],
    )
    def test_rewards_have_names_and_may_be_per_turn(
        self, tmp_path: Path, content: Any, rewards: dict[str, float], by_turn: dict[str, Any]
    ) -> None:
        command = f"mkdir -p out; echo '{json.dumps(content)}' > out/reward.json"
        result = judge(tmp_path / "w", {"command": command, **REWARDS}, turns=2)
        assert result["rewards"] == rewards
        assert result.get("turn_rewards", {}) == by_turn

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            (
                "echo no such test >&2; exit 4",
                "did not write out/reward.json or reward.txt; exit code 4: no such test",
            ),
            (": > reward.txt", "reward.txt is empty (exit code 0)"),
            ("echo nan > reward.txt", "holds 'nan', which is not a finite number"),
            ("echo inf > reward.txt", "holds 'inf', which is not a finite number"),
            ("echo good > reward.txt", "holds 'good', which is not a finite number"),
            ('echo \'{"reward": "1"}\' > out/reward.json', "holds '1', which is not a number"),
            ("echo '{}' > out/reward.json", "is an empty object"),
            ("echo '[1, 2]' > out/reward.json", "has no number: [1, 2]"),
            ("echo '\"1\"' > out/reward.json", "holds '1', which is not a number"),
            ("echo '{' > out/reward.json", "out/reward.json is not JSON"),
            (
                'echo \'{"reward": 1, "turn_rewards": [1]}\' > out/reward.json',
                "holds 1 reward as 'reward', and the conversation has 2 turns",
            ),
            ("mkdir out/reward.json; echo 1 > reward.txt", "'out/reward.json' is a directory"),
            # Nothing falls through to the next file.
            (": > out/reward.json; echo 1 > reward.txt", "out/reward.json is empty"),
        ],
    )
    def test_a_check_without_a_reward_has_failed_itself(
        self, tmp_path: Path, command: str, message: str
    ) -> None:
        result = judge(tmp_path / "w", {"command": command, **REWARDS}, turns=2)
        assert (result["passed"], result["reward"]) == (None, None)
        assert message in result["error"]

    def test_what_the_model_left_there_does_not_count(self, tmp_path: Path) -> None:
        root = tmp_path / "w"
        (root / "reward.txt" / "deep").mkdir(parents=True)
        (root / "out").symlink_to(tmp_path)
        (root / "log").write_text("PASSED a\n")
        (tmp_path / "reward.json").write_text('{"reward": 1}')
        assert "did not write" in judge(root, {"command": "true", **REWARDS})["error"]
        tests = {"patterns": ["(?P<status>PASSED) (?P<name>.)"], "pass": ["a"], "log": "log"}
        assert not judge(root, {"command": "true", "tests": tests})["passed"]

    def test_a_check_whose_files_have_no_place_has_failed_itself(self, tmp_path: Path) -> None:
        reward_file = f"{300 * 'd'}/reward.json"
        result = judge(tmp_path / "w", {"command": "true", "reward_file": reward_file})
        assert (result["passed"], result["reward"], result["exit_code"]) == (None, None, None)
        assert f"cannot make room for {reward_file}" in result["error"]

    @pytest.mark.parametrize("how", [{}, REWARDS])
    def test_a_check_that_takes_too_long_gives_no_reward(self, tmp_path: Path, how: Any) -> None:
        command = "echo 1 | tee reward.txt; sleep 60"
        result = judge(tmp_path / "w", {"command": command, "timeout_s": 0.3, **how})
        assert (result["passed"], result["reward"], result["exit_code"]) == (None, None, None)
        assert result["error"].startswith("`check`: it timed out after ")
        assert result["stdout"] == "1\n"

    def test_a_check_that_ends_its_sandbox_gives_no_reward(self, tmp_path: Path) -> None:
        result = judge(tmp_path / "w", {"command": "kill -9 $PPID"})
        assert (result["passed"], result["reward"]) == (None, None)
        assert "the sandbox ended" in result["error"]


class TestPrintedRewards:
    @pytest.mark.parametrize(
        ("printed", "found"),
        [
            ({"reward": 0.5}, {"reward": 0.5}),
            ({"reward": 0.5, "why": "ok", "times": [1, 2, 3]}, {"reward": 0.5}),
            ({"reward": 0.5, "style": 2}, {"reward": 0.5, "rewards": {"reward": 0.5, "style": 2}}),
            ({"style": 2}, {"reward": 0.0, "rewards": {"style": 2}}),
            (
                {"reward": 1, "turn_rewards": {"format": [0, None]}},
                {"reward": 1, "rewards": {"reward": 1}, "turn_rewards": {"format": [0, None]}},
            ),
            ({str(n): n for n in range(200)}, {"reward": 0.0}),
            ({"reward": "high"}, {"reward": 0.0}),
            ([1, 2], {"reward": 0.0}),
        ],
    )
    def test_are_the_numbers_of_the_last_line(
        self, tmp_path: Path, printed: Any, found: dict[str, Any]
    ) -> None:
        """Other values are what a program prints besides."""
        result = judge(
            tmp_path / "w", {"command": f"echo x; echo '{json.dumps(printed)}'; false"}, turns=2
        )
        names = ("reward", "rewards", "turn_rewards")
        assert {name: result[name] for name in names if name in result} == found

    def test_a_reward_for_each_turn_needs_the_number_of_turns(self, tmp_path: Path) -> None:
        command = "echo '{\"turn_rewards\": ['$CONVERSATION_TURNS']}'"
        result = judge(tmp_path / "w", {"command": command}, turns=3)
        assert "the last line of its output holds 1 reward as 'reward'," in result["error"]
        result = judge(tmp_path / "w", {"command": command}, turns=1)
        assert result["turn_rewards"] == {"reward": [1]}

    @pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
    def test_a_reward_that_is_not_finite_fails_the_check(self, tmp_path: Path, number: str) -> None:
        result = judge(tmp_path / "w", {"command": f"echo '{{\"reward\": {number}}}'"})
        assert "not a finite number" in result["error"]

    @pytest.mark.parametrize("check", ["", {"command": " "}])
    def test_a_check_without_a_command_is_refused(self, check: Any) -> None:
        with pytest.raises(ValueError, match="command` is empty"):
            read_row_setup({"check": check})

    @pytest.mark.parametrize("wrong", [{"a": 1}, ["1", 1], 5])
    def test_wrong_rewards_of_turns_fail_the_check(self, tmp_path: Path, wrong: Any) -> None:
        command = f"echo '{json.dumps({'reward': 1, 'turn_rewards': wrong})}'"
        result = judge(tmp_path / "w", {"command": command}, turns=2)
        assert "the last line of its output" in result["error"]


def test_a_check_has_its_own_variables_and_scripts(tmp_path: Path) -> None:
    check = {
        "command": "./test.sh",
        "files": {"test.sh": '#!/bin/sh\ntest "$A" = "it\'s"'},
        "env": {"A": "it's"},
    }
    assert judge(tmp_path / "w", check)["passed"]
    assert not judge(tmp_path / "w", {**check, "env": {}})["passed"]


class TestOutcomes:
    PYTEST = (
        "\x1b[1m===== test session starts =====\x1b[0m\r\n"
        "t/test_a.py::test_one \x1b[32mPASSED\x1b[0m  [ 25%]\n"
        "t/test_a.py::test_two FAILED  [ 50%]\n"
        "PASSED t/test_a.py::test_two\n"
        "===== short test summary info =====\n"
        "PASSED t/test_a.py::test_one\n"
        "FAILED t/test_a.py::test_two - RuntimeError: PASSED t/test_a.py::test_one\n"
        "XFAIL t/test_a.py::TestB::test_three - known\n"
        "ERROR t/test_b.py\n"
    )

    def outcomes_of(self, kind: str, **changes: Any) -> Outcomes:
        row = load_rows_file(kind).row({**ROWS[kind], **changes})
        check = read_row_setup({"check": row["check"]}, InsideColumns()).check
        assert check is not None
        assert check.tests is not None
        return check.tests

    def wrong(self, tests: Outcomes, output: str) -> dict[str, str]:
        return wrong_outcomes(tests, outcomes(tests.patterns, output))

    @pytest.mark.parametrize("kind", ["swe-bench", "swe-smith"])
    def test_the_last_line_that_names_a_test_counts(self, kind: str) -> None:
        """What a test prints, or the message of its failure, does not make it pass."""
        passing = {"repo": "psf/requests", "PASS_TO_PASS": ["t/test_a.py::TestB::test_three"]}
        good = self.outcomes_of(kind, FAIL_TO_PASS=["t/test_a.py::test_one"], **passing)
        assert self.wrong(good, self.PYTEST) == {}
        bad = self.outcomes_of(
            kind, FAIL_TO_PASS=["t/test_a.py::test_two", "t/test_a.py::gone"], **passing
        )
        assert self.wrong(bad, self.PYTEST) == {
            "t/test_a.py::test_two": "FAILED",
            "t/test_a.py::gone": MISSING,
        }

    def test_django_names_tests_by_their_class_or_their_docstring(self) -> None:
        output = (
            "test_a (m.C) ... ok\n"
            "Forms are checked. ... skipped 'no database'\n"
            "test_b (m.C) ... Testing against Django installed in '/testbed/django'\nok\n"
            "test_c (m.C) ... FAIL\n"
        )
        tests = self.outcomes_of("swe-bench", PASS_TO_PASS=["test_b (m.C)", "test_c (m.C)"])
        assert self.wrong(tests, output) == {"test_c (m.C)": "FAIL"}

    def test_sympy_prints_one_letter(self) -> None:
        output = "test_a ok\ntest_b F\ntest_c E                         [FAIL]\n"
        tests = self.outcomes_of(
            "swe-bench",
            repo="sympy/sympy",
            FAIL_TO_PASS=["test_a"],
            PASS_TO_PASS=["test_b", "test_c"],
        )
        assert self.wrong(tests, output) == {"test_b": "F", "test_c": "E"}

    def test_r2e_gym_expects_exactly_these_tests(self) -> None:
        output = (
            "PASSED r2e_tests/test_1.py::TestA::test_a\n"
            "FAILED r2e_tests/test_1.py::test_b - AssertionError: x\n"
        )
        expected = {"\x1b[1mTestA.test_a\x1b[0m": "PASSED", "test_b - AssertionError": "FAILED"}
        tests = self.outcomes_of("r2e-gym", expected_output_json=json.dumps(expected))
        assert self.wrong(tests, output) == {}
        assert self.wrong(tests, output + "PASSED r2e_tests/test_1.py::test_c\n") == {
            "test_c": "PASSED"
        }
        assert self.wrong(tests, output.replace("FAILED", "PASSED")) == {"test_b": "PASSED"}
        assert self.wrong(tests, "") == {"TestA.test_a": MISSING, "test_b": MISSING}

    @pytest.mark.parametrize(
        ("parser", "output"),
        [
            ("parse_log_gotest", "    --- PASS: TestA (0.00s)\n--- FAIL: TestB/c (0.10s)\n"),
            ("parse_log_cargo", "test TestA ... ok\ntest TestB/c ... FAILED\n"),
            ("parse_log_jest", "    ✓ TestA (12 ms)\n    ✕ TestB/c\n"),
            ("parse_log_jest_json", "[PASSED] TestA\n[FAILED] TestB/c\n"),
            ("parse_log_pytest_v2", "PASSED TestA\nFAILED TestB/c - x\n"),
        ],
    )
    def test_swe_rebench_names_its_parser(self, parser: str, output: str) -> None:
        config = {"test_cmd": "x", "log_parser": parser}
        good = self.outcomes_of("swe-rebench", install_config=config, FAIL_TO_PASS=["TestA"])
        assert self.wrong(good, output) == {}
        bad = self.outcomes_of("swe-rebench", install_config=config, FAIL_TO_PASS=["TestB/c"])
        assert list(self.wrong(bad, output)) == ["TestB/c"]

    def test_a_check_reads_the_log_or_what_was_printed(self, tmp_path: Path) -> None:
        tests: dict[str, Any] = {
            "patterns": ["^(?P<status>[A-Z]+) (?P<name>.+)$"],
            "pass": ["a", "b"],
        }
        printed = judge(
            tmp_path / "w", {"command": "echo PASSED a; echo PASSED b; false", "tests": tests}
        )
        assert (printed["passed"], printed["reward"]) == (True, 1.0)
        tests["log"] = "logs/log"
        command = "(echo PASSED a; echo FAILED b) > logs/log; echo PASSED b"
        logged = judge(tmp_path / "w", {"command": command, "tests": tests})
        assert (logged["passed"], logged["reward"]) == (False, 0.0)
        assert logged["tests"] == {
            "expected": 2,
            "found": 2,
            "wrong": 1,
            "first_wrong": {"b": "FAILED"},
            "statuses": {"PASSED": 1, "FAILED": 1},
        }

    def test_long_output_is_read_from_a_log(self, tmp_path: Path) -> None:
        """More than a sandbox keeps of what a command prints."""
        tests = {"patterns": ["^(?P<status>[A-Z]+) (?P<name>.+)$"], "pass": ["a5000"], "log": "log"}
        command = "for n in $(seq 20000); do echo PASSED a$n; done > log"
        assert judge(tmp_path / "w", {"command": command, "tests": tests})["passed"]


def test_a_conversation_whose_check_failed_itself_is_kept_without_a_reward(tmp_path: Path) -> None:
    """It is paid for; it counts as neither passed nor failed."""
    silent = {"command": "echo no result", "reward_file": "reward.txt"}
    checks = {"silent": silent, "slow": {"command": "sleep 60", "timeout_s": 0.3}, "good": "true"}
    rows = [
        {"id": name, "prompt": name, "script": [say("x")], "check": check}
        for name, check in checks.items()
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", "--require_passed", **SCRIPTED)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    records = {record["id"]: record for record in lines(run_dir / "records.jsonl")}
    assert {record["status"] for record in records.values()} == {"completed"}
    assert records["silent"]["check"]["reward"] is None
    assert "did not write reward.txt; exit code 0: no result" in records["silent"]["check"]["error"]
    assert "timed out" in records["slow"]["check"]["error"]
    assert "error" not in records["good"]["check"]
    assert (
        "checked 1: passed 1 (100.0%), did not pass 0; mean reward 1; 2 checks gave no result"
        in (done.stdout)
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["checks"]["checked"], summary["checks"]["check_failed"]) == (1, 2)
    assert [row["id"] for row in lines(tmp_path / "trajectories" / "r.jsonl")] == ["good"]
    rejects = {row["id"]: row["reason"] for row in lines(run_dir / "exports" / "rejects.jsonl")}
    assert rejects == {"silent": "check_failed", "slow": "check_failed"}
    assert lines(run_dir / "failures.jsonl") == []


def test_a_record_says_what_a_check_found(tmp_path: Path) -> None:
    check = {"command": "echo 0.5 > reward.txt", "reward_file": "reward.txt"}
    rows = [{"id": "a", "prompt": "x", "script": [say("x")], "check": check}]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **SCRIPTED)
    assert done.returncode == 0, done.stderr
    [record] = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    assert (record["check"]["reward"], record["check"]["passed"]) == (0.5, False)
