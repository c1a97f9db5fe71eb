"""Unsloth on an export: which formats it takes, unchanged or not, and what carries loss."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import types
from importlib import metadata, util
from pathlib import Path
from typing import Any

import datasets
import transformers
import trl

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of


def main(directory: Path) -> None:
    """Standardize the rows of three formats, or read the labels of rows per turn."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if not directory.name.endswith("turns"):
        _standardize(directory)
    print("=", _labels(directory))


def _standardize(directory: Path) -> None:
    standardize = importlib.import_module("unsloth_zoo.dataset_utils").standardize_data_formats
    version = metadata.version("unsloth_zoo")
    for name in ("openai", "hermes", "llamafactory"):
        files = sorted(map(str, (directory / name).glob("*.jsonl")))
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
            before = list(rows)
            try:
                after = list(standardize(rows))
                told = "unchanged" if after == before else "changed"
            except Exception as error:  # what it says of a format is the finding
                told = f"refused: {type(error).__name__}: {error}".splitlines()[0]
                assert name != "openai", told
        print(f"= Unsloth (zoo {version}), {name}: {len(before)} rows, {told[:100]}")


def _labels(directory: Path) -> str:
    """What `train_on_responses_only` leaves of the labels of TRL's trainer."""
    train_on_responses_only = importlib.import_module(
        "unsloth_zoo.dataset_utils"
    ).train_on_responses_only
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    ours = list(rows_of(directory))
    with tempfile.TemporaryDirectory() as cache:
        trainer = trl.SFTTrainer(
            model=tiny.model_for(tokenizer),
            args=trl.SFTConfig(
                output_dir=cache, max_length=None, dataset_text_field="text", **tiny.FEW_STEPS
            ),
            train_dataset=datasets.Dataset.from_list([_as_text(row, tokenizer) for row in ours]),
            processing_class=tokenizer,
        )
        trainer = train_on_responses_only(
            trainer,
            instruction_part="<|im_start|>user\n",
            response_part="<|im_start|>assistant\n",
            last_response_only=directory.name.endswith("turns"),
        )
        prepared = list(trainer.train_dataset)
    assert len(prepared) == len(ours), f"{len(ours) - len(prepared)} rows were dropped"
    labels = Labels(tokenizer)
    for row, made in zip(ours, prepared, strict=True):
        labels.add(row, made["input_ids"], [label != IGNORED for label in made["labels"]])
    version = metadata.version("unsloth_zoo")
    return f"Unsloth (zoo {version}, TRL {trl.__version__}), {directory.name}: {labels}"


def _as_text(row: dict[str, Any], tokenizer: Any) -> dict[str, str]:
    tools = json.loads(row["tools"])
    text = tokenizer.apply_chat_template(row["messages"], tools=tools, tokenize=False)
    return {"text": text}


def _without_the_rest() -> None:
    """Make the module importable without the package, which asks for a GPU when it is imported."""
    spec = util.find_spec("unsloth_zoo")
    assert spec is not None
    module = types.ModuleType("unsloth_zoo")
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["unsloth_zoo"] = module


if __name__ == "__main__":
    _without_the_rest()
    main(Path(*sys.argv[1:]))
