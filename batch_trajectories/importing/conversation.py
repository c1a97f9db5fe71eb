"""What a source holds as a conversation, and the record that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from agent.messages.message import Message, Usage
from agent.models.usage import count_or_none
from agent.state.tally import cost_of, usage_of
from agent.wires.reading import CallsInOrder, function_tool
from agent.wires.wire import WireError
from agent.wires.wires import WIRES
from batch_trajectories.basics.text import clip
from batch_trajectories.records.tasks import SCHEMA_VERSION, Task

_SHOWN = 60

PartKinds = Mapping[str, frozenset[str] | None]
"""Types of the parts of a message, and what a part of each has beside its type. None: anything but
a text, because a record keeps the whole part."""


class Unreadable(ValueError):
    """What is wrong with a conversation; begins with the field, if one is wrong."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """The line of its file; None where that of the conversation is meant."""
        self.is_damaged = False
        """The file, or the rest of it, cannot be read."""


def is_blank(value: Any) -> bool:
    """Whether a value says nothing, as null does in tables where all rows have the same keys."""
    if isinstance(value, dict):
        return all(map(is_blank, value.values()))
    return value is None or value == "" or value == []


def refuse_unknown(
    value: Mapping[str, Any],
    known: Container[str],
    place: str,
    line: int | None = None,
    *,
    only_text: bool = False,
) -> None:
    """Raise `Unreadable` for a key that is not known and says something.

    `only_text`: numbers, true and false under such a key say nothing.
    """
    says_nothing = _has_no_text if only_text else is_blank
    for key, one in value.items():
        if key not in known and not says_nothing(one):
            where = f"{place}.{key}" if place else key
            raise Unreadable(f"{where}: it is unknown: {clip(repr(one), max_chars=_SHOWN)}", line)


def _has_no_text(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_has_no_text, value.values()))
    if isinstance(value, list):
        return all(map(_has_no_text, value))
    return not isinstance(value, str) or not value


def check_parts(content: Any, kinds: PartKinds, place: str, line: int | None = None) -> None:
    """Raise `Unreadable` for content that is neither text nor a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise Unreadable(f"{place}: it must be text or a list of parts", line)
    for n, part in enumerate(content):
        where = f"{place}[{n}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise Unreadable(f"{where}: a part of type {kind!r}; known: {known}", line)
        if (fields := kinds[kind]) is not None:
            refuse_unknown(part, {"type", *fields}, where, line)
            if "text" in fields and not isinstance(part.get("text"), str):
                raise Unreadable(f"{where}.text: it must be text", line)
        elif part.get("text") is not None:
            raise Unreadable(f"{where}.text: it is unknown in a part of type {kind!r}", line)


@dataclass(slots=True)
class Dialogue:
    """Messages, and what is known of the replies that the model wrote: those of the last assistant
    messages; earlier ones came with the prompt."""

    messages: list[Message]
    replies: list[dict[str, Any]]
    """Keys of a turn of a record; what is missing is unknown."""
    name: str = ""
    """What it is, if it is inside another one."""
    key: str = ""
    inner: list[Dialogue] = field(default_factory=list)
    no_loss: list[int] = field(default_factory=list)
    """Numbers of the replies, from 1, that nobody is to learn."""
    cut: list[int] = field(default_factory=list)
    """Numbers of the replies, from 1, that were cut off; nobody is to learn them either."""
    sums: Mapping[str, Any] = field(default_factory=dict)
    """`usage` and `cost_usd` of all calls, where the source has them."""

    def stored(self, at: float) -> dict[str, Any]:
        """Its part of a record; `at` (epoch seconds) stands for times that are unknown."""
        turns, runs = self._turns_and_runs(at)
        inner = [
            {"key": one.key, "name": one.name, **one.stored(at), "tools": tools_called(one)}
            for one in self.inner
        ]
        paid = self._paid()
        return {
            "messages": self.messages,
            "turns": turns,
            "tool_calls": runs,
            "notes": [],
            "discarded": [],
            "inner": inner,
            "resumes": [],
            "api_calls": len(paid),
            "usage": usage_of(paid),
            "cost_usd": cost_of(paid),
            **self.sums,
            "model_returned": next((turn["model"] for turn in turns[::-1] if turn["model"]), None),
        }

    def _paid(self) -> list[Any]:
        """The replies of this and all inner conversations, as far as they are known."""
        own = [{"usage": None, "cost_usd": None, **reply} for reply in self.replies]
        return [*own, *(reply for inner in self.inner for reply in inner._paid())]

    def _turns_and_runs(self, at: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        turns: list[dict[str, Any]] = []
        runs: list[dict[str, Any]] = []
        places: dict[str, int] = {}
        left = sum(message["role"] == "assistant" for message in self.messages)
        for message in self.messages:
            if message["role"] == "assistant":
                calls = message.get("tool_calls", [])
                places = {call["id"]: n for n, call in enumerate(calls)}
                if left <= len(self.replies):
                    turns.append(
                        {
                            "turn": len(turns) + 1,
                            "finish_reason": "tool_calls" if calls else "stop",
                            "usage": None,
                            "cost_usd": None,
                            "model": None,
                            "response_id": None,
                            "started_at": at,
                            "duration_s": 0.0,
                            **self.replies[-left],
                        }
                    )
                left -= 1
            elif message["role"] == "tool" and turns and message["tool_call_id"] in places:
                runs.append(
                    {
                        "turn": len(turns),
                        "call": places.pop(message["tool_call_id"]),
                        "name": message["name"],
                        "is_error": message["is_error"],
                        "started_at": turns[-1]["started_at"],
                        "duration_s": None,
                    }
                )
        return turns, runs


@dataclass(slots=True)
class Foreign:
    """A conversation of a source, with what its record says of it."""

    conversation: Dialogue
    api: str
    """The dialect of its messages, or the format."""
    id: str | None = None
    """None: it has none of its own."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """None: what was on offer is unknown."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """For filters, as the columns of a dataset."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a record that replace those that follow from the messages."""
    imported: Mapping[str, Any] = field(default_factory=dict)
    """What a record has no other place for."""
    agent: Mapping[str, Any] | None = None
    """Name and version of the agent that made the calls, if one did."""
    problems: Sequence[Unreadable] = ()
    """Of parts that were left out."""

    def prompt(self) -> str:
        """The first message of a user. Raises `Unreadable`."""
        for message in self.conversation.messages:
            if message["role"] == "user" and message["content"].strip():
                return message["content"]
        raise Unreadable("no message of a user")

    def record(
        self, task: Task, digest: str, at: float, place: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The record of its task; `place` says where it was read, `at` when that was written."""
        messages, content = self.conversation.messages, self.conversation.stored(at)
        last = messages[-1]
        is_cut = len(self.conversation.replies) in self.conversation.cut
        is_answered = (
            last["role"] == "assistant"
            and not is_cut
            and (self.agent is not None or not last.get("tool_calls"))
        )
        imported = {**place, **self.imported}
        if quiet := self.conversation.no_loss + self.conversation.cut:
            imported["no_loss"] = quiet
        tools = self.tools
        if tools is None:
            tools, imported["tools_called"] = tools_called(self.conversation), True
        reason = None if is_answered else "its source ends without an answer"
        return {
            "id": task.id,
            "status": "completed" if is_answered else "cancelled",
            "status_reason": reason,
            "error": None,
            "prompt_id": task.prompt_id,
            "sample": task.sample,
            "input_digest": task.input_digest,
            "attempt": 1,
            "row": task.columns,
            **content,
            **self._of_agent(content),
            "check": None,
            "tools": tools,
            "options": {},
            "view_compacted": False,
            "model": content["model_returned"],
            "api": self.api,
            "endpoint": None,
            "toolsets": [],
            "sandbox": None,
            "seed": None,
            "config_digest": digest,
            "versions": {},
            "finished_at": content["turns"][-1]["started_at"] if content["turns"] else at,
            **self.facts,
            "imported": imported,
            "schema_version": SCHEMA_VERSION,
        }

    def _of_agent(self, content: Mapping[str, Any]) -> dict[str, Any]:
        if self.agent is None:
            return {}
        parts = [{"key": "thread#0", "name": "main", **content}, *content["inner"]]
        threads = [
            {
                "key": part["key"],
                "name": part["name"],
                "calls": len(part["turns"]),
                "model": part["model_returned"],
            }
            for part in parts
        ]
        return {"agent": {"starts": 1, **self.agent}, "threads": threads}


class SourceRow(NamedTuple):
    """An object of a file: its line, or its number where the file has no lines."""

    number: int
    content: Mapping[str, Any]

    def time(self) -> float:
        """Its `timestamp`, epoch seconds. Raises `Unreadable`."""
        return time_of(self.content.get("timestamp"), "timestamp", self.number)


class Reader(NamedTuple):
    """A format. A row of it is a conversation, or else a whole file is: `session`."""

    recognizes: Callable[[Mapping[str, Any]], bool]
    """Whether an object of a file is of this format."""
    row: Callable[[Mapping[str, Any]], Foreign] | None = None
    """Raises `Unreadable`."""
    session: Callable[[Path, Sequence[SourceRow]], Foreign] | None = None
    """Reads a file, and others that belong to it. Raises `Unreadable`."""
    is_part: Callable[[Path, Sequence[SourceRow]], bool] | None = None
    """Whether a file, of which these are the first rows, is read with another one."""


def read_messages(api: str, items: Iterable[tuple[int | None, str, Any]]) -> list[list[Message]]:
    """The messages of each item of a conversation in this dialect, as a gateway records them.

    An item has its line, its place for errors, and its content. Raises `Unreadable`.
    """
    layout = WIRES[api].layout
    calls = CallsInOrder()
    found = []
    for line, place, item in items:
        try:
            messages = layout.read_part(item, calls)
        except WireError as error:
            raise Unreadable(f"{place}: {error}", line) from error
        for message in messages:
            calls.add(message.get("tool_calls", ()))
        found.append(messages)
    return found


def read_tools(api: str, tools: Any) -> list[dict[str, Any]]:
    """The schemas of tools in the form of a dialect. Raises `Unreadable`."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unreadable("tools: it must be a list of objects")
    read = [WIRES[api].layout.read_tool(tool) for tool in tools]
    return [schema for one in read if not isinstance(one, str) for schema in one]


def time_of(text: Any, place: str, line: int | None = None) -> float:
    """Epoch seconds of a time in ISO 8601, in UTC if it names no zone. Raises `Unreadable`."""
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError) as error:
        raise Unreadable(f"{place}: {error}", line) from error


def tools_called(conversation: Dialogue) -> list[dict[str, Any]]:
    """Tools that were called, in the form of those on offer; their arguments are unknown."""
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    return [
        function_tool(name, "", None) for name in sorted({c["function"]["name"] for c in calls})
    ]


def usage(
    given: Any, made: Any, cached: Any, *, written: Any = None, reasoned: Any = None
) -> Usage:
    """Tokens of a call: of input with and output, of the input's from a cache and written to one,
    and of reasoning; what is no count is unknown."""
    return Usage(
        input_tokens=count_or_none(given),
        output_tokens=count_or_none(made),
        cache_read_tokens=count_or_none(cached),
        cache_write_tokens=count_or_none(written),
        reasoning_tokens=count_or_none(reasoned),
    )


def of_metadata(metadata: Any) -> dict[str, Any]:
    """Keys of a record, from what this program writes of it as the metadata of a row.

    Rewards are those of a check, so that filters find them.
    """
    if not isinstance(metadata, dict) or "config_digest" not in metadata:
        return {}
    known = {key: metadata[key] for key in _OF_METADATA if metadata.get(key) is not None}
    rewards = {
        key: metadata[key] for key in ("reward", "rewards", "turn_rewards") if key in metadata
    }
    return known | ({"check": rewards} if rewards else {})


_OF_METADATA = (
    "status",
    "status_reason",
    "prompt_id",
    "sample",
    "model",
    "model_returned",
    "api",
    "toolsets",
    "sandbox",
    "seed",
    "usage",
)
