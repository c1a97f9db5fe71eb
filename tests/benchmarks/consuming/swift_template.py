"""ms-swift's loader and template on an export: what carries loss, and where reasoning is lost."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import transformers
from swift import get_processor, get_template, load_dataset

from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import IGNORED, Labels
from tests.fakes.trainers.rows import rows as rows_of


def main(directory: Path) -> None:
    """Tokenize rows with reasoning in its own field and inline."""
    ours = list(rows_of(directory))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.tokenizer_for(directory)
        tokenizer.save_pretrained(folder)
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        transformers.Qwen3Config(vocab_size=len(tokenizer), **size).save_pretrained(folder)
        processor = get_processor(folder, model_type="qwen3", torch_dtype=None)
        template = get_template(processor, template_type="qwen3", agent_template="hermes")
        template.set_mode("train")
        for kind in ("field", "inline"):
            path = Path(folder, f"{kind}.jsonl")
            with path.open("w", encoding="utf-8") as file:
                for row in ours:
                    messages = [dict(message) for message in row["messages"]]
                    if kind == "inline":  # as --reasoning inline writes them
                        for message in messages:
                            if thoughts := message.pop("reasoning_content", None):
                                text = f"<think>\n{thoughts}\n</think>\n\n{message['content']}"
                                message["content"] = text.rstrip()
                    line = {"messages": messages, "tools": row["tools"]}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            loaded, _ = load_dataset(str(path), load_from_cache_file=False, strict=True)
            found = 0
            labels = Labels(tokenizer)
            for row, read in zip(ours, loaded, strict=True):
                made = template.encode(dict(read))
                marks = [label != IGNORED for label in made["labels"]]
                learnt = tokenizer.decode(
                    [n for n, mark in zip(made["input_ids"], marks, strict=True) if mark]
                )
                found += sum(text in learnt for text in _thoughts(row))
                if kind == "inline":
                    labels.add(row, made["input_ids"], marks)
            total = sum(len(_thoughts(row)) for row in ours)
            told = f"{found} of {total} thoughts are learnt"
            print(
                f"= ms-swift {metadata.version('ms-swift')}, {directory.name}, reasoning {kind}: "
                f"{told}; {labels}"
            )


def _thoughts(row: dict[str, list[dict[str, str]]]) -> list[str]:
    texts = (message.get("reasoning_content", "").strip() for message in row["messages"])
    return [text for text in texts if text]


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
