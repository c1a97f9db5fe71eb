"""The wheel: what a user has who installs it, outside of a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, ids, write_rows

pytestmark = pytest.mark.slow

NAMES = {"agent", "batch_runner.py", "batch_trajectories", "configs", "run_agent.py", "toolsets"}
"""All that may lie beside a user's other packages."""

SCRIPT = """
import api
from batch_trajectories import AIAgent, RunConfig, open_run, run

assert api.MINE
reveal_type((AIAgent, RunConfig, open_run, run))
"""
"""With a module of the user's own, whose name is that of a part of the program."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77, as pyproject.toml says")
    copy = tmp_path_factory.mktemp("checkout")  # setuptools leaves files where it builds
    for name in ("agent", "batch_trajectories", "configs", "packages", "toolsets"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("batch_runner.py", "run_agent.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", copy / "dist", copy], check=True, timeout=300)
    (built,) = sorted((copy / "dist").glob("*.whl"))
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with our packages for all else."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=300)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    (site,) = sorted(home.glob("lib/python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_its_top_level_names_are_those_that_users_import(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == NAMES
    packaged = {name for name in files if name.startswith("configs/")}
    presets = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert packaged >= presets
    assert {"configs/demo/prompts.jsonl", "configs/demo/library.py"} <= packaged
    templates = (ROOT / "batch_trajectories/export/templates/shipped").rglob("*.*")
    assert {str(path.relative_to(ROOT)) for path in templates} <= {*files}


def test_the_demo_runs_by_its_name(python: Path, tmp_path: Path) -> None:
    (tmp_path / "api.py").write_text("MINE = True\n")
    batch_runner = [str(python.with_name("batch-runner")), "--config=demo", "--run_name=demo"]
    done = subprocess.run(batch_runner, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(ids(tmp_path / "trajectories" / "demo.jsonl")) == 24
    config = json.loads((tmp_path / "trajectories" / "demo" / "run.json").read_text())["config"]
    assert not Path(config["dataset_file"]).is_relative_to(ROOT)


def test_a_script_beside_modules_of_the_same_names_sees_types(python: Path, tmp_path: Path) -> None:
    (tmp_path / "api.py").write_text("MINE = True\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text(SCRIPT.replace("reveal_type", "print"))
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([python, "plain.py"], cwd=tmp_path, env=clean, timeout=120)
    assert ran.returncode == 0
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=cache", "script.py"]
    checked = subprocess.run(
        [*mypy, f"--python-executable={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert checked.returncode == 0, checked.stdout
    assert "Any" not in checked.stdout.split("-> batch_trajectories.api.ai_agent.AIAgent")[0][:400]
    for name in ("ai_agent.AIAgent", "run_config.RunConfig", "stored_run.StoredRun"):
        assert f"-> batch_trajectories.{'config' if 'Config' in name else 'api'}.{name}" in (
            checked.stdout
        )


def test_the_scripts_of_the_docs_pass_a_strict_type_checker(python: Path, tmp_path: Path) -> None:
    """Those of docs/api.md as one script: later ones use names of earlier ones."""
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert len(scripts) > 5
    (tmp_path / "script.py").write_text("\n".join(scripts))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=cache", "script.py"]
    checked = subprocess.run(
        [*mypy, f"--python-executable={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert checked.returncode == 0, checked.stdout


def test_it_says_how_to_install_what_is_missing(python: Path) -> None:
    code = "from batch_trajectories.basics import errors; print(errors.install_command('live'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout == "pip install 'batch-trajectories[live]'\n"


def test_a_stranger_makes_a_published_dataset_again(python: Path, tmp_path: Path) -> None:
    """Another environment, directory, user and home: the scripted model gives the same bytes."""
    publisher, stranger = tmp_path / "publisher", tmp_path / "stranger"
    for folder in (publisher, stranger / "home"):
        folder.mkdir(parents=True)
    note = {"name": "write_file", "arguments": {"path": "note", "content": "six times seven"}}
    rows = [
        {
            "id": f"q{number}",
            "prompt": f"Question {number}: what is 6 times {number}?",
            "expected": str(6 * number),
            "script": [{"tool_calls": [note]}, {"content": f"<think>easy</think>{6 * number}"}],
        }
        for number in range(40)
    ]
    write_rows(publisher / "mine.jsonl", *rows)
    (publisher / "often.yaml").write_text("{file: 100, python: 50}\n")
    (publisher / "recipe.yaml").write_text(
        "formats: [openai, hermes, dpo, parquet]\nsplits: {train: 0.8, test: 0.2}\n"
        "sort: random\nseed: 3\ncard: {license: mit}\n"
    )
    options = ["--model=scripted", "--dataset_file=mine.jsonl", "--run_name=first", "--seed=11"]
    options += ["--distribution=often.yaml", "--num_samples=2", "--check_expected"]
    options += ["--system_prompt=Be brief.", "--num_workers=2"]
    here = {**os.environ, "HOME": str(publisher), "USER": "marlene7", "LOGNAME": "marlene7"}
    for args in (options, ["publish", "first", "OUT", "--recipe=recipe.yaml"]):
        line = [sys.executable, str(ROOT / "batch_runner.py"), *args]
        done = subprocess.run(line, cwd=publisher, env=here, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
    (publisher / "OUT").rename(stranger / "OUT")
    shutil.rmtree(publisher)
    text = b"".join(path.read_bytes() for path in (stranger / "OUT").rglob("*") if path.is_file())
    assert b"marlene7" not in text
    assert str(publisher).encode() not in text

    home = stranger / "home"
    there = {"HOME": str(home), "USER": "piet", "LOGNAME": "piet", "PATH": os.environ["PATH"]}
    there |= {"RUNNER": str(python.with_name("batch-runner")), "WORK": str(home / "work")}
    line = ["sh", str(stranger / "OUT" / "reproduce.sh"), "--num_workers=3"]
    done = subprocess.run(line, cwd=home, env=there, capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert b"the same rows" in done.stdout
    manifest = json.loads((stranger / "OUT" / "manifest.json").read_text())
    paths = [file["path"] for part in manifest["formats"] for file in part["files"]]
    assert len(paths) == 8
    for path in [*paths, "prompts.jsonl", "run.yaml", "recipe.yaml"]:
        again = (home / "work" / "published" / path).read_bytes()
        if path != "run.yaml":
            assert again == (stranger / "OUT" / path).read_bytes(), path
