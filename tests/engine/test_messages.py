"""The messages between parent and workers pass the pipe unchanged."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import pytest

from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.executor import Inbox, WorkerHandle
from batch_trajectories.engine.messages import (
    AnswerCall,
    Assignment,
    AssignTasks,
    CollectCall,
    FromWorker,
    HaltRun,
    Load,
    ReportBudget,
    ReportLoad,
    Say,
    StoreEvents,
    TaskFailed,
    TaskFinished,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.index import IndexFields
from batch_trajectories.records.tasks import Task

KEY = bytes(range(240, 256))
LONG = 10**30
"""An integer as a row or an argument of a tool may have it; most JSON libraries lose it."""

FAILURE = Failure("p", "d", 2, "timeout", "no reply\nsince 12:00 \N{GRINNING FACE}")


@pytest.mark.parametrize(
    "message",
    [
        AssignTasks(
            [
                Assignment(
                    task=Task("p", "p", 0, "d", {"prompt": "x", "size": LONG}),
                    attempt=1,
                    number=3,
                    events=[{"kind": "note", "value": LONG, "at": 0.1}],
                    knows_begun=True,
                    deaths=0,
                    workspace_id="",
                    reserved={"call": Cost(0.5, 7)},
                )
            ]
        ),
        AnswerCall(id="a", how="live"),
        AnswerCall(id="a", how="reply", payload=b'{"choices": []}\n'),
    ],
)
def test_a_worker_reads_what_the_parent_sends(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        TaskFinished(
            key=KEY,
            fields=IndexFields("p", "d", "failed", 1, 0, 0, None, LONG, 0.1, "timeout", None, None),
            failure=FAILURE,
            images=[{"reference": "python:3", "digest": "sha256:0"}],
            signs=None,
            payload=b'{"id": "p"}\n',
        ),
        TaskFailed(key=KEY, model=None, failure=FAILURE),
        CollectCall(id="a", model="m", most=Cost(0.5, 7), payload=b"{}\n\n{}"),
        ReportLoad(endpoint="u k", load=Load(in_flight=1, replies=2)),
        ReportBudget(
            grants=1,
            calls=2,
            is_short=False,
            returned=Cost(),
            wanted=Cost(0.25, 3),
            needs=[Cost(0.125, 1)],
        ),
        StoreEvents(keys=[KEY], number=4, payload=b"a\nb\n"),
        Say(""),
    ],
)
def test_the_parent_reads_what_a_worker_sends(message: FromWorker) -> None:
    assert decode_from_worker(encode(message)) == message


def test_a_header_is_one_line_and_says_the_kind() -> None:
    """Whatever the payload is, it is behind the first newline, as it was."""
    header, _, payload = encode(StoreEvents(keys=[], number=1, payload=b"a\nb\n")).partition(b"\n")
    assert msgspec.json.decode(header) == {"type": "StoreEvents", "keys": [], "number": 1}
    assert payload == b"a\nb\n"


@dataclass(eq=False, kw_only=True)
class PipedWorker(WorkerHandle):
    """A worker that is only a pipe."""

    connection: Connection

    def __post_init__(self) -> None:
        self._move_bytes(self.connection)

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        self.connection.close()

    def reap(self) -> None:
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()


def test_an_unreadable_message_stops_the_run() -> None:
    """Its worker may have finished a task with it, so nobody may just skip it."""
    ours, theirs = Pipe()
    inbox: Inbox = queue.SimpleQueue()
    worker = PipedWorker(3, "worker-3", inbox, connection=ours)
    theirs.send_bytes(encode(Say("hello")))
    theirs.send_bytes(b'{"type":"TaskReleased"}')
    assert inbox.get(timeout=9) == (worker, Say("hello"))
    sender, halt = inbox.get(timeout=9)
    assert sender is worker
    assert isinstance(halt, HaltRun)
    assert halt.message.startswith("worker-3 sent an unreadable message")
    theirs.close()
    worker.reap()
