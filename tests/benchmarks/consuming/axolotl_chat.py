"""Axolotl's strategy `chat_template` on an export: what it tokenizes and what carries loss."""

from __future__ import annotations

import logging
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import datasets
from axolotl.prompt_strategies.chat_template import load
from axolotl.utils.dict import DictDefault

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of


def main(directory: Path) -> None:
    """Tokenize the JSON lines and the Parquet twin."""
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    tokenizer = tiny.tokenizer_for(directory)
    settings = DictDefault({"train_on_inputs": False, "sequence_len": 1 << 17})
    entry = {"type": "chat_template", "chat_template": "jinja", "field_tools": "tools"}
    # Axolotl's own qwen3 drops the reasoning of turns before the last user message.
    entry["chat_template_jinja"] = PER_MESSAGE
    entry["message_field_training"] = "weight"
    strategy = load(tokenizer, settings, ds_cfg=DictDefault(entry))
    ours = list(rows_of(directory))
    for folder, kind in (("openai", "json"), ("openai_parquet", "parquet")):
        files = sorted(str(path) for path in (directory / folder).iterdir())
        labels = Labels(tokenizer)
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=cache)
            for row, told in zip(ours, rows, strict=True):
                made = strategy.tokenize_prompt(told)
                marks = [label != IGNORED for label in made["labels"]]
                assert any(marks), f"{row['id']}: nothing carries loss, so the row is dropped"
                labels.add(row, made["input_ids"], marks)
        print(f"= Axolotl {metadata.version('axolotl')}, {directory.name}, {kind}: {labels}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
