"""TRL's DPOTrainer and KTOTrainer on an export: what they train on, and a few steps.

A prompt's tokens must be the conversation up to the model's first turn, and those of a completion
the rest of it, all of which is trained on. Templates can show a prompt otherwise once more follows:
then loss begins there, and such prompts are counted.
"""

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
from tests.fakes.trainers.rows import not_checked
from tests.fakes.trainers.rows import rows as rows_of

_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_MARKS = ("weight", "loss")
_SIDES = {"dpo": ("chosen", "rejected"), "kto": ("completion",)}


def main(directory: Path) -> None:
    """Train on both formats, from JSON lines and from the directory of `datasets`."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for template in ("qwen3", "qwen3_training"):
        jinja = (_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
        tokenizer = tiny.tokenizer_for(directory, jinja)
        for name in _SIDES:
            with tempfile.TemporaryDirectory() as cache:
                files = sorted(map(str, (directory / name).glob("*.jsonl")))
                if not files:
                    not_checked(f"the run has no rows of {name}; it needs samples with rewards")
                loaded = datasets.load_dataset(
                    "json", data_files=files, split="train", cache_dir=cache
                )
                told = f"TRL {trl.__version__}, {template}, {name}"
                print(f"= {told}, JSON lines:", _train(name, loaded, directory, tokenizer, cache))
                if (directory / f"{name}_hf").is_dir():
                    saved = datasets.load_from_disk(directory / f"{name}_hf")
                    loaded = datasets.concatenate_datasets([saved[one] for one in sorted(saved)])
                    said = _train(name, loaded, directory, tokenizer, cache)
                    print(f"= {told}, load_from_disk:", said)


def _train(name: str, rows: Any, directory: Path, tokenizer: Any, folder: str) -> str:
    torch.manual_seed(0)
    kind, arguments = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
    }[name]
    given = arguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=16384,
        **tiny.FEW_STEPS,
    )
    trainer = kind(
        model=tiny.model_for(tokenizer),
        ref_model=tiny.model_for(tokenizer),
        args=given,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    prepared = list(trainer.train_dataset)
    assert len(prepared) == len(rows), f"{len(rows) - len(prepared)} rows were dropped"
    said = {row["id"]: row["messages"] for row in rows_of(directory)}
    counts = [
        _check(name, row, made, said, tokenizer)
        for row, made in zip(rows_of(directory, name), prepared, strict=True)
    ]
    _check_masks(name, trainer, prepared)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens, results, found, cut = map(sum, zip(*counts, strict=True))
    told = ", ".join(f"{float(loss):.2f}" for loss in losses)
    return (
        f"{len(prepared)} of {len(rows)} rows kept, {found} completions are conversations of "
        f"openai; all {tokens:,} tokens after the prompts carry loss, in them {results} results "
        f"of tools; {cut} prompts end where the template shows them otherwise; losses of 2 steps "
        f"{told}"
    )


def _check(
    name: str, row: Any, made: Any, said: dict[str, list[Any]], tokenizer: Any
) -> tuple[int, int, int, int]:
    """Compare texts; gives tokens and results that carry loss, conversations that are known, and
    whether the prompt is cut: where a message after it changes what the template shows of it."""
    tools = json.loads(row["tools"])
    about = json.loads(row["metadata"])
    tokens = results = found = 0
    given = tokenizer.apply_chat_template(
        row["prompt"], tools=tools, tokenize=False, add_generation_prompt=True
    )
    prompt, is_cut = _text(tokenizer, made["prompt_ids"]), False
    for side in _SIDES[name]:
        messages = row["prompt"] + row[side]
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = made["prompt_ids"] + made[f"{side}_ids"]
        assert _text(tokenizer, ids) == whole, f"{row['id']}: {side} is another conversation"
        is_cut |= not whole.startswith(given)
        assert row[side][0]["role"] == "assistant", f"{row['id']}: {side} begins with another"
        tokens += len(made[f"{side}_ids"])
        results += sum(message["role"] == "tool" for message in row[side])
        sample = row["id"] if name == "kto" else about[side]["id"]
        if sample in said:  # the format openai leaves out what did not pass
            known = [{k: v for k, v in m.items() if k not in _MARKS} for m in said[sample]]
            assert known == messages, f"{sample}: not the conversation of openai"
            found += 1
    shown = given.startswith(prompt) if is_cut else given == prompt
    assert shown, f"{row['id']}: another prompt"
    return tokens, results, found, is_cut


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _check_masks(name: str, trainer: Any, prepared: Sequence[Any]) -> None:
    """Assert that the batch has each row whole, and loss on its completion alone."""
    batch = trainer.data_collator(prepared)
    pairs = [(made, side) for side in _SIDES[name] for made in prepared]
    # Of KTO's batch there is a second half, with completions of other rows.
    for (made, side), ids, mask in zip(
        pairs, batch["input_ids"].tolist(), batch["completion_mask"].tolist(), strict=False
    ):
        given, learnt = made["prompt_ids"], made[f"{side}_ids"]
        size = len(given) + len(learnt)
        assert ids[:size] == given + learnt
        assert mask[:size] == [0] * len(given) + [1] * len(learnt)
        assert not any(mask[size:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
