"""Samples with a reward, labelled good or bad, for TRL's KTOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from batch_trajectories.export.conversation.metadata import metadata_of
from batch_trajectories.export.conversation.row_json import compact_json, dumps_row
from batch_trajectories.export.conversation.tolerance import ANYWHERE, TAGS
from batch_trajectories.export.rows.files import Loaded, OwnFormat, Why
from batch_trajectories.export.rows.samples import PreferenceFiles, Sample
from batch_trajectories.runs.store.checks import judgement_of


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


class _LabelFiles(PreferenceFiles):
    def compare(self, split: str, samples: Sequence[Sample]) -> Iterator[tuple[Loaded, Why]]:
        recipe = self.export.recipe
        threshold = recipe.preference.threshold
        for sample in samples:
            row = kto_row(sample, threshold=threshold, reward_name=recipe.reward_name)
            self.write(split, dumps_row(row))
        yield from ()


FORMAT = OwnFormat(
    name="kto",
    card="TRL KTOTrainer: prompt, completion, label. Needs datasets 4.7 or newer.",
    trainers={"TRL KTOTrainer": ("kto_hf", "kto")},
    columns={
        "id": "string",
        **dict.fromkeys(("prompt", "completion"), "messages"),
        "label": "bool",
        **dict.fromkeys(("tools", "metadata"), "string"),
    },
    holds=ANYWHERE | TAGS,
    by_prompt=True,
    prefers=True,
    files=_LabelFiles,
)
