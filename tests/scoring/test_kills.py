"""Many conversations of a model are judged again while the process group is killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone
from tests.faults.test_process import asking
from tests.helpers.running import (
    LONG_S,
    Process,
    lines,
    run,
    run_long,
    started,
    wait_until,
    write_rows,
)

NOTE: dict[str, Any] = {
    "tool": "write_file",
    "arguments": '{"path": "n{turn}", "content": "{conversation}"}',
}


def row_of(number: int) -> dict[str, Any]:
    """A row whose conversation passes or does not: by its check, one in five by its answer.

    All write the file n1, none n9; the answer is never the expected one.
    """
    row: dict[str, Any] = {"id": f"p{number:05}", "prompt": f"Question {number}"}
    if number % 5 == 0:
        row |= {"agent_options": {"check_expected": True, "expected_attempts": 1}}
        return {**row, "expected": "42"}
    file = "n1" if number % 3 == 0 else "n9"
    return {**row, "check": f"test -f {file} && test $CONVERSATION_TURNS = 2"}


def other_row(number: int, answer: str, *, is_flipped: bool) -> dict[str, Any]:
    """The same row with another check, whose verdict is another where `is_flipped`."""
    row = row_of(number)
    if "expected" in row:
        return {**row, "expected": answer.upper() if is_flipped else "43"}
    file = "n1" if (number % 3 == 0) != is_flipped else "n9"
    return {**row, "check": {"command": f"cat {file}", "timeout_s": 60}}


def expected_verdict(number: int) -> bool:
    return number % 5 != 0 and number % 3 == 0


def verdicts(cwd: Path) -> list[dict[str, Any]]:
    path = cwd / "trajectories" / "r" / "scores.jsonl"
    return lines(path) if path.exists() else []


def kill_while_judging(cwd: Path, kills: int, of: int, *args: object) -> None:
    """Kill the group each time another part of the conversations has been judged."""
    checks = cwd / "trajectories" / "r" / "checks"

    def wait(process: Process, enough: int) -> None:
        def is_enough() -> bool:
            found = checks.glob("*/judging/records.jsonl")
            judged = sum(path.read_bytes().count(b"\n") for path in found)
            return process.poll() is not None or judged >= enough

        wait_until(is_enough, timeout_s=LONG_S)

    for number in range(kills):
        with started(cwd, "check", "r", *args, num_workers=2, batch_size=4) as process:
            wait(process, of * (number + 1) // (kills + 2))
            assert process.poll() is None, (cwd / "output.txt").read_text()
            os.killpg(process.pid, signal.SIGKILL)
            assert_gone(process.pid)


def check_to_the_end(cwd: Path, **options: object) -> str:
    """Judge what is left, however long it takes."""
    done = run_long(cwd, "check", "r", num_workers=2, batch_size=4, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("conversations", "kills"),
    [
        pytest.param(40, 3, marks=pytest.mark.slow),
        pytest.param(2000, 10, marks=pytest.mark.long),
    ],
)
def test_each_is_judged_once_without_a_call(
    tmp_path: Path, conversations: int, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = range(conversations)
    write_rows(tmp_path / "p.jsonl", *map(row_of, numbers))
    flips = {number for number in numbers if number % 7 == 3}
    with_check = sum(number % 5 != 0 for number in numbers)
    with FakeEndpoint(turns=2, latency_s=0, **NOTE) as endpoint:
        given = asking(endpoint, keep_workspaces=1)
        done = run_long(tmp_path, "--row_setup", **given)
        assert done.returncode == 0, done.stderr
        calls = endpoint.journal()["requests"]
        assert calls == 2 * conversations

        # The check that they had gives the verdict that they had.
        check_to_the_end(tmp_path)
        first = verdicts(tmp_path)
        assert len(first) == len({line["record"] for line in first}) == conversations
        own = {line["id"]: line["check"]["passed"] for line in first}
        assert own == {f"p{number:05}": expected_verdict(number) for number in numbers}
        records = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
        then = {one["id"]: (one["check"] or {"passed": False})["passed"] for one in records}
        assert own == then

        # Other checks change the verdicts that were planted, and no others.
        answers = {one["id"]: one["messages"][-1]["content"] for one in records}
        new = [
            other_row(number, answers[f"p{number:05}"], is_flipped=number in flips)
            for number in numbers
        ]
        write_rows(tmp_path / "new.jsonl", *new)
        kill_while_judging(tmp_path, kills, with_check, "--dataset_file=new.jsonl")
        assert verdicts(tmp_path) == first
        check_to_the_end(tmp_path, dataset_file="new.jsonl")
        assert endpoint.journal()["requests"] == calls
    second = verdicts(tmp_path)[len(first) :]
    changed = {line["id"] for line in second if line["check"]["passed"] != own[line["id"]]}
    assert changed == {f"p{number:05}" for number in flips}
    assert Counter(line["id"] for line in second) == {f"p{number:05}": 1 for number in numbers}
    assert not (tmp_path / "trajectories" / "r" / "checks").exists()
    for_readers(tmp_path, own, changed)
    with capsys.disabled():
        print(
            f"\n{conversations} conversations, {kills} kills of the group: {len(second)} verdicts, "
            f"each once, {len(changed)} changed as planted, 0 of {calls} calls repeated; "
            f"{len(own)} of {len(own)} as at the time"
        )


def for_readers(cwd: Path, own: dict[str, bool], changed: set[str]) -> None:
    """Totals, training file, exports and comparison have the last verdict."""
    now = {id_: passed != (id_ in changed) for id_, passed in own.items()}
    passed = sum(now.values())
    status = run(cwd, "status", "r", "--json")
    assert f'"passed": {passed}' in status.stdout, status.stdout
    stats = run(cwd, "stats", "r", "--json")
    assert f'"passed": {passed}' in stats.stdout, stats.stdout
    made = run(cwd, "export", "r", "--format=openai", "--require_passed", output="data")
    assert made.returncode == 0, made.stderr
    exported = [line for path in (cwd / "data" / "openai").iterdir() for line in lines(path)]
    assert len(exported) == passed
    training = {
        row["id"]: json.loads(row["metadata"])["reward"]
        for row in lines(cwd / "trajectories" / "r.jsonl")
    }
    assert {id_ for id_, reward in training.items() if reward == 1.0} == {
        id_ for id_, has_passed in now.items() if has_passed
    }
    compared = run(cwd, "compare", "r")
    assert f"{len(changed)} changed" in compared.stdout
    assert run(cwd, "verify", "r", "--read_data").returncode == 0
