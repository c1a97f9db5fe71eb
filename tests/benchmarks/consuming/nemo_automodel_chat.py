"""NeMo AutoModel's ChatDataset on an export: what carries loss."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of


def main(directory: Path) -> None:
    """Tokenize the JSON lines."""
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    files = sorted(map(str, (directory / "openai").glob("*.jsonl")))
    data = ChatDataset(files, tokenizer, mask_history=directory.name.endswith("turns"))
    ours = list(rows_of(directory))
    assert len(data) == len(ours), f"{len(ours) - len(data)} rows were dropped"
    labels = Labels(tokenizer)
    for number, row in enumerate(ours):
        made = data[number]
        # A label is that of the next token.
        marks = [False, *(label != IGNORED for label in made["labels"])][: len(made["input_ids"])]
        labels.add(row, made["input_ids"], marks)
    print(f"= NeMo AutoModel {metadata.version('nemo_automodel')}, {directory.name}: {labels}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
