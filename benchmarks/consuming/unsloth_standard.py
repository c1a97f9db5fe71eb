"""Unsloth's `standardize_data_formats` on an export: which formats it takes, unchanged or not."""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from importlib import metadata, util
from pathlib import Path

import datasets


def main(directory: Path) -> None:
    """Standardize the rows of three formats."""
    datasets.disable_progress_bars()
    standardize = importlib.import_module("unsloth_zoo.dataset_utils").standardize_data_formats
    version = metadata.version("unsloth_zoo")
    for name in ("openai", "hermes", "llamafactory"):
        files = sorted(map(str, (directory / name).glob("*.jsonl")))
        with tempfile.TemporaryDirectory() as cache:
            rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
            before = list(rows)
            try:
                after = list(standardize(rows))
                told = "unchanged" if after == before else "changed"
            except Exception as error:  # what it says of a format is the finding
                told = f"refused: {type(error).__name__}: {error}".splitlines()[0]
                assert name != "openai", told
        print(f"= Unsloth (zoo {version}), {name}: {len(before)} rows, {told[:100]}")


def _without_the_rest() -> None:
    """Make the module importable without the package, which asks for a GPU when it is imported."""
    spec = util.find_spec("unsloth_zoo")
    assert spec is not None
    module = types.ModuleType("unsloth_zoo")
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["unsloth_zoo"] = module


if __name__ == "__main__":
    _without_the_rest()
    main(Path(sys.argv[1]))
