"""What the consumers of exports make of them: each in its own words, from packages of their own.

    python -m benchmarks.consumers RUN_DIR [--templates DIR] [--atif DIR] [--llamafactory DIR]

Exports a run into a temporary directory and reads it back with `datasets` (if it is installed),
renders its rows through the chat templates in `--templates` (those that TRL ships, for instance),
validates documents with the models of an unpacked harbor package, and feeds rows to the converter
and the formatter of an unpacked LLaMA-Factory package. The last two are imported without the rest
of their packages, which would bring in a deep learning stack.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from batch.config import RunConfig
from batch.prompts import scan
from batch.run_dir import read_run_json
from export.dataset import Source
from export.dataset_directory import export_dataset
from export.recipe import FormatName, Recipe
from export.rendering import load_template

_FORMATS: tuple[FormatName, ...] = ("hermes", "openai", "llamafactory", "atif", "dpo", "kto")


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--templates", type=click.Path(path_type=Path))
@click.option("--atif", type=click.Path(path_type=Path))
@click.option("--llamafactory", type=click.Path(path_type=Path))
def main(
    run_dir: Path, templates: Path | None, atif: Path | None, llamafactory: Path | None
) -> None:
    """Export RUN_DIR and show what consumers make of it."""
    identity = read_run_json(run_dir)
    config = RunConfig.model_validate(identity["config"])
    rules = config.row_rules(identity["api"])
    found = scan(Path(identity["dataset"]["path"]), max_samples=config.max_samples, rules=rules)
    source = Source(run_dir, found, config.num_samples)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "lines")
        splits = {"train": 0.8, "test": 0.2}
        export_dataset(source, Recipe(formats=_FORMATS, splits=splits), directory)
        twins = Path(folder, "twins")
        export_dataset(source, Recipe(formats=(*_FORMATS, "parquet"), splits=splits), twins)
        for name, where in (("lines", directory), ("twins", twins)):
            _load(name, where, Path(folder, "cache"))
        if templates is not None:
            _render(sorted(templates.glob("*.jinja")), directory)
        if atif is not None:
            _validate(atif, directory)
        if llamafactory is not None:
            _convert(llamafactory, directory)


def _rows(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in sorted((directory / name).glob("*.jsonl")):
        yield from map(json.loads, path.read_bytes().splitlines())


def _load(name: str, directory: Path, cache: Path) -> None:
    try:
        import datasets
    except ImportError:
        click.echo("datasets: not installed")
        return
    datasets.disable_progress_bars()
    for config in datasets.get_dataset_config_names(str(directory)):
        loaded = datasets.load_dataset(str(directory), config, cache_dir=str(cache / name))
        rows = {split: len(part) for split, part in loaded.items()}
        click.echo(f"datasets {datasets.__version__}, {name}, {config}: {rows}")


def _render(templates: list[Path], directory: Path) -> None:
    rows = list(_rows(directory, "openai"))
    for path in templates:
        kinds: Counter[str] = Counter()
        render = load_template(path)
        for row in rows:
            dropped = render(row).dropped
            kinds.update({" ".join(p.split(": ")[0].split(", ")[1:]) or p for p in dropped})
        lost = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))
        click.echo(f"template {path.stem}: {len(rows)} rows, drops {lost or 'nothing'}")


def _bare(*packages: tuple[str, Path]) -> None:
    """Make packages importable without running what their own modules import first."""
    for name, path in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


def _validate(package: Path, directory: Path) -> None:
    _bare(("harbor", package / "harbor"), ("harbor.models", package / "harbor" / "models"))
    model = importlib.import_module("harbor.models.trajectories.trajectory").Trajectory
    count = 0
    for row in _rows(directory, "atif"):
        model.model_validate(row, strict=True)
        count += 1
    click.echo(f"harbor: {count} documents are valid")


def _convert(package: Path, directory: Path) -> None:
    root = package / "llamafactory"
    _bare(
        ("llamafactory", root),
        ("llamafactory.data", root / "data"),
        ("llamafactory.extras", root / "extras"),
    )
    told: list[str] = []
    quiet = types.ModuleType("llamafactory.extras.logging")
    vars(quiet).update(
        get_logger=lambda name: types.SimpleNamespace(warning_rank0=told.append),
    )
    sys.modules["llamafactory.extras.logging"] = quiet
    sys.modules["llamafactory.extras"].logging = quiet  # type: ignore[attr-defined]
    converter = importlib.import_module("llamafactory.data.converter")
    formatter = importlib.import_module("llamafactory.data.formatter")
    info = json.loads((directory / "llamafactory" / "dataset_info.json").read_bytes())
    entry = next(iter(info.values()))
    tags, columns = entry["tags"], entry["columns"]
    media = dict.fromkeys(("images", "videos", "audios", "kto_tag", "system", "chosen", "rejected"))
    attributes = types.SimpleNamespace(ranking=False, **columns, **tags, **media)
    convert = converter.SharegptDatasetConverter(attributes, None)
    function = formatter.FunctionFormatter(slots=["{{content}}"], tool_format="qwen")
    tools = formatter.ToolFormatter(tool_format="qwen")
    rows = turns = 0
    for row in _rows(directory, "llamafactory"):
        aligned = convert(row)
        assert aligned["_prompt"], "its converter drops the row"
        for message in [*aligned["_prompt"], *aligned["_response"]]:
            if message["role"] == "function":
                function.apply(
                    content=message["content"],
                    thought_words=("<think>\n", "\n</think>\n\n"),
                    tool_call_words=("<tool_call>", "</tool_call>"),
                )
                turns += 1
        if aligned["_tools"]:  # its templates skip blank ones
            tools.apply(content=aligned["_tools"])
        rows += 1
    click.echo(f"LLaMA-Factory: {rows} rows kept, {turns} call turns read, {len(told)} warnings")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
