"""The messages between parent and workers, over one pipe per worker.

A message is a JSON header, a newline, and for finished tasks the record as it goes to disk: the
parent never parses records.

Parent to worker:  tasks {"assignments": [Assignment…]} · durable {"keys": [hex…]}
                   · stop {"grace_s"} · exit {"done"} · limits {"limits"} · grant {"amount"}
                   · reclaim · answer {"id", "how"} + reply
                   · key {"command", "number", "problem"} + key · cancel {"key"}
Worker to parent:  ready · alive {"counters", "proven", "busy"} · finished {"key", "fields",
                   "failure", "signs"} + record · failed {"key", "model", "failure"}
                   · released {"key"}
                   · ask {"id", "model"} + body of a call that is to go by a batch
                   · load {"endpoint", "load"} · refused {"endpoint", "retry_after_s", "sent_at"}
                   · key_rejected {"command", "number"} · budget {"report"}
                   · outage {"url", "message", "left_s"} · say {"message"} · halt {"message"}

A worker on another machine also sends its log and its journal, and waits until that is on disk:

                   events {"keys": [hex…], "number"} + lines · log + lines
Parent to worker:  kept {"number"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from agent.messages.message import Event
from agent.models.model import ModelSettings
from agent.models.scripted import ScriptedTurn
from batch_trajectories.basics import exact_json
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.record import Provenance

if TYPE_CHECKING:
    from batch_trajectories.records.journal import Inflight
    from batch_trajectories.records.tasks import Task


class Assignment(TypedDict):
    """A task for a worker, with its journaled events."""

    task: dict[str, Any]
    """The fields of a `Task`."""
    attempt: int
    number: int
    """How often the task was assigned, including this time."""
    events: list[Event]
    knows_begun: bool
    """See `Inflight.knows_begun`."""
    deaths: int
    """How many workers died while they worked on the task."""
    place: str
    """Where the workspace of the events is; see `WorkerSetup.place`."""
    held: dict[str, list[Any]]
    """Amounts already reserved for calls of the task, by call id."""


def assignment_of(
    task: Task, attempt: int, inflight: Inflight, *, deaths: int, held: dict[str, list[Any]]
) -> Assignment:
    """The message that assigns a task. Raises `StorageError` if its journal cannot be read."""
    return Assignment(
        task=task._asdict(),
        attempt=attempt,
        number=inflight.next_assignment(task.key),
        events=inflight.events(task.key),
        knows_begun=inflight.knows_begun(task.key),
        deaths=deaths,
        place=inflight.workspace_place(task.key),
        held=held,
    )


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


_HASH_BYTES = 10


def name_of(settings: ModelSettings) -> str:
    """The name of a model between parent and workers; it stays if the endpoint moves."""
    return f"{settings.api} {settings.reference or settings.name}"


def item_id(task: bytes, request: bytes, time: int) -> str:
    """The id of a task's call with this question, asked for the `time`-th time (from 0).

    It begins with the task's key and has 53 characters that every provider allows.
    """
    digest = blake2b(b"%d %b" % (time, request), digest_size=_HASH_BYTES).hexdigest()
    return f"{task.hex()}-{digest}"


def task_of(id: str) -> bytes:
    """The key of the task that a call belongs to."""
    return bytes.fromhex(id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The settings of a worker, sent to its process. Contains no secrets."""

    number: int
    parent_pid: int
    run_dir: Path
    config: RunConfig
    api: str
    """The dialect of the run's models."""
    provenance: Provenance
    script: list[ScriptedTurn] | None
    limits: Mapping[str, EndpointLimits]
    """The run's limits on calls, by endpoint."""
    budget: Cost | None
    proven: frozenset[str]
    """Base URLs that have answered before."""
    images: Mapping[str, str] = field(default_factory=dict)
    """The digests of images that finished conversations used, by reference."""
    run_key: str = ""
    """See `RunDir.key`."""
    start: str = ""
    """Names the start of the run, which other starts do not share."""
    place: str = ""
    """Names the storage with the workspaces; "" for the run directory."""
    is_remote: bool = False
    """It shares no disk with the parent, which keeps its journal and log."""
    clock_offset_s: float = 0.0
    """Add this to the local monotonic clock to get that of the parent's machine."""
