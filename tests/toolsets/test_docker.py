"""The docker sandbox, against an engine that is played by a script, and a real one if there is one.

The script does what `docker run` would do, with bubblewrap in the place of the container, and takes
note of how it was called.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.dataset.row import RowRules
from tests.helpers.playing import call, calls, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from toolsets.sandbox.base import ImageSpec, Limits, SandboxError, SandboxSettings
from toolsets.sandbox.containers.engine import image_config
from toolsets.sandbox.factory import make_sandbox, sandbox_problem
from toolsets.workspace.workspace import Workspace

ENGINE = """\
#!{python}
import json, os, sys
args = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps({{"args": args, "env": sorted(os.environ)}}) + "\\n")
if args[0] in ("version", "ps", "images"):
    sys.exit(0)
if args[:2] == ["image", "inspect"]:
    if args[-1] in ("python:3.11", "other:1"):
        print("sha256:" + args[-1][0] * 64, "null")
        sys.exit(0)
    sys.exit("Error response from daemon: No such image: " + args[-1])
home = args[args.index("--volume") + 1].split(":")[0]
command = args[args.index("python3") + 1 :]
options = ["--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--die-with-parent"]
for name in set(os.listdir("/")) - {{"dev", "proc", "workspace"}}:
    options += ["--ro-bind-try", "/" + name, "/" + name]
options += ["--tmpfs", "/tmp", "--bind", home, "/workspace", "--chdir", "/workspace"]
os.execvp("bwrap", ["bwrap", *options, "--", os.path.realpath(sys.executable), *command])
"""

PYTHON = SandboxSettings(image="python:3.11")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` on the PATH; gives the file of its calls."""
    log = tmp_path / "calls.jsonl"
    binary = tmp_path / "bin" / "docker"
    binary.parent.mkdir()
    binary.write_text(ENGINE.format(python=sys.executable, log=str(log)))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    return log


needs_bwrap = pytest.mark.skipif(
    sandbox_problem("bwrap") is not None, reason=str(sandbox_problem("bwrap"))
)


def argument(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


@needs_bwrap
def test_a_container_is_started_once_per_task_with_its_limits(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    workspace = Workspace(tmp_path / "ws")
    limits = Limits(memory_mb=300, processes=20, tmp_mb=7)

    async def use() -> list[str]:
        sandbox = make_sandbox("docker", workspace, limits, PYTHON)
        try:
            first = await sandbox.run("shell", "cd /tmp; X=1; touch /workspace/f")
            second = await sandbox.run("shell", "pwd; echo $X; ls /workspace")
            third = await sandbox.exec(["cat", "/proc/1/cmdline"])
            return [first.stdout, second.stdout, third.stdout]
        finally:
            await sandbox.stop()

    assert asyncio.run(use())[:2] == ["", "/tmp\n1\nf\n"]
    assert (workspace.root / "f").exists()
    [started] = lines(engine)
    args = started["args"]
    assert args[0] == "run"
    assert argument(args, "--network") == "none"
    assert argument(args, "--memory") == "300m"
    assert argument(args, "--pids-limit") == "20"
    assert argument(args, "--cap-drop") == "ALL"
    assert argument(args, "--security-opt") == "no-new-privileges"
    assert argument(args, "--user") == f"{os.getuid()}:{os.getgid()}"
    assert argument(args, "--volume") == f"{workspace.root}:/workspace"
    assert argument(args, "--pull") == "never"
    assert argument(args, "--stop-timeout") == "0"
    assert argument(args, "--name").startswith("bt-")
    assert args[args.index("python:3.11") + 1] == "python3"
    assert "OPENAI_API_KEY" not in started["env"]
    assert not any("canary" in argument for argument in args)


@needs_bwrap
def test_the_engine_is_asked_in_one_environment(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the check at the start would find images that conversations do not have."""
    for name in ("CONTAINERS_STORAGE_CONF", "STORAGE_DRIVER", "CONTAINER_HOST", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    assert sandbox_problem("docker", PYTHON) is None

    async def use() -> None:
        sandbox = make_sandbox("docker", Workspace(tmp_path / "ws"), Limits(), PYTHON)
        try:
            await sandbox.run("shell", "true")
        finally:
            await sandbox.stop()

    asyncio.run(use())
    checked, started = (set(call["env"]) - {"LC_CTYPE"} for call in lines(engine))
    assert checked == started
    assert {"CONTAINERS_STORAGE_CONF", "STORAGE_DRIVER", "CONTAINER_HOST", "TMPDIR"} <= checked
    assert "OPENAI_API_KEY" not in checked


PULLING = """\
#!/bin/sh
echo "$1 $2" >> {log}
case "$1 $2" in
"image inspect") test -e {pulled} && echo '1234 {{"WorkingDir": "/app"}}' ;;
"pull --quiet") echo pulled >> {pulled} ;;
esac
"""


def test_a_missing_image_is_pulled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many conversations wait for it; and never unless the run says so."""
    log, pulled = tmp_path / "log", tmp_path / "pulled"
    binary = tmp_path / "bin" / "podman"
    binary.parent.mkdir()
    binary.write_text(PULLING.format(log=log, pulled=pulled))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    with pytest.raises(ToolError, match="podman does not have it"):
        image_config("podman", "a:1", "never")
    assert not pulled.exists()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: image_config("podman", "a:1", "missing"), range(8)))
    assert found == [({"WorkingDir": "/app"}, "sha256:1234")] * 8
    assert pulled.read_text() == "pulled\n"


class TestProblems:
    def test_an_image_that_the_engine_has_is_not_a_problem(self, engine: Path) -> None:
        assert sandbox_problem("docker", PYTHON) is None
        assert sandbox_problem("docker") is None

    def test_an_image_that_it_lacks_is_named(self, engine: Path) -> None:
        assert sandbox_problem("docker", SandboxSettings(image="nope:1")) == (
            "sandbox docker: image 'nope:1': Error response from daemon: No such image: nope:1 "
            "(docker pull nope:1?)"
        )

    def test_without_the_program_there_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "docker was not found" in str(sandbox_problem("docker", PYTHON))
        with pytest.raises(SandboxError, match="no image was named"):
            make_sandbox("docker", Workspace(tmp_path), Limits())


class TestRows:
    def test_a_row_names_its_image_where_the_run_uses_docker(self) -> None:
        row = {"prompt": "x", "image": "swe/repo:1", "docker_image": "swe/repo@sha256:ab"}
        assert RowRules(image="allowed").read(row).image == ImageSpec("swe/repo@sha256:ab")
        assert RowRules().read(row).image is None
        assert "docker_image" in RowRules(image="allowed").rollout_columns(row)

    @pytest.mark.parametrize("image", ["--privileged", "a b", "", 7, "$(x)"])
    def test_an_invalid_image_name_makes_a_bad_row(self, image: Any) -> None:
        with pytest.raises(ValueError, match="is not a valid image name"):
            RowRules(image="allowed").read({"prompt": "x", "docker_image": image})

    def test_where_the_run_has_none_every_row_needs_one(self) -> None:
        with pytest.raises(ValueError, match="no `docker_image`, `image` or `image_name` field"):
            RowRules(image="needed").read({"prompt": "x"})


def test_a_run_refuses_an_image_that_is_not_there(tmp_path: Path, engine: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [say("x")]})
    options = {**SCRIPTED, "enabled_toolsets": "terminal", "sandbox": "docker"}
    refused = run(tmp_path, **options, docker_image="nope:1")
    assert refused.returncode == 2
    assert "No such image: nope:1" in refused.stderr
    none = run(tmp_path, **options)
    assert none.returncode == 2
    assert (
        "no `docker_image`, `image` or `image_name` field (or give --docker_image)" in none.stderr
    )


@needs_bwrap
def test_each_row_runs_in_its_own_image(tmp_path: Path, engine: Path) -> None:
    script = [calls(call("terminal", command="echo hi > f; cat f")), say("done")]
    rows = [
        {"prompt": "a", "script": script},
        {"prompt": "b", "script": script, "image": "other:1"},
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(
        tmp_path,
        **{**SCRIPTED, "enabled_toolsets": "terminal"},
        sandbox="docker",
        docker_image="python:3.11",
    )
    assert done.returncode == 0, done.stderr
    for record in lines(tmp_path / "trajectories" / "r" / "records.jsonl"):
        assert json.loads(record["messages"][2]["content"])["stdout"] == "hi\n"
        assert record["sandbox"] == "docker"
        reference = record["image"]["reference"]
        assert record["image"]["digest"] == "sha256:" + reference[0] * 64
    started = [one["args"] for one in lines(engine) if one["args"][0] == "run"]
    images = {args[args.index("python3") - 1] for args in started}
    assert (len(started), images) == (2, {"python:3.11", "other:1"})


def _real_problem() -> str | None:
    if shutil.which("docker") is None:
        return "there is no docker here"
    image = os.environ.get("DOCKER_TEST_IMAGE")
    if image is None:
        return "DOCKER_TEST_IMAGE names no image with python3"
    return sandbox_problem("docker", SandboxSettings(image=image))


@pytest.mark.long
def test_a_real_engine_runs_a_conversation(tmp_path: Path) -> None:
    if problem := _real_problem():
        pytest.skip(problem)
    script = [
        calls(call("terminal", command="cd /tmp; X=1; touch /workspace/f; id -u")),
        calls(call("terminal", command="pwd; echo $X; ls /workspace; wget -T1 example.org")),
        calls(call("python", code="6 * 7")),
        say("done"),
    ]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    image = os.environ["DOCKER_TEST_IMAGE"]
    done = run(
        tmp_path,
        **{**SCRIPTED, "enabled_toolsets": "terminal,python"},
        sandbox="docker",
        docker_image=image,
    )
    assert done.returncode == 0, done.stderr
    [record] = lines(tmp_path / "trajectories" / "r" / "records.jsonl")
    first, second, third = (
        json.loads(message["content"])
        for message in record["messages"]
        if message["role"] == "tool"
    )
    assert first["stdout"] == f"{os.getuid()}\n"
    assert second["stdout"] == "/tmp\n1\nf\n"
    assert second["exit_code"] != 0
    assert third["value"] == "42"
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"ancestor={image}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert left.stdout == ""
