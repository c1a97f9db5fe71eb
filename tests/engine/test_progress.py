"""The progress of a run: what the line says, from which sums, and what others can read of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.engine.messages import Counters
from batch_trajectories.engine.supervisor.progress import PROGRESS_FILE, Progress, describe
from tests.cli.test_looking import on_terminal
from tests.helpers.running import SCRIPTED, run, write_rows


def counters(**more: Any) -> Counters:
    none = Counters(turns=0, input_tokens=0, output_tokens=0, cost_usd=0.0, cost_unknown=False)
    return Counters(**{**none, **more})  # type: ignore[typeddict-item]


def state_of(progress: Progress, *, running: int = 0, limit: str = "") -> dict[str, Any]:
    return progress._state(running, limit, progress._started_at + 10.0, 0.0)


@pytest.fixture
def progress() -> Progress:
    progress = Progress(total=100, tell=lambda message: None)
    progress.count_earlier_tasks(done=0, failed=0, cost_usd=1.0)
    return progress


def test_failures_are_counted_by_class(progress: Progress) -> None:
    for failure in ("timeout", None, "bad_request", "timeout", None):
        progress.count_ended_task(failure=failure)
    progress.count_earlier_tasks(done=1, failed=1)
    message = describe(state_of(progress))
    assert "done 3, failed 4 (timeout 2, bad_request 1, in earlier starts 1)" in message
    assert progress.left == 93


def test_what_was_checked_is_counted(progress: Progress) -> None:
    assert "checked" not in describe(state_of(progress))
    for passed in (True, None, False):
        progress.count_ended_task(failure=None, passed=passed)
    progress.count_earlier_tasks(done=3, failed=0, passed=2, not_passed=1)
    assert "done 6, passed 3 of 5, failed 0, running" in describe(state_of(progress))


def test_a_silent_endpoint_is_seen(progress: Progress) -> None:
    message = describe(state_of(progress, running=2))
    assert message == "done 0, failed 0, running 2, $1.00, no reply yet"
    progress.add(counters(turns=1))
    assert "no reply yet" not in describe(state_of(progress, running=2))


def test_work_without_a_model_says_how_fast_it_is() -> None:
    audit = Progress(total=10, turns=None)
    audit.count_ended_task(failure=None, passed=False)
    line = describe(audit._state(2, "", audit._started_at + 30, 0.0), None)
    assert line == "left 02:00, done 1, failed 0, running 2, 2 per minute"
    audit.close()


def test_rates_are_those_of_the_last_seconds(progress: Progress) -> None:
    progress.add(counters(turns=20, input_tokens=5_000, output_tokens=300))
    assert "2.0 turns/s, tokens/s 500 in 30 out" in describe(state_of(progress))
    later = progress._state(0, "", progress._started_at + 45.0, 0.0)
    assert later["turns_per_s"] == 0


def test_the_forecast_takes_what_is_in_flight_to_be_half_way(progress: Progress) -> None:
    """10 of 100 ended and 20 half-way: 20 tasks' work has been paid."""
    progress._started_at = float(round(progress._started_at))  # so that sums of seconds are exact
    progress.add(counters(turns=1, cost_usd=2.0))
    assert state_of(progress, running=20)["forecast_usd"] is None  # nothing has ended
    for _ in range(10):
        progress.count_ended_task(failure=None)
    state = state_of(progress, running=20)
    assert state["cost_usd"] == 3.0
    assert state["forecast_usd"] == pytest.approx(1.0 + 2.0 / 20 * 100)
    assert state["left_s"] == pytest.approx(10.0 / 20 * 80)
    assert "left 00:40, done 10, failed 0, running 20, $3.00 of ~$11.00, " in describe(state)


def test_the_time_that_is_left_includes_a_pause_of_the_endpoint(progress: Progress) -> None:
    for _ in range(98):
        progress.count_ended_task(failure=None)
    state = progress._state(2, "", progress._started_at + 10.0, 57.0)
    assert "left 00:57, done 98" in describe(state)


def test_at_the_end_the_forecast_is_what_was_spent(progress: Progress) -> None:
    for _ in range(100):
        progress.count_ended_task(failure=None)
    progress.add(counters(cost_usd=5.0))
    state = state_of(progress)
    assert (state["forecast_usd"], state["left_s"]) == (pytest.approx(6.0), None)


def test_an_unknown_cost_is_not_forecast(progress: Progress) -> None:
    progress.count_ended_task(failure=None)
    progress.add(counters(turns=1, cost_usd=0.5, cost_unknown=True))
    message = describe(state_of(progress, running=1, limit="limit 9 (endpoint)"))
    assert "$1.50 + unknown, limit 9 (endpoint), " in message
    assert "~" not in message


def test_the_state_is_a_file_until_the_end(tmp_path: Path) -> None:
    events: list[str] = []
    progress = Progress(total=3, run_dir=tmp_path, tell=events.append)
    progress.say("waiting")
    progress._written_at -= 60  # as if it had been written a minute ago
    progress.show(2, "limit 1")
    state = json.loads((tmp_path / PROGRESS_FILE).read_bytes())
    assert (state["pid"], state["running"], state["limit"]) == (os.getpid(), 2, "limit 1")
    assert state["messages"] == events == ["waiting"]
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_written_stops_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken" / PROGRESS_FILE).mkdir(parents=True)
    for place in ("gone", "taken"):
        progress = Progress(total=3, run_dir=tmp_path / place, tell=lambda message: None)
        progress._written_at -= 60
        progress.show(2, "")
        progress.close()
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [PROGRESS_FILE]


@pytest.mark.slow
def test_a_terminal_gets_one_line_that_fits(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [{"content": "Yes."}]})
    shown = on_terminal(tmp_path, dict(os.environ), **SCRIPTED)
    line = shown.replace("\r\n", "\n").split("1 prompt x 1")[0].rstrip("\n").rpartition("\r")[2]
    assert line.startswith("100%|██████████| 1/1 [")
    assert "done 1, failed 0, running 0, " in line
    plain = run(tmp_path, **SCRIPTED)
    assert plain.returncode == 0
    assert "|" not in plain.stderr
