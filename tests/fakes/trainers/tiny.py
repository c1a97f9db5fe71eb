"""A tokenizer made of the texts at hand and a random model, for checks that download nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.fakes.trainers.rows import rows

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

FEW_STEPS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}
"""Arguments of a trainer that is watched for a few steps, and leaves nothing behind."""


def tokenizer_for(directory: Path, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer for rows in the format openai, with a chat template of Qwen's kind."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    texts = (json.dumps(row["messages"], ensure_ascii=False)[:20_000] for row in rows(directory))
    model.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def model_for(
    tokenizer: PreTrainedTokenizerFast, *, layers: int = 1, heads: int = 2, **more: Any
) -> Qwen3ForCausalLM:
    """A random model of small layers; `more` are fields of its config."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16 * heads,
        "intermediate_size": 32 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1 << 17,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **more}))
