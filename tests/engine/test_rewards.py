"""Reward functions: their scores are in records, and whatever they do harms nothing else."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_trajectories.engine.worker.reward_functions import RewardFunctions
from batch_trajectories.records.checks import (
    Judgement,
    Rewards,
    judge_record,
    parse_rewards,
    record_rewards,
)
from tests.helpers.exporting import call_record
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, lines, run, started, wait_until, write_rows
from tests.helpers.stored import to_record

GRADERS = """
import os, signal, sys

def length(conversation, workspace, row):
    return len(conversation["messages"][-1]["content"])

def named(conversation, workspace, row):
    files = sorted(path.name for path in workspace.iterdir()) if workspace else []
    turns = [int(bool(m.get("tool_calls"))) for m in conversation["messages"]
             if m["role"] == "assistant"]
    return {"reward": row.get("worth", 0.25), "files": len(files), "calls": turns}

async def later(conversation, workspace, row):
    return [None for turn in conversation["turns"]]

def ask(conversation, workspace, row):
    does = row["does"]
    if does == "raise":
        raise KeyError("no such thing")
    if does == "exit":
        sys.exit("gone")
    if does == "die":
        print("last words", flush=True)
        os._exit(7)
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "hang":
        signal.pause()
    if does == "text":
        return "good"
    if does == "nan":
        return float("nan")
    if does == "short":
        return [1]
    if does == "none":
        return None
    if does == "print":
        print("x" * 100_000)
    return 1
"""


HELD = """
import os
from pathlib import Path

def held(conversation, workspace, row):
    Path(f"called-{os.getpid()}").touch()
    while Path("hold").exists():
        pass
    return 1
"""


def score_record(folder: Path, record: dict[str, Any], *names: str, timeout_s: float = 60) -> Any:
    """The scores of a record by functions of GRADERS."""
    (folder / "graders.py").write_text(GRADERS)

    async def score() -> Any:
        places = [f"{folder}/graders.py:{name}" for name in names]
        functions = RewardFunctions(places, timeout_s=timeout_s)
        try:
            return await functions.scores(record, folder / "workspace")
        finally:
            await functions.close()

    return asyncio.run(score())


class TestAFunction:
    def test_gets_conversation_workspace_and_row(self, tmp_path: Path) -> None:
        record = call_record(row={"worth": 0.5})
        named, length = score_record(tmp_path, record, "named", "length")
        assert named["rewards"] == {"reward": 0.5, "files": 0}
        assert named["turn_rewards"] == {"calls": [1, 0]}
        assert length["rewards"] == {"length": len("Done.")}
        assert (length["error"], len(length["version"])) == (None, 16)
        (tmp_path / "workspace").mkdir()
        (tmp_path / "workspace" / "a").touch()
        assert score_record(tmp_path, record, "named")[0]["rewards"]["files"] == 1

    def test_may_be_a_coroutine_that_rewards_turns(self, tmp_path: Path) -> None:
        (score,) = score_record(tmp_path, call_record(), "later")
        assert (score["rewards"], score["turn_rewards"]) == ({}, {"later": [None, None]})

    @pytest.mark.parametrize(
        ("does", "message"),
        [
            ("raise", "KeyError: 'no such thing' (graders.py:19)"),
            ("exit", "SystemExit: gone (graders.py:21)"),
            ("die", "it ended its process (exit code 7): last words"),
            ("kill", "it ended its process (signal SIGKILL)"),
            ("hang", "it took more than 0.5 s (--reward_timeout_s)"),
            ("text", "what it returned holds 'good', which is not a number"),
            ("nan", "what it returned holds nan, which is not a finite number"),
            ("short", "what it returned holds 1 reward as 'ask', and the conversation has 2 turns"),
            ("none", "what it returned holds None, which is not a number"),
        ],
    )
    def test_that_fails_leaves_a_score_with_the_reason(
        self, tmp_path: Path, does: str, message: str
    ) -> None:
        timeout_s = 0.5 if does == "hang" else 60
        (score,) = score_record(
            tmp_path, call_record(row={"does": does}), "ask", timeout_s=timeout_s
        )
        assert score["rewards"] is None
        assert score["error"] == message

    def test_may_print_what_it_likes(self, tmp_path: Path) -> None:
        (score,) = score_record(tmp_path, call_record(row={"does": "print"}), "ask")
        assert score["rewards"] == {"ask": 1}

    def test_that_changes_has_another_version(self, tmp_path: Path) -> None:
        (before,) = score_record(tmp_path, call_record(), "length")
        (same,) = score_record(tmp_path, call_record(), "length")
        file = tmp_path / "other.py"
        file.write_text(GRADERS + "# changed")

        async def score() -> Any:
            functions = RewardFunctions([f"{file}:length"], timeout_s=60)
            amount = await functions.scores(call_record(), None)
            await functions.close()
            return amount

        (after,) = asyncio.run(score())
        assert before["version"] == same["version"] != after["version"]


CHECK = {"passed": False, "reward": 0.25, "rewards": {"reward": 0.25, "style": 2.0}}
SCORE = {"source": "m:f", "version": "1", "error": None}
FAILED = {**SCORE, "rewards": None, "error": "ValueError"}


class TestRewardsOfARecord:
    def test_are_those_of_the_check_then_those_of_functions(self) -> None:
        later = {**SCORE, "rewards": {"style": 3.0, "f": 1.0}, "turn_rewards": {"f": [0, 1]}}
        record = call_record(check=CHECK, scores=[FAILED, later])
        assert record_rewards(to_record(record)).by_name == {"reward": 0.25, "style": 3.0, "f": 1.0}
        assert record_rewards(to_record(record)).by_turn == {"f": [0, 1]}
        assert judge_record(to_record(record)) == Judgement(False, 0.25)
        assert judge_record(to_record(record), "f") == Judgement(None, 1.0)
        assert judge_record(to_record(record), "other") == Judgement(None, None)

    def test_the_first_is_the_reward_of_a_record_without_one_of_that_name(self) -> None:
        first = {**SCORE, "rewards": {"f": 0.75, "g": 1.0}}
        assert judge_record(to_record(call_record(scores=[first]))) == Judgement(None, 0.75)
        assert judge_record(to_record(call_record(scores=[FAILED]))) == Judgement(None, None)

    def test_none_stands_for_the_first_if_that_failed(self) -> None:
        later = {**SCORE, "source": "m:g", "rewards": {"length": 30.0}}
        record = call_record(scores=[FAILED, later])
        assert judge_record(to_record(record)) == Judgement(None, None)
        assert judge_record(to_record(record), "length").reward == 30.0
        again = call_record(scores=[FAILED, later, {**SCORE, "rewards": {"f": 0.4}}])
        assert judge_record(to_record(again)).reward == 0.4

    def test_a_function_can_replace_the_reward_of_the_check(self) -> None:
        score = {**SCORE, "rewards": {"reward": 0.9}}
        assert judge_record(to_record(call_record(check=CHECK, scores=[score]))) == Judgement(
            False, 0.9
        )


@pytest.mark.parametrize(
    "value", [{}, {"": 1}, {"x" * 101: 1}, {"a": None}, "0.5", 10**400, math.nan]
)
def test_what_is_no_reward_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is an empty|names a reward|not a"):
        parse_rewards(value, name="f", turns=1)


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (False, 0.0), (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5)]
)
def test_truth_and_other_numbers_are_rewards(value: Any, reward: float) -> None:
    rewards = parse_rewards({"f": value, "g": [value, None]}, name="f", turns=2)
    assert rewards == Rewards({"f": reward}, {"g": [reward, None]})
    assert parse_rewards(value, name="f", turns=1) == Rewards({"f": reward}, {})


def test_numbers_and_arrays_of_numpy_are_rewards() -> None:
    values = np.array([0.5, 1.0], dtype=np.float32)
    assert parse_rewards(values, name="f", turns=2) == Rewards({}, {"f": [0.5, 1.0]})
    for number in (values[0], np.float64(0.5), np.array(0.5)):
        assert parse_rewards(number, name="f", turns=1) == Rewards({"f": 0.5}, {})
    assert parse_rewards({"f": np.bool_(True)}, name="f", turns=1) == Rewards({"f": 1.0}, {})


def test_too_many_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 101 rewards; the limit is 100"):
        parse_rewards({str(n): n for n in range(101)}, name="f", turns=1)


class TestARun:
    @pytest.mark.slow
    def test_keeps_the_scores_of_its_functions_and_continues_after_failures(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "graders.py").write_text(GRADERS)
        write = calls(call("write_file", path="a.txt", content="x"))
        does = ("raise", "die", "hang", "fine")
        script = [write, say("done")]
        write_rows(
            tmp_path / "p.jsonl",
            *({"id": name, "prompt": "x", "script": script, "does": name} for name in does),
        )
        done = run(
            tmp_path,
            reward="graders:ask,graders.py:named",
            reward_timeout_s=2,
            **SCRIPTED,
        )
        assert done.returncode == 0, done.stderr
        records = {line["id"]: line for line in lines(tmp_path / "trajectories/r/records.jsonl")}
        failed = {name: records[name]["scores"][0]["error"] for name in does}
        assert failed == {
            "raise": "KeyError: 'no such thing' (graders.py:19)",
            "die": "it ended its process (exit code 7): last words",
            "hang": "it took more than 2 s (--reward_timeout_s)",
            "fine": None,
        }
        for record in records.values():
            assert record["status"] == "completed"
            assert [score["source"] for score in record["scores"]] == [
                "graders:ask",
                "graders.py:named",
            ]
            assert record["scores"][1]["rewards"] == {"reward": 0.25, "files": 1}
        assert "scored 4: passed 0 (0.0%), did not pass 4" in done.stdout
        assert "\n3 scores of reward functions failed; " in done.stdout
        assert "(graders.py:19)" not in done.stderr
        log = (tmp_path / "trajectories/r/run.log").read_text()
        assert (
            "Task raise gets no reward from --reward=graders:ask: KeyError: 'no such thing' "
            "(graders.py:19)" in log
        )
        assert run(tmp_path, "verify", "r").returncode == 0

    @pytest.mark.slow
    def test_that_is_killed_in_a_function_leaves_no_process_and_resumes(
        self, tmp_path: Path
    ) -> None:
        """A killed run takes its reward functions with it, though they have their own session."""
        (tmp_path / "graders.py").write_text(HELD)
        hold = tmp_path / "hold"
        hold.touch()
        rows = [{"id": f"p{n}", "prompt": "x", "script": [say("done")]} for n in range(3)]
        write_rows(tmp_path / "p.jsonl", *rows)
        with started(tmp_path, reward="graders:held", **SCRIPTED) as process:
            wait_until(lambda: list(tmp_path.glob("called-*")))
            process.kill()
            process.wait()
        called = [int(path.name.partition("-")[2]) for path in tmp_path.glob("called-*")]
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in called))
        hold.unlink()
        done = run(tmp_path, reward="graders:held", **SCRIPTED)
        assert done.returncode == 0, done.stderr
        records = lines(tmp_path / "trajectories/r/records.jsonl")
        assert sorted(record["id"] for record in records) == ["p0", "p1", "p2"]
        assert all(record["scores"][0]["rewards"] == {"held": 1} for record in records)

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            ("graders:none", "cannot import 'graders:none': AttributeError"),
            ("nowhere:f", "cannot import 'nowhere:f': ModuleNotFoundError"),
            ("graders:os", "'graders:os' is not callable"),
            ("ends.py:f", "ends.py:f: its import ended the process (exit code 3): bye"),
        ],
    )
    def test_does_not_start_without_its_functions(
        self, tmp_path: Path, place: str, message: str
    ) -> None:
        (tmp_path / "graders.py").write_text(GRADERS)
        (tmp_path / "ends.py").write_text("import os; print('bye', flush=True); os._exit(3)")
        write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("done")]})
        done = run(tmp_path, "--dry_run", reward=place, **SCRIPTED)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (tmp_path / "trajectories" / "r" / "records.jsonl").exists()


def test_recorded_sessions_are_scored_later(tmp_path: Path) -> None:
    """`record` has no place where a function could be called."""
    done = run(tmp_path, "record", upstream="openai", run_name="s", reward="m:f")
    assert done.returncode == 2
    assert "reward: means nothing for `record`: use `score` afterwards" in done.stderr
