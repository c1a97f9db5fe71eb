"""A program of the user's is found with everything that it needs to run in a sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batch_trajectories.engine.worker.agent_program import Installed, NotInstalled, find_program
from tests.toolsets.test_sandbox import needs_bwrap
from toolsets.sandbox.base import ExecResult, Extras, Limits, SandboxError
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_shown(tmp_path: Path, installed: Installed, *arguments: str) -> str:
    """Run a program in bubblewrap, which shows nothing but what was found."""

    async def once() -> str:
        extras = Extras(installed.binds, "/home/user")
        sandbox = make_sandbox(
            "bwrap", Workspace(tmp_path / "ws"), Limits(timeout_s=30), extras=extras
        )
        path = f"PATH={':'.join([*installed.directories, '/usr/bin', '/bin'])}"
        try:
            result = await sandbox.exec(["env", path, installed.path, *arguments])
        finally:
            await sandbox.stop()
        assert result.exit_code == 0, result.stderr
        return result.stdout.strip()

    return asyncio.run(once())


def test_a_program_of_the_system_needs_nothing() -> None:
    program = find_program("sh")
    assert not program.binds
    assert Path(program.path).is_relative_to("/usr")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(NotInstalled, match="'no-such-agent' was not found"):
        find_program("no-such-agent")


@needs_bwrap
def test_an_npm_program_is_shown_with_all_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds a package beside its own, through the link that npm makes."""
    packages = tmp_path / "lib" / "node_modules"
    script(packages / "other" / "data", "from the other package")
    script(
        packages / "agent" / "bin" / "agent.sh",
        '#!/bin/sh\ncat "$(dirname "$0")/../../other/data"\n',
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent").symlink_to(packages / "agent" / "bin" / "agent.sh")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    program = find_program("agent")
    assert list(program.binds) == [str(packages)]
    assert run_shown(tmp_path, program) == "from the other package"


@needs_bwrap
def test_a_program_of_a_virtual_environment_is_shown_with_its_interpreter(tmp_path: Path) -> None:
    """Its first line names the environment's interpreter, a link to one elsewhere."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "its_package.py").write_text("NAME = 'found'\n")
    program = script(
        environment / "bin" / "agent", f"#!{python}\nimport its_package\nprint(its_package.NAME)\n"
    )
    assert run_shown(tmp_path, find_program(str(program))) == "found"


@needs_bwrap
def test_a_link_into_a_virtual_environment_is_followed(tmp_path: Path) -> None:
    """As tools for applications in environments of their own make it."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    program = script(
        environment / "bin" / "agent",
        f"#!{environment / 'bin' / 'python'}\nimport sys\nprint(sys.prefix)\n",
    )
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "agent"
    link.symlink_to(program)
    assert run_shown(tmp_path, find_program(str(link))) == str(environment)


@needs_bwrap
def test_a_single_file_is_shown_without_its_neighbours(tmp_path: Path) -> None:
    program = script(tmp_path / "apps" / "agent", '#!/bin/sh\nls "$(dirname "$0")"\n')
    script(tmp_path / "apps" / "private", "")
    assert run_shown(tmp_path, find_program(str(program))) == "agent"


@needs_bwrap
def test_further_paths_are_shown(tmp_path: Path) -> None:
    program = script(tmp_path / "apps" / "agent", '#!/bin/sh\ncat "$1"\n')
    data = script(tmp_path / "data" / "file", "further")
    installed = find_program(str(program), [data.parent])
    assert run_shown(tmp_path, installed, str(data)) == "further"
    with pytest.raises(NotInstalled, match="gone does not exist"):
        find_program(str(program), [tmp_path / "gone"])


@needs_bwrap
def test_a_runtime_may_map_more_memory_than_it_uses(tmp_path: Path) -> None:
    """Garbage collectors reserve; what is used is still limited, in sum."""

    async def once(code: str) -> ExecResult:
        limits = Limits(timeout_s=30, memory_mb=200)
        workspace = Workspace(tmp_path / "ws")
        sandbox = make_sandbox("bwrap", workspace, limits, extras=Extras())
        try:
            return await sandbox.exec(["python3", "-c", code])
        finally:
            await sandbox.stop()

    mapped = "import mmap; m = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE)"
    assert asyncio.run(once(f"{mapped}; print('fine')")).stdout == "fine\n"
    with pytest.raises(SandboxError, match="used more memory than its limit of 200 MB"):
        asyncio.run(once(f"{mapped}\nfor at in range(0, 600 << 20, 4096): m[at] = 1"))
