"""LLaMA-Factory's whole loader on an export: its dataset files, converter, template and labels."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import datasets
import transformers
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args

from testing.trainers import tiny
from testing.trainers.labels import IGNORED, Labels
from testing.trainers.rows import rows as rows_of

_TEMPLATES = ("qwen3", "qwen", "llama3", "glm4_moe")


def main(directory: Path) -> None:
    """Load every dataset that `dataset_info.json` names with several templates."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    folder = directory / "llamafactory"
    names = sorted(json.loads((folder / "dataset_info.json").read_bytes()))
    count = len(list(rows_of(directory, "llamafactory")))
    for template in _TEMPLATES:
        with tempfile.TemporaryDirectory() as place:
            print("=", _load(directory, folder, names, count, template, Path(place)))


def _load(
    directory: Path, folder: Path, names: list[str], count: int, template_name: str, place: Path
) -> str:
    tokenizer = tiny.tokenizer_for(directory)
    tokenizer.save_pretrained(place)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Qwen3Config(vocab_size=len(tokenizer), **size).save_pretrained(place)
    model, data, training, _, _ = get_train_args(
        {
            "model_name_or_path": str(place),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset": ",".join(names),
            "dataset_dir": str(folder),
            "template": template_name,
            "mask_history": directory.name.endswith("turns"),
            "cutoff_len": 1 << 17,
            "output_dir": str(place / "out"),
            "overwrite_cache": True,
            "use_cpu": True,
            "report_to": "none",
        }
    )
    model.cache_dir = str(place / "cache")
    template = get_template_and_fix_tokenizer(tokenizer, data)
    loaded = get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)
    rows = loaded["train_dataset"]
    assert len(rows) == count, f"{count - len(rows)} of {count} rows were dropped"
    by_id = {row["id"]: row for row in rows_of(directory)}
    order = [row["id"] for row in rows_of(directory, "llamafactory")]
    labels = Labels(tokenizer)
    for name, made in zip(order, rows, strict=True):
        labels.add(by_id[name], made["input_ids"], [label != IGNORED for label in made["labels"]])
    version = metadata.version("llamafactory")
    return f"LLaMA-Factory {version}, {directory.name}, template {template_name}: {labels}"


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
