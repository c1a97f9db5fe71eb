"""Compares the samples of one prompt, for preference data.

Messages are those of `messages.py`. The prompt is everything before the first turn of this run's
model; for branches of a conversation, their shared beginning.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.turns import Conversation, Turn, UserMessage
from batch_trajectories.export.conversation.validity import Reason, Rejected, Rejection
from batch_trajectories.export.rows.files import Candidate, CandidateFiles, Export
from batch_trajectories.export.rows.messages import render_messages, tools_column
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.record_types import Tools


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation with its reward, as prompt and completion."""

    candidate: Candidate
    conversation: Conversation
    """The conversation in the style of the recipe."""
    prompt: Sequence[dict[str, Any]]
    completion: Sequence[dict[str, Any]]
    tools: str | Tools
    reward: float | None
    """The reward; None is possible only if labels decide."""

    @property
    def id(self) -> str:
        """The id of the record."""
        return self.conversation.record.id


def make_sample(candidate: Candidate, style: Style, *, needs_reward: bool = True) -> Sample:
    """Make a sample of a conversation. Raises Rejected if it has no reward but needs one."""
    conversation = apply_style(candidate.parsed, style)
    name = style.reward_name
    _, reward, error = judge_record(conversation.record, name)
    if error is not None and needs_reward:
        raise Rejected(Reason.CHECK_FAILED, f"its check gave no result: {error}")
    if reward is None and needs_reward:
        which = "" if name is None else f": it has no reward named {name!r}"
        raise Rejected(Reason.NO_REWARD, f"nothing judged this conversation{which}")
    messages = render_messages(conversation, style)
    own_messages = sum(
        1 + len(entry.results)
        for entry in conversation.entries
        if isinstance(entry, Turn) and not entry.is_prior
    )
    # The completion is everything from the first turn of this run's model on, with user messages.
    first = next(
        n
        for n, entry in enumerate(conversation.entries)
        if isinstance(entry, Turn) and not entry.is_prior
    )
    later_entries = conversation.entries[first:]
    user_messages = sum(isinstance(entry, UserMessage) for entry in later_entries)
    completion_start = len(messages) - own_messages - user_messages
    tools = tools_column(conversation, style)
    return Sample(
        candidate=candidate,
        conversation=conversation,
        prompt=messages[:completion_start],
        completion=messages[completion_start:],
        tools=tools,
        reward=reward,
    )


class PreferenceFiles(CandidateFiles):
    """Writes rows that compare the samples of one prompt."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self._style = export.format.limit(export.recipe.style)
        self._samples: list[Sample] = []

    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        by_reward = self.export.recipe.preference.by == "reward"
        self._samples.append(make_sample(candidate, self._style, needs_reward=by_reward))
        return None

    def add(
        self, split: str, candidates: Sequence[Candidate], left_out: Mapping[str, Rejection]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        self._samples.clear()
        yield from super().add(split, candidates, {})
        yield from self.compare(split, self._samples)

    @abstractmethod
    def compare(
        self, split: str, samples: Sequence[Sample]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        """Write the rows of the samples of one prompt; yields the candidates that are not used."""
