"""TRL makes a tiny model of our own rows, which can think, call two tools and answer.

    python -m tests.real.servers.training EXPORT MODEL STEPS

Asserts that TRL keeps each row and that its labels are what the model said, and nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import AddedToken

from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>")


def main(export: Path, model_dir: Path, steps: int) -> None:
    """Train on the rows in the format openai and save model and tokenizer for a server."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training = (_TEMPLATES / "qwen3_training.jinja").read_text(encoding="utf-8")
    tokenizer = tiny.tokenizer_for(export, training)
    # The parsers of a server look for these tags as tokens.
    tags = [AddedToken(tag, special=False, normalized=False) for tag in (*_TAGS, "</think>")]
    tokenizer.add_tokens(tags)
    model = tiny.model_for(
        tokenizer,
        layers=2,
        heads=4,
        hidden_size=96,
        intermediate_size=256,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    ours = list(rows_of(export))
    files = sorted(map(str, (export / "openai").glob("*.jsonl")))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=4e-3,
                warmup_steps=10,
                max_length=None,
                assistant_only_loss=True,
                **{**tiny.FEW_STEPS, "logging_steps": steps // 4},
            ),
            train_dataset=datasets.load_dataset(
                "json", data_files=files, split="train", cache_dir=folder
            ),
            processing_class=tokenizer,
        )
        print("=", _labels(trainer.train_dataset, ours, tokenizer))
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    tokenizer.chat_template = (_TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    told = ", ".join(f"{float(loss):.2f}" for loss in losses)
    print(f"= TRL {trl.__version__}: {steps} steps, losses {told}")


def _labels(prepared: Any, ours: list[dict[str, Any]], tokenizer: Any) -> str:
    """Compare the labels of all rows with what the model said."""
    assert len(prepared) == len(ours), f"{len(ours) - len(prepared)} rows were dropped"
    labels = Labels(tokenizer)
    for row, made in zip(ours, prepared, strict=True):
        labels.add(row, made["input_ids"], [label != IGNORED for label in made["labels"]])
    return f"labels of TRL: {labels}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
