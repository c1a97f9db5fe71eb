"""OpenRLHF's SFTDataset on an export, several turns: what carries loss. It passes no tools."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import metadata
from importlib.metadata import files
from pathlib import Path
from types import SimpleNamespace

import datasets
from openrlhf.datasets.sft_dataset import SFTDataset

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import Labels
from tests.fakes.trainers.rows import rows as rows_of
from tests.fakes.trainers.rows import training_page


def main(directory: Path) -> None:
    """Tokenize the JSON lines, after a look at the command of docs/training.md."""
    _check_command()
    datasets.disable_progress_bars()
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    files = sorted(map(str, (directory / "openai").glob("*.jsonl")))
    options = {"input_key": "messages", "output_key": None, "apply_chat_template": True}
    strategy = SimpleNamespace(args=SimpleNamespace(data=SimpleNamespace(**options)))
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        data = SFTDataset(
            rows,
            tokenizer,
            1 << 17,
            strategy,
            num_processors=1,
            multiturn=not directory.name.endswith("turns"),
        )
        labels = Labels(tokenizer)
        ours = list(rows_of(directory))
        assert len(data) == len(ours), f"{len(ours) - len(data)} rows were dropped"
        has_tools = 0
        for number, row in enumerate(ours):
            ids, _, mask = data[number][:3]
            # The mask of a token says whether the one after it is learnt.
            marks = [False, *(bool(mark) for mark in mask[0].tolist()[:-1])]
            labels.add(row, ids[0].tolist(), marks)
            has_tools += "<tools>" in tokenizer.decode(ids[0])
    version, told = metadata.version("openrlhf"), f"tools are in the prompt of {has_tools} rows"
    print(f"= OpenRLHF {version}, {directory.name}: {labels}; {told}")


def _check_command() -> None:
    """Assert that the program has all options of the page's command, and is told its model.

    Without its model it stops, without `max_len` it cuts rows at 2,048 tokens. It is not run: its
    modules want packages that are compiled for a GPU.
    """
    page = training_page()
    (command,) = re.findall(r"^python -m openrlhf\.cli\.train_sft(.+?)```", page, re.M | re.S)
    given = set(re.findall(r"--([\w.]+)", command))
    (source,) = (path for path in files("openrlhf") or () if path.name == "train_sft.py")
    known = set(re.findall(r'add_argument\(\s*"--([\w.]+)"', source.read_text()))
    assert not given - known, f"options that it has not: {given - known}"
    needed = {"model.model_name_or_path", "data.max_len"}
    assert given >= needed, f"not given: {needed - given}"


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
