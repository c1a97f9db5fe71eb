"""A tokenizer made of the texts at hand and a random model, for checks that download nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from testing.trainers.rows import rows

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


def said_by_the_model(row: dict[str, Any]) -> Iterator[str]:
    """All that a model should learn of a row in the format openai."""
    for message in row["messages"]:
        if message["role"] == "assistant" and message.get("weight") != 0:
            yield message.get("reasoning_content", "")
            yield message["content"]
            for call in message.get("tool_calls", ()):
                yield call["function"]["name"]
                yield from map(str, filter(_is_text, call["function"]["arguments"].values()))


def said_to_the_model(row: dict[str, Any]) -> Iterator[str]:
    """What it should not learn."""
    for message in row["messages"]:
        if message["role"] != "assistant":
            yield message["content"]


def said_without_loss(row: dict[str, Any]) -> Iterator[str]:
    """What it said and should not learn, which templates may leave out."""
    marked = [m for m in row["messages"] if m["role"] == "assistant" and m.get("weight") == 0]
    yield from said_by_the_model({"messages": [{**m, "weight": 1} for m in marked]})


def check_spans(row: dict[str, Any], learnt: str, rest: str) -> tuple[int, int]:
    """Assert that texts are on their side of the mask; gives how many there are on each."""
    ours = [text.strip() for text in said_by_the_model(row) if text.strip()]
    theirs = [text.strip() for text in said_to_the_model(row) if text.strip()]
    for text in ours:
        # Templates write arguments as JSON, so a text may stand there escaped.
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        assert any(form in learnt for form in forms), f"{row['id']}: not learnt: {text[:80]!r}"
    for text in theirs:
        assert text in rest, f"{row['id']}: not in the masked part: {text[:80]!r}"
    for text in map(str.strip, said_without_loss(row)):
        if text and not any(text in one for one in ours):
            assert text not in learnt, f"{row['id']}: learnt, but marked: {text[:80]!r}"
    return len(ours), len(theirs)


class Spans:
    """Counts of the texts of rows that are on their side of the mask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.rows = self.learnt = self.masked = 0

    def add(self, row: dict[str, Any], ids: Iterable[int], marks: Iterable[bool]) -> None:
        """Check one row in the format openai; `marks` say which tokens carry loss."""
        sides: dict[bool, list[int]] = {True: [], False: []}
        for token, mark in zip(ids, marks, strict=True):
            sides[bool(mark)].append(token)
        texts = (self._tokenizer.decode(sides[side]) for side in (True, False))
        learnt, masked = check_spans(row, *texts)
        self.rows += 1
        self.learnt += learnt
        self.masked += masked

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.learnt} texts of the model are learnt, {self.masked} of "
            "others masked"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
