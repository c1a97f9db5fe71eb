"""A process in a sandbox: what its server sends it, and waits for."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

import pytest

from toolsets.sandbox.inside.job import Job


class Polling:
    """What a server watches, as it does."""

    output_bytes = 1000

    def __init__(self) -> None:
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def forget(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.handlers[fd]
        os.close(fd)


SENT = 100_000
"""More than is written at once."""


@pytest.fixture
def job() -> Iterator[tuple[Polling, Job]]:
    """A process that answers once it has read all that it is sent."""
    polling = Polling()
    command = f"head -c {SENT} <&3 >/dev/null; echo read >&3; cat <&3"
    made = Job(polling, ["sh", "-c", command], control_at=3)
    yield polling, made
    made.close()
    os.waitpid(made.pid, 0)


@pytest.mark.parametrize("later", [0, 1])
def test_nothing_is_due_once_all_is_sent(job: tuple[Polling, Job], later: int) -> None:
    """A socket that is watched for room would wake the server all the time."""
    polling, made = job
    made.send(b"x" * (SENT - later))
    assert made.unsent
    if later:
        made.send(b"x" * later)
    while made.status is None:
        for fd, _ in polling.poll.poll():
            polling.handlers[fd]()
    assert polling.poll.poll(0) == []
