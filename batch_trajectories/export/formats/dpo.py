"""Best and worst sample of a prompt by reward, for TRL's DPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from batch_trajectories.export.conversation.metadata import VIEW_COUNTS, model_lineage
from batch_trajectories.export.conversation.row_json import compact_json, dumps_row
from batch_trajectories.export.conversation.tolerance import COMMON_FLAWS, TAG_FLAWS
from batch_trajectories.export.conversation.validity import Reason, Rejection
from batch_trajectories.export.rows.files import Candidate, CustomFormat
from batch_trajectories.export.rows.samples import PreferenceFiles, Sample
from batch_trajectories.records.scores import score_key


def widest_pair(samples: Sequence[Sample], *, min_margin: float) -> tuple[Sample, Sample] | None:
    """The two samples whose rewards differ most, the better first.

    The two have the same prompt and tools, different completions, and rewards that differ by more
    than `min_margin`; None without such a pair. Among equal ones the first is taken.
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
    best = max(samples, key=attrgetter("reward"))
    content = _completion_content(best)
    others = [sample for sample in samples if _completion_content(sample) != content]
    return (best, min(others, key=attrgetter("reward"))) if others else None


def _margin(pair: tuple[Sample, Sample]) -> float:
    return (pair[0].reward or 0.0) - (pair[1].reward or 0.0)


def labelled_pairs(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    """Pairs of samples of which a reviewer prefers the first, and no reviewer the second.

    The two have the same prompt and tools, and different completions.
    """
    names = [score_key(sample.conversation.record) for sample in samples]
    by_name = dict(zip(names, samples, strict=True))
    preferred = {
        (name, other)
        for name, sample in by_name.items()
        for label in sample.conversation.record.labels
        for other in (label.over or {}).values()
    }
    for name, better in by_name.items():
        for other, worse in by_name.items():
            is_preferred = (name, other) in preferred and (other, name) not in preferred
            is_same = better.prompt == worse.prompt and better.tools == worse.tools
            if (
                is_preferred
                and is_same
                and _completion_content(better) != _completion_content(worse)
            ):
                yield better, worse


def dpo_row(chosen: Sample, rejected: Sample) -> dict[str, Any]:
    """One row of prompt, chosen and rejected messages."""
    lineage = model_lineage(chosen.conversation.record)
    lineage.pop("branch", None)
    metadata: dict[str, Any] = {
        "chosen": {"id": chosen.id, "reward": chosen.reward, **_view_counts(chosen)},
        "rejected": {"id": rejected.id, "reward": rejected.reward, **_view_counts(rejected)},
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


def _view_counts(sample: Sample) -> dict[str, int]:
    metadata = sample.conversation.metadata
    return {key: metadata[key] for key in VIEW_COUNTS if metadata.get(key)}


def _completion_content(sample: Sample) -> list[Any]:
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


class _PairFiles(PreferenceFiles):
    def compare(
        self, split: str, samples: Sequence[Sample]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        preference = self.export.recipe.preference
        if preference.by == "label":
            pairs = [*labelled_pairs(samples)]
            detail = "no reviewer prefers it to another, or another to it"
        else:
            pair = widest_pair(samples, min_margin=preference.min_margin)
            pairs = [] if pair is None else [pair]
            detail = "no other sample differs enough" if pair is None else "others are the pair"
        used: set[str] = set()
        for better, worse in pairs:
            new = {better.id, worse.id} - used
            used |= new
            self.write(split, dumps_row(dpo_row(better, worse)), uses=len(new))
        for sample in samples:
            if sample.id not in used:
                yield self.reject(sample.candidate, Rejection(Reason.NO_PAIR.value, detail))


FORMAT = CustomFormat(
    name="dpo",
    card="TRL DPOTrainer: prompt, chosen, rejected. Needs datasets 4.7 or newer.",
    trainers={"TRL DPOTrainer": ("dpo_hf", "dpo")},
    columns={
        "id": "string",
        **dict.fromkeys(("prompt", "chosen", "rejected"), "messages"),
        **dict.fromkeys(("tools", "metadata"), "string"),
    },
    holds=COMMON_FLAWS | TAG_FLAWS,
    by_prompt=True,
    compares_samples=True,
    files=_PairFiles,
)
