"""TRL's DPOTrainer and KTOTrainer on an export: which rows they keep, and a few steps."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl

from testing.trainers import tiny
from testing.trainers.rows import not_checked

_TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"


def main(directory: Path) -> None:
    """Train on both formats where the export has rows of them."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    tokenizer = tiny.tokenizer_for(directory, _TEMPLATE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as cache:
        for name in ("dpo", "kto"):
            files = sorted(map(str, (directory / name).glob("*.jsonl")))
            if not files:
                not_checked(f"the run has no rows of {name}; it needs samples with rewards")
            rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
            print("=", _train(name, rows, tokenizer, cache))


def _train(name: str, rows: Any, tokenizer: Any, folder: str) -> str:
    torch.manual_seed(0)
    kind, arguments = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
    }[name]
    given = arguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=None,
        **tiny.FEW_STEPS,
    )
    trainer = kind(
        model=tiny.model_for(tokenizer),
        ref_model=tiny.model_for(tokenizer),
        args=given,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    prepared = trainer.train_dataset
    assert len(prepared) == len(rows), f"{len(rows) - len(prepared)} rows were dropped"
    columns = [column for column in prepared.column_names if column.endswith("_ids")]
    tokens = {column: sum(map(len, prepared[column])) for column in columns}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = ", ".join(f"{count:,} {column}" for column, count in tokens.items())
    return (
        f"TRL {trl.__version__}, {name}: {len(prepared)} of {len(rows)} rows kept; {told}; losses "
        f"of {len(losses)} steps {', '.join(f'{float(loss):.2f}' for loss in losses)}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
