"""Exports read by the loading code of each consumer, in a virtual environment of its own.

    python -m tests.benchmarks.consumers [RUN_DIR] --venvs DIR [--only trl,axolotl] [--torch SPEC]

Exports a run, by default that of `tests.fakes.trainers.sample_run`, into a temporary directory and
loads it with `datasets` (the newest and an old one), TRL's SFTTrainer, DPOTrainer and KTOTrainer,
LLaMA-Factory's loader, Axolotl's chat-template strategy, the models of harbor and others. A run of
your own needs rewards that differ between samples, and token ids (`--num_samples`, `--token_ids`);
failed calls and conversations that did not pass are masked in a part of the exports. Of the labels
of each trainer it is checked that all tokens of turns that are learnt carry loss, and none of
masked turns and of others.
Environments are made in DIR the first time, which takes gigabytes and minutes, and kept. `--torch`
is what pip is to install as torch, such as `torch==2.13.0+cpu` where there is such a wheel. Ends
with 1 if a consumer drops a row or learns what is not the model's, and if one could not be
installed or a check could not run: each is named at the end.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import scan
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import FormatName, Recipe
from batch_trajectories.export.templates.rendering import load_template
from tests.fakes.trainers import sample_run
from tests.fakes.trainers.environment import interpreter_in, run_module
from tests.fakes.trainers.rows import rows

_FORMATS: tuple[FormatName, ...] = (
    "hermes",
    "openai",
    "llamafactory",
    "atif",
    "dpo",
    "kto",
    "rl",
)


_MASKED, _MASKED_TURNS = "masked", "masked_turns"
"""Exports with turns that carry no loss: marked, and left out of rows per turn."""
_SPLIT_TURNS, _WITHOUT_REASONING = "split_turns", "without_reasoning"
"""Exports for templates that allow one call per turn, or no reasoning beside calls."""
_TEXT = "text"
"""An export whose arguments are JSON text."""


@dataclass(frozen=True)
class _Consumer:
    """What is installed, and the module of `tests/benchmarks/consuming` that runs in it."""

    module: str
    packages: tuple[str, ...]
    needs_torch: bool = False
    bare: tuple[str, ...] = ()
    """Installed without what they depend on."""
    more: tuple[str, ...] = ()
    """Further modules that run in the same environment, with arguments after spaces."""
    is_asked_for: bool = False
    """Only with `--only`: it needs modules that are in no registry."""


_CONSUMERS = {
    "datasets": _Consumer("hf_datasets", ("datasets",)),
    "datasets_old": _Consumer("hf_datasets", ("datasets==3.6.0",)),
    "trl": _Consumer(
        "trl_sft",
        ("trl",),
        needs_torch=True,
        more=("trl_preferences", "trl_turns turns", f"trl_turns {_MASKED_TURNS}"),
    ),
    "llamafactory": _Consumer(
        "llamafactory_loader",
        ("llamafactory",),
        needs_torch=True,
        more=(
            f"llamafactory_loader {_MASKED_TURNS}",
            "llamafactory_templates",
            f"llamafactory_templates {_SPLIT_TURNS}",
            f"llamafactory_templates {_WITHOUT_REASONING}",
        ),
    ),
    "axolotl": _Consumer(
        "axolotl_chat", ("axolotl",), needs_torch=True, more=(f"axolotl_chat {_MASKED}",)
    ),
    "verl": _Consumer(
        "verl_sft",
        ("verl[verl-core]",),
        needs_torch=True,
        more=(f"verl_sft {_MASKED}", "rl_rows verl", f"rl_rows {_MASKED} verl", "verl_prompts"),
    ),
    "skyrl": _Consumer(
        "rl_rows skyrl",
        ("skyrl", "loguru", "jaxtyping"),  # its extra asks for packages that are compiled for a GPU
        needs_torch=True,
        more=(f"rl_rows {_MASKED} skyrl",),
    ),
    "prime-rl": _Consumer("rl_rows prime_rl", ("msgspec",), is_asked_for=True),
    "slime": _Consumer("rl_rows slime", (), needs_torch=True, is_asked_for=True),
    "ms-swift": _Consumer(
        "swift_template", ("ms-swift",), needs_torch=True, more=(f"swift_template {_MASKED}",)
    ),
    "openrlhf": _Consumer(
        "openrlhf_sft",
        ("transformers", "datasets", "loguru", "pylatexenc", "ray"),
        needs_torch=True,
        bare=("openrlhf",),  # it depends on packages that are compiled for a GPU
        more=(f"openrlhf_sft {_MASKED_TURNS}",),
    ),
    "unsloth": _Consumer(
        "unsloth_labels",
        ("unsloth",),
        needs_torch=True,
        more=("unsloth_labels turns", f"unsloth_labels {_MASKED_TURNS}"),
    ),
    "automodel": _Consumer(
        f"nemo_automodel_chat {_TEXT}",
        ("nemo_automodel",),
        needs_torch=True,
        more=("nemo_automodel_chat turns", f"nemo_automodel_chat {_MASKED_TURNS}"),
    ),
    "harbor": _Consumer("atif_models", ("pydantic",), bare=("harbor",)),
}


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option("--venvs", type=click.Path(path_type=Path), required=True)
@click.option("--only", default=",".join(n for n, c in _CONSUMERS.items() if not c.is_asked_for))
@click.option("--torch", default="torch")
def main(run_dir: Path | None, venvs: Path, only: str, torch: str) -> None:
    """Export RUN_DIR and show what consumers make of it."""
    names = only.split(",")
    if unknown := set(names) - set(_CONSUMERS):
        raise click.UsageError(f"unknown {sorted(unknown)}; known are {', '.join(_CONSUMERS)}")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        lines, twins = Path(folder, "lines"), Path(folder, "twins")
        _export(run_dir or sample_run.make_sample_run(Path(folder)), lines, twins)
        for name in names:
            consumer = _CONSUMERS[name]
            try:
                python = interpreter_in(
                    venvs.resolve() / name,
                    [*([torch] if consumer.needs_torch else []), *consumer.packages],
                    bare=consumer.bare,
                    mend=_fit_to_torch if consumer.needs_torch else None,
                )
            except subprocess.CalledProcessError as error:
                failed.append(f"{name}: cannot be installed: {error}")
                continue
            directories = [twins]  # it holds the JSON lines too
            if name == "datasets":
                directories = [lines, twins]
            modules = (consumer.module, *consumer.more)
            for directory, module in product(directories, modules):
                file, *given = module.split()
                if why := run_module(
                    python, f"tests.benchmarks.consuming.{file}", directory, *given
                ):
                    failed.append(f"{name}, {module}: {why}")
            if name == "trl":
                _render(python, twins)
    for failure in failed:
        click.echo(f"FAILED {failure}")
    sys.exit(int(bool(failed)))


def _export(run_dir: Path, lines: Path, twins: Path) -> None:
    identity = read_run_json(run_dir)
    config = RunConfig.model_validate(identity["config"])
    rules = config.row_rules(identity["api"])
    scanned = scan(
        Path(identity["dataset"]["path"]),
        max_samples=config.max_samples,
        rules=rules,
        num_samples=config.num_samples,
    )
    source = Source(run_dir, scanned, config.num_samples)
    splits = {"train": 0.8, "test": 0.2}
    export_dataset(source, Recipe(formats=_FORMATS, splits=splits), lines)
    export_dataset(
        source, Recipe(formats=(*_FORMATS, "prompts", "parquet", "hf"), splits=splits), twins
    )
    export_dataset(source, Recipe(formats=("openai",), per_turn=True), twins / "turns")
    export_dataset(source, Recipe(formats=("openai",), arguments="text"), twins / _TEXT)
    split = Recipe(formats=("openai", "llamafactory"), parallel_calls="split")
    for name, recipe in (
        (_SPLIT_TURNS, {"per_turn": True}),
        (_WITHOUT_REASONING, {"reasoning": "none"}),
    ):
        export_dataset(source, split.model_copy(update=recipe), twins / name)
    masked = {"include": "not_passed"}
    for name, choice in (
        (_MASKED, {"formats": "openai,parquet,rl"}),
        (_MASKED_TURNS, {"formats": "openai,llamafactory", "per_turn": True}),
    ):
        export_dataset(source, Recipe.model_validate({**masked, **choice}), twins / name)


def _fit_to_torch(python: Path) -> None:
    """Take out what was compiled for another torch than the one that is there.

    Pictures and sound are not needed here, but trainers import both libraries if they can, and
    LLaMA-Factory imports torchaudio whether it can or not: that works without its compiled part.
    """
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "pip", "uninstall", "-qy", "torchvision"], check=True)
    if subprocess.run([str(python), "-c", "import torchaudio"], capture_output=True).returncode:
        for library in python.parent.parent.glob("lib/*/site-packages/torchaudio/lib/*.so"):
            library.unlink()


def _render(python: Path, directory: Path) -> None:
    """Say what the chat templates that TRL ships drop of the rows."""
    found = list(rows(directory, "openai"))
    (package,) = python.parent.parent.glob("lib/*/site-packages/trl")
    for path in sorted((package / "chat_templates").glob("*.jinja")):
        kinds: Counter[str] = Counter()
        render = load_template(path)
        for row in found:
            kinds.update(_kind(place) for place in render(row).dropped)
        lost = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(4))
        click.echo(f"template {path.stem}: {len(found)} rows, drops {lost or 'nothing'}")


def _kind(place: str) -> Any:
    return " ".join(place.split(": ")[0].split(", ")[1:]) or place


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
