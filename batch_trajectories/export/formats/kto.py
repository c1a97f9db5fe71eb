"""Samples with a reward, labelled good or bad, for TRL's KTOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from batch_trajectories.export.conversation.metadata import row_metadata
from batch_trajectories.export.conversation.row_json import compact_json, dumps_row
from batch_trajectories.export.conversation.tolerance import COMMON_FLAWS, TAG_FLAWS
from batch_trajectories.export.conversation.validity import Reason, Rejection
from batch_trajectories.export.rows.files import Candidate, CustomFormat
from batch_trajectories.export.rows.samples import PreferenceFiles, Sample
from batch_trajectories.records.checks import judge_record
from batch_trajectories.records.scores import agreed_verdict

if TYPE_CHECKING:
    from batch_trajectories.export.rows.recipe import Preference


def is_good(sample: Sample, preference: Preference, reward_name: str | None) -> bool | None:
    """Whether a sample is good by its reward or by its reviewers; None if reviewers do not say."""
    record = sample.conversation.record
    if preference.by == "label":
        return {"keep": True, "reject": False}.get(agreed_verdict(record.labels) or "")
    return bool(judge_record(record, reward_name).is_good(preference.threshold))


def kto_row(sample: Sample, *, is_good: bool) -> dict[str, Any]:
    """One row of a prompt, a completion and whether it is good."""
    return {
        "id": sample.id,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "label": is_good,
        "tools": sample.tools,
        "metadata": compact_json({"reward": sample.reward, **row_metadata(sample.conversation)}),
    }


class _LabelFiles(PreferenceFiles):
    def compare(
        self, split: str, samples: Sequence[Sample]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        recipe = self.export.recipe
        for sample in samples:
            good = is_good(sample, recipe.preference, recipe.reward_name)
            if good is None:
                detail = "no reviewer keeps or rejects it, or they differ"
                yield self.reject(sample.candidate, Rejection(Reason.NO_LABEL.value, detail))
            else:
                self.write(split, dumps_row(kto_row(sample, is_good=good)))


FORMAT = CustomFormat(
    name="kto",
    card="TRL KTOTrainer: prompt, completion, label. Needs datasets 4.7 or newer.",
    trainers={"TRL KTOTrainer": ("kto_hf", "kto")},
    columns={
        "id": "string",
        **dict.fromkeys(("prompt", "completion"), "messages"),
        "label": "bool",
        **dict.fromkeys(("tools", "metadata"), "string"),
    },
    holds=COMMON_FLAWS | TAG_FLAWS,
    by_prompt=True,
    compares_samples=True,
    files=_LabelFiles,
)
