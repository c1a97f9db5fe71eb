"""Preference data (DPO, KTO) from the samples of one prompt.

Messages are those of `export/formats/openai_chat.py`. The prompt is everything before the model's
first own turn; for branches of a conversation, their shared beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batch_trajectories.export.conversation.metadata import COUNTS, lineage_of, metadata_of
from batch_trajectories.export.conversation.row_json import compact_json
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import Conversation, Said, Turn
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.formats.openai_chat import messages_of, tools_column
from batch_trajectories.runs.store.checks import judgement_of
from batch_trajectories.runs.store.record_types import Tools


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation with its reward, as prompt and completion."""

    conversation: Conversation
    prompt: Sequence[dict[str, Any]]
    completion: Sequence[dict[str, Any]]
    tools: str | Tools
    reward: float

    @property
    def id(self) -> str:
        """The id of its record."""
        return self.conversation.record.id


def sample_of(conversation: Conversation, style: Style) -> Sample:
    """Make a sample of a conversation; raises Rejected without a reward."""
    name = style.reward_name
    _, reward, error = judgement_of(conversation.record, name)
    if error is not None:
        raise Rejected(Reason.CHECK_FAILED, f"its check gave no result: {error}")
    if reward is None:
        named = "" if name is None else f": it has no reward named {name!r}"
        raise Rejected(Reason.NO_REWARD, f"nothing judged this conversation{named}")
    messages = messages_of(conversation, style)
    own = sum(
        1 + len(entry.results)
        for entry in conversation.entries
        if isinstance(entry, Turn) and not entry.is_given
    )
    # Everything from the model's first own turn on is its completion, later user messages too.
    first = next(
        n
        for n, entry in enumerate(conversation.entries)
        if isinstance(entry, Turn) and not entry.is_given
    )
    said = sum(isinstance(entry, Said) for entry in conversation.entries[first:])
    cut = len(messages) - own - said
    tools = tools_column(conversation, style)
    return Sample(conversation, messages[:cut], messages[cut:], tools, reward)


def pair_of(samples: Sequence[Sample], *, min_margin: float) -> tuple[Sample, Sample] | None:
    """The two samples whose rewards differ most, the better first.

    They have the same prompt and tools and different completions, and their rewards differ by more
    than `min_margin`; None without such a pair. Among equals the first is taken.
    """
    groups: list[list[Sample]] = []
    for sample in samples:
        for group in groups:
            if group[0].prompt == sample.prompt and group[0].tools == sample.tools:
                group.append(sample)
                break
        else:
            groups.append([sample])
    pairs = [pair for group in groups if (pair := _extremes(group)) is not None]
    widest = max(pairs, key=_margin, default=None)
    return widest if widest is not None and _margin(widest) > min_margin else None


def _extremes(samples: Sequence[Sample]) -> tuple[Sample, Sample] | None:
    """The best sample, and the worst with another completion."""
    best = max(samples, key=_reward)
    said = _said(best)
    others = [sample for sample in samples if _said(sample) != said]
    return (best, min(others, key=_reward)) if others else None


def _margin(pair: tuple[Sample, Sample]) -> float:
    return pair[0].reward - pair[1].reward


def dpo_row(chosen: Sample, rejected: Sample) -> dict[str, Any]:
    """One row of prompt, chosen and rejected messages."""
    lineage = lineage_of(chosen.conversation.record)
    lineage.pop("branch", None)
    metadata: dict[str, Any] = {
        "chosen": {"id": chosen.id, "reward": chosen.reward, **_views(chosen)},
        "rejected": {"id": rejected.id, "reward": rejected.reward, **_views(rejected)},
        **({"fork": lineage} if lineage else {}),
    }
    return {
        "id": chosen.conversation.record.prompt_id,
        "prompt": chosen.prompt,
        "chosen": chosen.completion,
        "rejected": rejected.completion,
        "tools": chosen.tools,
        "metadata": compact_json(metadata),
    }


def _views(sample: Sample) -> dict[str, int]:
    metadata = sample.conversation.metadata
    return {key: metadata[key] for key in COUNTS if metadata.get(key)}


def kto_row(sample: Sample, *, threshold: float, reward_name: str | None = None) -> dict[str, Any]:
    """One row of a prompt, a completion and whether it is good."""
    judgement = judgement_of(sample.conversation.record, reward_name)
    return {
        "id": sample.id,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "label": bool(judgement.is_good(threshold)),
        "tools": sample.tools,
        "metadata": compact_json({"reward": sample.reward, **metadata_of(sample.conversation)}),
    }


def _said(sample: Sample) -> list[Any]:
    """The content of a completion, without ids of calls."""
    return [
        (
            message["role"],
            message["content"],
            message.get("reasoning_content"),
            [call["function"] for call in message.get("tool_calls", ())],
        )
        for message in sample.completion
    ]


def _reward(sample: Sample) -> float:
    return sample.reward
