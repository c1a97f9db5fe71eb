"""verl's RLHFDataset on the prompts of an export: which of them it keeps."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.benchmarks.consuming.templates import PER_MESSAGE
from tests.fakes.trainers import tiny


def main(directory: Path) -> None:
    """Read the Parquet files."""
    tokenizer = tiny.tokenizer_for(directory, PER_MESSAGE)
    files = sorted(map(str, (directory / "prompts").glob("*.parquet")))
    config = OmegaConf.create({"max_prompt_length": 1 << 17, "filter_overlong_prompts_workers": 1})
    data = RLHFDataset(files, tokenizer, config)
    rows = [data[number] for number in range(len(data))]
    assert all(row["raw_prompt"] and row["data_source"] for row in rows)
    assert all("ground_truth" in row["reward_model"] for row in rows)
    told = len({row["extra_info"]["id"] for row in rows})
    assert told == len(rows), "a prompt has several rows"
    print(f"= verl {metadata.version('verl')}: RLHFDataset takes {len(rows)} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
