"""Make the dataset and config of a run of branches.

Each conversation to branch from becomes a row; its branches are the samples of that row.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agent.messages.message import (
    SUMMARY,
    USER_TURN,
    Event,
    Message,
    NoteEvent,
    OpeningEvent,
    ReplyEvent,
    ResultEvent,
    call_failure,
    user_key,
)
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.row_conversation import FORK_COLUMN
from batch_trajectories.engine.origin import describe_unused, harmless_options
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.records.files import (
    make_directory,
    open_temporary,
    sync_directory,
    temporary_path,
)

FIXED_KEYS = ("dataset_file", "num_samples", "max_samples", "shard", "forks")
"""Keys of the config that the fork determines."""


@dataclass(slots=True)
class ForkedRows:
    """The result of `write_forks`."""

    path: Path
    """The dataset of the branches."""
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of other conversations, by the reason: a filter, or why they cannot be forked."""

    def describe(self) -> str:
        """The counts for a person: a line for the rows, and one per reason."""
        lines = [f"{self.rows:>9,} conversations to branch from, in {self.path}"]
        lines += [f"{count:>9,} left out: {why}" for why, count in self.left_out.most_common()]
        return "\n".join(lines)


def forked_config(
    parent: Mapping[str, Any],
    config_file: Path | None,
    flags: Mapping[str, Any],
    *,
    branches: int,
    fresh: bool = False,
    received: Path | None = None,
) -> RunConfig:
    """The config of a run of branches: that of the `parent` run.json, changed by file and flags.

    `received` is the directory of a parent that was not started here. Options that run code, or
    name a variable, a file, an address or a model, must then come from file and flags. Raises
    `ConfigError`.
    """
    if given := [f"--{name}" for name in FIXED_KEYS if name in flags]:
        raise ConfigError(f"{', '.join(given)}: `fork` sets this itself; leave it out")
    if (agent := parent["config"].get("agent")) is not None:
        # The run.json may be a stranger's, so its agent may be any value.
        name = agent.get("name") if isinstance(agent, dict) else agent
        raise ConfigError(
            f"RUN was made with the agent {name!r}, which cannot start in the middle of a "
            "conversation; run it on the prompts again, with --num_samples for several each"
        )
    if "run_name" not in flags:
        raise ConfigError("--run_name: the name of the new run is missing")
    needed = {"dataset_file": "-", "run_name": flags["run_name"]}
    given_config = load_config(config_file, {**needed, **flags})
    changed = given_config.model_dump(
        mode="json", include=given_config.model_fields_set - set(FIXED_KEYS)
    )
    options: Mapping[str, Any] = parent["config"]
    if received is not None:
        if unused := describe_unused(received, options, given={*changed, *FIXED_KEYS}):
            raise ConfigError(unused)
        output_dir = RunConfig.model_fields["output_dir"].get_default()
        options = {"output_dir": output_dir, **harmless_options(options, given=changed)}
    values = {**options, **changed}
    servers = (values.get("mcp") or {}).values()
    hidden = [values.get("ephemeral_system_prompt")]
    hidden += (v for s in servers for v in (s.get("env") or {}).values())
    if any(isinstance(text, str) and text.startswith("sha256:") for text in hidden):
        raise ConfigError(
            "the ephemeral_system_prompt of RUN and the env of its MCP servers are not stored: "
            "give them again, by flags or --config"
        )
    run_dir = Path(values["output_dir"], values["run_name"])
    return load_config(
        None,
        {
            **values,
            "dataset_file": _dataset_path(run_dir, fresh=fresh),
            "columns": {},
            "rows": None,
            "num_samples": branches,
            "max_samples": None,
            "shard": None,
            "forks": True,
        },
    )


def _dataset_path(run_dir: Path, *, fresh: bool) -> Path:
    """The path of the dataset of a run of branches: that of its last start.

    Raises `ConfigError` if the directory has a run of something else, unless `fresh` moves it.
    """
    first = run_dir.with_name(f"{run_dir.name}.fork.jsonl")
    try:
        last_name = Path(read_run_json(run_dir)["dataset"]["path"]).name
    except RunDirError:
        return first
    if re.fullmatch(rf"{re.escape(run_dir.name)}\.fork(\.\d+)?\.jsonl", last_name):
        return first.with_name(last_name)
    if not fresh:
        raise ConfigError(
            f"--run_name: {run_dir} is a run of {last_name}, not of branches; use another "
            "--run_name, or --fresh to move it aside"
        )
    return first


def write_forks(
    path: Path,
    records: Iterable[dict[str, Any]],
    *,
    run: str,
    turn: int,
    rules: RowRules,
    fresh: bool,
    left_out: Counter[str] | None = None,
) -> ForkedRows:
    """Write a dataset to `path` with branches of `records` after `turn`.

    `run` is the name of their run, `rules` are its row rules. If `path` has other branches and
    `fresh` is given, that file stays with the run that is moved aside, and the new dataset gets a
    number. `left_out` counts what `records` leave out as they are read. Raises `ConfigError` if no
    record can be forked, or if `path` has other branches and `fresh` is not given.
    """
    forked = ForkedRows(path, left_out=Counter() if left_out is None else left_out)
    rules = replace(rules, with_forks=False)
    make_directory(path.parent, is_inside=False, parents=True)
    temporary = temporary_path(path)
    try:
        with open_temporary(temporary, path) as file:
            for record in records:
                try:
                    row = _make_row(record, run, turn, rules)
                except NotForkable as error:
                    forked.left_out[str(error)] += 1
                else:
                    file.write(exact_json.dumps(row) + b"\n")
                    forked.rows += 1
            file.flush()
            os.fsync(file.fileno())
        if not forked.rows:
            raise ConfigError(
                f"no conversation of {run} to branch from after turn {turn}\n{forked.describe()}"
            )
        for candidate in _candidates(path) if fresh else [path]:
            if not candidate.exists():
                temporary.replace(candidate)
                sync_directory(candidate.parent)
            elif not filecmp.cmp(candidate, temporary, shallow=False):
                continue
            forked.path = candidate
            return forked
        raise ConfigError(
            f"{path}: has the branches of another `fork`; use another --run_name, or --fresh"
        )
    finally:
        temporary.unlink(missing_ok=True)


def _candidates(path: Path) -> Iterable[Path]:
    """File names for the dataset of a run with `fresh`, in order, without end."""
    stem = path.name.rpartition(".fork.")[0] + ".fork"
    yield path.with_name(f"{stem}.jsonl")
    yield from (path.with_name(f"{stem}.{number}.jsonl") for number in count(2))


def _make_row(record: dict[str, Any], run: str, turn: int, rules: RowRules) -> dict[str, Any]:
    """A row: the parent's columns and its conversation so far. Raises `NotForkable`."""
    row = record["row"]
    try:
        opening = rules.read(row).opening
    except ValueError as error:
        raise NotForkable(f"its row cannot be used: {error}") from error
    events = events_until(record, turn, opening=opening)
    parent_fork = row.get(FORK_COLUMN) if "fork" in record else None
    return {
        **row,
        # Ids of this form cannot collide with generated ones.
        "id": f"fork.{record['id']}@{turn}",
        FORK_COLUMN: {
            "run": run,
            "record": record["id"],
            "turn": turn,
            "drawn_as": parent_fork["drawn_as"] if parent_fork else record["id"],
            "inherited": inherited_cost(events),
            "events": events,
        },
    }


class NotForkable(Exception):
    """The conversation cannot continue from that turn; the message says why."""


def events_until(
    record: Mapping[str, Any], turn: int, *, opening: Sequence[Message]
) -> list[Event]:
    """The events of `record` from its opening to the last result of `turn`, in order.

    Replies are marked as inherited. `opening` are the messages of its prompt. Notes after the turn
    are left out, and so are inner conversations: only their results count. Raises `NotForkable` if
    the conversation did not continue after that turn, or if the record does not determine its
    events.
    """
    if "agent" in record:
        raise NotForkable("a run of a command-line agent cannot be forked")
    if turn >= len(record["turns"]):
        raise NotForkable(f"it does not continue after turn {turn}")
    if any(inner["key"].startswith(f"{SUMMARY}#") for inner in record["inner"]):
        raise NotForkable("the model was shown summaries of it")
    messages: list[Message] = record["messages"]
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    replies = replies[-len(record["turns"]) :]  # earlier ones are part of the prompt
    first = replies[0] if replies else 0
    _refuse_user_calls(record, turn)
    if len(replies) < len(record["turns"]) or first == 0:
        raise NotForkable("its record lacks messages of its turns")
    notes = [_to_note(note) for note in record["notes"] if note["turn"] < turn]
    events: list[Event] = []
    begun = _remove_notes(messages[:first], [note for note in notes if note["turn"] == 0])
    if begun != list(opening):
        events.append(OpeningEvent(kind="opening", messages=begun))
    events += [note for note in notes if note["turn"] == 0]
    results = {
        message["tool_call_id"]: message for message in messages if "tool_call_id" in message
    }
    for number in range(1, turn + 1):
        events += [
            _to_reply(discarded) for discarded in record["discarded"] if discarded["turn"] == number
        ]
        message = messages[replies[number - 1]]
        events.append(_to_reply({**record["turns"][number - 1], "message": message}))
        added = [note for note in record["notes"] if note["turn"] == number]
        events += _result_events(record, number, message, results, notes=added)
        events += [note for note in notes if note["turn"] == number]
    _check_events(Trajectory(opening, events), messages, record, turn)
    return events


def _refuse_user_calls(record: Mapping[str, Any], turn: int) -> None:
    """Raise `NotForkable` if the simulated user called tools before the end of `turn`.

    A branch has none of these calls: the workspace would lack what they did.
    """
    sent = sum(note["reason"] == USER_TURN and note["turn"] < turn for note in record["notes"])
    keys = {user_key(number) for number in range(sent + 1)}
    if any(inner["key"] in keys and inner["tool_calls"] for inner in record["inner"]):
        raise NotForkable("its simulated user called tools before that turn")


def inherited_cost(events: Sequence[Event]) -> dict[str, Any]:
    """The cost of the inherited replies of `events`: `api_calls`, `usage`, `cost_usd`."""
    replies: list[Event] = []
    for event in events:
        if event["kind"] == "reply":
            event = event.copy()
            event.pop("inherited", None)
            replies.append(event)
    paid = Trajectory((), replies)
    return {"api_calls": paid.api_calls(), "usage": paid.usage(), "cost_usd": paid.cost_usd()}


def _to_note(fields: Mapping[str, Any]) -> NoteEvent:
    return NoteEvent(
        kind="note",
        turn=fields["turn"],
        reason=fields["reason"],
        text=fields["text"],
        at=fields["at"],
    )


def _to_reply(fields: Mapping[str, Any]) -> ReplyEvent:
    reply: ReplyEvent = {"kind": "reply", **fields, "inherited": True}  # type: ignore[typeddict-item]
    return reply


def _result_events(
    record: Mapping[str, Any],
    turn: int,
    message: Message,
    results: Mapping[str, Message],
    *,
    notes: Sequence[Mapping[str, Any]],
) -> list[ResultEvent]:
    timings = {call["call"]: call for call in record["tool_calls"] if call["turn"] == turn}
    calls = message.get("tool_calls", [])
    if not calls and turn == len(record["turns"]):
        raise NotForkable("it had ended")
    result_events: list[ResultEvent] = []
    for n, call in enumerate(calls):
        result = results.get(call["id"])
        if result is None or n not in timings:
            raise NotForkable(f"a call of turn {turn} has no result")
        if call_failure(result) == "not_run":
            raise NotForkable(f"a call of turn {turn} was not run")
        is_last = n == len(calls) - 1
        result_events.append(
            ResultEvent(
                kind="result",
                turn=turn,
                call=n,
                message=_remove_notes([result], notes)[0] if is_last else result,
                started_at=timings[n]["started_at"],
                duration_s=timings[n]["duration_s"],
            )
        )
    return result_events


def _remove_notes(messages: Sequence[Message], notes: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages without `notes`, which the runtime added to the last of them."""
    *before, last = messages
    if not notes or "notes" not in last:
        return list(messages)
    last = last.copy()
    for note in reversed(notes):
        last["content"] = last["content"].removesuffix("\n\n" + note["text"])
    earlier = last["notes"][: -len(notes)]
    if earlier:
        last["notes"] = earlier
    else:
        del last["notes"]
    return [*before, last]


def _check_events(
    trajectory: Trajectory, messages: Sequence[Message], record: Mapping[str, Any], turn: int
) -> None:
    """The events must give the messages of the record, or the branch would not continue it."""
    if (record["options"] or {}).get("awaiting_input") and any(
        "\n\nUser: " in message["content"]
        for message in trajectory.messages[trajectory.opening_length :]
    ):
        raise NotForkable("a tool asked the user before that turn")
    count = len(trajectory.messages)
    expected = list(messages[:count])
    if trajectory.messages and trajectory.messages[-1]["role"] == "tool":
        after = [note for note in record["notes"] if note["turn"] == turn]
        expected = _remove_notes(expected, after)
    if trajectory.messages != expected:
        raise NotForkable("what happened before that turn cannot be rebuilt from its record")
