"""What `load_dataset` makes of an export, by its card."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import datasets


def main(directory: Path) -> None:
    """Load every config of the card and compare its rows with the manifest."""
    datasets.disable_progress_bars()
    manifest = json.loads((directory / "manifest.json").read_bytes())
    has_twins = any(file["path"].endswith(".parquet") for file in _files(manifest))
    suffix = ".parquet" if has_twins else ".jsonl"
    for config in datasets.get_dataset_config_names(str(directory)):
        written: Counter[str] = Counter()
        for part in manifest["formats"]:
            if part["format"] == config:
                files = [file for file in part["files"] if file["path"].endswith(suffix)]
                for file in files:
                    written[file["split"]] += file["rows"]
        with tempfile.TemporaryDirectory() as cache:
            loaded = datasets.load_dataset(str(directory), config, cache_dir=cache)
            rows = {split: len(part) for split, part in loaded.items()}
        assert rows == dict(written), f"{config}: {rows} of {dict(written)} rows"
        print(f"= datasets {datasets.__version__}, {suffix[1:]}, {config}: {rows}, none dropped")
    saved_ones = sorted(directory.glob("*_hf")) if hasattr(datasets, "Json") else ()
    for folder in saved_ones:
        saved = datasets.load_from_disk(folder)
        for split, rows in saved.items():
            lines = directory / folder.name.removesuffix("_hf") / f"{split}.jsonl"
            ours = [json.loads(line) for line in lines.open(encoding="utf-8")]
            for row in ours:
                if saved[split].features["tools"] != datasets.Value("string"):
                    row["tools"] = json.loads(row["tools"])
            assert list(rows) == ours, f"{folder.name}, {split}: other rows than the JSON lines"
        told = {split: len(rows) for split, rows in saved.items()}
        print(f"= datasets {datasets.__version__}, load_from_disk, {folder.name}: {told}")


def _files(manifest: dict[str, list[dict[str, list[dict[str, str]]]]]) -> list[dict[str, str]]:
    return [file for part in manifest["formats"] for file in part["files"]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
