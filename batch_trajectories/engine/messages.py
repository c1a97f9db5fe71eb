"""The messages between parent and workers, over one pipe per worker.

A message is a JSON header, a newline, and the bytes of its `payload`, if it has one: the parent
never parses records. Each kind of message is a class; `type` in the header names it.

`ToWorker` and `FromWorker` are the kinds that go each way. `StoreEvents`, `WriteLog` and
`EventsStored` exist only for a worker on another machine, whose journal and log the parent writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec

from agent.models.model import ModelSettings
from agent.models.scripted import ScriptedTurn
from batch_trajectories.config.endpoints import Cost, EndpointLimits
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.parser_signs import ParserSigns
from batch_trajectories.engine.record import Provenance, UsedImage
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.index import IndexFields
from batch_trajectories.records.tasks import Task

if TYPE_CHECKING:
    from batch_trajectories.records.journal import Inflight


class PipeMessage(msgspec.Struct, omit_defaults=True, tag=True):
    """One message; a subclass for each kind."""


class MessageWithPayload(PipeMessage, kw_only=True):
    """A message with bytes that JSON would have to escape; they follow its header."""

    payload: bytes = b""


# From the parent to a worker.


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A task for a worker, with its journaled events."""

    task: Task
    attempt: int
    number: int
    """Number of times that the task was assigned, including this time."""
    events: list[Any]
    """The journaled events of the task; each is an `Event`."""
    knows_begun: bool
    """Whether the events have a start event for every tool call; see `has_start_events`."""
    deaths: int
    """Number of workers that died while they worked on the task."""
    workspace_id: str
    """The id of the storage with the workspace of the events; see `WorkerSetup.workspace_id`."""
    reserved: dict[str, Cost]
    """Amounts already reserved for calls of the task, by call id."""


def make_assignment(
    task: Task, attempt: int, inflight: Inflight, *, deaths: int, reserved: dict[str, Cost]
) -> Assignment:
    """The message that assigns a task. Raises `StorageError` if its journal cannot be read."""
    return Assignment(
        task=task,
        attempt=attempt,
        number=inflight.next_assignment(task.key),
        events=inflight.events(task.key),
        knows_begun=inflight.has_start_events(task.key),
        deaths=deaths,
        workspace_id=inflight.workspace_id(task.key),
        reserved=reserved,
    )


class AssignTasks(PipeMessage):
    """Run these tasks."""

    assignments: list[Assignment]


class RecordsDurable(PipeMessage):
    """The records of these tasks are on disk: drop their journals and workspaces."""

    keys: list[bytes]


class SetLimits(PipeMessage):
    """The worker's share of an endpoint's limits; see `CallLimiter.allow`."""

    endpoint: str
    permits: int
    number: int
    cool_down_s: float
    rpm: float | None
    tpm: float | None
    rates_s: float | None


class GrantBudget(PipeMessage):
    """An amount that the worker may spend."""

    amount: Cost


class ReclaimBudget(PipeMessage):
    """Return all budget that is not reserved for a call, from now on."""


class AnswerCall(MessageWithPayload, kw_only=True):
    """The answer to a `CollectCall`; `payload` is the reply, if there is one."""

    id: str
    how: str
    """See `BatchAnswer`."""


class EndpointAnswered(PipeMessage):
    """The answer to `AskIfAnswered`: whether any worker has had a reply from this base URL."""

    url: str
    is_answered: bool


class SetKey(PipeMessage):
    """The present key of a key command, or the problem that it has."""

    command: str
    number: int
    """Counts the keys of the command, from 1."""
    key: str
    problem: str
    """The reason why the command gave no new key; "" if it did."""


class CancelTask(PipeMessage):
    """A person has stopped this task."""

    key: bytes


class EventsStored(PipeMessage):
    """The parent has written all `StoreEvents` up to this number."""

    number: int


class StopWorking(PipeMessage):
    """Begin no further call; cancel what still runs after `grace_s` seconds."""

    grace_s: float


class Exit(PipeMessage):
    """End the process."""

    is_done: bool
    """No later start needs the worker's files."""


ToWorker = (
    AssignTasks
    | RecordsDurable
    | SetLimits
    | GrantBudget
    | ReclaimBudget
    | AnswerCall
    | EndpointAnswered
    | SetKey
    | CancelTask
    | EventsStored
    | StopWorking
    | Exit
)
"""Messages of the parent."""


# From a worker to the parent.


class Counters(TypedDict):
    """A worker's work since its last heartbeat; only for the progress line."""

    turns: int
    input_tokens: int
    output_tokens: int
    cost_usd: float
    cost_unknown: bool


def no_counters() -> Counters:
    """All counters at 0."""
    return Counters(turns=0, input_tokens=0, output_tokens=0, cost_usd=0.0, cost_unknown=False)


@dataclass(slots=True)
class Load:
    """Calls in flight and waiting, and results since the last report."""

    in_flight: int = 0
    waiting: int = 0
    limits_number: int = 0
    """The number of the last `SetLimits` that has arrived."""
    replies: int = 0
    failures: int = 0
    """Attempts that failed otherwise than by a refusal (429), and are repeated."""
    overloads: int = 0
    """Failures that the load of the endpoint may have caused; `failures` counts them as well."""


class Ready(PipeMessage):
    """The worker can take tasks."""


class Heartbeat(PipeMessage):
    """The worker is alive."""

    counters: Counters
    proven: list[str]
    """Base URLs that have answered."""
    busy: float
    """The share of a core that the process has used since its last heartbeat."""


class TaskFinished(MessageWithPayload, kw_only=True):
    """A task has its record; `payload` is the record's line, as it goes to disk."""

    key: bytes
    fields: IndexFields
    failure: Failure | None
    images: list[UsedImage]
    signs: ParserSigns | None


class TaskFailed(PipeMessage):
    """An attempt of a task has failed, and the task has attempts left."""

    key: bytes
    model: str | None
    failure: Failure


class TaskReleased(PipeMessage):
    """The worker gives a task back unfinished, because it stops."""

    key: bytes


class CollectCall(MessageWithPayload, kw_only=True):
    """A model call to be made in a batch; `payload` is the body of its request."""

    id: str
    model: str
    """See `model_label`."""
    most: Cost | None
    """The amount reserved for the call; None without a budget."""


class ReportLoad(PipeMessage):
    """The calls to an endpoint since the last report."""

    endpoint: str
    load: Load


class CallRefused(PipeMessage):
    """An endpoint has refused a call (429)."""

    endpoint: str
    retry_after_s: float | None
    """The delay that the endpoint asks for; None if it names none."""
    sent_at: float
    """The time when the call was sent, on the monotonic clock of the parent's machine."""


class AskIfAnswered(PipeMessage):
    """Asks whether this base URL has answered any worker; the parent sends `EndpointAnswered`."""

    url: str


class KeyRejected(PipeMessage):
    """An endpoint has rejected the key with this number of a key command."""

    command: str
    number: int


class ReportBudget(PipeMessage):
    """A worker's budget, and the budget that it needs; see `WorkerBudget`."""

    grants: int
    """Number of grants that have arrived."""
    calls: int
    """Calls with a reserved cost."""
    is_short: bool
    """All budget that is not reserved is returned."""
    returned: Cost
    wanted: Cost
    needs: list[Cost]
    """The least amounts that let a waiting call go; empty if none waits."""


class ReportOutage(PipeMessage):
    """A call to a base URL has failed and is retried."""

    url: str
    message: str
    left_s: float
    """Seconds until the call is given up."""


class Say(PipeMessage):
    """Show a text to the user, once."""

    message: str


class HaltRun(PipeMessage):
    """Stop the whole run for this reason."""

    message: str


class StoreEvents(MessageWithPayload, kw_only=True):
    """Journal events of these tasks; `payload` is their lines."""

    keys: list[bytes]
    number: int


class WriteLog(MessageWithPayload, kw_only=True):
    """Lines for the log of the run, in `payload`."""


FromWorker = (
    Ready
    | Heartbeat
    | TaskFinished
    | TaskFailed
    | TaskReleased
    | CollectCall
    | ReportLoad
    | CallRefused
    | AskIfAnswered
    | KeyRejected
    | ReportBudget
    | ReportOutage
    | Say
    | HaltRun
    | StoreEvents
    | WriteLog
)
"""Messages of a worker."""

TaskEnded = TaskFinished | TaskFailed | TaskReleased
"""Messages that a worker no longer works on a task."""


_encoder = msgspec.json.Encoder()
_to_worker: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Encode a message for the pipe."""
    if isinstance(message, MessageWithPayload):
        header = _encoder.encode(msgspec.structs.replace(message, payload=b""))
        return header + b"\n" + message.payload
    return _encoder.encode(message)


def decode_to_worker(message: bytes) -> ToWorker:
    """Decode a message of the parent. Raises `msgspec.DecodeError`."""
    header, _, payload = message.partition(b"\n")
    return _attach_payload(_to_worker.decode(header), payload)


def decode_from_worker(message: bytes) -> FromWorker:
    """Decode a message of a worker. Raises `msgspec.DecodeError`."""
    header, _, payload = message.partition(b"\n")
    return _attach_payload(_from_worker.decode(header), payload)


_M = TypeVar("_M", bound=PipeMessage)


def _attach_payload(message: _M, payload: bytes) -> _M:
    return msgspec.structs.replace(message, payload=payload) if payload else message


_HASH_BYTES = 10


def model_label(settings: ModelSettings) -> str:
    """The name of a model between parent and workers; it stays if the endpoint moves."""
    return f"{settings.api} {settings.reference or settings.name}"


def make_call_id(task: bytes, request: bytes, time: int) -> str:
    """The id of a task's call with this question, asked for the `time`-th time (from 0).

    It begins with the task's key and has 53 characters that every provider allows.
    """
    digest = blake2b(b"%d %b" % (time, request), digest_size=_HASH_BYTES).hexdigest()
    return f"{task.hex()}-{digest}"


def parse_task_key(id: str) -> bytes:
    """The key of the task that a call belongs to."""
    return bytes.fromhex(id.partition("-")[0])


class WorkerSetup(msgspec.Struct, frozen=True):
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
    images: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The digests of images that finished conversations used, by reference."""
    run_key: str = ""
    """See `RunDir.key`."""
    start: str = ""
    """Names the start of the run, which other starts do not share."""
    workspace_id: str = ""
    """The id of the storage with the workspaces; "" for the run directory."""
    has_overlays: bool = False
    """The parent has mounted an overlay of an image, on the machine of the worker."""
    is_remote: bool = False
    """The worker shares no disk with the parent, which keeps its journal and log."""
    clock_offset_s: float = 0.0
    """Add this to the local monotonic clock to get that of the parent's machine."""
