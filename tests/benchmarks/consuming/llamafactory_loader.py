"""LLaMA-Factory's whole loader on an export: its dataset files, converter, template and labels."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import transformers
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args

from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of

_TEMPLATES = ("qwen3", "qwen", "llama3", "glm4_moe")
_AS_THEY_ARE = {"qwen3": "qwen3_nothink"}
"""Which template shows the earlier turns of rows per turn as they are."""


def main(directory: Path) -> None:
    """Load every dataset that `dataset_info.json` names with several templates."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for template in _TEMPLATES:
        if directory.name.endswith("turns"):
            template = _AS_THEY_ARE.get(template, template)
        with tempfile.TemporaryDirectory() as place:
            print("=", _load(directory, template, Path(place)))


def arguments_of(directory: Path, template: str, place: Path) -> tuple[Any, Any, Any]:
    """LLaMA-Factory's arguments of model, data and training; `place` has the tokenizer."""
    folder = directory / "llamafactory"
    names = sorted(json.loads((folder / "dataset_info.json").read_bytes()))
    per_turn = directory.name.endswith("turns")
    transformers.Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(place)
    model, data, training, _, _ = get_train_args(
        {
            "model_name_or_path": str(place),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset": ",".join(names),
            "dataset_dir": str(folder),
            "template": template,
            "mask_history": per_turn,
            "preserve_thinking": per_turn,
            "cutoff_len": 1 << 17,
            "output_dir": str(place / "out"),
            "overwrite_cache": True,
            "use_cpu": True,
            "report_to": "none",
        }
    )
    model.cache_dir = str(place / "cache")
    return model, data, training


def marks_of(ids: Sequence[int], labels: Sequence[int]) -> tuple[list[bool], int]:
    """Which tokens carry loss as themselves, and how many as the end of the turn before them.

    The label of the first token is never used: that of a token is asked of the one before it.
    """
    pairs = list(zip(ids, labels, strict=True))
    ends = sum(label not in (IGNORED, token) for token, label in pairs[1:])
    return [label == token for token, label in pairs], ends


def _load(directory: Path, template_name: str, place: Path) -> str:
    tokenizer = tiny.tokenizer_for(directory)
    tokenizer.save_pretrained(place)
    model, data, training = arguments_of(directory, template_name, place)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    loaded = get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)
    rows = loaded["train_dataset"]
    by_id = {row["id"]: row for row in rows_of(directory)}
    order = [row["id"] for row in rows_of(directory, "llamafactory")]
    assert len(rows) == len(order), f"{len(order) - len(rows)} of {len(order)} rows were dropped"
    labels = Labels(tokenizer)
    ends = 0
    for name, made in zip(order, rows, strict=True):
        marks, more = marks_of(made["input_ids"], made["labels"])
        labels.add(by_id[name], made["input_ids"], marks)
        ends += more
    assert not labels.left_out, f"the model saw more of earlier turns: {labels}"
    version = metadata.version("llamafactory")
    return (
        f"LLaMA-Factory {version}, {directory.name}, template {template_name}: {labels}; {ends} "
        "tokens carry loss as the end of the turn before them"
    )


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
