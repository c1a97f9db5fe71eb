"""A conversation as formats render it, with its parts: user messages, turns, calls, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from agent.state.final_answer import RESERVED_TOOLS
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.tolerance import Flaw
from batch_trajectories.records.record_types import Record, StoredTurn, Tools

Author = Literal["model", "other_model", "prompt", "parent", "context", "simulated_user", "runtime"]
"""Who wrote a message. Results of calls have no author: tools write them.

- `model`: this run's model; `other_model`: another model that an agent called
- `prompt`: the row; `parent`: the parent conversation of a branch
- `context`: anyone, in a turn that is only context in its row
- `simulated_user`: the model that plays the user; `runtime`: a note of the runtime
"""


# Objects of these types form no cycles, so the garbage collector need not track them (`gc=False`).


class Call(msgspec.Struct, frozen=True, gc=False):
    """One tool call; `arguments` is the JSON text of an object, `value` that object.

    If the model wrote no object (a flaw), `arguments` is a JSON string of what it wrote and `value`
    is empty.
    """

    id: str
    name: str
    arguments: str
    value: Mapping[str, Any]


class Result(msgspec.Struct, frozen=True, gc=False):
    """The result of a call, as text."""

    id: str
    name: str
    content: str
    is_error: bool
    own_chars: int | None = None
    """The length of the tool's own text if other text follows it, of user or system; else None."""


class UserMessage(msgspec.Struct, frozen=True, gc=False):
    """A message on the user's side: from the row, a simulated user or the runtime."""

    text: str
    author: Author = "prompt"


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One assistant turn with the results of its calls, in the order of the calls."""

    number: int
    """Counted from 1 over all turns, including those of the prompt."""
    reasoning: str
    text: str
    calls: Sequence[Call] = ()
    results: Sequence[Result] = ()
    replies: int = 1
    """Number of replies: several if the provider paused; 0 for a final answer that was part of a
    reply with calls."""
    author: Author = "model"
    hides_reasoning: bool = False
    """Whether the model reasoned, but the API hides the reasoning."""
    masked: tuple[str, ...] = ()
    """The reasons why the turn carries no loss although this run's model wrote it."""

    @property
    def is_prior(self) -> bool:
        """Whether the turn is from before this run's first model call."""
        return self.author in ("prompt", "parent", "context")

    @property
    def has_loss(self) -> bool:
        """Whether trainers are to learn the turn."""
        return self.author == "model" and not self.masked


Entry = UserMessage | Turn
"""A user message or an assistant turn."""


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The content of a record, from which rows of any format are rendered."""

    system: str
    """The system prompt that the model saw, "" without one."""
    entries: Sequence[Entry]
    tools: Tools
    completed: bool
    record: Record
    authored: AuthoredWork
    metadata: Mapping[str, Any]
    num_tool_calls: int
    flaws: Sequence[Flaw] = ()
    """Flaws that not every format accepts."""
    has_other_authors: bool = False
    """Whether any turn has another author than this run's model."""
    is_for_turn: bool = False
    """Whether the row is for the last turn only; all earlier entries are its context."""

    @property
    def num_turns(self) -> int:
        """Number of replies of this run's model; 1 in a row for a single turn."""
        return 1 if self.is_for_turn else len(self.authored.turns)

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that this run paid for; in a row for a single turn only this one."""
        if self.is_for_turn and isinstance(last := self.entries[-1], Turn):
            return [last]
        turns = [entry for entry in self.entries if isinstance(entry, Turn)]
        return [turn for turn in turns if not turn.is_prior] if self.has_other_authors else turns

    @property
    def others(self) -> Counter[str]:
        """The number of turns by each author other than this run's model."""
        if not self.has_other_authors:
            return Counter()
        authors = [entry.author for entry in self.entries if isinstance(entry, Turn)]
        return Counter(author for author in authors if author != "model")

    @property
    def replies_by_turn(self) -> dict[int, list[StoredTurn]]:
        """The replies of each turn that this run paid for, by the number of the turn.

        A turn has several replies if the provider paused it.
        """
        left = list(self.authored.turns)
        by_turn = {}
        for turn in reversed(self.own_turns):
            if count := min(turn.replies, len(left)):
                by_turn[turn.number] = left[-count:]
                del left[-count:]
        return by_turn


def has_null_arguments(conversation: Conversation) -> bool:
    """Whether a call has an argument that is null, at any depth."""
    return any(
        "null" in call.arguments and _has_null(call.value)
        for entry in conversation.entries
        if isinstance(entry, Turn)
        for call in entry.calls
    )


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))


# Values computed once per list of tools, which many conversations share.
#
# Records that are read together hold the same list if they were offered the same tools.

T = TypeVar("T")

_MAX_LISTS = 64
_cache: dict[tuple[int, Callable[[Any], Any]], tuple[Tools, Any]] = {}
"""Lists of tools with the computed values. A reference to the list keeps its `id` in use."""


def compute_once(tools: Tools, make: Callable[[Tools], T]) -> T:
    """The value of `make(tools)`, computed once for each list object."""
    key = id(tools), make
    known = _cache.get(key)
    if known is None:
        if len(_cache) >= _MAX_LISTS:
            _cache.clear()
        known = _cache[key] = tools, make(tools)
    value: T = known[1]
    return value


def tool_names(tools: Tools) -> frozenset[str]:
    """The names of tools."""
    return compute_once(tools, _read_names)


def remove_reserved(tools: Tools) -> Tools:
    """The tools that do not end a conversation; `tools` itself if no tool does."""
    return compute_once(tools, _remove_reserved)


def _read_names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


def _remove_reserved(tools: Tools) -> Tools:
    others = [tool for tool in tools if tool["function"]["name"] not in RESERVED_TOOLS]
    return others if len(others) < len(tools) else tools
