"""What is written for people is true: the README, the demo, the package."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from batch_runner import main
from batch_trajectories.cli import reference_docs
from batch_trajectories.cli.command_line import COMMANDS
from batch_trajectories.cli.option_docs import page as option_page
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.rows_file import load_rows_file
from run_agent import AIAgent
from tests.helpers.running import ROOT, ids, run

README = (ROOT / "README.md").read_text()


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for pattern in re.findall(r"readme_command '([^']+)'", ci):
        assert len([line for line in README.splitlines() if pattern in line]) == 1


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def options_of(name: str) -> set[str]:
    """What a command shows in its help, without dashes."""
    command = main.import_command(name)
    collected = [
        param
        for param in (*command.get_params(click.Context(command)), *main.params)
        if not (isinstance(param, click.Option) and param.hidden)
    ]
    long = [opt for param in collected for opt in (*param.opts, *param.secondary_opts)]
    return {opt.removeprefix("--") for opt in long if opt.startswith("--")}


KNOWN = {option for name in COMMANDS for option in options_of(name)} | set(
    inspect.signature(AIAgent).parameters
)


FOR_OTHERS = re.compile(
    r"(?:#SBATCH|\bsbatch|\bsrun|\bray (?:start|job|get))[^`\n]*"
    r"|(?:-m (?:tests\.(?:benchmarks|fakes|real)\.\w+|pytest|openrlhf\.)|swift sft)[^`]*"
    r"|--(?:signal|array)="
    r"|--logprobs-mode|--policy\b|py-spy[^`]*"
)
"""Commands for programs other than ours."""


def command_lines() -> list[tuple[str, str]]:
    """The commands that pages and presets show: in blocks, in the text, in comments."""
    collected = []
    scripts = (ROOT / "docs").glob("*.sh")
    for page in [*PAGES, *scripts, *(ROOT / "configs").rglob("*.yaml")]:
        text = page.read_text().replace("\\\n", " ")
        inline = re.findall(r"`(python\s+batch_runner\.py\s[^`]*)`", text)
        lines = re.findall(
            r"^#? *((?:[^\s`]*python[^\s`]* batch_runner\.py|batch-runner) .*)$", text, re.MULTILINE
        )
        collected += [(page.name, " ".join(line.split())) for line in [*inline, *lines]]
    return collected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_on_a_page_exists(page: Path) -> None:
    text = FOR_OTHERS.sub("", page.read_text())
    used = set(re.findall(r"(?<![\w-])--([a-z][a-z_]+)(?![\w-])", text))
    assert used - KNOWN == set()


def test_every_option_is_on_its_page() -> None:
    """docs/options.md is what `python -m batch_trajectories.cli.option_docs` writes."""
    text = (ROOT / "docs" / "options.md").read_text()
    assert text == option_page()
    for name in COMMANDS:
        for option in options_of(name) - {"help", "version"}:
            assert re.search(rf"--{option}\b", text), f"{name} --{option}"


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_generated_pages_are_what_the_code_says(name: str) -> None:
    """docs/reference/ holds what `python -m batch_trajectories.cli.reference_docs` writes."""
    assert (ROOT / "docs" / "reference" / name).read_text() == reference_docs.PAGES[name]()


def test_every_exit_code_of_an_error_is_on_its_page() -> None:
    page = reference_docs.codes()
    for code in reference_docs.error_codes():
        assert f"\n{code} | " in page


def test_every_command_that_a_page_shows_can_be_typed() -> None:
    shown = command_lines()
    assert len(shown) > 30
    for page, line in shown:
        program = re.search(r"batch_runner\.py|batch-runner", line)
        assert program is not None
        words = shlex.split(line[program.end() :].partition(" ||")[0], comments=True)
        name = words[0] if words[0] in COMMANDS else "run"
        given = {word.removeprefix("--").partition("=")[0] for word in words if word[:2] == "--"}
        assert given <= options_of(name) | {"help"}, f"{page}: {line}"


def test_every_file_that_a_page_shows_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"
    for name, line in command_lines():
        for path in re.findall(r"configs/\S+?\.yaml", line):
            assert (ROOT / path).exists(), f"{name}: {line}"


def test_every_page_is_named_in_a_table_of_pages() -> None:
    """README names them, or the table of all pages, which stands beside them."""
    table = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        named = f"(docs/{name})" in README or f"({name})" in table
        assert named or name == "README.md", name


def test_every_fault_is_proved_by_tests_that_exist() -> None:
    text = (ROOT / "tests" / "faults" / "README.md").read_text()
    named = re.findall(r"(tests/\S+\.py)::(\w+)", text)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
    rows = {int(number) for number in re.findall(r"\bF(\d+)\b", text)}
    assert rows == {*range(1, 23), *range(33, 40), 48, 51, 52, 54}


def test_every_option_has_a_sentence_of_help() -> None:
    for name, field in RunConfig.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_demo_is_what_the_readme_says(tmp_path: Path, workers: int) -> None:
    """26 tasks, all ended; one early, one rejected; with any number of workers."""
    done = run(tmp_path, config="demo", run_name="demo", num_workers=workers)
    assert done.returncode == 0, done.stderr
    exports = tmp_path / "trajectories" / "demo" / "exports"
    assert len(ids(tmp_path / "trajectories" / "demo.jsonl")) == 24
    assert ids(exports / "partial.jsonl") == ["demo-14-never-done"]
    assert ids(exports / "rejects.jsonl") == ["demo-13-unknown-tool"]
    manifest = json.loads((exports / "manifest.json").read_text())
    assert manifest["rejected_by_reason"] == {"unknown_tool": 1}


RUNS = [path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "agents"]
"""Presets of runs; `tests/config/test_agents.py` has those of agents."""


@pytest.mark.parametrize("path", RUNS, ids=str)
def test_every_preset_is_valid(path: Path) -> None:
    if path.parent.name == "rows":
        load_rows_file(str(path))
        return
    own = yaml.safe_load(path.read_text())
    missing = {} if "dataset_file" in own else {"dataset_file": path}
    load_config(path, {"run_name": "x", **missing})


KEYS = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "openrouter": "OPENROUTER_API_KEY",
    "server": None,
    "vllm": None,
    "ollama": None,
}


@pytest.mark.parametrize("name", KEYS)
def test_a_preset_is_ready_or_says_which_key_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    options = ["--dataset_file=p.jsonl", "--run_name=x", "--enabled_toolsets=file", "--dry_run"]

    def start(env: dict[str, str]) -> Result:
        return CliRunner().invoke(main, ["run", f"--config={name}", *options], env=env)

    key = KEYS[name]
    if key is not None:
        without = start({key: ""})
        assert without.exit_code == 2
        assert f"set the environment variable {key} " in without.stderr
        assert without.stderr.count("\n") == 1
    ready = start({} if key is None else {key: "k"})
    assert ready.exit_code == 0, ready.stderr
    assert re.search(r"^model      \S+ \(\w+ at https?://", ready.stdout, re.MULTILINE)
    assert not (tmp_path / "trajectories").exists()
