"""The journal that a worker on another machine sends: kept before it is used, in few messages."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.messages.message import Event, is_cost_only
from agent.state.events import Clock, note_event, reply_event
from batch_trajectories.engine.messages import StoreEvents
from batch_trajectories.ray_cluster.remote_journal import RemoteJournal
from batch_trajectories.records.journal import Inflight, JournalWriter
from batch_trajectories.records.tasks import task_key
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.builders import completion
from tests.helpers.running import (
    SCRIPTED,
    WRITE_A_NOTE,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
)

KEY = task_key("p", "d")


def reply(turn: int) -> Event:
    return reply_event(turn, completion("hello"), Clock(), discarded=None)


def note(turn: int) -> Event:
    return note_event(turn, "budget", "words")


async def passes() -> None:
    """Let the event loop do what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_reply_is_used_only_when_it_is_kept() -> None:
    async def work() -> None:
        sent: list[StoreEvents] = []
        journal = RemoteJournal(sent.append, workspace_id="there")
        journal.append("p", "d", reply(1), assignment=1, position=0)
        waiting = asyncio.create_task(journal.wait_persisted(KEY))
        await passes()
        assert len(sent) == 1
        assert not waiting.done()
        journal.on_kept(sent[0].number)
        await waiting
        await journal.wait_persisted(task_key("another", "d"))

    asyncio.run(work())


def test_what_comes_while_the_parent_is_busy_travels_together() -> None:
    async def work() -> None:
        sent: list[StoreEvents] = []
        journal = RemoteJournal(sent.append, workspace_id="there")
        for position in range(5):
            journal.append(f"p{position}", "d", reply(1), assignment=1, position=0)
            await passes()
        assert len(sent) == 1
        journal.on_kept(1)
        assert len(sent) == 2
        assert len(sent[1].payload.splitlines()) == 4
        assert set(sent[1].keys) == {task_key(f"p{n}", "d") for n in range(1, 5)}

    asyncio.run(work())


def test_what_was_noted_goes_before_the_end_of_its_task() -> None:
    async def work() -> None:
        sent: list[StoreEvents] = []
        journal = RemoteJournal(sent.append, workspace_id="there")
        journal.append("p", "d", note(0), assignment=1, position=0)
        await passes()
        assert not sent
        journal.flush()
        assert len(sent) == 1

    asyncio.run(work())


def test_the_parent_reads_what_was_sent_and_where_the_workspace_is(tmp_path: Path) -> None:
    """The last of several assignments says where; an older journal says the run directory."""
    sent: list[StoreEvents] = []

    async def work() -> None:
        journal = RemoteJournal(sent.append, workspace_id="there")
        journal.append("p", "d", reply(1), assignment=2, position=0)
        journal.flush()

    asyncio.run(work())
    errors: list[Any] = []
    first = JournalWriter(tmp_path, 0, on_storage_error=errors.append)
    first.append("p", "d", reply(1), assignment=1, position=0)
    first.append("q", "d", reply(1), assignment=1, position=0)
    second = JournalWriter(tmp_path, 1, on_storage_error=errors.append)
    second.append_lines(sent[0].keys, sent[0].payload)
    for writer in (first, second):
        writer.close()
    inflight = Inflight(tmp_path)
    inflight.read(settled=())
    assert inflight.workspace_id(KEY) == "there"
    assert inflight.workspace_id(task_key("q", "d")) == ""
    assert inflight.workspace_id(task_key("r", "d")) == ""
    assert [is_cost_only(event) for event in inflight.events(KEY)] == [False, True]
    assert not errors


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "there"])
def test_a_workspace_of_an_earlier_time_is_not_used(tmp_path: Path, place: str) -> None:
    """The task has continued elsewhere since: the files here are not those of its journal."""
    write_prompts(tmp_path / "p.jsonl", 1)
    with FakeEndpoint(turns=3, latency_s=0.0, answers=1, **WRITE_A_NOTE) as endpoint:
        given = {**SCRIPTED, "model": "openai:m", "key_env": "none"}
        given["base_url"] = endpoint.openai_url
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["requests"] == 2)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        endpoint.answer(None)
        run_dir = tmp_path / "trajectories/r"
        (segment,) = (run_dir / "inflight").iterdir()
        told = [{**line, "place": place} for line in lines(segment)]
        segment.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in told))
        assert run(tmp_path, **given).returncode == 0
    (record,) = lines(run_dir / "records.jsonl")
    (resume,) = record["resumes"]
    assert resume["workspace_kept"]
    # What is there was made by its calls, which ran again.
    assert resume.get("rebuild", {}).get("calls") == (1 if place else None)
