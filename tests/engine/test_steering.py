"""Steering a run that works: real runs against an endpoint that answers when it is told to."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.engine import control
from batch_trajectories.engine.control import identify_process, refuse_strangers
from batch_trajectories.engine.messages import SetLimits
from batch_trajectories.engine.supervisor.budget import BudgetLog, RunBudget
from batch_trajectories.engine.supervisor.limits import RunLimits
from batch_trajectories.engine.supervisor.steering import Steering
from batch_trajectories.records.files import append_line, read_json
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import lines, run, started, wait_until, write_prompts


class Told:
    """A worker that is sent messages."""

    ready = True

    def __init__(self) -> None:
        self.limits: list[SetLimits] = []

    def send(self, message: SetLimits) -> None:
        self.limits.append(message)


def test_limits_that_change_are_sent() -> None:
    limits = RunLimits({"openai x": EndpointLimits(8, 8, rpm=None, tpm=None)})
    worker: Any = Told()
    limits.share([worker])
    limits.change(60.0, 2)
    limits.share([worker])
    limits.pause(is_paused=True)
    limits.share([worker])
    limits.pause(is_paused=False)
    limits.share([worker])
    assert [one.permits for one in worker.limits] == [8, 2, 0, 2]
    assert [one.rpm for one in worker.limits] == [None, 60.0, 0.0, 60.0]


def test_a_budget_can_only_be_raised(tmp_path: Path) -> None:
    budget = RunBudget(Cost(5.0), spent=Cost(4.0), budget_log=BudgetLog(tmp_path, tmp_path))
    with pytest.raises(ValueError, match=r"can only be raised during the run; it is \$5"):
        budget.raise_to(4.5)
    budget.raise_to(8.0)
    assert budget.budget == Cost(8.0)
    without = RunBudget(None, spent=Cost(), budget_log=BudgetLog(tmp_path, tmp_path))
    with pytest.raises(ValueError, match="no max_run_cost_usd"):
        without.raise_to(9.0)


@pytest.mark.parametrize(
    "asked", [{"max_in_flight": 0.5}, {"concurrency": 0}, {"rpm": -1}, {"rpm": True}, {}]
)
def test_limits_that_would_stop_a_run_are_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Whoever wrote the line: half a call in flight would be none, for ever."""
    limits = RunLimits({"openai x": EndpointLimits(8, 8, rpm=None, tpm=None)})
    budget = RunBudget(None, spent=Cost(), budget_log=BudgetLog(tmp_path, tmp_path))
    answers: dict[str, Any] = {}
    progress = SimpleNamespace(say=lambda text, keep: None, set_steering=answers.update)
    start: Any = SimpleNamespace(run_dir=SimpleNamespace(path=tmp_path), progress=progress)
    pool: Any = SimpleNamespace(workers=[])
    append_line(tmp_path / "control.jsonl", {"to": identify_process({}), "do": "limits", **asked})
    Steering(start, pool, limits, budget, interrupt=pytest.fail).carry_out_requests()
    assert [answer["refused"] for answer in answers["answers"].values()] == [True]
    worker: Any = Told()
    limits.share([worker])
    assert [one.permits for one in worker.limits] == [8]


def test_limits_change_together_or_not_at_all(tmp_path: Path) -> None:
    budget = RunBudget(Cost(5.0), spent=Cost(), budget_log=BudgetLog(tmp_path, tmp_path))
    answers: dict[str, Any] = {}
    progress = SimpleNamespace(say=lambda text, keep: None, set_steering=answers.update)
    start: Any = SimpleNamespace(run_dir=SimpleNamespace(path=tmp_path), progress=progress)
    line = {"to": identify_process({}), "do": "limits", "max_run_cost_usd": 9.0, "rpm": 5.0}
    append_line(tmp_path / "control.jsonl", line)
    pool: Any = SimpleNamespace(workers=[])
    Steering(start, pool, RunLimits({}), budget, interrupt=pytest.fail).carry_out_requests()
    (answer,) = answers["answers"].values()
    assert answer["refused"]
    assert "nothing was changed" in answer["text"]
    assert budget.budget == Cost(5.0)


def test_an_answer_written_just_before_the_end_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resume` of a run whose last conversation then ends at once."""

    def ended(run_dir: Path) -> None:
        end = (tmp_path / "control.jsonl").stat().st_size
        answers = {str(end): {"text": "resumed", "refused": False}}
        (tmp_path / "progress.json").write_bytes(orjson.dumps({"steered": {"answers": answers}}))

    monkeypatch.setattr(control, "read_holder", ended)
    assert control.steer(tmp_path, {}, "resume") == "resumed"


def test_a_run_of_another_user_is_not_steered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_strangers(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RunDirError, match="who alone may change it"):
        refuse_strangers(tmp_path)


def test_a_run_that_does_not_work_is_not_steered(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    done = run(tmp_path, "pause", "r", output_dir=tmp_path)
    assert done.returncode == 2
    assert "no process works on this run" in done.stderr
    assert "`resume r` starts it again" in done.stderr


def test_a_limit_that_is_no_number_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, call_record())
    done = run(tmp_path, "limits", "r", rpm="nan", output_dir=tmp_path)
    assert done.returncode == 2
    assert "--rpm: nan cannot be a limit" in done.stderr


def options(endpoint: FakeEndpoint, **more: Any) -> dict[str, Any]:
    """Those of a run at an endpoint."""
    return {
        "dataset_file": "p.jsonl",
        "run_name": "r",
        "base_url": endpoint.openai_url,
        "key_env": "none",
        "num_workers": 1,
        "model": "openai:m",
        "enabled_toolsets": "none",
        **more,
    }


@pytest.mark.slow
def test_a_run_is_paused_limited_and_resumed(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 40)
    with FakeEndpoint(turns=3, latency_s=0.0, answers=0) as endpoint:

        def asked() -> int:
            return int(endpoint.journal()["requests"])

        with started(tmp_path, **options(endpoint, num_workers=2, batch_size=4)) as process:
            wait_until(lambda: asked() >= 8)
            paused = run(tmp_path, "pause", "r")
            assert "paused: calls in flight end" in paused.stdout, paused.stderr
            before = asked()
            endpoint.answer(None)
            held = run(tmp_path, "limits", "r", max_in_flight=1)
            assert "max_in_flight 1 until this start ends" in held.stdout, held.stderr
            assert asked() == before, "no call began while it was paused"
            refused = run(tmp_path, "limits", "r", max_run_cost_usd=5)
            assert refused.returncode == 2
            assert "no max_run_cost_usd" in refused.stderr
            assert "`run --run_name=RUN --max_run_cost_usd=N`" in refused.stderr
            unknown = run(tmp_path, "stop", "r", "nobody")
            assert "no conversation with the id 'nobody' is in flight" in unknown.stderr
            wait_until(lambda: "limits changed" in run(tmp_path, "status", "r").stdout)
            shown = run(tmp_path, "status", "r").stdout
            assert "limits changed for this start: max_in_flight 1" in shown
            assert "paused before the next call" in shown
            assert "left " not in shown
            who = getpass.getuser()
            assert f"no more are made until `resume` (asked by {who})" in shown
            assert "resumed" in run(tmp_path, "resume", "r").stdout
            assert process.wait(timeout=60) == 0
    log = (tmp_path / "trajectories/r/run.log").read_text()
    assert "asked for `pause`. Done: paused" in log
    assert "asked for `limits`. Done: max_in_flight 1" in log
    assert len(lines(tmp_path / "trajectories/r/records.jsonl")) == 40


@pytest.mark.slow
def test_a_run_that_ends_at_once_was_resumed(tmp_path: Path) -> None:
    """Whoever asks looks ten times a second; the answer stays when the run is over."""
    write_prompts(tmp_path / "p.jsonl", 1)
    with (
        FakeEndpoint(turns=2, latency_s=0.0, answers=0) as endpoint,
        started(tmp_path, **options(endpoint)) as process,
    ):
        wait_until(lambda: endpoint.journal()["requests"] == 1)
        assert run(tmp_path, "pause", "r").returncode == 0
        endpoint.answer(None)
        wait_until(lambda: endpoint.journal()["replies"] == 1)
        resumed = run(tmp_path, "resume", "r")
        assert resumed.stdout == "trajectories/r: resumed\n", resumed.stderr
        assert process.wait(timeout=60) == 0
    assert "not running" in run(tmp_path, "status", "r").stdout


@pytest.mark.slow
def test_a_conversation_is_stopped_and_retried(tmp_path: Path) -> None:
    """It fails, is queued again, and continues after its saved replies."""
    write_prompts(tmp_path / "p.jsonl", 2)
    with FakeEndpoint(turns=3, latency_s=0.0, answers=2) as endpoint:
        with started(
            tmp_path, **options(endpoint, enabled_toolsets="file", max_attempts=3)
        ) as process:
            wait_until(lambda: endpoint.journal()["requests"] >= 4)
            stopped = run(tmp_path, "stop", "r", "p0000")
            assert "p0000 is stopped" in stopped.stdout, stopped.stderr
            failures = tmp_path / "trajectories/r/failures.jsonl"
            wait_until(lambda: failures.exists() and lines(failures))
            assert lines(failures)[0]["class"] == "stopped"
            again = run(tmp_path, "retry", "r")
            assert "1 failed conversation queued again" in again.stdout, again.stderr
            endpoint.answer(None)
            assert process.wait(timeout=60) == 0
        counts = endpoint.journal(full=True)["counts"]
    records = lines(tmp_path / "trajectories/r/records.jsonl")
    assert {record["id"]: record["status"] for record in records} == {
        "p0000": "completed",
        "p0001": "completed",
    }
    assert max(one["answered"] for one in counts) == 1, "no reply was paid for twice"
    assert run(tmp_path, "verify", "r").returncode == 0


@pytest.mark.slow
def test_a_run_is_stopped_moved_and_resumed_without_its_options(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 12)
    with FakeEndpoint(turns=1, latency_s=0.0, answers=4) as endpoint:
        with started(tmp_path, **options(endpoint, batch_size=2)) as process:
            records = tmp_path / "trajectories/r/records.jsonl"
            wait_until(lambda: records.exists() and len(lines(records)) == 4)
            stopped = run(tmp_path, "stop", "r")
            assert "stopping in order" in stopped.stdout, stopped.stderr
            endpoint.answer(None)
            assert process.wait(timeout=60) == 130
        assert "`resume r` continues" in run(tmp_path, "status", "r").stdout
        done = len(lines(records))
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "trajectories/r").rename(elsewhere / "moved")
        resumed = run(elsewhere, "resume", "moved", output_dir=".")
        assert resumed.returncode == 0, resumed.stderr
        assert f"resuming: {done} done, {12 - done} to continue" in resumed.stderr
        assert len(lines(elsewhere / "moved/records.jsonl")) == 12
        assert (elsewhere / "moved.jsonl").exists()


@pytest.mark.slow
def test_the_name_of_a_run_is_enough_to_start_it_again(tmp_path: Path) -> None:
    """Options beside the name are those of this start; what is fixed stays fixed."""
    write_prompts(tmp_path / "p.jsonl", 3)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        assert run(tmp_path, **options(endpoint, max_samples=1)).returncode == 0
        assert run(tmp_path, run_name="r", max_samples=2).returncode == 0
        assert len(lines(tmp_path / "trajectories/r/records.jsonl")) == 2
        refused = run(tmp_path, run_name="r", model="openai:other")
        assert refused.returncode == 2
        assert "model" in refused.stderr
        new = run(tmp_path, run_name="new")
        assert new.returncode == 2
        assert "--dataset_file is missing" in new.stderr


@pytest.mark.slow
def test_the_number_of_conversations_changes_while_a_run_works(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 20)
    with (
        FakeEndpoint(turns=1, latency_s=0.0, answers=0) as endpoint,
        started(tmp_path, **options(endpoint, batch_size=2)) as process,
    ):
        wait_until(lambda: int(endpoint.journal()["requests"]) == 2)
        changed = run(tmp_path, "limits", "r", concurrency=5)
        assert "concurrency 5 until this start ends" in changed.stdout, changed.stderr
        progress = tmp_path / "trajectories/r/progress.json"
        # Their calls wait until the endpoint has shown that it answers more than two.
        wait_until(lambda: (read_json(progress) or {}).get("running") == 5)
        endpoint.answer(None)
        assert process.wait(timeout=60) == 0
