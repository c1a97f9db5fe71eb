"""Options for rendering conversations, the same for all formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from batch_trajectories.basics.text import clip
from batch_trajectories.export.conversation.tolerance import STRICT, Tolerance
from batch_trajectories.export.conversation.turns import (
    Call,
    Conversation,
    Entry,
    Result,
    Turn,
    UserMessage,
)

ReasoningStyle = Literal["inline", "field", "last", "none", "since_user"]
REASONING_KEY: Final = "reasoning_content"
ReasoningKey = Literal["reasoning_content", "reasoning", "thinking"]
CallStyle = Literal["keep", "split"]
SystemStyle = Literal["saved", "omit"]
EmptyThink = Literal["keep", "omit", "text"]
CallText = Literal["keep", "reasoning"]
Arguments = Literal["objects", "text"]
ToolsForm = Literal["text", "list"]


class Style(msgspec.Struct, frozen=True):
    """Options for rendering conversations; None: each format has its default."""

    reasoning: ReasoningStyle | None = None
    """The place of reasoning: inline, in a field, kept for the last turn only, or nowhere.

    `since_user` is for segments: the format's default place, but only reasoning since the last user
    message of a request."""
    parallel_calls: CallStyle = "keep"
    """Whether a turn with several calls is kept, or split into one turn per call."""
    system: SystemStyle | None = None
    """Whether the system prompt that the model saw is included."""
    empty_think: EmptyThink = "keep"
    """Whether turns without reasoning begin with an empty think block in `hermes`; `text`: also in
    formats with messages."""
    max_tool_chars: int | None = None
    """Maximum characters of a tool result; the middle of longer results is cut out."""
    tools: ToolsForm | None = None
    """Whether formats with messages hold tools as JSON text or as a list."""
    reward_name: str | None = None
    """The reward that counts; None: the one named `reward`, else the first."""
    tolerance: Tolerance = STRICT
    """Which flaws of a conversation are accepted."""
    require_reasoning: bool = False
    """Whether completed conversations need reasoning in words to be in a run's training file."""
    require_passed: bool = False
    """Whether conversations that did not pass their check are left out of the training file."""

    reasoning_key: ReasoningKey = REASONING_KEY
    """The key of reasoning in messages."""
    call_text: CallText = "keep"
    """Whether text beside calls joins the reasoning in messages."""
    arguments: Arguments = "objects"
    """Whether messages hold the arguments of calls as objects, or as the JSON text of one."""

    def with_reasoning(self, reasoning: ReasoningStyle | None) -> Style:
        """A copy of this style with another choice for reasoning."""
        return replace(self, reasoning=reasoning)

    def with_calls(self, calls: CallStyle) -> Style:
        """A copy of this style with another choice for parallel calls."""
        return replace(self, parallel_calls=calls)

    def is_inline(self, *, by_default: bool) -> bool:
        """Whether reasoning is inline, in a format that allows both."""
        return self.reasoning == "inline" or (self.reasoning != "field" and by_default)

    def has_system(self, *, by_default: bool) -> bool:
        """Whether the system prompt is included."""
        return by_default if self.system is None else self.system == "saved"


def apply_style(conversation: Conversation, style: Style) -> Conversation:
    """Apply a style to the reasoning, calls and results of a conversation."""
    entries = conversation.entries
    if style.max_tool_chars is not None:
        entries = [_cut_results(entry, style.max_tool_chars) for entry in entries]
        if cut := sum(map(_count_cut_results, conversation.entries, entries)):
            metadata = {**conversation.metadata, "cut_by_export": cut}
            conversation = msgspec.structs.replace(conversation, metadata=metadata)
    if style.reasoning in ("last", "none"):
        keeps_last = style.reasoning == "last"
        last = max(n for n, entry in enumerate(entries) if isinstance(entry, Turn))
        entries = [
            msgspec.structs.replace(entry, reasoning="")
            if isinstance(entry, Turn) and not (keeps_last and n == last)
            else entry
            for n, entry in enumerate(entries)
        ]
    if style.parallel_calls == "split":
        entries = [part for entry in entries for part in _split_calls(entry)]
    if entries is conversation.entries:
        return conversation
    return msgspec.structs.replace(conversation, entries=entries)


def _cut_results(entry: Entry, max_chars: int) -> Entry:
    if isinstance(entry, UserMessage) or all(len(r.content) <= max_chars for r in entry.results):
        return entry
    short = [
        msgspec.structs.replace(r, content=clip(r.content, max_chars=max_chars))
        for r in entry.results
    ]
    return msgspec.structs.replace(entry, results=short)


def _count_cut_results(entry: Entry, short: Entry) -> int:
    if isinstance(entry, UserMessage) or isinstance(short, UserMessage) or entry is short:
        return 0
    return sum(
        now.content != before.content
        for before, now in zip(entry.results, short.results, strict=True)
    )


def _split_calls(entry: Entry) -> Sequence[Entry]:
    """Divide a turn into one turn per call; calls without results share a turn.

    The first turn keeps reasoning and text.
    """
    if isinstance(entry, UserMessage) or len(entry.calls) < 2 or not entry.results:
        return [entry]
    results = {result.id: result for result in entry.results}
    steps: list[tuple[list[Call], list[Result]]] = [
        ([call], [results[call.id]]) for call in entry.calls if call.id in results
    ]
    if unanswered := [call for call in entry.calls if call.id not in results]:
        steps.append((unanswered, []))
    first, *rest = [
        msgspec.structs.replace(entry, calls=calls, results=got) for calls, got in steps
    ]
    return [first, *(msgspec.structs.replace(turn, reasoning="", text="") for turn in rest)]
