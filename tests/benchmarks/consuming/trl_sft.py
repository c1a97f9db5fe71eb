"""TRL's SFTTrainer on an export: a few steps of a tiny random model, and what it trains on."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl

from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of

_TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"


def main(directory: Path) -> None:
    """Train on the JSON lines, the Parquet copy and the directory of `datasets`."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    tokenizer = tiny.tokenizer_for(directory, _TEMPLATE.read_text(encoding="utf-8"))
    rows = list(rows_of(directory))
    with tempfile.TemporaryDirectory() as cache:
        files = sorted(map(str, (directory / "openai").glob("*.jsonl")))
        lines = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        print("=", _train("JSON lines", lines, rows, tokenizer, cache))
        files = sorted(map(str, (directory / "openai_parquet").glob("*.parquet")))
        twin = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
        told = [{**row, "messages": _as_chat(row["messages"])} for row in twin]
        messages = datasets.List(datasets.Json())
        features = datasets.Features({**twin.features, "messages": messages})
        decoded = datasets.Dataset.from_list(told, features=features)
        print("=", _train("Parquet, decoded", decoded, rows, tokenizer, cache))
        saved = datasets.load_from_disk(directory / "openai_hf")
        joined = datasets.concatenate_datasets([saved[split] for split in sorted(saved)])
        print("=", _train("load_from_disk", joined, rows, tokenizer, cache))


def _as_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the Parquet twin without their nulls, arguments as objects."""
    told = [{key: value for key, value in m.items() if value is not None} for m in messages]
    for message in told:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return told


def _train(
    what: str, rows: Any, ours: Sequence[dict[str, Any]], tokenizer: Any, folder: str
) -> str:
    torch.manual_seed(0)
    arguments = trl.SFTConfig(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=1,
        max_length=None,
        assistant_only_loss=True,
        **tiny.FEW_STEPS,
    )
    trainer = trl.SFTTrainer(
        model=tiny.model_for(tokenizer),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    prepared = trainer.train_dataset
    assert len(prepared) == len(ours), f"{len(ours) - len(prepared)} rows were dropped"
    labels = Labels(tokenizer)
    for row, made in zip(ours, prepared, strict=True):
        labels.add(row, made["input_ids"], [label != IGNORED for label in made["labels"]])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = ", ".join(f"{float(loss):.2f}" for loss in losses)
    return f"TRL {trl.__version__}, {what}: {labels}; losses of 3 steps {told}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
