"""What single commands import, by name: the first second of a command is mostly imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import ROOT, run, write_rows

_OUR_FOLDERS = {"agent", "batch_trajectories", "toolsets"}

_PACKAGES = {
    "annotated_types",
    "click",
    "msgspec",
    "orjson",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}
"""The packages of others that each command may import."""

_CLIENT_PACKAGES = {
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "frozenlist", "genai_prices", "idna"),
    *("multidict", "propcache", "tenacity", "tqdm", "truststore", "yarl"),
    *("aiodns", "backports", "brotli", "brotlicffi", "envwrap", "tornado"),  # asked for in vain
}
"""The packages of others that a run with a live model may import beside these."""

_OPTIONS = {
    *("agent.messages", "agent.models", "agent.options", "agent.state"),
    *("batch_trajectories.basics", "batch_trajectories.cli", "batch_trajectories.config"),
    *("batch_trajectories.dataset", "batch_trajectories.records", "toolsets.sandbox"),
}
"""The folders and modules that define the options of a run."""

_ROWS = {
    *("agent.loop", "toolsets.context", "toolsets.tool", "toolsets.workspace"),
}
"""The folders and modules that define the rows of a dataset."""

_TOOLS = {
    *("agent.setup", "toolsets.catalog", "toolsets.function_threads", "toolsets.toolbox"),
}

_FOLDERS = {
    "--help": _OPTIONS,
    "status": _OPTIONS
    | _ROWS
    | {"batch_trajectories.api", "batch_trajectories.engine", "batch_trajectories.export"}
    | {"batch_trajectories.report"},
    "--dry_run": _OPTIONS
    | _ROWS
    | _TOOLS
    | {"agent.gateway", "agent.runner", "batch_trajectories.engine", "toolsets.builtin"},
    "first call": _OPTIONS
    | _ROWS
    | _TOOLS
    | {"agent.runner", "batch_trajectories.api", "batch_trajectories.engine"}
    | {"batch_trajectories.export"},
}
"""Our folders, and modules beside them, that a command may import."""

_COSTLY = {
    *("asyncio", "concurrent", "email", "http", "importlib.metadata", "multiprocessing"),
    *("socket", "ssl", "subprocess", "tomllib", "unittest", "urllib.request", "zipfile"),
}
"""Modules of Python that take milliseconds each."""

_OF_VERSIONS = {"email", "importlib.metadata", "socket", "zipfile"}
"""Modules with which Python finds the versions of packages."""

_OF_SANDBOXES = {"asyncio", "concurrent", "ssl", "subprocess"}
"""Modules that the module of a sandbox imports."""

_COSTLY_ALLOWED = {
    "--help": set[str](),
    "status": _OF_VERSIONS,
    "--dry_run": _OF_VERSIONS | _OF_SANDBOXES | {"http", "multiprocessing"},
    "first call": _OF_VERSIONS
    | _OF_SANDBOXES
    | {"http", "multiprocessing", "tomllib", "urllib.request"},
}


def _modules_of(cwd: Path, *arguments: str) -> set[str]:
    """The names of all modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "batch_runner.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    _title, *names = (line.rpartition("|")[2].strip() for line in lines)
    return set(names)


@pytest.mark.parametrize("command", _FOLDERS)
def test_a_command_imports_only_what_is_listed_for_it(tmp_path: Path, command: str) -> None:
    """Imports that one command needs are where it needs them, so that others start faster."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    flags = ["--dataset_file=p.jsonl", "--model=scripted", "--enabled_toolsets=none"]
    flags.append("--run_name=r")
    arguments = [command]
    if command == "status":
        assert run(tmp_path, *flags).returncode == 0
        arguments.append("r")
    elif command == "--dry_run":
        arguments += flags
    with FakeEndpoint(turns=1) as endpoint:
        if command == "first call":
            arguments = [*flags, "--model=openai:m", "--key_env=none"]
            arguments.append(f"--base_url={endpoint.openai_url}")
        modules = _modules_of(tmp_path, *arguments)
    ours = {name for name in modules if name.partition(".")[0] in _OUR_FOLDERS}
    assert "batch_trajectories.cli" in ours, "the list of modules was read"
    folders = {".".join(name.split(".")[:2]) for name in ours} - _OUR_FOLDERS
    assert folders <= _FOLDERS[command]
    costly = {name for name in _COSTLY if any(f"{one}.".startswith(f"{name}.") for one in modules)}
    assert costly <= _COSTLY_ALLOWED[command]
    known = sys.stdlib_module_names | _OUR_FOLDERS
    # Those with an underscore, and these two, are of the interpreter and its installation.
    packages = {name.partition(".")[0] for name in modules} - known - {"sitecustomize", "org"}
    allowed = _PACKAGES | (_CLIENT_PACKAGES if command == "first call" else set())
    assert {name for name in packages if not name.startswith("_")} <= allowed
