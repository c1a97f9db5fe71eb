"""TRL's SFTTrainer on rows per turn: under templates that strip old reasoning, what is learnt."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import datasets
import transformers
import trl

from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of

_TEMPLATES = ("qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_ultra")


def main(directory: Path) -> None:
    """Tokenize the rows as prompts and completions, with templates of models."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    ours = list(rows_of(directory))
    files = sorted(map(str, (directory / "openai").glob("*.jsonl")))
    for name in _TEMPLATES:
        template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
        tokenizer = tiny.tokenizer_for(directory, template.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
            pairs = rows.map(
                lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
                remove_columns=["messages"],
            )
            trainer = trl.SFTTrainer(
                model=tiny.model_for(tokenizer),
                args=trl.SFTConfig(output_dir=cache, max_length=None, **tiny.FEW_STEPS),
                train_dataset=pairs,
                processing_class=tokenizer,
            )
            prepared = list(trainer.train_dataset)
        assert len(prepared) == len(ours), f"{len(ours) - len(prepared)} rows were dropped"
        labels = Labels(tokenizer)
        for row, made in zip(ours, prepared, strict=True):
            marks = [label != IGNORED for label in made["labels"]]
            labels.add(row, made["input_ids"], marks)
        print(f"= TRL {trl.__version__}, {directory.name}, template {name}: {labels}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
