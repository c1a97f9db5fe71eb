"""The calls of agents in journals: found, paid, and used only as far as nothing is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import OUT_OF_PLACE, Event, reply_in
from agent.state.trajectory import Trajectory
from batch_trajectories.api.stored_run import conversations_in_flight
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.supervisor.budget import BudgetLog, sum_up_earlier_starts
from batch_trajectories.maintenance.fork import NotForkable, events_until
from batch_trajectories.records.journal import (
    Inflight,
    JournalWriter,
    read_journaled_replies,
    usable_prefix,
)
from batch_trajectories.records.tasks import task_key
from tests.agent.gateway.talking import ChatTalk, Recording, Said

PROMPT = "Count."


def work(*commands: str) -> Recording:
    """An agent's calls, each of which costs a quarter of a dollar."""
    recording, talk = Recording(PROMPT), ChatTalk()
    talk.say(PROMPT)
    for command in commands:
        recording.relay(talk, Said("", command))
        talk.result(f"ran {command}")
    for event in recording.events:
        if (reply := reply_in(event)) is not None:
            reply |= {"cost_usd": 0.25, "started_at": 100.0, "duration_s": 1.0}
    return recording


def write_journal(
    run_dir: Path, events: list[Event], *, without: frozenset[int] = frozenset()
) -> Path:
    inflight = run_dir / "inflight"
    inflight.mkdir(exist_ok=True)
    writer = JournalWriter(inflight, 0, on_storage_error=lambda error: None)
    for position, event in enumerate(events):
        if position not in without:
            writer.append("a", "d", event, assignment=1, position=position)
    writer.close()
    return inflight


def read_back(inflight: Path) -> list[Event]:
    journals = Inflight(inflight)
    journals.read(settled=())
    return journals.events(task_key("a", "d"))


def test_calls_of_agents_count_as_replies_and_are_paid(tmp_path: Path) -> None:
    inflight = write_journal(tmp_path, work("ls", "wc").events)
    [replies] = read_journaled_replies(inflight).tasks.values()
    assert (replies.turns, replies.costs) == (2, [0.25, 0.25])
    journals = Inflight(inflight)
    journals.read(settled=())
    assert journals.paid_usd == 0.5
    log = BudgetLog(tmp_path, tmp_path / "quarantine")
    assert sum_up_earlier_starts([], journals, log) == Cost(0.5, 30)


def test_calls_behind_a_gap_are_paid_and_not_used(tmp_path: Path) -> None:
    """A power loss took the second call: the third cannot be placed."""
    recording = work("ls", "wc", "cat")
    found = read_back(write_journal(tmp_path, recording.events, without=frozenset({1})))
    assert found[0] == recording.events[0]
    [lost] = found[1:]
    assert lost["kind"] == "reply"
    assert (lost["discarded"], lost["cost_usd"]) == (OUT_OF_PLACE, 0.25)
    trajectory = Trajectory([{"role": "user", "content": PROMPT}], found)
    record = trajectory.to_record()
    assert (record["cost_usd"], record["api_calls"], len(record["turns"])) == (0.5, 2, 1)


def test_an_answer_by_a_call_that_is_missing_is_not_used() -> None:
    recording = work("ls")
    answered: Any = {"kind": "answered", "exchange": 1}
    events = [*recording.events, answered]
    assert usable_prefix(events) == recording.events
    restarted: Any = {"kind": "agent_restarted", "at": 1.0}
    answered = {"kind": "answered", "exchange": 0}
    events = [*recording.events, restarted, answered]
    assert usable_prefix(events) == events


def test_the_status_says_what_an_agent_is_doing(tmp_path: Path) -> None:
    inflight = write_journal(tmp_path, work("ls", "wc").events)
    (one,) = conversations_in_flight(inflight, settled=(), now=103.0)
    assert one == {
        "id": "a",
        "turns": 2,
        "tool": "bash",
        "doing": "tools",
        "calls": ["bash"],
        "idle_s": 2.0,
    }


def test_an_agents_conversation_cannot_be_continued_from_its_middle() -> None:
    record = work("ls", "wc").trajectory.to_record()
    with pytest.raises(NotForkable, match="agent cannot be forked"):
        events_until(record, 1, opening=[{"role": "user", "content": PROMPT}])
