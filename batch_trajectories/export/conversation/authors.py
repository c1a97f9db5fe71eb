"""Finds who wrote each message of a conversation: only turns of this run's model are learnt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from msgspec.structs import replace

from agent.messages.message import USER_TURN, user_key
from batch_trajectories.export.conversation.own_work import AuthoredWork, first_reply
from batch_trajectories.export.conversation.turns import Author, Entry, Turn, UserMessage
from batch_trajectories.records.record_types import (
    InnerRecord,
    Record,
    StoredBlocks,
    StoredConversation,
    StoredMessage,
)

_VERSION = re.compile(r"(?:[-@:]v?\d[\w.-]*|[-:](?:latest|preview))*")
"""The suffix, such as a date, that an endpoint adds to the requested name of a model."""


def assign_authors(entries: list[Entry], record: Record, authored: AuthoredWork) -> list[Entry]:
    """Return the entries of a record with their authors."""
    messages, turns = record.messages, record.turns
    retried = retried_turns(record)
    if (
        not authored.prior_replies
        and record.agent is None
        and UserMessage not in map(type, entries[1:])
    ):
        return entries  # most conversations: the prompt, then turns of the model
    # Turns of the prompt come first, then those of a branch's parent.
    prior_replies = first_reply(messages, turns=len(turns))
    prompt_turns = _count_turns(messages, prior_replies)
    prior_turns = _count_turns(messages, authored.start)
    others = other_models(record)
    added = _added_texts(record)
    has_begun = False
    result: list[Entry] = []
    next_reply = len(turns) - len(authored.turns)
    for entry in entries:
        if isinstance(entry, UserMessage):
            if has_begun:
                entry = replace(entry, author=_take_author(entry.text, added))
            result.append(entry)
            continue
        has_begun = entry.number > prompt_turns
        if entry.number <= prior_turns:
            author: Author = "prompt" if entry.number <= prompt_turns else "parent"
            entry = replace(entry, author=author)
        elif entry.number - prompt_turns in retried:
            # An answer that was found wrong and given again: only the last one is to be learnt.
            entry = replace(entry, masked=("wrong_answer",))
        elif others:
            replies = turns[next_reply : next_reply + entry.replies]
            next_reply += entry.replies
            if replies and all(reply.model in others for reply in replies):
                entry = replace(entry, author="other_model")
        result.append(entry)
    return result


def retried_turns(record: Record) -> set[int]:
    """Numbers of the turns whose answer was wrong and was given again (`--expected_attempts`).

    Empty for runs from before `--expected_match`, so that their rows stay as they are.
    """
    if "expected_match" not in (record.options or {}):
        return set()
    return {note.turn for note in record.notes if note.reason == "expected"}


def mark_context(
    entries: list[Entry], part: StoredConversation, authored: AuthoredWork
) -> list[Entry]:
    """The entries of an inner conversation, with earlier turns marked as context.

    Earlier turns are those before the conversation's first model call: an agent may have written
    them itself, or repeats them after a compaction.
    """
    prior_turns = _count_turns(part.messages, authored.start) if authored.prior_replies else 0
    return [
        replace(entry, author="context")
        if isinstance(entry, Turn) and entry.number <= prior_turns
        else entry
        for entry in entries
    ]


def _take_author(text: str, added: list[tuple[str, Author]]) -> Author:
    """Take the added text with which a user message begins out of `added`; return its author.

    Texts before it are removed, too. Return `prompt` if the message begins with no added text.
    """
    for n, (beginning, author) in enumerate(added, start=1):
        if text.startswith(beginning):
            # Texts before this one were appended to other messages, whose authors stay.
            del added[:n]
            return author
    return "prompt"


def _added_texts(record: Record) -> list[tuple[str, Author]]:
    """The texts that were added on the user's side after the prompt, in order, with authors."""
    simulated = {inner.key for inner in record.inner}
    added: list[tuple[str, Author]] = []
    user_turns = 0
    for note in record.notes:
        if note.text is None:
            continue
        if note.reason == USER_TURN:
            user_turns += 1
            is_simulated = user_key(user_turns) in simulated
            added.append((note.text, "simulated_user" if is_simulated else "prompt"))
        else:
            added.append((note.text, "runtime"))
    return added


def _count_turns(messages: Sequence[StoredMessage], start: int) -> int:
    """The number of turns that end before the reply at `start`.

    A turn that this reply continues is not counted.
    """
    opening = [message.role for message in messages[: start + 1]]
    turns = [role for role, _ in groupby(opening) if role == "assistant"]
    return max(0, len(turns) - 1)


def other_models(record: Record, *, with_inner: bool = False) -> frozenset[str]:
    """The names of models in an agent's conversation that are not this run's model.

    An agent that runs as a command may call several models. Empty if no name is that of the run's
    model: then the endpoint names models differently. `with_inner`: include the agent's other
    conversations.
    """
    if not is_agent_conversation(record):
        return frozenset()
    parts = [record, *record.inner] if with_inner else [record]
    names = {turn.model for part in parts for turn in part.turns if turn.model is not None}
    model = record.model or ""
    model_name = model.partition(":")[2] or model
    model_name = model_name.rpartition("/")[2]
    same_model = {name for name in names if _is_model_version(name.rpartition("/")[2], model_name)}
    return frozenset(names - same_model) if same_model else frozenset()


def _is_model_version(name: str, model_name: str) -> bool:
    return name.startswith(model_name) and _VERSION.fullmatch(name, len(model_name)) is not None


_THREAD = "thread#"

_Part = TypeVar("_Part", bound=StoredConversation)


def is_agent_conversation(part: StoredConversation) -> bool:
    """Whether a record or inner conversation comes from an agent that runs as a command."""
    if isinstance(part, Record):
        return part.agent is not None
    return isinstance(part, InnerRecord) and part.key.startswith(_THREAD)


def ends_with_call(record: Record) -> bool:
    """Whether an agent's conversation ends with a call, whose result no model has seen."""
    last = record.messages[-1]
    return is_agent_conversation(record) and last.role == "assistant" and bool(last.tool_calls)


def order_messages(part: _Part) -> _Part:
    """Put the messages of an agent's conversation in order; any other one is returned as it is.

    Agents that run as commands write several messages in a row: reminders after results, several
    messages before the first reply, system messages in the middle. Trainers expect system, user,
    assistant, results, and so on. A message out of order is appended to the one before it, where
    the model read it; `OWN_CHARS` of a result says where the tool's own text ends.
    """
    return (
        replace(part, messages=merge_messages(part.messages))
        if is_agent_conversation(part)
        else part
    )


def merge_messages(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """Append user and system messages to the message before, unless they may follow it."""
    merged: list[StoredMessage] = []
    for message in messages:
        role, before = message.role, merged[-1].role if merged else "system"
        if role in ("assistant", "tool") or (before == "system" and role in ("system", "user")):
            merged.append(message)
        elif before in ("user", "tool"):
            earlier = merged[-1]
            own_chars = earlier.own_chars
            if before == "tool" and own_chars is None:
                own_chars = len(earlier.content)
            merged[-1] = replace(
                earlier,
                content=f"{earlier.content}\n\n{message.content}",
                own_chars=own_chars,
                provider_blocks=_join_blocks(earlier, message),
            )
        else:
            merged.append(replace(message, role="user"))
    return merged


def _join_blocks(earlier: StoredMessage, message: StoredMessage) -> StoredBlocks | None:
    if (added := message.provider_blocks) is None:
        return earlier.provider_blocks
    known = earlier.provider_blocks or StoredBlocks()
    return replace(known, blocks=[*known.blocks, *added.blocks])
