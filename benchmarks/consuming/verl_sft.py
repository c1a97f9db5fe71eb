"""verl's MultiTurnSFTDataset on the Parquet files of an export: what carries loss."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from benchmarks.consuming.templates import PER_MESSAGE
from testing.trainers import tiny
from testing.trainers.labels import Labels
from testing.trainers.rows import rows as rows_of


class Rows(MultiTurnSFTDataset):
    """The class of docs/training.md: tools are lists, and marked turns carry no loss."""

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.tools = [json.loads(tools) for tools in self.dataframe["tools"]]

    def _process_single_message(
        self, index: int, message: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        made = super()._process_single_message(index, message, *args, **more)
        ids, loss, attention, inputs = made
        return ids, loss * (message.get("weight") != 0), attention, inputs


def main(directory: Path) -> None:
    """Tokenize all rows, first as verl reads them by itself."""
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    files = sorted(map(str, (directory / "openai_parquet").glob("*.parquet")))
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 1 << 17})
    ours = {row["id"]: row for row in rows_of(directory)}
    try:
        MultiTurnSFTDataset(files, tokenizer, config)[0]
        alone = "reads tools as text"
    except Exception as error:  # what its own class says of them is the finding
        alone = f"{type(error).__name__}: {error}"
    data = Rows(files, tokenizer, config)
    labels = Labels(tokenizer)
    for number, name in enumerate(data.dataframe["id"]):
        made = data[number]
        labels.add(ours[name], made["input_ids"].tolist(), made["loss_mask"].tolist())
    version = metadata.version("verl")
    print(f"= verl {version}, {directory.name}: {labels}; without tools as lists: {alone[:90]!r}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
