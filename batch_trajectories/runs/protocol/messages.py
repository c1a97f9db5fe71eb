"""The messages between parent and workers, over one pipe per worker.

A message is a JSON header, a newline, and for finished tasks the record as it goes to disk: the
parent never parses records.

Parent to worker:  tasks {"assignments": [Assignment…]} · durable {"keys": [hex…]}
                   · stop {"grace_s"} · exit {"done"} · limits {"limits"} · grant {"amount"}
                   · reclaim · answer {"id", "how"} + reply
                   · key {"command", "number", "problem"} + key
Worker to parent:  ready · alive {"counters", "proven", "busy"} · finished {"key", "fields",
                   "failure"} + record · failed {"key", "failure"} · released {"key"}
                   · ask {"id", "model"} + body of a call that is to go by a batch
                   · load {"endpoint", "load"} · refused {"endpoint", "retry_after_s", "sent_at"}
                   · key_rejected {"command", "number"} · budget {"report"}
                   · outage {"url", "words", "left_s"} · say {"message"} · halt {"message"}

A worker on another machine also sends its log and its journal, and waits until that is on disk:

                   events {"keys": [hex…], "number"} + lines · log + lines
Parent to worker:  kept {"number"}
"""

from __future__ import annotations

from typing import Any, TypedDict

from agent.messages.message import Event
from batch_trajectories.basics import exact_json


class Assignment(TypedDict):
    """A task for a worker, with its journaled events."""

    task: dict[str, Any]
    """The fields of a `Task`."""
    attempt: int
    number: int
    """How often the task was assigned, including this time."""
    events: list[Event]
    place: str
    """Where the workspace of the events is; see `WorkerSetup.place`."""
    held: dict[str, list[Any]]
    """Amounts already reserved for calls of the task, by call id."""


class Counters(TypedDict):
    """What a worker has done since its last heartbeat; only for the progress line."""

    turns: int
    input_tokens: int
    output_tokens: int
    cost_usd: float
    cost_unknown: bool


def pack(type: str, payload: bytes = b"", **fields: Any) -> bytes:
    """Encode a message."""
    return exact_json.dumps({"type": type, **fields}) + b"\n" + payload


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Decode a message into header and payload."""
    header, _, payload = message.partition(b"\n")
    return exact_json.loads(header), payload


def no_counters() -> Counters:
    """All counters at 0."""
    return Counters(turns=0, input_tokens=0, output_tokens=0, cost_usd=0.0, cost_unknown=False)
