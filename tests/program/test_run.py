"""Whole runs: real processes, a real endpoint on loopback, real signals."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent.models.errors import RULES
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import judge_run_dir, resume_and_judge
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import (
    PATIENCE_S,
    ROOT,
    SCRIPTED,
    WRITE_A_NOTE,
    command,
    ids,
    kill_repeatedly,
    lines,
    run,
    session_of,
    started,
    summary,
    wait_until,
    workers_of,
    write_prompts,
    write_rows,
)
from toolsets.sandbox.factory import sandbox_problem

OPENAI: dict[str, Any] = {"model": "openai:m", "key_env": "none"}
LIST = {"name": "list_files", "arguments": "{}"}
RUN: dict[str, Any] = {
    "run_name": "r",
    "dataset_file": "p.jsonl",
    "enabled_toolsets": "file",
    "num_workers": 2,
    "heartbeat_timeout_s": 20,
    "grace_s": 20,
}


def options(endpoint: FakeEndpoint, **more: object) -> dict[str, Any]:
    return {**RUN, **OPENAI, "base_url": endpoint.openai_url, **more}


def records_file(cwd: Path) -> Path:
    return cwd / "trajectories" / "r" / "records.jsonl"


def assert_sums_agree(cwd: Path) -> None:
    """prompts x samples = done + failed + discarded + pending, in summary and manifest alike."""
    sums = summary(cwd)
    parts = sums["done"] + sums["failed"] + sums["discarded"] + sums["pending"]
    assert parts == sums["tasks"] == sums["prompts"] * sums["samples"]
    manifest = json.loads((records_file(cwd).parent / "exports" / "manifest.json").read_text())
    kinds = ("exported", "partial", "rejected", "discarded", "failed", "pending")
    assert sum(manifest[kind] for kind in kinds) == manifest["tasks"] == sums["tasks"]


@pytest.mark.parametrize("dialect", ["openai", pytest.param("anthropic", marks=pytest.mark.slow)])
def test_a_run_makes_one_record_and_one_training_row_per_prompt(
    tmp_path: Path, dialect: str
) -> None:
    """Tools, parallel calls and reasoning included; the endpoint checks what is sent back."""
    write_prompts(tmp_path / "p.jsonl", 30)
    with FakeEndpoint(
        turns=4, latency_s=0.0, reasoning_chars=80, calls_per_turn=2, **WRITE_A_NOTE
    ) as endpoint:
        url = endpoint.openai_url if dialect == "openai" else endpoint.anthropic_url
        done = run(tmp_path, **{**RUN, "model": f"{dialect}:m", "key_env": "none", "base_url": url})
        journal = endpoint.journal()
    # A slow machine shows progress.
    said = [line for line in done.stderr.splitlines() if "/30 tasks: " not in line]
    assert (done.returncode, said) == (0, [])
    assert journal["requests"] == 120
    assert sorted(ids(records_file(tmp_path))) == [f"p{n:04}" for n in range(30)]
    rows = lines(tmp_path / "trajectories" / "r.jsonl")
    assert [row["id"] for row in rows] == [f"p{n:04}" for n in range(30)], "dataset order"
    assert all(row["has_reasoning"] and row["num_tool_calls"] == 6 for row in rows)
    assert_sums_agree(tmp_path)
    left = {path.name for path in records_file(tmp_path).parent.iterdir() if any_file(path)}
    assert left == {
        "run.json",
        "records.jsonl",
        "records.idx",
        "dataset.idx",
        "failures.jsonl",
        "summary.json",
        "statistics.json",
        "run.log",
        "lock",
        "exports",
    }


def any_file(path: Path) -> bool:
    return path.is_file() or any(path.iterdir())


def test_running_again_asks_for_nothing(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 5)
    with FakeEndpoint(turns=2, latency_s=0.0, **WRITE_A_NOTE) as endpoint:
        run(tmp_path, **options(endpoint))
        before = (records_file(tmp_path).read_bytes(), endpoint.journal()["requests"])
        again = run(tmp_path, **options(endpoint))
        assert again.returncode == 0
        assert (records_file(tmp_path).read_bytes(), endpoint.journal()["requests"]) == before


def test_more_rows_and_more_samples_run_only_what_is_new(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 3)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        run(tmp_path, **options(endpoint))
        write_prompts(tmp_path / "p.jsonl", 5)
        run(tmp_path, **options(endpoint, num_samples=2))
        assert endpoint.journal()["requests"] == 10
    assert len(set(ids(records_file(tmp_path)))) == 10
    assert_sums_agree(tmp_path)


def test_the_training_file_does_not_depend_on_workers_or_order(tmp_path: Path) -> None:
    files = []
    write_prompts(tmp_path / "p.jsonl", 20)
    with FakeEndpoint(turns=3, latency_s=0.01, **WRITE_A_NOTE) as endpoint:
        for name, workers, batch in (("a", 1, 1), ("b", 3, 7)):
            given = options(endpoint, num_workers=workers, batch_size=batch)
            run(tmp_path, **{**given, "run_name": name})
            files.append((tmp_path / "trajectories" / f"{name}.jsonl").read_bytes())
    assert files[0]
    assert files[0] == files[1]


@pytest.mark.slow
def test_no_more_workers_start_than_there_are_tasks(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    with (
        FakeEndpoint(turns=1, latency_s=0.0, answers=0) as endpoint,
        started(tmp_path, **options(endpoint, num_workers=5)) as process,
    ):
        wait_until(lambda: endpoint.journal()["requests"])
        assert len(workers_of(process.pid)) == 1
        endpoint.answer(None)
        assert process.wait() == 0
    assert_sums_agree(tmp_path)


def crash_loop(cwd: Path, *, prompts: int, kills: int, seed: int) -> dict[str, int]:
    """Kill the whole process group `kills` times at random moments, then let it finish.

    Returns what matters: records, calls asked again after their reply was delivered, and how
    many calls can have been in flight at the kills.
    """
    draw = random.Random(seed)
    write_prompts(cwd / "p.jsonl", prompts)
    with FakeEndpoint(turns=5, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint:
        given = options(endpoint, batch_size=8)
        calls = [draw.randint(1, prompts * 5 // (kills + 2)) for _ in range(kills)]
        kill_repeatedly(cwd, given, endpoint, calls)
        in_flight = kills * 2 * 8
        resume_and_judge(cwd, given, tasks=prompts, endpoint=endpoint, wasted=in_flight)
        repeated = endpoint.journal()["repeated"]
    done = ids(records_file(cwd))
    assert len(lines(cwd / "trajectories" / "r.jsonl")) == prompts
    assert_sums_agree(cwd)
    return {"records": len(done), "repeated": repeated, "in_flight_at_kills": in_flight}


@pytest.mark.slow
def test_killing_the_process_group_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """The short form: 4 kills over 60 prompts of 5 turns."""
    crash_loop(tmp_path, prompts=60, kills=4, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killing_the_process_group_20_times(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 kills over 200 prompts of 5 turns; prints what was repeated."""
    figures = crash_loop(tmp_path, prompts=200, kills=20, seed=seed)
    with capsys.disabled():
        print(f"\n{figures}")


def test_after_a_crash_a_conversation_resumes_at_its_turn(tmp_path: Path) -> None:
    """The records of conversations that were cut say so, and no turn in them is doubled."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=5, latency_s=0.05, answers=10, **WRITE_A_NOTE) as endpoint:
        with started(tmp_path, **options(endpoint, num_workers=1)) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 10)
            os.killpg(process.pid, signal.SIGKILL)
        endpoint.answer(None)
        run(tmp_path, **options(endpoint, num_workers=1))
        assert endpoint.journal()["requests"] <= 4 * 5 + 4
    resumed = [record for record in lines(records_file(tmp_path)) if record["resumes"]]
    assert resumed
    for record in resumed:
        assert [turn["turn"] for turn in record["turns"]] == [1, 2, 3, 4, 5]
        assert record["resumes"][0]["workspace_kept"]
        assert record["status"] == "completed"


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_worker_that_dies_or_hangs_is_replaced(tmp_path: Path, how: signal.Signals) -> None:
    """The run finishes by itself, and every record is there once."""
    write_prompts(tmp_path / "p.jsonl", 20)
    with FakeEndpoint(turns=4, latency_s=0.05, answers=16, **WRITE_A_NOTE) as endpoint:
        # Where a worker hangs, the test waits for as long.
        given = options(endpoint, batch_size=5, heartbeat_timeout_s=60 if how == 9 else 10)
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] == 16)
            os.kill(workers_of(process.pid)[0], how)
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 0, (tmp_path / "output.txt").read_text()
        judge_run_dir(records_file(tmp_path).parent, tasks=20)
        resume_and_judge(tmp_path, given, tasks=20, endpoint=endpoint, wasted=5)
    deaths = lines(records_file(tmp_path).parent / "failures.jsonl")
    assert {line["class"] for line in deaths} == {"worker_died"}
    assert_sums_agree(tmp_path)


@pytest.mark.slow
def test_a_task_that_kills_its_workers_fails_alone(tmp_path: Path) -> None:
    """The culprit becomes a failed record with its reason; all its neighbours complete."""
    (tmp_path / "own.py").write_text(
        "import os, signal\n\n\ndef die() -> None:\n"
        '    """Kill the worker."""\n    os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    kill = {"name": "die", "arguments": {}}
    nap = {"name": "terminal", "arguments": {"command": "sleep 0.2"}}
    rows: list[Any] = [
        {"id": f"good{n}", "prompt": "x", "script": [{"tool_calls": [nap]}, {"content": "ok"}]}
        for n in range(12)
    ]
    rows.insert(3, {"id": "culprit", "prompt": "x", "script": [{"tool_calls": [kill]}] * 9})
    write_rows(tmp_path / "p.jsonl", *rows)
    given = {**RUN, "model": "scripted", "sandbox": "local", "tools": "own.py:die"}
    given["enabled_toolsets"] = "own,terminal"
    done = run(tmp_path, **given, batch_size=4)
    assert done.returncode == 1, done.stderr
    by_id = {record["id"]: record for record in lines(records_file(tmp_path))}
    assert len(by_id) == 13
    assert {id for id, record in by_id.items() if record["status"] == "failed"} == {"culprit"}
    assert by_id["culprit"]["error"]["class"] == "worker_died"
    assert by_id["culprit"]["turns"]
    assert_sums_agree(tmp_path)


@pytest.mark.parametrize("sandbox", ["bwrap", pytest.param("local", marks=pytest.mark.slow)])
def test_commands_obey_signals(tmp_path: Path, sandbox: str) -> None:
    """What the workers leave to their parent must not be ignored in the agents' shells."""
    if problem := sandbox_problem(sandbox):
        pytest.skip(problem)
    look = {"name": "terminal", "arguments": {"command": "grep SigIgn /proc/self/status"}}
    write_rows(
        tmp_path / "p.jsonl", {"prompt": "x", "script": [{"tool_calls": [look]}, {"content": "y"}]}
    )
    given = {**RUN, "model": "scripted", "sandbox": sandbox, "enabled_toolsets": "terminal"}
    assert run(tmp_path, **given).returncode == 0
    (record,) = lines(records_file(tmp_path))
    ignored = json.loads(record["messages"][2]["content"])["stdout"].split()[1]
    # Above the signals of the system lie those that the C library keeps for itself.
    assert int(ignored, 16) & 0x7FFFFFFF == 0


def test_an_interrupt_during_start_up_has_its_exit_code(tmp_path: Path) -> None:
    """Exit code 1 would read as: complete, some tasks failed."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x" * 1000}) + "\n")
    os.mkfifo(tmp_path / "fifo.json")
    given = {**RUN, "model": "openai:m", "key_env": "none", "prefill_messages": "fifo.json"}
    for number in (signal.SIGINT, signal.SIGTERM):
        with started(tmp_path, **given) as process:
            # It now waits for somebody to write the messages.
            wait_until(lambda: "fifo" in stack_of(process.pid))
            process.send_signal(number)
            assert process.wait(timeout=PATIENCE_S) == 128 + number


def stack_of(pid: int) -> str:
    return "fifo" if b"wait_for_partner" in Path(f"/proc/{pid}/wchan").read_bytes() else ""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_one_signal_stops_the_run_after_the_turns_in_flight(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Running turns are finished and journaled: the next start repeats no call at all."""
    write_prompts(tmp_path / "p.jsonl", 24)
    with FakeEndpoint(turns=4, latency_s=0.2, answers=20, **WRITE_A_NOTE) as endpoint:
        with started(tmp_path, **options(endpoint, batch_size=8)) as process:
            wait_until(lambda: endpoint.journal()["in_flight"] == 16)
            os.killpg(process.pid, number)
            wait_until(lambda: "stopping" in (tmp_path / "output.txt").read_text())
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 128 + number
        output = (tmp_path / "output.txt").read_text()
        assert "Traceback" not in output
        assert (
            f"interrupted by {number.name}; finished work is safe: run the same command" in output
        )
        assert_sums_agree(tmp_path)
        assert summary(tmp_path)["pending"] > 0
        resume_and_judge(tmp_path, options(endpoint, batch_size=8), tasks=24, endpoint=endpoint)
        assert endpoint.journal()["requests"] == 96
    assert_sums_agree(tmp_path)


def test_two_signals_stop_the_run_at_once(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 8)
    with (
        FakeEndpoint(turns=2, latency_s=60.0, **WRITE_A_NOTE) as endpoint,
        started(tmp_path, **options(endpoint)) as process,
    ):
        wait_until(lambda: endpoint.journal()["in_flight"] >= 8)
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "stopping" in (tmp_path / "output.txt").read_text())
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        wait_until(lambda: not session_of(process.pid))
    assert "Traceback" not in (tmp_path / "output.txt").read_text()


def test_a_second_runner_is_refused_by_name(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=1, latency_s=60.0) as endpoint:
        with started(tmp_path, **options(endpoint)) as process:
            wait_until(lambda: endpoint.journal()["in_flight"] >= 4)
            second = run(tmp_path, **options(endpoint))
            assert second.returncode == 5
            assert f"pid {process.pid} on host {os.uname().nodename}" in second.stderr
            status = run(tmp_path, "status", "r")
            assert f"running (pid {process.pid}" in status.stdout
        assert endpoint.journal()["requests"] == 4


@pytest.mark.slow
def test_rejected_credentials_stop_the_run(tmp_path: Path) -> None:
    """Exit 4 after the calls in flight; no task counts as failed; the key is in no file."""
    write_prompts(tmp_path / "p.jsonl", 200)
    with FakeEndpoint(turns=1, latency_s=0.05, key="right") as endpoint:
        given = {**options(endpoint, batch_size=4), "key_env": "MY_KEY"}
        wrong = run(tmp_path, **given, env={"MY_KEY": "wrong-canary"})
        assert wrong.returncode == 4
        assert "HTTP 401" in wrong.stderr
        assert f"{endpoint.openai_url}: the endpoint refused the credentials" in wrong.stderr
        assert "the environment variable MY_KEY" in wrong.stderr
        assert endpoint.journal()["requests"] <= 16
        assert summary(tmp_path)["pending"] == 200
        right = run(tmp_path, **given, env={"MY_KEY": "right"})
        assert right.returncode == 0
    for path in (tmp_path / "trajectories").rglob("*"):
        assert not path.is_file() or b"wrong-canary" not in path.read_bytes()


@pytest.mark.slow
def test_the_table_of_failures_can_be_read(tmp_path: Path) -> None:
    done = run(tmp_path, "errors")
    assert done.returncode == 0
    for kind, rule in RULES.items():
        assert f"{kind} - {rule.meaning}" in done.stdout
    assert "code  insufficient_quota" in done.stdout
    assert "word  end_turn" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://model.example/v1", True),
        ("http://10.0.0.7:8000/v1", True),
        ("https://model.example/v1", False),
        ("http://127.0.0.1:8000/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://[::1]:8000/v1", False),
    ],
)
def test_an_endpoint_that_others_can_listen_to_is_warned_of(
    tmp_path: Path, url: str, warned: bool
) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    done = run(tmp_path, "--dry_run", **{**RUN, "model": "m", "base_url": url})
    assert done.returncode == 0
    assert ("is not encrypted" in done.stderr) is warned


@pytest.mark.slow
def test_temporary_faults_are_retried(tmp_path: Path) -> None:
    """One call in eight fails in some way; every conversation still completes."""
    write_prompts(tmp_path / "p.jsonl", 20)
    kinds = ["http500", "http429", "disconnect", "html", "cut", "no_finish", "null", "empty"]
    with FakeEndpoint(
        turns=3, latency_s=0.0, faults=dict.fromkeys(kinds, 0.015), seed=3, **WRITE_A_NOTE
    ) as endpoint:
        done = run(tmp_path, **options(endpoint))
        assert sum(endpoint.journal()["faults"].values()) > 0
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["statuses"] == {"completed": 20}


@pytest.mark.slow
def test_failed_attempts_are_reported_retried_and_finally_given_up(
    tmp_path: Path,
) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        assert run(tmp_path, **options(endpoint)).returncode == 0, "the endpoint has answered once"
        write_prompts(tmp_path / "p.jsonl", 4)
        endpoint.change(faults={"http500": 1.0})
        endpoint.reset()
        given = options(endpoint, call_attempts=1, max_attempts=2)
        for start in (1, 2):
            done = run(tmp_path, **given)
            assert done.returncode == 1
            assert summary(tmp_path)["failed"] == 3
            assert summary(tmp_path)["to_retry"] == (3 if start == 1 else 0)
            assert endpoint.journal()["requests"] == 3 * start
        assert run(tmp_path, **given).returncode == 1
        assert endpoint.journal()["requests"] == 6, "what is given up is not asked for again"
        assert_sums_agree(tmp_path)
        endpoint.change(faults={})
        assert run(tmp_path, **options(endpoint, max_attempts=3)).returncode == 0
    assert summary(tmp_path)["done"] == 4
    assert_sums_agree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "path", "message"),
    [
        ("down", "", "the connection failed or was cut: Connect"),
        ("http500", "", "HTTP 500"),
        ("none", "/nowhere", "does not know this model or path (404): HTTP 404"),
        ("http403", "", "does not allow this request (403)"),
    ],
)
def test_an_endpoint_that_never_answered_stops_the_run(
    tmp_path: Path, fault: str, path: str, message: str
) -> None:
    """A wrong URL or a server that is not up must not use up the attempts of all prompts."""
    write_prompts(tmp_path / "p.jsonl", 50)
    endpoint = FakeEndpoint(
        turns=1, latency_s=0.0, faults={fault: 1.0} if fault.startswith("http") else {}
    )
    with endpoint:
        given = options(endpoint, call_attempts=1, base_url=endpoint.openai_url + path)
        if fault != "down":
            done = run(tmp_path, **given)
    if fault == "down":
        done = run(tmp_path, **given)
    assert done.returncode == 4
    assert message in done.stderr
    assert (summary(tmp_path)["pending"], summary(tmp_path)["failed"]) == (50, 0)


@pytest.mark.slow
def test_passing_failures_fail_their_tasks_once_the_endpoint_has_answered(tmp_path: Path) -> None:
    """After the first answer of a run, a failed call says something of its task."""
    write_prompts(tmp_path / "p.jsonl", 10)
    with FakeEndpoint(turns=2, latency_s=0.0, **WRITE_A_NOTE) as endpoint:
        assert run(tmp_path, **options(endpoint)).returncode == 0
        write_prompts(tmp_path / "p.jsonl", 40)
        endpoint.change(faults={"disconnect": 0.2})
        done = run(tmp_path, **options(endpoint, call_attempts=1))
    assert done.returncode == 1
    assert 0 < summary(tmp_path)["failed"] < 30
    assert summary(tmp_path)["pending"] == 0
    assert set(summary(tmp_path)["failures"]) == {"connection"}


@pytest.mark.slow
def test_deaths_over_several_starts_fail_no_task_that_was_not_alone(tmp_path: Path) -> None:
    """An operator who kills a worker in each start convicts at most the one task held alone."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=6, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint:
        given = options(endpoint, num_workers=1)
        for start in (1, 2, 3):
            with started(tmp_path, **given) as process:
                wait_for_calls(endpoint, 4)
                (worker,) = workers_of(process.pid)
                os.kill(worker, signal.SIGKILL)
                if start == 3:
                    endpoint.answer(None)
                    assert process.wait(timeout=PATIENCE_S) in (0, 1)
                else:
                    wait_for_calls(endpoint, 1)
                    os.killpg(process.pid, signal.SIGKILL)
    statuses = [record["status"] for record in lines(records_file(tmp_path))]
    assert len(statuses) == 4
    assert statuses.count("completed") >= 3


def wait_for_calls(endpoint: FakeEndpoint, more: int) -> None:
    """Wait for so many calls; later ones get no reply."""
    enough = endpoint.journal()["requests"] + more
    endpoint.answer(enough)
    wait_until(lambda: endpoint.journal()["requests"] >= enough)


@pytest.mark.slow
def test_tasks_of_a_dead_worker_survive_the_next_crash_too(tmp_path: Path) -> None:
    """They may have gone on in a worker that was started before it: order is not by worker."""
    write_prompts(tmp_path / "p.jsonl", 12)
    with FakeEndpoint(turns=12, latency_s=0.05, answers=36, **WRITE_A_NOTE) as endpoint:

        def count_waiting() -> tuple[int, int]:
            """Requests so far, and those in flight if each conversation that is not over has one.

            A conversation that asks has journaled its earlier replies. Else the second is 0.
            """
            shown = endpoint.journal(full=True)
            over = sum(count["turn"] == 12 and count["answered"] > 0 for count in shown["counts"])
            waiting = shown["in_flight"] if shown["in_flight"] + over == 12 else 0
            return shown["requests"], waiting

        given = options(endpoint, num_workers=3, batch_size=12)
        with started(tmp_path, **given) as process:
            wait_until(lambda: count_waiting() == (48, 12))
            os.kill(max(workers_of(process.pid)), signal.SIGKILL)
            wait_until(lambda: count_waiting()[0] > 48 and count_waiting()[1])
            answered = endpoint.journal()["requests"] + 36
            endpoint.answer(answered)

            def all_wait() -> bool:
                """Whether what is in flight are the requests beyond those that get a reply."""
                requests, waiting = count_waiting()
                return waiting > 0 and waiting == requests - int(answered)

            wait_until(all_wait)
            os.killpg(process.pid, signal.SIGKILL)
        endpoint.answer(None)
        assert run(tmp_path, **given).returncode == 0
        assert endpoint.journal()["repeated"] == 0, "no journaled reply was asked for again"
    for record in lines(records_file(tmp_path)):
        assert [turn["turn"] for turn in record["turns"]] == list(range(1, 13))


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_after_the_turns_in_flight(tmp_path: Path) -> None:
    """SIGHUP goes to the whole group; running turns are finished and journaled all the same."""
    write_prompts(tmp_path / "p.jsonl", 8)
    with FakeEndpoint(turns=3, latency_s=0.1, answers=0, **WRITE_A_NOTE) as endpoint:
        with started(tmp_path, **options(endpoint)) as process:
            wait_until(lambda: endpoint.journal()["in_flight"] >= 8)
            os.killpg(process.pid, signal.SIGHUP)
            wait_until(lambda: "stopping" in (tmp_path / "output.txt").read_text())
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGHUP
        assert "8 in flight" in (tmp_path / "output.txt").read_text()
        assert run(tmp_path, **options(endpoint)).returncode == 0
        assert endpoint.journal()["requests"] == 24


@pytest.mark.slow
def test_damage_that_the_index_does_not_see_is_repaired_by_the_next_start(tmp_path: Path) -> None:
    """A power loss can leave zeros where a record was."""
    write_prompts(tmp_path / "p.jsonl", 3)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        run(tmp_path, **options(endpoint))
        first, second, third = records_file(tmp_path).read_bytes().splitlines(keepends=True)
        records_file(tmp_path).write_bytes(first + b"\0" * (len(second) - 1) + b"\n" + third)
        damaged = run(tmp_path, **options(endpoint))
        assert damaged.returncode == 4
        assert "is unreadable: " in damaged.stderr
        assert "--repair` sets it aside" in damaged.stderr
        assert "Traceback" not in damaged.stderr
        assert run(tmp_path, **options(endpoint)).returncode == 0
        assert endpoint.journal()["requests"] == 4
    assert len(set(ids(records_file(tmp_path)))) == 3
    assert_sums_agree(tmp_path)


def test_records_without_a_run_json_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    given = {**RUN, "model": "scripted"}
    run(tmp_path, **given)
    (records_file(tmp_path).parent / "run.json").unlink()
    refused = run(tmp_path, **given)
    assert refused.returncode == 2
    assert "no run.json" in refused.stderr


@pytest.mark.slow
def test_strange_files_in_the_run_directory_stop_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    given = {**RUN, "model": "scripted"}
    run(tmp_path, **given)
    (records_file(tmp_path).parent / "workspaces" / ".DS_Store").touch()
    (records_file(tmp_path).parent / ".run.json.1.tmp").touch()
    (records_file(tmp_path).parent / ".directory.tmp").mkdir()
    assert run(tmp_path, **given).returncode == 0
    assert not (records_file(tmp_path).parent / ".run.json.1.tmp").exists()


@pytest.mark.slow
def test_a_conversation_that_starts_over_has_an_empty_workspace(tmp_path: Path) -> None:
    """What is left of one whose journal was lost belongs to nobody."""
    look = {"name": "list_files", "arguments": {}}
    write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "x", "script": [{"tool_calls": [look]}, {"content": "y"}]},
    )
    given = {**RUN, "model": "scripted"}
    run(tmp_path, **given)
    (record,) = lines(records_file(tmp_path))
    from batch_trajectories.records.tasks import task_key

    key = task_key(record["id"], record["input_digest"]).hex()
    left = records_file(tmp_path).parent / "workspaces" / key
    for name in ("records.jsonl", "records.idx"):
        (records_file(tmp_path).parent / name).unlink()
    left.mkdir()
    (left / "stale").touch()
    run(tmp_path, **given)
    (record,) = lines(records_file(tmp_path))
    assert record["messages"][2]["content"] == "[no files]"
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_run_with_closed_output_completes(tmp_path: Path, closed: str) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]}, {})
    line = " ".join(command(**{**RUN, "model": "scripted"})) + " " + closed
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path).returncode == 0
    assert len(ids(tmp_path / "trajectories" / "r.jsonl")) == 1


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_process_of_a_run_shows_the_key_to_others(tmp_path: Path, forks: bool) -> None:
    """The helper process of multiprocessing would inherit it, and is readable by this user."""
    write_prompts(tmp_path / "p.jsonl", 1)
    canary = b"canary-in-environment"
    os.environ["MY_KEY"] = canary.decode()
    try:
        with (
            FakeEndpoint(turns=1, latency_s=60.0) as endpoint,
            started(tmp_path, forks=forks, **{**options(endpoint), "key_env": "MY_KEY"}) as process,
        ):
            wait_until(lambda: endpoint.journal()["in_flight"] == 1)
            others = set(session_of(process.pid)) - {process.pid, *workers_of(process.pid)}
            assert bool(others) != forks, "forked workers need no helper process"
            for pid in others:
                assert canary not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        del os.environ["MY_KEY"]


def test_endings_are_sorted_into_their_files(tmp_path: Path) -> None:
    """Early endings are done and in partial.jsonl; invented tools are rejected with the reason."""
    ask = {"name": "list_files", "arguments": {}}
    write_rows(
        tmp_path / "p.jsonl",
        {"id": "good", "prompt": "x", "script": [{"content": "yes"}]},
        {"id": "endless", "prompt": "x", "script": [{"tool_calls": [ask]}] * 5},
        {"id": "cut", "prompt": "x", "script": [{"content": "y", "finish_reason": "length"}]},
        {
            "id": "invented",
            "prompt": "x",
            "script": [{"tool_calls": [{"name": "fly"}]}, {"content": "no"}],
        },
        {"id": "bad", "script": []},
    )
    done = run(tmp_path, **{**RUN, "model": "scripted"}, max_turns=3)
    assert done.returncode == 0, done.stderr
    assert "p.jsonl:5: discarded: no `prompt` field" in done.stderr
    assert ids(tmp_path / "trajectories" / "r.jsonl") == ["good"]
    exports = records_file(tmp_path).parent / "exports"
    assert ids(exports / "partial.jsonl") == ["endless", "cut"]
    (reject,) = lines(exports / "rejects.jsonl")
    assert (reject["id"], reject["reason"]) == ("invented", "unknown_tool")
    assert "  rejected           1  unknown_tool\n" in done.stdout
    sums = summary(tmp_path)
    assert (sums["done"], sums["discarded"]) == (4, 1)
    assert_sums_agree(tmp_path)


def test_a_changed_meaning_is_refused_and_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    given = {**RUN, "model": "scripted"}
    assert run(tmp_path, **given).returncode == 0
    assert run(tmp_path, **given, concurrency=3).returncode == 0, "not part of the meaning"
    refused = run(tmp_path, **given, temperature=0.5)
    assert refused.returncode == 2
    assert "temperature: the run has None, now 0.5" in refused.stderr
    accepted = run(tmp_path, **given, temperature=0.5, accept_config_change="temperature")
    assert accepted.returncode == 0
    assert run(tmp_path, "--fresh", **given).returncode == 0
    aside = [path.name for path in (tmp_path / "trajectories").iterdir() if path.is_dir()]
    assert len(aside) == 2


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_the_next_start_resumes(tmp_path: Path) -> None:
    """Files may grow to 40 KB: one message, exit 4, and after that a clean resume."""
    write_prompts(tmp_path / "p.jsonl", 60)
    with FakeEndpoint(turns=3, latency_s=0.0, **WRITE_A_NOTE) as endpoint:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
        try:
            full = run(tmp_path, **options(endpoint, batch_size=4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert full.returncode == 4, full.stderr
        assert "Traceback" not in full.stderr
        assert "run the same command again" in full.stderr
        given = options(endpoint, batch_size=4)
        resume_and_judge(tmp_path, given, tasks=60, endpoint=endpoint, wasted=16)
    assert_sums_agree(tmp_path)


BAD_INPUT: list[tuple[dict[str, object], str]] = [
    ({"dataset_file": "absent.jsonl"}, "no such dataset file"),
    ({"dataset_file": "empty.jsonl"}, "the file is empty"),
    ({"enabled_toolsets": "file,flight"}, "unknown toolset 'flight'; known: browser, file, "),
    ({"model": "foo:bar"}, "unknown prefix 'foo'. Known: anthropic, "),
    ({"model": "anthropic:m"}, "set the environment variable ANTHROPIC_API_KEY"),
    ({"output_dir": "p.jsonl"}, "p.jsonl/r: cannot use this run directory: p.jsonl is not a dir"),
    ({"output_dir": "p.jsonl/a/b"}, "cannot use this run directory: p.jsonl is not a directory; "),
    ({"output_dir": "/dev/null"}, "cannot use this run directory: /dev/null is not a directory; "),
    ({"run_name": "file"}, "cannot use this run directory: trajectories/file is not a directory; "),
    ({"run_name": "a/b"}, "must be letters, digits"),
    ({"run_name": "../up"}, "must be letters, digits"),
    ({"run_name": ""}, "must be letters, digits"),
    ({"max_turns": 0}, "--max_turns"),
    ({"num_samples": 1_000_000_000}, "--num_samples"),
    ({"num_workers": "many"}, "--num_workers"),
    ({"base_url": "localhost:8000"}, "must start with http"),
    ({"sandbox": "none"}, "--sandbox"),
    ({"config": "absent.yaml"}, "absent.yaml: cannot read this config file"),
    ({"config": "bad.yaml"}, "bad.yaml:1: max_turn: unknown option; did you mean 'max_turns'?"),
    ({"on_bad_row": "fail", "dataset_file": "mixed.jsonl"}, "no model call was made"),
    ({"frobnicate": "1"}, "No such option"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input_gets_a_clear_line_and_exit_code_2(
    tmp_path: Path, change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "file").touch()
    (tmp_path / "mixed.jsonl").write_text((tmp_path / "p.jsonl").read_text() + "{\n")
    (tmp_path / "bad.yaml").write_text("max_turn: 3\n")
    done = run(tmp_path, **{**RUN, "model": "scripted", **change})
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("trajectories/*/records.jsonl"))


def test_a_run_without_its_required_options_names_them(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert "--dataset_file is missing" in done.stderr
    assert "--run_name is missing" in done.stderr


def test_dry_run_says_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    done = run(tmp_path, "--dry-run", **{**RUN, "model": "scripted"}, num_samples=3)
    assert done.returncode == 0
    assert "1 prompt x 3 samples = 3\n" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_dataset_where_the_training_file_goes_is_refused(tmp_path: Path) -> None:
    """The run would put its rows in the place of the prompts."""
    write_rows(tmp_path / "mine.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    before = (tmp_path / "mine.jsonl").read_bytes()
    done = run(
        tmp_path, dataset_file="mine.jsonl", model="scripted", run_name="mine", output_dir="."
    )
    assert done.returncode == 2
    assert "mine.jsonl: the training file of this run would overwrite" in done.stderr
    assert (tmp_path / "mine.jsonl").read_bytes() == before


def test_a_renamed_run_is_not_exported_over_its_dataset(tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    before = (tmp_path / "mine.jsonl").read_bytes()
    place: dict[str, Any] = {"output_dir": "."}
    run(tmp_path, dataset_file="mine.jsonl", model="scripted", run_name="other", **place)
    (tmp_path / "other").rename(tmp_path / "mine")
    done = run(tmp_path, "export", "mine", **place)
    assert "mine.jsonl: the training file of this run would overwrite its dataset" in done.stderr
    assert done.returncode == 2
    assert (tmp_path / "mine.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mine", "mine.jsonl: the training file of this run has this name, but it is a directory"),
        ("é" * 115, "--run_name: is too long: it has 230 bytes in UTF-8"),
    ],
)
def test_a_training_file_that_could_not_be_written_is_refused_before_any_call(
    tmp_path: Path, name: str, reason: str
) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    (tmp_path / "trajectories" / "mine.jsonl").mkdir(parents=True)
    done = run(tmp_path, **{**SCRIPTED, "run_name": name})
    assert done.returncode == 2
    assert reason in done.stderr
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["mine.jsonl"]


@pytest.mark.slow
def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    """Also for the seed's command line, with and without the word run."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    flags = ["--dataset-file=p.jsonl", "--batch-size=20", "--num-workers=1", "--model=scripted"]
    assert run(tmp_path, *flags, "--run-name=r").returncode == 0
    assert run(tmp_path, "run", *flags, "--run_name=r2").returncode == 0


def test_status_of_no_run_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "status", "nothing")
    assert done.returncode == 2
    assert "no such run" in done.stderr


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Heavy libraries are imported where they are used."""
    code = (
        "import sys; sys.argv = ['batch_runner.py', '--help']; import batch_runner\n"
        "try: batch_runner.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'httpx2', 'aiohttp', 'genai_prices', 'asyncio', 'urllib.request'}\n"
        "heavy |= {'openai', 'anthropic'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "LOADED []" in done.stdout


@pytest.mark.slow
def test_commands_that_only_read_a_run_import_nothing_that_runs_tasks(tmp_path: Path) -> None:
    """That would take about 20 MB more."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    flags = ["--dataset_file=p.jsonl", "--model=scripted", "--run_name=r"]
    assert run(tmp_path, *flags).returncode == 0
    for arguments in (["status", "r"], ["export", "r", "--format=hermes"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(ROOT / "batch_runner.py"), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
        assert "batch_trajectories.api.stored_run" in imported
        supervisor = "batch_trajectories.engine.supervisor.supervisor"
        assert not {"aiohttp", "agent.runner", supervisor} & imported, arguments


@pytest.mark.slow
def test_workers_import_nothing_that_the_command_has_not(tmp_path: Path) -> None:
    """What a worker imports itself, each of them imports: here none is imported twice."""
    write_prompts(tmp_path / "p.jsonl", 8)
    with FakeEndpoint(turns=2, **WRITE_A_NOTE) as endpoint:
        python, *arguments = command(**options(endpoint))
        done = subprocess.run(
            [python, "-X", "importtime", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
    imported = Counter(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    ours = {"agent", "batch_trajectories", "toolsets", "aiohttp", "genai_prices", "pydantic"}
    named = {name: times for name, times in imported.items() if name.split(".")[0] in ours}
    assert "batch_trajectories.engine.worker.worker" in named
    assert [name for name, times in named.items() if times > 1] == []
    heavy = {"gzip", "grp", "httpx2", "pwd", "ray", "tarfile", "yaml"}
    assert not heavy & imported.keys()


@pytest.mark.slow
def test_a_reply_with_100_000_calls_holds_up_no_neighbour(tmp_path: Path) -> None:
    """Its worker stays to be heard of, so nothing is paid twice; the reply itself is recorded."""
    listed = [{"id": f"c{n}", "type": "function", "function": LIST} for n in range(100_000)]
    counts: Counter[str] = Counter()

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        prompt = body["messages"][0]["content"]
        counts[prompt] += 1
        calls = listed if prompt == "huge" else listed[:1]
        message: JSON = {"role": "assistant", "content": None, "tool_calls": calls}
        if prompt != "huge" and len(body["messages"]) > 4:
            message = {"role": "assistant", "content": "Done."}
        return 200, chat_reply(message)

    names = ["huge", *(f"p{n}" for n in range(8))]
    write_rows(tmp_path / "p.jsonl", *({"id": name, "prompt": name} for name in names))
    given = {**RUN, **OPENAI, "num_workers": 1, "heartbeat_timeout_s": 30}
    with answering(answer) as (url, _):
        done = run(tmp_path, **given, base_url=url)
    assert done.returncode == 0, done.stderr
    records = {one["id"]: one for one in lines(tmp_path / "trajectories" / "r" / "records.jsonl")}
    assert (
        "does not answer any more" not in (tmp_path / "trajectories" / "r" / "run.log").read_text()
    )
    assert counts == dict.fromkeys(names, 3)
    assert {id: one["status"] for id, one in records.items()} == {
        name: "errors" if name == "huge" else "completed" for name in names
    }
    huge = records["huge"]
    assert [len(one["message"]["tool_calls"]) for one in huge["discarded"]] == [100_000] * 3
    assert [message["role"] for message in huge["messages"]] == ["user"]
