"""Suspects in the supervisor: tasks that may have killed their workers. The workers are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.start import run
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import Inbox, WorkerHandle
from batch_trajectories.engine.messages import (
    Assignment,
    AssignTasks,
    Exit,
    FromWorker,
    HaltRun,
    Load,
    Ready,
    ReportLoad,
    StopWorking,
    TaskFailed,
    TaskReleased,
    ToWorker,
    WorkerSetup,
)
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.journal import JournalWriter
from tests.helpers.running import lines, write_prompts
from tests.records.test_storage import reply

URL = "http://127.0.0.1:9/v1"

Play = Callable[["Player", ToWorker | None], None]
"""What a worker does with a message; None: it was started."""


@dataclass(eq=False)
class Player(WorkerHandle):
    """A worker that answers each message as `play` says."""

    play: Play = lambda player, message: None
    inflight: Path = Path()
    heard: list[ToWorker] = field(default_factory=list)
    was_killed_with: int = 0
    """Number of tasks it had when it was killed."""

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        self.was_killed_with = len(self.assigned)

    def reap(self) -> None:
        pass

    def send(self, message: ToWorker) -> None:
        self.heard.append(message)
        self.play(self, message)
        if isinstance(message, Exit):
            self.inbox.put((self, None))

    def say(self, message: FromWorker) -> None:
        """Send a message to the supervisor."""
        self.inbox.put((self, message))

    def die(self, assignment: Assignment) -> None:
        """Write the first event of a task, then die."""
        writer = JournalWriter(self.inflight, self.number, on_storage_error=print)
        event: Any = reply(1)
        writer.append(
            assignment.task.id,
            assignment.task.input_digest,
            event,
            assignment=assignment.number,
            position=len(assignment.events),
        )
        writer.close()
        self.inbox.put((self, None))

    def fail(self, assignment: Assignment, error_class: str) -> None:
        """Report that a task has failed."""
        task, attempt = assignment.task, assignment.attempt
        failure = Failure(task.id, task.input_digest, attempt, error_class, message="no")
        self.say(TaskFailed(key=task.key, model=None, failure=failure))

    @property
    def assignments(self) -> list[Assignment]:
        """All that it got."""
        return [one for message in self.heard for one in assignments_in(message)]

    @property
    def tasks(self) -> list[str]:
        """The ids of all tasks that it got."""
        return [one.task.id for one in self.assignments]


def release_at_stop(player: Player, message: ToWorker | None) -> None:
    """Give the tasks of a worker back, once the run stops."""
    if isinstance(message, StopWorking):
        for key in list(player.assigned):
            player.say(TaskReleased(key))


def assignments_in(message: ToWorker | None) -> list[Assignment]:
    return message.assignments if isinstance(message, AssignTasks) else []


@dataclass
class Players:
    """An executor whose workers are played."""

    play: Play
    workers: list[Player] = field(default_factory=list)

    def start(self, setup: WorkerSetup, inbox: Inbox) -> Player:
        player = Player(
            setup.number,
            f"worker {setup.number}",
            inbox,
            play=self.play,
            inflight=setup.run_dir / "inflight",
        )
        self.workers.append(player)
        self.play(player, None)
        player.say(Ready())
        return player

    def close(self) -> None:
        pass


def run_played(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    play: Play,
    *,
    prompts: int,
    say: Callable[[str], object] = str,
    **options: Any,
) -> tuple[list[Player], str]:
    """Run with played workers; return these, and why the run was stopped."""
    players = Players(play)
    opened = "batch_trajectories.engine.supervisor.run.open_executor"
    monkeypatch.setattr(opened, lambda config, run_dir: players)
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        run_name="r",
        dataset_file=write_prompts(tmp_path / "p.jsonl", prompts),
        base_url=URL,
        key_env="none",
        **{"model": "m", "num_workers": 2, "batch_size": 1, **options},
    )
    try:
        ended = run(config, progress=say)
    except EnvironmentStop as error:
        return players.workers, str(error)
    return players.workers, ended.stopped_by or ""


def test_a_suspect_whose_journal_is_damaged_stops_the_run_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns of other workers may end: they are paid for."""

    def play(player: Player, message: ToWorker | None) -> None:
        if message is None and player.number == 3:
            for segment in player.inflight.glob("*.jsonl"):
                segment.write_bytes(b"x" * segment.stat().st_size)
        for assignment in assignments_in(message):
            if assignment.task.id == "p0000":
                player.die(assignment)
        release_at_stop(player, message)

    workers, stopped_by = run_played(tmp_path, monkeypatch, play, prompts=2)
    assert "removed or changed while the run needed it" in stopped_by
    assert [worker.tasks for worker in workers] == [["p0000"], ["p0001"], ["p0000"], []]
    assert not any(worker.was_killed_with for worker in workers)


def test_a_poison_task_whose_journal_is_damaged_stops_the_run_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is made of its journal."""

    def play(player: Player, message: ToWorker | None) -> None:
        for assignment in assignments_in(message):
            if assignment.task.id == "p0000":
                if player.number == 3:
                    for segment in player.inflight.glob("worker-[02]-*"):
                        segment.write_bytes(b"x" * segment.stat().st_size)
                player.die(assignment)
        release_at_stop(player, message)

    workers, stopped_by = run_played(tmp_path, monkeypatch, play, prompts=2)
    assert "removed or changed while the run needed it" in stopped_by
    assert not any(worker.was_killed_with for worker in workers)
    failures = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert [one["class"] for one in failures] == ["worker_died"] * 3


def test_a_suspect_stays_alone_while_refusals_of_its_worker_are_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal that was held back is of a task that its worker no longer has."""

    def kill_workers(player: Player, message: ToWorker | None) -> None:
        for assignment in assignments_in(message):
            if player.number < 2:
                player.die(assignment)
            else:
                player.say(HaltRun("enough"))
        release_at_stop(player, message)

    run_played(tmp_path, monkeypatch, kill_workers, prompts=1)
    started: list[Player] = []

    def play(player: Player, message: ToWorker | None) -> None:
        if message is None:
            started.append(player)
        for assignment in assignments_in(message):
            if assignment.task.id == "p0005":
                for refused in player.assignments:
                    player.fail(refused, "bad_request")
            elif assignment.task.id == "p0000":
                player.say(ReportLoad(endpoint=f"{URL} none", load=Load(replies=1)))
            elif len(started) == 3 and assignment.task.id == "p0004":
                player.say(HaltRun("enough"))
        release_at_stop(player, message)

    def on_replayed(text: str) -> None:
        if text.startswith("p0005: attempt 1 failed"):
            started[1].inbox.put((started[1], None))  # its tasks have to go elsewhere

    run_played(tmp_path, monkeypatch, play, prompts=6, say=on_replayed, batch_size=4)
    assert [player.tasks for player in started] == [
        ["p0001", "p0003", "p0005", "p0000"],
        ["p0002", "p0004"],
        ["p0002", "p0004"],
    ]
