"""verl's MultiTurnSFTDataset on the Parquet files of an export: what carries loss.

The rows are read by the class and the settings of docs/training.md, as they stand there.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from omegaconf import OmegaConf
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import Labels
from tests.fakes.trainers.rows import rows as rows_of
from tests.fakes.trainers.rows import training_page


def main(directory: Path) -> None:
    """Tokenize all rows, first as verl reads them by itself."""
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    files = sorted(map(str, (directory / "openai_parquet").glob("*.parquet")))
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 1 << 17})
    page = training_page()
    code, yaml = re.findall(
        r"```(?:python\n# rows.py|yaml\n# verl: its config)\n(.+?)```", page, re.S
    )
    ours = {row["id"]: row for row in rows_of(directory)}
    try:
        MultiTurnSFTDataset(files, tokenizer, config)[0]
        alone = "reads tools as text"
    except Exception as error:  # what its own class says of them is the finding
        alone = f"{type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.py").write_text(code)
        given = OmegaConf.create(yaml.replace("rows.py", f"{folder}/rows.py")).data
        settings = OmegaConf.merge({"pad_mode": "no_padding"}, given)
        data = create_sft_dataset(files, settings, tokenizer, None)
    labels = Labels(tokenizer)
    for number, name in enumerate(data.dataframe["id"]):
        made = data[number]
        labels.add(ours[name], made["input_ids"].tolist(), made["loss_mask"].tolist())
    version = metadata.version("verl")
    print(f"= verl {version}, {directory.name}: {labels}; without tools as lists: {alone[:90]!r}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
