"""One conversation of a run: its record, its training row, its requests, the samples beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from agent.messages.message import Message
from agent.state.trajectory import Trajectory
from batch_trajectories.api.stored_run import describe_conversations
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import RunError
from batch_trajectories.dataset.row_conversation import opening_messages
from batch_trajectories.dataset.scan import tasks
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.segments import CallView, views_by_conversation
from batch_trajectories.export.training_files import run_style
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.journal import Inflight, segments
from batch_trajectories.records.names import INFLIGHT, SCORES_FILE
from batch_trajectories.records.reader import open_records, read_record
from batch_trajectories.records.record_types import Record, StoredMessage
from batch_trajectories.records.scores import Labels, add_stored_scores, score_key
from batch_trajectories.report.page.writer import masks_of_dataset, training_form
from batch_trajectories.view.index.filters import in_keys
from batch_trajectories.view.index.table import RowPlace, Table
from batch_trajectories.view.runs import RunPlace

_MAX_SIBLINGS = 64


class NoSuchRecord(LookupError):
    """No record has this id."""


def find_record(table: Table, id: str) -> RowPlace:
    """Find the place of the record with an id; of several, the last. Raises `NoSuchRecord`."""
    found = table.find("id", id)
    if not found:
        raise NoSuchRecord(f"no conversation that has ended has the id {id!r}")
    return found[-1]


def read_found(run: RunPlace, table: Table, found: RowPlace, labels: Labels | None) -> Record:
    """The record of a row, with its scores and labels.

    Raises `UnreadableRecord` if it is damaged or has been replaced.
    """
    offset, length, key, places = (
        table.value(found, name) for name in ("offset", "length", "key", "score_places")
    )
    with open_records(run.path) as records:
        record = read_record(records, offset, length, key)
    record = add_stored_scores(run.path / SCORES_FILE, record, places)
    if labels is None:
        return record
    return msgspec.structs.replace(record, labels=labels.get(score_key(record)))


def make_form(run: RunPlace, record: Record) -> bytes:
    """The record's training row, as JSON; see `training_form`.

    A function of the user that masks turns is not called: the run may be anybody's.
    """
    style = run_style(read_run_json(run.path)["config"])
    masks = masks_of_dataset(run.path, calls_functions=False)
    return dumps_row(
        training_form(record, AuthoredWork(record), style=style, masks=masks, key_of=str)
    )


def describe_requests(record: Record) -> list[dict[str, Any]]:
    """Describe the requests of each conversation of a record; see the API's `requests`."""
    return [
        {
            "part": part.name,
            "unknown": part.unknown,
            "turns": [
                {
                    "turn": view.turn.turn,
                    "messages": len(view.messages),
                    "plain": list(view.messages)
                    == list(part.conversation.messages[: len(view.messages)]),
                }
                for view in part.views
            ],
        }
        for part in views_by_conversation(record)
    ]


def find_request(record: Record, part: str, turn: int) -> dict[str, Any]:
    """The request that a turn answered. Raises `NoSuchRecord` if the record does not say it."""
    for shown in views_by_conversation(record):
        if shown.name == part and (view := _find_view(shown.views, turn)) is not None:
            return {
                "messages": _json(list(view.messages)),
                "tools": exact_json.loads(exact_json.dumps(list(view.tools))),
                "reply": _json(view.reply),
            }
    raise NoSuchRecord(f"{record.id!r}: the record does not say what turn {turn} of {part} saw")


def _find_view(views: Sequence[CallView], turn: int) -> CallView | None:
    return next((view for view in views if view.turn.turn == turn), None)


def _json(value: Any) -> orjson.Fragment:
    return orjson.Fragment(msgspec.json.encode(value))


def find_siblings(
    run: RunPlace, table: Table, found: RowPlace, labels: Labels | None
) -> list[dict[str, Any]]:
    """The samples of the same prompt, and where they part from this one."""
    own = table.value(found, "id")
    same = table.find("prompt_id", table.value(found, "prompt_id"))[:_MAX_SIBLINGS]
    steps = {place: list(_steps(read_found(run, table, place, None))) for place in {*same, found}}
    rows = table.rows([table.number(place) for place in same])
    keys = (
        "id",
        "sample",
        "model",
        "status",
        "passed",
        "reward",
        "turns",
        "calls",
        "cost_usd",
        "step",
        "answer",
        "record",
    )
    siblings = [
        {
            **{key: row[key] for key in keys},
            "verdict": verdict_in(labels, row["record"]),
            "same_turns": _same(steps[found], steps[place]),
            "is_this": row["id"] == own,
        }
        for place, row in zip(same, rows, strict=True)
    ]
    return sorted(siblings, key=lambda sibling: sibling["sample"])


def verdict_in(labels: Labels | None, record: str) -> str | None:
    """The verdict of the reviewers of a record."""
    from batch_trajectories.records.scores import agreed_verdict

    return None if labels is None else agreed_verdict(labels.get(record))


def _steps(record: Record) -> Iterator[tuple[Any, ...]]:
    """The model's steps in each turn."""
    replies = [message for message in record.messages if message.role == "assistant"]
    for reply in replies[len(replies) - len(record.turns) :]:
        yield _step(reply)


def _step(reply: StoredMessage) -> tuple[Any, ...]:
    calls = tuple((call.function.name, call.function.arguments) for call in reply.tool_calls)
    return reply.content, calls


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same


# Conversations that have not ended, from the journals of the workers.


def _read(run: RunPlace, table: Table) -> tuple[Inflight, list[bytes]]:
    """The journals, and their tasks without a record, as far as the table knows."""
    journals = Inflight(run.path / INFLIGHT, read_only=True)
    journals.read(settled=frozenset())
    tasks_there = journals.tasks()
    if not tasks_there:
        return journals, []
    masks = table.select(in_keys("key", tasks_there))
    ended = set(table.columns(masks, ["key"])["key"].to_pylist())
    return journals, [key for key in tasks_there if key not in ended]


def in_flight(run: RunPlace, table: Table) -> list[dict[str, Any]]:
    """See `StoredRun.in_flight`."""
    journals, keys = _read(run, table)
    return describe_conversations(journals, keys, now=time.time())


def signature(run_dir: Path) -> tuple[tuple[str, int], ...]:
    """Changes when a journal does."""
    found = []
    for segment in segments(run_dir / INFLIGHT):
        try:
            found.append((segment.name, segment.stat().st_size))
        except FileNotFoundError:  # its last task has a record now
            continue
    return tuple(sorted(found))


def conversation(run: RunPlace, table: Table, id: str) -> dict[str, Any]:
    """The journaled part of a conversation; see the API's `live`."""
    journals, keys = _read(run, table)
    for key in keys:
        try:
            if journals.task_id(key) != id:
                continue
            events = journals.events(key)
        except StorageError:
            continue  # its record was just written
        found = Trajectory(_opening(run, key), events).to_record()
        return {"id": id, "is_over": False, **found}
    return {"id": id, "is_over": True, "messages": [], "turns": [], "tool_calls": []}


def _opening(run: RunPlace, key: bytes) -> list[Message]:
    """The prompt, which no journal has; nothing if the dataset cannot be read any more."""
    try:
        stored = run.stored()
        dataset = Path(stored.identity["dataset"]["path"])
        if dataset.exists() and not (dataset.is_file() or dataset.is_dir()):
            return []  # a pipe or a device, as a run directory from elsewhere could name
        scan = stored.scan
        at = scan.keys.find(key)
        while at % 16:
            at = scan.keys.find(key, at + 1)
        if at < 0:
            return []
        columns = next(tasks(scan, [at // 16])).columns
        return opening_messages(columns, stored.config.system_prompt)
    except (RunError, OSError, ValueError):
        return []
