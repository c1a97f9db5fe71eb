"""Runs that ask by the provider's batches, against both APIs on the loopback interface."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.batch_api.batch_log import jobs_in
from batch_trajectories.engine.supervisor.budget import BudgetLog
from tests.fakes.fake_batches import FakeBatches
from tests.fakes.fake_script import Options
from tests.faults.oracle import check_run, finished_lines
from tests.helpers.running import (
    PATIENCE_S,
    WRITE_A_NOTE,
    lines,
    run,
    started,
    wait_until,
    workers_of,
    write_prompts,
)

TURNS = 3
OPTIONS = Options(turns=TURNS, **WRITE_A_NOTE)
MODELS = {
    "chat": "openai:gpt-5-mini",
    "responses": "responses:gpt-5-mini",
    "messages": "anthropic:claude-sonnet-4-5",
}
BY_BATCH = "--batch_api"


def only_long(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


def asking(api: FakeBatches, dialect: str = "chat", **more: object) -> dict[str, Any]:
    """Options of a run of two workers that asks `api`."""
    return {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "enabled_toolsets": "file",
        "num_workers": 2,
        "model": MODELS[dialect],
        "key_env": "none",
        "max_tokens": 1000,
        "base_url": api.anthropic_url if dialect == "messages" else api.openai_url,
        **more,
    }


def records_of(cwd: Path, name: str = "r") -> list[dict[str, Any]]:
    entries = finished_lines(cwd / "trajectories" / name / "records.jsonl")
    return [json.loads(line) for _, line in sorted(entries.items())]


def summary_of(cwd: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((cwd / "trajectories/r/summary.json").read_text())
    return parsed


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["messages", *map(only_long, ["chat", "responses"])])
def test_a_run_by_batches_makes_the_same_data_for_half_the_price(
    tmp_path: Path, dialect: str
) -> None:
    write_prompts(tmp_path / "p.jsonl", 6)
    with FakeBatches(options=OPTIONS) as api:
        given = asking(api, dialect)
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr
        assert not api.live
        assert api.paid.total() == 6 * TURNS
        assert len(api.batches) == TURNS
        assert run(tmp_path, **given | {"run_name": "live"}).returncode == 0
    assert not check_run(tmp_path / "trajectories" / "r").found
    ours, live = records_of(tmp_path), records_of(tmp_path, "live")
    for one, other in zip(ours, live, strict=True):
        assert one["messages"] == other["messages"]
        assert one["cost_usd"] == pytest.approx(other["cost_usd"] / 2, rel=0.05)
        assert all(turn["batch_item"] for turn in one["turns"])
    sums = summary_of(tmp_path)["batches"]
    assert (sums["batches"], sums["calls"], sums["live"]) == (TURNS, 6 * TURNS, 0)
    cost = sum(record["cost_usd"] for record in ours)
    assert sums["cost_usd"] == pytest.approx(cost)
    # Live requests are longer by `"stream": false`, which this endpoint counts.
    saved = sum(r["cost_usd"] for r in live) - cost
    assert sums["saved_usd"] == pytest.approx(saved, rel=0.05)
    assert "saved" in done.stdout
    left = tmp_path / "trajectories" / "r" / "batches"
    assert not left.exists()


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_calls_that_fail_or_expire_in_a_batch_are_made_live(tmp_path: Path, dialect: str) -> None:
    write_prompts(tmp_path / "p.jsonl", 8)
    with FakeBatches(options=OPTIONS, errored=0.2, expired=0.2) as api:
        done = run(tmp_path, BY_BATCH, **asking(api, dialect))
        assert done.returncode == 0, done.stderr
        assert api.live
        assert api.paid.total() + api.live.total() == 8 * TURNS
        assert not api.paid_twice
    sums = summary_of(tmp_path)["batches"]
    assert (sums["live"], sums["failed"]) == (api.live.total(), api.live.total())


@pytest.mark.slow
def test_the_last_calls_are_made_live(tmp_path: Path) -> None:
    """19 of 20 tasks have ended before; the last one waits for no batch."""
    write_prompts(tmp_path / "p.jsonl", 20)
    with FakeBatches(options=OPTIONS) as api:
        assert run(tmp_path, **asking(api, max_samples=19)).returncode == 0
        assert api.live.total() == 19 * TURNS
        done = run(tmp_path, BY_BATCH, **asking(api))
        assert done.returncode == 0, done.stderr
        assert not api.batches
        assert api.live.total() == 20 * TURNS
    assert "3 calls live" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["chat", only_long("messages")])
def test_a_kill_while_a_batch_is_created(tmp_path: Path, dialect: str) -> None:
    """It is carried out, but its id is lost: the next start finds it."""
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeBatches(options=OPTIONS, answer_s=1000.0) as api:
        given = asking(api, dialect)
        with started(tmp_path, BY_BATCH, **given) as process:
            wait_until(lambda: api.batches)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        api.answer_s = 0.0
        assert noted_steps(tmp_path) == ["gathered", "sending"]
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr
        assert noted_steps(tmp_path)[:4] == ["gathered", "sending", "created", "collected"]
        assert api.paid.total() == 4 * TURNS
        assert not api.live


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stop_while_a_batch_is_waited_for(tmp_path: Path, number: int) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeBatches(options=OPTIONS, delay_s=1000) as api:
        given = asking(api)
        with started(tmp_path, BY_BATCH, **given) as process:
            wait_until(lambda: "created" in noted_steps(tmp_path))
            status = run(tmp_path, "status", "r", "--json")
            os.kill(process.pid, number)
            assert process.wait() == (-9 if number == signal.SIGKILL else 128 + number)
        assert json.loads(status.stdout)["batches"]["waiting"] == 4
        for batch in api.batches.values():
            batch.over_at = 0.0
        api.delay_s = 0.0
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr
        assert len(api.batches) == TURNS
        assert api.paid.total() == 4 * TURNS


@pytest.mark.long
def test_a_run_with_calls_in_batches_cannot_be_merged(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 2)
    with FakeBatches(options=OPTIONS, delay_s=60) as api:
        with started(tmp_path, BY_BATCH, **asking(api, grace_s=1)) as process:
            wait_until(lambda: "created" in noted_steps(tmp_path))
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        refused = run(tmp_path, "merge", "r", "--into=m")
        assert refused.returncode != 0
        assert "2 calls in batches, already paid for" in refused.stderr
        assert run(tmp_path, "merge", "r", "--into=m", "--drop_unfinished").returncode == 0


@pytest.mark.slow
def test_a_start_without_batches_waits_for_those_under_way(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeBatches(options=OPTIONS, delay_s=1000) as api:
        with started(tmp_path, BY_BATCH, **asking(api)) as process:
            wait_until(lambda: "created" in noted_steps(tmp_path))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for batch in api.batches.values():
            batch.over_at = 0.0
        done = run(tmp_path, **asking(api))
        assert done.returncode == 0, done.stderr
        assert (api.paid.total(), api.live.total()) == (4, 4 * (TURNS - 1))
        assert not api.paid_twice
    assert "earlier starts" in done.stderr


@pytest.mark.long
def test_a_worker_dies_while_a_batch_is_waited_for(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeBatches(options=OPTIONS, delay_s=1000) as api:
        with started(tmp_path, BY_BATCH, **asking(api)) as process:
            wait_until(lambda: "created" in noted_steps(tmp_path))
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            api.delay_s = 0.0
            for batch in api.batches.values():
                batch.over_at = 0.0
            assert process.wait() == 0
        assert api.paid.total() == 4 * TURNS
        assert not api.live


@pytest.mark.long
def test_an_endpoint_without_batches_stops_the_run(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 2)
    with FakeBatches(options=OPTIONS, refuse=404) as api:
        done = run(tmp_path, BY_BATCH, **asking(api))
        assert done.returncode == 4, done.stderr
        assert "batches of openai_chat openai:gpt-5-mini" in done.stderr
        api.refuse = 0
        assert run(tmp_path, BY_BATCH, **asking(api)).returncode == 0
        assert api.paid.total() == 2 * TURNS


@pytest.mark.parametrize("model", ["scripted", "openrouter:m"])
def test_models_without_batches_are_refused(tmp_path: Path, model: str) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    done = run(
        tmp_path, BY_BATCH, run_name="r", dataset_file="p.jsonl", model=model, key_env="none"
    )
    assert done.returncode == 2
    assert "batch_api" in done.stderr


@pytest.mark.long
def test_a_budget_holds(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeBatches(options=OPTIONS) as api:
        given = asking(api, max_run_cost_usd=0.0001, batch_wait_s=1)
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 3, done.stderr
        assert not api.paid
        given["max_run_cost_usd"] = 0.004
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr
        assert api.paid.total() == 4 * TURNS


@pytest.mark.slow
@pytest.mark.parametrize("number", [only_long(signal.SIGKILL), signal.SIGTERM])
def test_a_batch_has_one_reserve_over_all_starts(tmp_path: Path, number: int) -> None:
    """Three starts are ended in mid-batch, under a budget that has room for one worst case each."""
    write_prompts(tmp_path / "p.jsonl", 3)
    with FakeBatches(options=OPTIONS, delay_s=1000) as api:
        given = asking(api, max_run_tokens=22_000, num_workers=1)
        for _ in range(3):
            with started(tmp_path, BY_BATCH, **given) as process:
                wait_until(lambda pid=process.pid: running(tmp_path, pid) == 3)
                os.kill(process.pid, number)
                process.wait()
        for batch in api.batches.values():
            batch.over_at = 0.0
        api.delay_s = 0.0
        done = run(tmp_path, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr
        assert api.paid.total() == 3 * TURNS
    sums = summary_of(tmp_path)
    ledger = BudgetLog(tmp_path / "trajectories" / "r", tmp_path)
    assert ledger.balance.tokens >= sums["input_tokens"] + sums["output_tokens"]
    if number == signal.SIGTERM:
        assert ledger.balance.tokens == sums["input_tokens"] + sums["output_tokens"]


@pytest.mark.slow
def test_the_reserve_of_calls_never_sent_is_free_at_the_next_start(
    tmp_path: Path,
) -> None:
    """They are still being gathered, for want of money of one of them, when the run is stopped.

    The next start is stopped too, before anything was assigned.
    """
    write_prompts(tmp_path / "p.jsonl", 3)
    place = tmp_path / "trajectories" / "r"

    def given_back() -> int:
        return (place / "budget.jsonl").read_text().count("returned")

    with FakeBatches(options=OPTIONS) as api:
        given = asking(api, max_run_tokens=12_000, num_workers=1)
        with started(tmp_path, BY_BATCH, **given) as process:
            wait_until(lambda: running(tmp_path, process.pid, "budget") == 3)
            os.kill(process.pid, signal.SIGTERM)
            process.wait()
        before = given_back()
        with started(tmp_path, BY_BATCH, **given) as process:
            wait_until(lambda: given_back() > before)
            os.kill(process.pid, signal.SIGTERM)
            process.wait()
        assert not api.batches
    jobs = jobs_in(place / "batches.jsonl")
    held = [tokens for one in jobs if one.state == "gathered" for _, tokens in one.reserves]
    assert BudgetLog(place, tmp_path).balance.tokens == sum(held)


@pytest.mark.long
def test_the_reserve_of_calls_never_sent_is_made_once(tmp_path: Path) -> None:
    """As above, and the run continues after all."""
    write_prompts(tmp_path / "p.jsonl", 3)
    budget = tmp_path / "trajectories" / "r" / "budget.jsonl"
    with FakeBatches(options=OPTIONS) as api:
        given = asking(api, max_run_tokens=12_000, num_workers=1)
        for _ in range(3):
            with started(tmp_path, BY_BATCH, **given) as process:
                wait_until(lambda pid=process.pid: running(tmp_path, pid, "budget") == 3)
                os.kill(process.pid, signal.SIGTERM)
                process.wait()
        assert not api.batches
        assert BudgetLog(budget.parent, tmp_path).balance.tokens <= 12_000
        done = run(tmp_path, BY_BATCH, **given | {"max_run_tokens": 22_000})
        assert done.returncode == 0, done.stderr
        assert api.paid.total() == 3 * TURNS


def running(cwd: Path, pid: int, limit: str = "calls in") -> int:
    """Conversations that the run of process `pid` says to have assigned, while `limit` holds."""
    try:
        parsed = json.loads((cwd / "trajectories" / "r" / "progress.json").read_text())
    except FileNotFoundError:
        return 0
    is_waiting = parsed["pid"] == pid and limit in parsed["limit"]
    return int(parsed["running"]) if is_waiting else 0


def noted_steps(cwd: Path) -> list[str]:
    """The steps that the run has noted, of all waves."""
    path = cwd / "trajectories" / "r" / "batches.jsonl"
    return [line["kind"] for line in lines(path)] if path.exists() else []


def kill_on_and_on(cwd: Path, dialect: str, kills: int, seed: int, **fake: Any) -> Counter[str]:
    """Kill a run at random points, until it is done or that often; finish it, and judge.

    Returns how often it was killed, by the last step that it had noted.
    """
    draw = random.Random(seed)
    write_prompts(cwd / "p.jsonl", 12)
    killed: Counter[str] = Counter()
    with FakeBatches(options=OPTIONS, create_s=0.1, **fake) as api:
        given = asking(api, dialect, grace_s=1)
        while killed.total() < kills:
            with started(cwd, BY_BATCH, **given) as process:
                # Most of a short run is its start, where nothing is at stake.
                steps, batches = len(noted_steps(cwd)), len(api.batches)
                awaited = draw.choice(["step", "batch", "nothing"])
                late = draw.uniform(0, 0.4)

                def is_due(
                    awaited: str = awaited, steps: int = steps, batches: int = batches
                ) -> bool:
                    if process.poll() is not None or awaited == "nothing":
                        return True
                    if awaited == "step":
                        return len(noted_steps(cwd)) > steps
                    return len(api.batches) > batches

                wait_until(is_due)
                time.sleep(late if awaited != "nothing" else draw.uniform(0.5, 6))
                if process.poll() is not None:
                    break
                number = draw.choice([signal.SIGKILL] * 5 + [signal.SIGTERM])
                workers = workers_of(process.pid)
                if workers and not killed and draw.random() < 0.5:
                    with suppress(ProcessLookupError):  # it was done
                        os.kill(workers[0], signal.SIGKILL)
                    time.sleep(draw.uniform(0, 1))
                os.kill(process.pid, number)
                process.wait()
                killed[(noted_steps(cwd) or ["nothing"])[-1]] += 1
                if noted_steps(cwd):  # what a kill leaves is no damage
                    problems = check_run(cwd / "trajectories" / "r").found
                    assert not [one for one in problems if one.file.name == "batches.jsonl"]
        done = run(cwd, BY_BATCH, **given)
        assert done.returncode == 0, done.stderr + (cwd / "output.txt").read_text()
        assert not api.paid_twice, f"seed {seed}, {killed}"
        if not fake:
            assert not api.live
            assert api.paid.total() == 12 * TURNS
    assert len(records_of(cwd)) == 12
    assert not check_run(cwd / "trajectories" / "r").found
    return killed


@pytest.mark.slow
def test_kills_at_random_points(tmp_path: Path) -> None:
    kill_on_and_on(tmp_path, "chat", 2, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("dialect", MODELS)
def test_many_kills_at_random_points(
    tmp_path: Path, dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that was paid is asked for twice. Prints how often runs were killed."""
    runs = 0
    killed: Counter[str] = Counter()
    while killed.total() < 50:
        cwd = tmp_path / str(runs)
        cwd.mkdir()
        more = {"errored": 0.1, "expired": 0.1} if runs % 2 else {}
        killed += kill_on_and_on(cwd, dialect, min(10, 50 - killed.total()), seed=runs, **more)
        runs += 1
    with capsys.disabled():
        print(f"\n{dialect}: {killed.total()} kills in {runs} runs, by last step {dict(killed)}")
