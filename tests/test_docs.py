"""What is written for people is true: the README, the demo, the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from batch.config import RunConfig
from batch.config_file import load_config
from tests.running import ROOT, ids, run

README = (ROOT / "README.md").read_text()


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for pattern in re.findall(r"readme_command '([^']+)'", ci):
        assert len([line for line in README.splitlines() if pattern in line]) == 1


def test_every_flag_in_the_readme_exists() -> None:
    known = set(RunConfig.model_fields)
    known |= {"config", "dry_run", "help", "json", "fresh", "resume", "pilot", "format"}
    known |= {"read_data", "repair", "watch"}
    used = set(re.findall(r"--([a-z_]+)", README))
    assert used <= known


def test_every_fault_is_proved_by_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"(tests/\S+\.py)::(\w+)", text)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
    rows = {int(number) for number in re.findall(r"\bF(\d+)\b", text)}
    assert rows == {*range(1, 23), *range(33, 40), 48}


def test_every_option_has_a_sentence_of_help() -> None:
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_the_readme_names_every_exit_code_of_the_errors() -> None:
    from batch import errors

    codes = {e.exit_code for e in vars(errors).values() if hasattr(e, "exit_code")}
    for code in codes:
        assert re.search(rf"\b{code}\s", README.split("Exit codes:")[1])


@pytest.mark.parametrize("workers", [1, 3])
def test_the_demo_is_what_the_readme_says(tmp_path: Path, workers: int) -> None:
    """26 tasks, all ended; one early, one rejected; whatever the number of workers."""
    done = run(
        tmp_path, config=ROOT / "configs/demo/run.yaml", run_name="demo", num_workers=workers
    )
    assert done.returncode == 0, done.stderr
    exports = tmp_path / "trajectories" / "demo" / "exports"
    assert len(ids(tmp_path / "trajectories" / "demo.jsonl")) == 24
    assert ids(exports / "partial.jsonl") == ["demo-14-never-done"]
    assert ids(exports / "rejects.jsonl") == ["demo-13-unknown-tool"]
    manifest = json.loads((exports / "manifest.json").read_text())
    assert manifest["rejected_by_reason"] == {"unknown_tool": 1}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=str)
def test_every_preset_is_valid(path: Path) -> None:
    own = yaml.safe_load(path.read_text())
    missing = {} if "dataset_file" in own else {"dataset_file": path}
    load_config(path, {"run_name": "x", **missing})
