"""Every fenced block of the README and of docs/ is run or read as it stands.

A reader pastes blocks one after the other: rows into `prompts.jsonl`, options into a YAML file,
commands into a shell. So rows are read by the rules of a run, YAML by what reads it, and commands
by the command line; all commands that name one run must agree on what its data is.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from agent.options import AgentOptions
from batch_runner import main
from batch_trajectories.cli.command_line import COMMANDS
from batch_trajectories.config.fingerprint import data_options
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.rows_file import load_rows_file
from batch_trajectories.export.rows.recipe import load_recipe
from batch_trajectories.records.checks import printed_rewards
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import ROOT, lines, write_rows

# The blocks of guides are run one after the other by `tests/test_guides.py`.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "guides"),
]

NOT_RUN_HERE = {
    # how a line begins: why it is not read by this program
    "source .venv/bin/activate": "the shell's own",
    "python3 -m venv .venv": "`.ci/run` runs both commands of the README in a fresh clone",
    "npm install": "installs an agent",
    "pip install": "installs this program on other machines",
    "cp ": "the shell's own",
    "export ": "the shell's own",
    "eval ": "tells a shell where completions come from",
    "_BATCH_RUNNER_COMPLETE=": "writes the completions of a shell",
    "mkdir ": "the shell's own",
    "sh my_dataset/reproduce.sh": "`tests/program/test_wheel.py` runs it",
    "podman ": "needs images",
    "skopeo ": "needs a registry",
    "ray ": "starts a cluster",
    "swift ": "a trainer",
    "python -m openrlhf.": "a trainer",
    "...": "stands for lines between",
}
"""Shell commands that are not ours, each with what it is instead."""

FOREIGN = ("# llamafactory", "# axolotl", "# automodel", "# verl")
"""YAML of trainers says at its top whose it is."""

NO_CODE = ("", "text")
"""Blocks in these languages are commands of other programs or output, unless they call ours."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


@cache
def blocks() -> tuple[Block, ...]:
    """The fenced blocks of all pages."""
    collected = []
    for path in PAGES:
        page = path.read_text()
        for fence in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE):
            line = page.count("\n", 0, fence.start()) + 1
            collected.append(Block(path.name, line, fence[2], textwrap.dedent(fence[3])))
    return tuple(collected)


def of(*languages: str) -> pytest.MarkDecorator:
    """A parameter: the blocks in these languages."""
    found = [block for block in blocks() if block.language in languages]
    assert found
    return pytest.mark.parametrize("block", found, ids=lambda block: f"{block.page}:{block.line}")


def commands_in(text: str) -> list[str]:
    """The command lines of a block, in one line each, without comments."""
    joined = text.replace("\\\n", " ")
    found = [" ".join(line.partition(" #")[0].split()) for line in joined.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def ours(line: str) -> list[str] | None:
    """The words after the program, if a line calls ours."""
    match = re.match(r"\S*python\S* batch_runner\.py (.*)", line)
    return None if match is None else shlex.split(match[1])


def test_all_languages_are_known() -> None:
    known = {"json", "yaml", "toml", "python", "bash", "sh", *NO_CODE}
    assert {block.language for block in blocks()} <= known


@of("json")
def test_rows_can_be_pasted_into_a_file(block: Block) -> None:
    """One object per line; those with a prompt or a user are rows that a run reads."""
    user = AgentOptions.model_validate({"simulated_user": {}})
    for line in block.text.splitlines():
        row = json.loads(line)
        assert isinstance(row, dict), line
        if "prompt" in row or "simulated_user" in row:
            options = user if "simulated_user" in row else AgentOptions()
            RowRules(script="allowed", with_setup=True, image="allowed", options=options).read(row)
        else:
            assert printed_rewards(row, turns=3) is not None, line


@of("yaml")
def test_yaml_is_read_by_what_reads_it(block: Block, tmp_path: Path) -> None:
    """A rows file, a recipe, or options of a run; those of trainers say whose they are."""
    read = yaml.safe_load(block.text)
    if block.text.startswith(FOREIGN):
        return
    keys = set(read)
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    if keys == {"options", "columns", "keep"}:
        load_rows_file(str(path))
    elif "formats" in keys:
        # Keys that exclude each other stand side by side, to show all: each is read alone.
        recipe = yaml.safe_load(block.text)
        for name, value in recipe.pop("filters", {}).items():
            path.write_text(yaml.safe_dump({"formats": ["openai"], "filters": {name: value}}))
            load_recipe(path, {})
        path.write_text(yaml.safe_dump({**recipe, "formats": ["openai", "parquet"]}))
        load_recipe(path, {})
    else:
        assert keys <= set(RunConfig.model_fields)
        given = {"dataset_file": "p.jsonl", "run_name": "r"}
        named = {} if keys & {"model", "models"} else {"model": "openai:m"}
        load_config(path, {**named, **given})


@of("toml")
def test_toml_stands_in_the_example_beside_the_pages(block: Block) -> None:
    """A page shows a part of a `pyproject.toml` that is installed and tried."""
    example = tomllib.loads((ROOT / "docs/gvisor/pyproject.toml").read_text())
    assert tomllib.loads(block.text)["project"].items() <= example["project"].items()


@of("python")
def test_python_compiles(block: Block) -> None:
    """`tests/program/test_api.py` runs those of docs/api.md; others need trainers."""
    compile(block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@of("bash", "sh", *NO_CODE)
def test_commands_are_those_of_this_program(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of our commands is parsed with all its options; others are in `NOT_RUN_HERE`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    for line in commands_in(block.text):
        words = ours(line)
        if words is None:
            in_shell = block.language in ("bash", "sh")
            assert not in_shell or line.startswith(tuple(NOT_RUN_HERE)), line
            continue
        if "[" in line:  # a summary of usage, such as `status [RUN]`
            continue
        name = words[0] if words[0] in COMMANDS else "run"
        rest = words[1:] if words[0] in COMMANDS else words
        try:
            main.import_command(name).make_context(name, rest).close()
        except click.UsageError as error:
            pytest.fail(f"{line}: {error.format_message()}")


STARTING = ("run", "estimate")


@cache
def runs() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Where pages start runs, and the flags there; without those that only look."""
    collected = []
    for block in blocks():
        for line in commands_in(block.text):
            words = ours(line)
            if words is None or "[" in line:
                continue
            name = words[0] if words[0] in COMMANDS else "run"
            if name not in STARTING:
                continue
            command = main.import_command(name)
            rest = words[1:] if words[0] in COMMANDS else words
            with command.make_context(name, rest) as context:
                given = {
                    key: value
                    for key, value in context.params.items()
                    if value not in (None, (), False) and key in RunConfig.model_fields
                }
                config = context.params["config_file"]
            collected.append((f"{block.page}:{block.line}", {**given, "config": config}))
    assert len(collected) > 10
    return tuple(collected)


def test_every_start_names_a_model() -> None:
    """By `--model`, or by a config: a reader has no default that fits."""
    without = [
        place for place, flags in runs() if not {"model", "config"} & flags.keys() - _unset(flags)
    ]
    assert without == []


def _unset(flags: dict[str, Any]) -> set[str]:
    return {name for name, value in flags.items() if value is None}


def test_starts_of_one_run_agree_on_what_its_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that uses the run of another with other options would be refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yaml").write_bytes((ROOT / "configs/openai.yaml").read_bytes())
    (tmp_path / "run.yaml").write_text("model: openai:gpt-5-mini\ndataset_file: prompts.jsonl\n")
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, flags in runs():
        own = {key: value for key, value in flags.items() if key != "config"}
        config = load_config(flags["config"], own)
        meaning = {**data_options(config), "dataset_file": str(config.dataset_file)}
        first, before = seen.setdefault(config.run_name, (place, meaning))
        differing = [key for key in meaning if meaning[key] != before[key]]
        assert differing == [], f"{place} and {first} start {config.run_name} with other options"


@pytest.mark.slow
def test_the_steps_of_the_readme_lead_to_a_dataset(tmp_path: Path) -> None:
    """Its blocks one after the other, in a shell, with the endpoint on loopback."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    steps = [block for block in blocks() if block.page == "README.md" and "my" in block.text]
    (row,) = (block.text for block in blocks() if block.page == "README.md" and "q1" in block.text)
    write_rows(tmp_path / "prompts.jsonl", json.loads(row), *({"prompt": f"{n}"} for n in range(3)))
    bash = "\n".join(block.text for block in steps if block.language == "bash")
    assert bash.count("batch_runner.py") == 6
    with FakeEndpoint(turns=2, latency_s=0.0) as endpoint:
        program = f"{sys.executable} {ROOT / 'batch_runner.py'}"
        bash = bash.replace("python batch_runner.py", program).replace(" --watch", "")
        # `responses:` of the config is called at this address instead.
        bash = re.sub(
            r"(--run_name=my_run)",
            rf"\1 --base_url={endpoint.openai_url} --enabled_toolsets=file --model=openai:m"
            ' --prices=\'{"m": {"input": 1, "output": 1}}\'',
            bash,
        )
        done = subprocess.run(
            ["bash", "-e", "-c", bash],
            cwd=tmp_path,
            env={**os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trajectories/my_run/report.html").exists()
    assert len(lines(tmp_path / "trajectories/my_run/exports/dataset/openai/train.jsonl")) == 4
