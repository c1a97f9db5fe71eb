"""A conversation that was read from a source, and the record that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from agent.messages.message import Message, Usage
from agent.models.usage import count_or_none
from agent.state.tally import sum_cost, sum_usage
from agent.wires.reading import CallsInOrder, function_tool
from agent.wires.wire import WireError
from agent.wires.wires import WIRES
from batch_trajectories.basics.text import clip
from batch_trajectories.records.tasks import SCHEMA_VERSION, Task

_EXCERPT_CHARS = 60

PartKinds = Mapping[str, frozenset[str] | None]
"""Types of the parts of a message, and the keys of each beside `type`. None: any key but `text`,
because a record keeps the whole part."""


class Unreadable(ValueError):
    """A conversation cannot be read. The message begins with the field that is wrong, if one is."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """The line of the file; None for the line of the conversation."""
        self.is_damaged = False
        """Whether the file, or the rest of it, cannot be read."""


def is_blank(value: Any) -> bool:
    """Whether a value is empty, like null in tables in which all rows have the same keys."""
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
    """Raise `Unreadable` for an unknown key whose value is not empty.

    With `only_text`, numbers, true and false count as empty.
    """
    says_nothing = _has_no_text if only_text else is_blank
    for key, one in value.items():
        if key not in known and not says_nothing(one):
            where = f"{place}.{key}" if place else key
            raise Unreadable(
                f"{where}: it is unknown: {clip(repr(one), max_chars=_EXCERPT_CHARS)}", line
            )


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
    """Messages, and facts about the replies that the model wrote.

    The replies are the last assistant messages; earlier ones came with the prompt.
    """

    messages: list[Message]
    replies: list[dict[str, Any]]
    """The keys of a record's turn for each reply; missing keys are unknown."""
    name: str = ""
    """The kind of conversation inside another one; "" for the outermost."""
    key: str = ""
    inner: list[Dialogue] = field(default_factory=list)
    no_loss: list[int] = field(default_factory=list)
    """The numbers of the replies, from 1, that carry no loss."""
    cut: list[int] = field(default_factory=list)
    """The numbers of the replies, from 1, that were cut off; they carry no loss either."""
    sums: Mapping[str, Any] = field(default_factory=dict)
    """`usage` and `cost_usd` of all calls, as far as the source has them."""

    def to_record(self, at: float) -> dict[str, Any]:
        """Return its part of a record; `at` (epoch seconds) replaces unknown times."""
        turns, runs = self._turns_and_runs(at)
        inner = [
            {"key": one.key, "name": one.name, **one.to_record(at), "tools": tools_called(one)}
            for one in self.inner
        ]
        paid = self._list_replies()
        return {
            "messages": self.messages,
            "turns": turns,
            "tool_calls": runs,
            "notes": [],
            "discarded": [],
            "inner": inner,
            "resumes": [],
            "api_calls": len(paid),
            "usage": sum_usage(paid),
            "cost_usd": sum_cost(paid),
            **self.sums,
            "model_returned": next((turn["model"] for turn in turns[::-1] if turn["model"]), None),
        }

    def _list_replies(self) -> list[Any]:
        """Return the replies of this and all inner conversations; unknown usage is None."""
        own = [{"usage": None, "cost_usd": None, **reply} for reply in self.replies]
        return [*own, *(reply for inner in self.inner for reply in inner._list_replies())]

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
class SourceConversation:
    """A conversation of a source, with the facts for its record."""

    conversation: Dialogue
    api: str
    """The dialect of the messages, or the format."""
    id: str | None = None
    """The id in the source; None without one."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools on offer; None if they are unknown."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns to filter by, as in a dataset."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the record that replace those computed from the messages."""
    imported: Mapping[str, Any] = field(default_factory=dict)
    """Facts for which a record has no other place."""
    agent: Mapping[str, Any] | None = None
    """Name and version of the agent that made the calls; None without one."""
    problems: Sequence[Unreadable] = ()
    """The errors of parts that were left out."""

    def prompt(self) -> str:
        """Return the first message of a user. Raises `Unreadable`."""
        for message in self.conversation.messages:
            if message["role"] == "user" and message["content"].strip():
                return message["content"]
        raise Unreadable("no message of a user")

    def record(
        self, task: Task, digest: str, at: float, place: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Make the record of a task.

        `place` tells where the conversation was read, `at` when the source was written.
        """
        messages, content = self.conversation.messages, self.conversation.to_record(at)
        last = messages[-1]
        is_cut = len(self.conversation.replies) in self.conversation.cut
        is_answered = (
            last["role"] == "assistant"
            and not is_cut
            and (self.agent is not None or not last.get("tool_calls"))
        )
        imported = {**place, **self.imported}
        if masked := self.conversation.no_loss + self.conversation.cut:
            imported["no_loss"] = masked
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
            **self._agent_facts(content),
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

    def _agent_facts(self, content: Mapping[str, Any]) -> dict[str, Any]:
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
    """An object of a file, with the number of its line or row."""

    number: int
    content: Mapping[str, Any]

    def time(self) -> float:
        """Return its `timestamp`, epoch seconds. Raises `Unreadable`."""
        return parse_time(self.content.get("timestamp"), "timestamp", self.number)


class Reader(NamedTuple):
    """The reader of a format in which a row (`row`) or a file (`session`) is a conversation."""

    recognizes: Callable[[Mapping[str, Any]], bool]
    """Whether an object of a file is of this format."""
    row: Callable[[Mapping[str, Any]], SourceConversation] | None = None
    """Reads a row. Raises `Unreadable`."""
    session: Callable[[Path, Sequence[SourceRow]], SourceConversation] | None = None
    """Reads a file, and other files that belong to it. Raises `Unreadable`."""
    is_part: Callable[[Path, Sequence[SourceRow]], bool] | None = None
    """Whether a file is read together with another one; gets the file's first rows."""


def read_messages(api: str, items: Iterable[tuple[int | None, str, Any]]) -> list[list[Message]]:
    """Read the messages of each item of a conversation, as a gateway records them.

    An item has a line, a place for errors, and content in the dialect `api`. Raises `Unreadable`.
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
    """Read the schemas of tools in the form of a dialect. Raises `Unreadable`."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unreadable("tools: it must be a list of objects")
    read = [WIRES[api].layout.read_tool(tool) for tool in tools]
    return [schema for one in read if not isinstance(one, str) for schema in one]


def parse_time(text: Any, place: str, line: int | None = None) -> float:
    """Convert ISO 8601 to epoch seconds; without a zone, in UTC. Raises `Unreadable`."""
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError) as error:
        raise Unreadable(f"{place}: {error}", line) from error


def tools_called(conversation: Dialogue) -> list[dict[str, Any]]:
    """Make schemas of the tools that were called; their arguments are unknown."""
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    return [
        function_tool(name, "", None) for name in sorted({c["function"]["name"] for c in calls})
    ]


def usage(
    given: Any, made: Any, cached: Any, *, written: Any = None, reasoned: Any = None
) -> Usage:
    """Make the usage of a call; a value that is no count is unknown.

    `given` are input tokens, `made` output tokens, `cached` and `written` input tokens read from
    and written to a cache, `reasoned` reasoning tokens.
    """
    return Usage(
        input_tokens=count_or_none(given),
        output_tokens=count_or_none(made),
        cache_read_tokens=count_or_none(cached),
        cache_write_tokens=count_or_none(written),
        reasoning_tokens=count_or_none(reasoned),
    )


def facts_in_metadata(metadata: Any) -> dict[str, Any]:
    """Read the keys of a record from the metadata of a row that this program exported."""
    # Rewards go under `check`, so that filters find them.
    if not isinstance(metadata, dict) or "config_digest" not in metadata:
        return {}
    known = {key: metadata[key] for key in _METADATA_FACTS if metadata.get(key) is not None}
    rewards = {
        key: metadata[key] for key in ("reward", "rewards", "turn_rewards") if key in metadata
    }
    return known | ({"check": rewards} if rewards else {})


_METADATA_FACTS = (
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
