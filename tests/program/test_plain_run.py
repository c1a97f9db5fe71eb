"""What a plain prompt costs: features that are off are not loaded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from batch_trajectories.engine.features import FEATURES
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import ROOT, command, write_rows
from toolsets.sandbox.factory import sandbox_problem

INSIDE = ROOT / "toolsets" / "sandbox" / "inside"

_TRACER = """
import os, runpy, sys, threading

root, target, *sys.argv = sys.argv[1:]
trace = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
seen = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        what = "loaded" if frame.f_code.co_name == "<module>" else "run"
        line = f"{what} {frame.f_code.co_filename[len(root) + 1:]}\\n"
        if line not in seen:
            seen.add(line)
            os.write(trace, line.encode())

sys.path.insert(0, root)
threading.setprofile(note)
sys.setprofile(note)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, and writes which modules it and the processes that it forks load and run."""

_OURS = re.compile(r"(run|loaded) ((?:agent|toolsets|batch_\w+)(?:/[\w/]+)?)\.py")


_FEATURES = {place.partition(":")[0].rpartition(".")[0] for place in FEATURES.values()}
"""The folders of features, as `engine/features.py` names them."""

_TURNED_ON = (
    *sorted(folder.replace(".", "/") for folder in _FEATURES),
    "agent/flat",
    "agent/gateway",
    "agent/models/batches",
    "agent/models/dialects",
    "agent/views",
    "agent/wires",
    "toolsets/browser",
    "toolsets/images",
    "toolsets/mcp",
    "toolsets/net",
    "toolsets/web",
    *(
        f"batch_trajectories/{name}"
        for name in (
            "export/dataset",
            "export/filters",
            "importing",
            "maintenance",
            "mirror",
            "publishing",
            "recording",
            "report",
            "view",
        )
    ),
)
"""Folders and modules of what an option, an endpoint or another command turns on."""


class Modules(NamedTuple):
    """Modules of the program, without `__init__`."""

    loaded: set[str]
    run: set[str]
    """Those with a function or a class body that ran."""


def modules_of(cwd: Path, **options: object) -> Modules:
    """What the processes of a run load; its one prompt calls one tool in the default sandbox."""
    given = {"run_name": "r", "dataset_file": "p.jsonl", "num_workers": 1, **options}
    python, *arguments = command(**given, enabled_toolsets="terminal")
    trace = cwd / "trace"
    subprocess.run(
        [python, "-c", _TRACER, str(ROOT), str(trace), *arguments],
        cwd=cwd,
        check=True,
        capture_output=True,
    )
    lines = map(_OURS.fullmatch, trace.read_text().splitlines())
    found: dict[str, set[str]] = {"loaded": set(), "run": set()}
    for line in filter(None, lines):
        if not line[2].endswith("__init__"):
            found[line[1]].add(line[2])
    return Modules(**found)


@pytest.mark.slow
@pytest.mark.skipif(sandbox_problem("bwrap") is not None, reason="needs bubblewrap")
def test_a_plain_prompt_loads_no_feature(tmp_path: Path) -> None:
    """What an option, a column or a dialect turns on is imported where it is turned on."""
    call = {"name": "terminal", "arguments": {"command": "echo hello"}}
    write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "x", "script": [{"tool_calls": [call]}, {"content": "Done."}]},
    )
    modules = modules_of(tmp_path, model="scripted")
    assert "batch_trajectories/engine/worker/task_runner" in modules.run, (
        "the worker is traced, too"
    )
    # What runs inside the sandbox is not traced; it is taken from this folder, but for the program
    # that starts an agent, which nothing else imports.
    files = {path.stem: path.read_text() for path in INSIDE.glob("[!_]*.py")}
    importing = [name for name, text in files.items() if "inside.acp" in text]
    assert importing == ["forward"], "imported elsewhere? then it counts"
    inside = {f"toolsets/sandbox/inside/{name}" for name in files.keys() - {"forward", "acp"}}
    for place in _TURNED_ON:
        is_there = (ROOT / place / "__init__.py").exists() or (ROOT / f"{place}.py").exists()
        assert is_there, f"{place} has moved? then name its new place"
        loaded = [name for name in modules.loaded | inside if f"{name}/".startswith(f"{place}/")]
        assert not loaded, place


@pytest.mark.slow
@pytest.mark.skipif(sandbox_problem("bwrap") is not None, reason="needs bubblewrap")
def test_an_endpoint_adds_its_dialect_and_the_client(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x"})
    arguments = '{"command": "echo hello"}'
    with FakeEndpoint(turns=2, tool="terminal", arguments=arguments) as endpoint:
        given = {"model": "openai:m", "key_env": "none", "base_url": endpoint.openai_url}
        modules = modules_of(tmp_path, **given)
    dialects = {name for name in modules.loaded if name.startswith("agent/models/dialects/")}
    assert "agent/models/dialects/openai_chat" in dialects
    assert len(dialects) < 8, "of one API only"
