"""Runs that are killed again and again, whose users are played by a model of their own."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import resume_and_judge
from tests.helpers.answering import JSON, Answer
from tests.helpers.builders import chat_reply
from tests.helpers.running import kill_repeatedly

STOP = "###STOP###"
TASKS = 20

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
"""What each reply of a user's model reports."""


def number_replies(
    write: Callable[[list[JSON], int], str | JSON], *, latency_s: float = 0.0
) -> Answer:
    """Answer the chat API with the message that `write` makes of the messages and a number.

    Each reply has another number, which is in its id, too. So one that was paid for twice shows.
    """
    numbers = itertools.count()
    lock = threading.Lock()

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        with lock:
            number = next(numbers)
        time.sleep(latency_s)
        reply = chat_reply(write(body["messages"], number), id=f"user-{number}", usage=USAGE)
        return 200, {"object": "chat.completion", "model": "u", "created": 1, **reply}

    return answer


def user_options(endpoint: FakeEndpoint, **more: Any) -> dict[str, Any]:
    """Options of a run `r` of `p.jsonl` at an endpoint, with the tools for files."""
    return {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "enabled_toolsets": "file",
        "num_workers": 2,
        "batch_size": 4,
        "heartbeat_timeout_s": 20,
        "grace_s": 20,
        "model": "openai:m",
        "key_env": "none",
        "base_url": endpoint.openai_url,
        **more,
    }


def kill_and_finish(
    cwd: Path,
    given: dict[str, Any],
    endpoint: FakeEndpoint,
    *,
    calls: int,
    kills: int = 3,
    seed: int = 7,
) -> int:
    """Kill a run again and again, then have it complete; the endpoint's log judges it.

    `calls` are those of the run at the endpoint. Returns how many calls can have been in flight at
    the kills.
    """
    draw = random.Random(seed)
    waits = [draw.randint(1, calls // (kills + 2)) for _ in range(kills)]
    kill_repeatedly(cwd, given, endpoint, waits)
    in_flight = kills * int(given["num_workers"]) * int(given["batch_size"])
    resume_and_judge(cwd, given, tasks=TASKS, endpoint=endpoint, wasted=in_flight)
    return in_flight
