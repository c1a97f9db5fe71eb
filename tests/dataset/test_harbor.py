"""Harbor task directories: which run, and which are refused and why."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.basics.presets import presets
from batch_trajectories.config.agents import read_agent
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.columns import Executable, RowLimits
from batch_trajectories.dataset.harbor import HarborTask, tasks_in
from batch_trajectories.dataset.kept_dataset import rows_of_source, take_snapshot
from batch_trajectories.dataset.row import RowRules, RowTask
from batch_trajectories.dataset.row_workspace import Artifact, Check, Collect, count_requests
from batch_trajectories.dataset.rows_file import load_rows_file
from batch_trajectories.dataset.source import parse_source
from tests.helpers.running import run
from toolsets.sandbox.base import ImageSpec

INSIDE = RowRules(with_setup=True, image="needed", inside=True, check_network=True)

SIMPLE = '[environment]\ndocker_image = "org/task:1"\n'
FINAL = 'multi_step_reward_strategy = "final"\n'


def write_task(directory: Path, task: str = SIMPLE, **files: str | None) -> Path:
    """A task directory; names of `files` have __ for / and _ for . before the last word."""
    written: dict[str, str | None] = {
        "task.toml": task,
        "instruction.md": "Solve it.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        **files,
    }
    for name, text in written.items():
        if text is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
    return directory


def read(directory: Path, rules: RowRules = INSIDE) -> RowTask:
    return rules.read(load_rows_file("harbor").row(HarborTask(directory).row()))


def check_of(task: RowTask) -> Check:
    assert task.setup is not None
    assert task.setup.check is not None
    return task.setup.check


def test_a_task_with_all_that_is_supported(tmp_path: Path) -> None:
    write_task(
        tmp_path / "full",
        """
        schema_version = "1.4"
        artifacts = ["/app/out"]
        [task]
        name = "org/full"
        [metadata]
        difficulty = "easy"
        made = 2026-01-02
        [environment]
        docker_image = "org/full:1"
        workdir = "/srv"
        cpus = 2
        gpus = 0
        memory_mb = 4096
        storage_mb = 10240
        network_mode = "no-network"
        mcp_servers = []
        env = { A = "1", B = "${UNSET:-two}" }
        [agent]
        timeout_sec = 900.0
        user = "agent"
        [verifier]
        timeout_sec = 300
        network_mode = "public"
        env = { C = "3" }
        """,
        **{"tests/data/a.bin": "\x00", "solution/solve.sh": "the solution"},
    )
    (tmp_path / "full" / "tests" / "b.bin").write_bytes(b"\xff")
    task = read(tmp_path / "full")
    env = {"A": "1", "B": "two"}
    assert task.image == ImageSpec("org/full:1", "/srv", "agent", env, network=False)
    assert task.limits == RowLimits(4096, 10240, 2)
    assert task.spec.options.max_conversation_s == 900
    assert task.opening == [{"role": "user", "content": "Solve it."}]
    check = check_of(task)
    assert check.files["/tests/b.bin"] == b"\xff"
    assert check.files.keys() == {"/tests/test.sh", "/tests/data/a.bin", "/tests/b.bin"}
    assert check.reward_files == ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
    assert (check.user, check.network, check.timeout_s) == ("root", True, 300)
    assert check.env == {"C": "3"}
    assert check.where == "same"
    row = load_rows_file("harbor").row(HarborTask(tmp_path / "full").row())
    assert row["metadata"] == {"difficulty": "easy", "made": "2026-01-02"}
    assert "the solution" not in json.dumps(row)


def test_a_task_that_says_little_takes_the_defaults(tmp_path: Path) -> None:
    allowed = RowRules(image="needed", with_setup=True, inside=True, network=True)
    task = read(write_task(tmp_path / "plain"), allowed)
    assert task.image == ImageSpec("org/task:1", network=True)
    assert task.limits == RowLimits()
    assert check_of(task).timeout_s == 600
    assert not check_of(task).network  # --check_network decides


def test_old_names_are_understood(tmp_path: Path) -> None:
    old = (
        'version = "1.0"\n[environment]\ndocker_image = "i"\nmemory = "2G"\nstorage = "512M"\n'
        "allow_internet = false\n"
    )
    row = HarborTask(write_task(tmp_path / "old", old)).row()
    assert row["limits"] == {"memory_mb": 2048, "disk_mb": 512}
    assert not row["network"]


def test_an_image_that_is_built_is_named_by_its_sources(tmp_path: Path) -> None:
    task = HarborTask(write_task(tmp_path / "My Task", "", **{"environment/Dockerfile": "FROM a"}))
    first = task.row()["image"]
    assert first.startswith("localhost/harbor/my-task:")
    assert task.row()["image"] == first
    (task.path / "environment" / "data.txt").write_text("x")
    second = task.row()["image"]
    (task.path / "environment" / "data.txt").chmod(0o755)
    third = task.row()["image"]
    assert len({first, second, third}) == 3
    (task.path / "instruction.md").write_text("Other.")
    assert task.row()["image"] == third


def test_canary_lines_are_not_for_the_model(tmp_path: Path) -> None:
    text = "<!-- org-canary GUID 1 -->\n# BENCHMARK DATA, canary GUID 2\n\n# Title\nSolve it.\n"
    row = HarborTask(write_task(tmp_path / "a", **{"instruction.md": text})).row()
    assert row["instruction"] == "# Title\nSolve it."
    assert row["canary"] == "<!-- org-canary GUID 1 -->\n# BENCHMARK DATA, canary GUID 2"
    plain = write_task(tmp_path / "b", **{"instruction.md": "# Title\nDescribe the canary.\n"})
    assert HarborTask(plain).row()["instruction"].startswith("# Title")


REFUSED: dict[str, tuple[str, dict[str, str | None], str]] = {
    "compose": (
        SIMPLE,
        {"environment/docker-compose.yaml": "services: {}"},
        "task.toml: environment/docker-compose.yaml: compose is not supported",
    ),
    "windows": (
        SIMPLE + 'os = "windows"',
        {},
        "task.toml:3: environment.os: windows is not supported",
    ),
    "gpus": (SIMPLE + "gpus = 1", {}, "task.toml:3: environment.gpus: GPUs are not supported"),
    "tpus": (
        SIMPLE + '[environment.tpu]\ntype = "v5e"',
        {},
        "task.toml:3: environment.tpu: TPUs are not supported",
    ),
    "separate": (
        SIMPLE + '[verifier]\nenvironment_mode = "other"',
        {},
        "task.toml:4: verifier.environment_mode: other verifiers are not supported",
    ),
    "verifier-health": (
        SIMPLE + '[verifier.environment.healthcheck]\ncommand = "true"',
        {},
        "task.toml:3: verifier.environment.healthcheck: health checks of verifiers are not",
    ),
    "verifier-compose": (
        SIMPLE + '[verifier]\nenvironment_mode = "separate"',
        {"tests/compose.yaml": "services: {}"},
        "tests/compose.yaml: compose is not supported",
    ),
    "env": (
        SIMPLE + '[verifier]\nenvironment_mode = "separate"\nenv = ["A=b"]',
        {"tests/Dockerfile": "FROM x"},
        "task.toml:3: verifier: `env` must be a table",
    ),
    "service": (
        SIMPLE + '[[verifier.collect]]\ncommand = "true"\nservice = "db"',
        {},
        "task.toml:3: verifier.collect: services of compose are not supported",
    ),
    "artifact": (
        'artifacts = [{source = "/data", service = "db"}]\n'
        + SIMPLE
        + '[verifier]\nenvironment_mode = "separate"',
        {},
        "task.toml:1: artifacts: services of compose are not supported",
    ),
    "allowlist": (
        SIMPLE + 'network_mode = "allowlist"',
        {},
        "task.toml:3: environment.network_mode: allowlist is not supported",
    ),
    "mcp": (
        SIMPLE + '[[environment.mcp_servers]]\nname = "m"',
        {},
        "task.toml:3: environment.mcp_servers: m: sse needs `url`",
    ),
    "mcp-transport": (
        SIMPLE + 'mcp_servers = [{name = "m", transport = "pigeon"}]',
        {},
        "task.toml:3: environment.mcp_servers: m: the transport 'pigeon' is not known",
    ),
    "mcp-headers": (
        SIMPLE + 'mcp_servers = [{name = "m", url = "http://localhost", headers = {A = "${B}"}}]',
        {},
        "task.toml:3: environment.mcp_servers: m: headers are not supported: no key enters a",
    ),
    "mcp-host": (
        SIMPLE + 'network_mode = "no-network"\nmcp_servers = [{name = "m", url = "http://db/mcp"}]',
        {},
        "task.toml:4: environment.mcp_servers: m: db needs a network, which the task has not",
    ),
    "mcp-without-agent": (
        SIMPLE + 'mcp_servers = [{name = "m", transport = "stdio", command = "serve"}]',
        {},
        "`mcp_servers`: only agents that run as commands use the MCP servers of a task",
    ),
    "health": (
        SIMPLE + '[environment.healthcheck]\ncommand = "true"\nretries = "3"',
        {},
        "task.toml:5: environment.healthcheck.retries: '3' is not a number of seconds or retries",
    ),
    "verifier-os": (
        SIMPLE + '[verifier.environment]\ndocker_image = "v"\nos = "windows"',
        {},
        "task.toml:5: verifier.environment.os: windows is not supported",
    ),
    "shared-environment": (
        SIMPLE + '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\nos = "linux"',
        {},
        "task.toml:4: verifier.environment_mode: a shared verifier has no environment of its own",
    ),
    "artifact-above": (
        'artifacts = ["/a/../b"]\n' + SIMPLE,
        {},
        "task.toml:1: artifacts: '/a/../b' must not contain `..`",
    ),
    "artifact-exclude": (
        'artifacts = [{source = "/a", exclude = 3}]\n' + SIMPLE,
        {},
        "task.toml:1: artifacts: `exclude` must be a list of patterns",
    ),
    "two-sizes": (
        SIMPLE + 'memory_mb = 100\nmemory = "2G"',
        {},
        "task.toml:4: environment.memory: '2G' is not what `memory_mb` says",
    ),
    "steps": (
        SIMPLE + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"',
        {},
        "task.toml:3: steps: only the reward of the last step is supported",
    ),
    "steps-form": (f"steps = 3\n{SIMPLE}", {}, "task.toml:1: steps: must be a list of tables"),
    "step-name": (
        SIMPLE + '[[steps]]\nname = "../one"',
        {},
        "task.toml:3: steps: each needs a `name`",
    ),
    "steps-twice": (
        FINAL + SIMPLE + '[[steps]]\nname = "one"\n[[steps]]\nname = "one"',
        {},
        "task.toml:4: steps: two have the same name",
    ),
    "step-threshold": (
        FINAL + SIMPLE + '[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"',
        {},
        "task.toml:4: steps: `min_reward` before the last step is not supported",
    ),
    "step-user": (
        SIMPLE + '[[steps]]\nname = "one"\n[steps.agent]\nuser = "me"',
        {},
        "task.toml:3: steps: one: only `agent.timeout_sec` is supported",
    ),
    "step-health": (
        SIMPLE + '[[steps]]\nname = "one"\n[steps.healthcheck]\ncommand = "true"',
        {},
        "task.toml:3: steps: one: `healthcheck` of a step is not supported",
    ),
    "step-files": (
        SIMPLE + '[[steps]]\nname = "one"',
        {"steps/one/instruction.md": "Go.", "steps/one/workdir/setup.sh": "true"},
        "task.toml:3: steps: steps/one/workdir: files of a step are not supported",
    ),
    "step-words": (
        SIMPLE + '[[steps]]\nname = "one"',
        {},
        "task.toml: steps/one/instruction.md is missing",
    ),
    "steps-unnamed": (
        SIMPLE,
        {"steps/one/instruction.md": "Go."},
        "task.toml: steps/ is there, but task.toml names no [[steps]]",
    ),
    "continued": (SIMPLE, {"trajectory.json": "{}"}, "that continue a conversation are not"),
    "no-image": ("", {}, "no image: neither environment.docker_image nor environment/Dockerfile"),
    "no-test": (SIMPLE, {"tests/test.sh": None}, "task.toml: tests/test.sh is missing"),
    "no-words": (SIMPLE, {"instruction.md": " \n"}, "task.toml: instruction.md is empty"),
    "not-toml": ("[environment", {}, "task.toml: not TOML: "),
    "long": (f"a = 1{'0' * 5000}", {}, "task.toml: not TOML: Exceeds the limit (4300 digits)"),
    "deep": (f"a = {'[' * 2000}", {}, "task.toml: not TOML: nested too deeply"),
    "network": (
        SIMPLE + "network_mode = [1]",
        {},
        "task.toml:3: environment.network_mode: [1] is not supported",
    ),
    "huge": (SIMPLE + f"memory = '{'9' * 400}'", {}, "task.toml:3: environment.memory: '999"),
    "odd": (SIMPLE, {"tests/\udcff": ""}, "task.toml: tests/\ufffd: its name is not UTF-8"),
    "carriage": (
        SIMPLE,
        {"tests/test.sh": "#!/bin/bash\r\ntrue\r\n"},
        "task.toml: tests/test.sh: line 1 ends with a carriage return; remove it",
    ),
    "new": ('schema_version = "2.0"', {}, "task.toml:1: schema_version: version 2.0 of the"),
    "size": (SIMPLE + 'memory = "much"', {}, "task.toml:3: environment.memory: 'much' is not a"),
    "variable": (
        SIMPLE + 'env = {KEY = "${OPENAI_API_KEY}"}',
        {},
        "`env.KEY` names the variable OPENAI_API_KEY of this machine; allow it: --env_from=OPENAI",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    task, files, message = REFUSED[name]
    error = refusal(write_task(tmp_path / name, task, **files))
    assert message in error
    if name not in ("variable", "mcp-without-agent"):
        assert error.startswith(f"{name}/task.toml")


def test_steps_are_messages_of_the_user_and_the_last_gives_the_reward(tmp_path: Path) -> None:
    """Its tests are laid over the task's; the time is that of all steps."""
    task = (
        FINAL
        + SIMPLE
        + "[agent]\ntimeout_sec = 100\n[verifier]\ntimeout_sec = 5\n"
        + '[[steps]]\nname = "scaffold"\n[steps.agent]\ntimeout_sec = 60.0\n'
        + '[[steps]]\nname = "build"\nmin_reward = 0.5\n[steps.verifier]\ntimeout_sec = 30.0\n'
    )
    directory = write_task(
        tmp_path / "t",
        task,
        **{
            "instruction.md": None,
            "tests/helpers.sh": "help",
            "steps/scaffold/instruction.md": "Scaffold it.\n",
            "steps/scaffold/tests/test.sh": "#!/bin/zsh\n",
            "steps/build/instruction.md": "Build it.\n",
            "steps/build/tests/test.sh": "#!/bin/bash\ncheck\n",
            "steps/build/solution/solve.sh": "the solution",
        },
    )
    row = HarborTask(directory).row()
    assert (row["instruction"], row["user_turns"]) == ("Scaffold it.", ["Build it."])
    assert row["interpreter"] == "/bin/bash"
    read_task = read(directory)
    assert read_task.opening == [{"role": "user", "content": "Scaffold it."}]
    assert read_task.spec.user_turns == ("Build it.",)
    assert read_task.spec.options.max_conversation_s == 160
    check = check_of(read_task)
    assert check.timeout_s == 30
    assert check.files.keys() == {"/tests/test.sh", "/tests/helpers.sh"}
    assert check.files["/tests/test.sh"] == Executable(b"#!/bin/bash\ncheck\n")
    assert "the solution" not in json.dumps(row)


def test_a_step_without_tests_takes_those_of_the_task(tmp_path: Path) -> None:
    directory = write_task(
        tmp_path / "t",
        SIMPLE + '[[steps]]\nname = "only"',
        **{"steps/only/instruction.md": "Go."},
    )
    row = HarborTask(directory).row()
    assert row["instruction"] == "Go."
    assert "user_turns" not in row
    assert row["tests"].keys() == {"/tests/test.sh"}


def test_a_solution_that_is_no_table_is_refused(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "t", f"solution = 3\n{SIMPLE}", **{"solution/solve.sh": "x"})
    row = HarborTask(directory).row(with_solution=True)
    assert row["row_error"] == "t/task.toml:1: solution: must be a table"
    assert "row_error" not in HarborTask(directory).row()


def test_names_of_systems_are_compared_without_case(tmp_path: Path) -> None:
    row = HarborTask(write_task(tmp_path / "t", SIMPLE + 'os = "Linux"')).row()
    assert "row_error" not in row


def test_tests_keep_what_may_be_run(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "t", **{"tests/run": "x", "tests/data": "y"})
    (directory / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (directory / "tests" / "elf").write_bytes(b"\x7fELF\xff")
    for name in ("run", "elf"):
        (directory / "tests" / name).chmod(0o755)
    files = check_of(read(directory)).files
    programs = {path for path, content in files.items() if isinstance(content, Executable)}
    assert programs == {"/tests/test.sh", "/tests/run", "/tests/elf"}
    assert files["/tests/elf"] == b"\x7fELF\xff"
    assert files["/tests/data"] == b"y"


@pytest.mark.parametrize(
    ("line", "verifier", "needed"),
    [
        ("#!/usr/bin/env ruby", "", "ruby"),
        ("#!/usr/bin/env -S uv run --script", "", "uv"),
        ("#!/usr/bin/env A=b ruby", "", "/usr/bin/env"),
        ("#!/usr/bin/env ruby", '[verifier.env]\nPATH = "/opt/ruby/bin"', "/usr/bin/env"),
        ("#!/bin/bash -e", "", "/bin/bash"),
        ("#!", "", "/bin/sh"),
        ("true", "", "/bin/sh"),
    ],
)
def test_the_program_that_runs_the_tests_is_looked_for_before_the_first_call(
    tmp_path: Path, line: str, verifier: str, needed: str
) -> None:
    task = write_task(tmp_path / "t", SIMPLE + verifier, **{"tests/test.sh": f"{line}\n"})
    setup = read(task).setup
    assert setup is not None
    assert any(f"command -v {needed} >" in command for command in setup.commands)


def test_files_that_a_task_would_keep_are_counted(tmp_path: Path) -> None:
    for n, task in enumerate(['artifacts = ["/app"]\n' + SIMPLE, SIMPLE]):
        row = load_rows_file("harbor").row(HarborTask(write_task(tmp_path / f"{n}", task)).row())
        largest: dict[str, int] = {}
        count_requests(largest, row)
        assert largest == {"network": 1, "check.network": 1, **({"artifacts": 1} if n < 1 else {})}


SEPARATE = """\
artifacts = ["out.txt", {source = "/data", exclude = ["*.tmp"]}]
[environment]
docker_image = "org/task:1"
workdir = "/app"
env = {A = "1"}
[agent]
user = "agent"
[verifier]
environment_mode = "separate"
env = {B = "2"}
[[verifier.collect]]
command = "dump > /data/state"
timeout_sec = 5
"""


SERVERS = """\
[environment]
docker_image = "org/task:1"
network_mode = "no-network"
[[environment.mcp_servers]]
name = "notes"
transport = "stdio"
command = "python3"
args = ["/srv/notes.py", "say \\"hi\\""]
[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://localhost:9000/mcp"
"""


class TestServers:
    """MCP servers of a task, in the files of the agent."""

    def files_of(self, tmp_path: Path, agent: str, task: str = SERVERS) -> dict[str, str]:
        rules = replace(INSIDE, agent=read_agent(agent))
        read_task = read(write_task(tmp_path / "t", task), rules)
        assert read_task.agent is not None
        return read_task.agent.files

    def test_claude_code_reads_them_in_its_json(self, tmp_path: Path) -> None:
        assert json.loads(self.files_of(tmp_path, "claude-code")[".claude.json"]) == {
            "mcpServers": {
                "notes": {
                    "type": "stdio",
                    "command": "python3",
                    "args": ["/srv/notes.py", 'say "hi"'],
                },
                "web": {"type": "http", "url": "http://localhost:9000/mcp"},
            }
        }

    def test_codex_reads_them_in_its_toml(self, tmp_path: Path) -> None:
        told = tomllib.loads(self.files_of(tmp_path, "codex")[".codex/config.toml"])
        assert told["model"] == "{model}"
        assert told["mcp_servers"] == {
            "notes": {"command": "python3", "args": ["/srv/notes.py", 'say "hi"']},
            "web": {"url": "http://localhost:9000/mcp"},
        }

    def test_an_agent_that_cannot_be_told_of_them_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="'mini-swe-agent' is not told of MCP servers"):
            self.files_of(tmp_path, "mini-swe-agent")
        older = SERVERS.replace('"http"', '"sse"')
        with pytest.raises(ValueError, match="'web': codex does not know `sse`"):
            self.files_of(tmp_path, "codex", older)


class TestSeparateVerifier:
    """A check in a container of its own."""

    def test_it_has_limits_of_its_own(self, tmp_path: Path) -> None:
        """Without an environment of its own, those of the task."""
        own = SIMPLE + 'memory_mb = 9\n[verifier.environment]\ndocker_image = "v"\nmemory_mb = 700'
        assert check_of(read(write_task(tmp_path / "own", own))).limits == RowLimits(700)
        copied = SIMPLE + 'memory_mb = 9\n[verifier]\nenvironment_mode = "separate"'
        assert check_of(read(write_task(tmp_path / "copied", copied))).limits == RowLimits(9)

    def test_it_is_a_fresh_copy_of_the_tasks(self, tmp_path: Path) -> None:
        check = check_of(read(write_task(tmp_path / "t", SEPARATE)))
        assert check.image_spec is not None
        assert (check.image_spec.reference, check.image_spec.workdir) == ("org/task:1", "/app")
        assert check.env == {"A": "1", "B": "2"}
        assert check.files.keys() == {"/tests/test.sh"}
        assert (check.user, check.where) == (None, None)
        assert check.artifacts == (
            Artifact("/logs/artifacts"),
            Artifact("out.txt"),
            Artifact("/data", ("*.tmp",)),
        )
        assert check.collect == (Collect("dump > /data/state", 5),)

    def test_an_image_of_its_own_brings_the_tests(self, tmp_path: Path) -> None:
        own = (
            SEPARATE + '[verifier.environment]\ndocker_image = "v:1"\nnetwork_mode = "no-network"\n'
        )
        check = check_of(read(write_task(tmp_path / "t", own, **{"tests/test.sh": None})))
        assert check.image_spec is not None
        assert (check.image_spec.reference, check.image_spec.workdir) == ("v:1", None)
        assert (check.files, check.env, check.network) == ({}, {"B": "2"}, False)

    def test_a_dockerfile_of_the_tests_is_built(self, tmp_path: Path) -> None:
        files = {"tests/Dockerfile": "FROM scratch\n", "environment/Dockerfile": "FROM scratch\n"}
        task = SEPARATE.replace('docker_image = "org/task:1"\n', "")
        found = HarborTask(write_task(tmp_path / "t", task, **files))
        row = found.row()
        assert row["verifier"]["image"].startswith("localhost/harbor/t-verifier:")
        assert {*found.dockerfiles} == {row["image"], row["verifier"]["image"]}
        assert "tests" not in row


def test_a_health_check_is_waited_for(tmp_path: Path) -> None:
    """As Docker's: failures count from the end of the start period on."""
    health = (
        '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.01\nretries = 2\n'
        "start_period_sec = 0\n"
    )
    for command, code in (("test -e b || ! touch b", 0), ("echo . >> c; false", 1)):
        task = read(write_task(tmp_path / f"{code}", SIMPLE + health.format(command)))
        assert task.setup is not None
        wait = task.setup.commands[-1]
        done = subprocess.run(["sh", "-c", wait], cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == code
    assert done.stderr.decode() == "the health check failed 2 times: echo . >> c; false\n"
    assert (tmp_path / "c").read_text() == ".\n.\n"


def refusal(directory: Path) -> str:
    with pytest.raises(ValueError, match=r"\w") as raised:
        read(directory)
    return str(raised.value)


def test_a_link_does_not_bring_files_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for n, name in enumerate(["tests/file", "tests/directory", "instruction.md", "tests/test.sh"]):
        directory = write_task(tmp_path / f"t{n}")
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(tmp_path if "directory" in name else tmp_path / "secret")
        message = f"t{n}/task.toml: {name} is a link; copy the tasks without links (cp -rL)"
        assert refusal(directory) == message


@pytest.mark.parametrize("link", ["steps", "steps/one", "steps/one/tests", "tests"])
def test_a_linked_folder_does_not_bring_files_of_this_machine(tmp_path: Path, link: str) -> None:
    task = SIMPLE + '[[steps]]\nname = "one"\n'
    steps = {"steps/one/instruction.md": "Go.", "steps/one/tests/test.sh": "true\n"}
    directory = write_task(tmp_path / "t", task, **steps)
    (directory / link).rename(tmp_path / "elsewhere")
    (directory / link).symlink_to(tmp_path / "elsewhere")
    assert (
        refusal(directory)
        == f"t/task.toml: {link} is a link; copy the tasks without links (cp -rL)"
    )


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Neither for a row, nor for the name of an image that is built."""
    for n, name in enumerate(["instruction.md", "tests/pipe", "environment/pipe"]):
        directory = write_task(tmp_path / f"t{n}", "", **{"environment/Dockerfile": "FROM x"})
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)
        message = f"t{n}/task.toml: {name} is neither a file nor a directory"
        assert refusal(directory) == message


@pytest.mark.parametrize("name", ["t\udcff/task.toml", "t\udcff.jsonl"])
def test_names_that_are_not_utf8_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    looked = run(tmp_path, "look", ".")
    assert looked.returncode == 2
    assert "t\ufffd" in looked.stderr
    assert "its name is not UTF-8; rename it" in looked.stderr


class TestDataset:
    def write(self, tmp_path: Path) -> Path:
        """Twelve tasks, of which seven are refused."""
        tasks = tmp_path / "tasks"
        for n in range(5):
            write_task(tasks / f"good-{n}")
        for name in ("compose", "windows", "gpus", "separate", "allowlist", "mcp", "steps"):
            task, files, _ = REFUSED[name]
            write_task(tasks / name, task, **files)
        (tasks / "README.md").write_text("not a task")
        return tasks

    def test_its_rows_are_the_tasks_by_name(self, tmp_path: Path) -> None:
        source = parse_source(self.write(tmp_path))
        rows: list[Any] = list(rows_of_source(source, Omissions()))
        assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
        assert len(rows) == 12
        single = parse_source(tmp_path / "tasks" / "good-1")
        assert [task.path.name for task in single.tasks] == ["good-1"]

    def test_tasks_are_found_in_directories(self, tmp_path: Path) -> None:
        """With their paths as ids, at any depth and behind links; what is in a task is its own."""
        tasks = tmp_path / "tasks"
        write_task(tasks / "one")
        write_task(tasks / "org" / "one")
        write_task(tasks / "org" / "set" / "two", SIMPLE + "gpus = 1")
        write_task(tasks / "one" / "environment" / "inner")
        write_task(tasks / "a" / "b" / "c" / "d" / "deep")
        (tasks / "a" / "around").symlink_to(tasks)
        write_task(tmp_path / "elsewhere" / "far")
        (tasks / "org" / "zone").symlink_to(tmp_path / "elsewhere")
        rows: list[Any] = list(rows_of_source(parse_source(tasks), Omissions()))
        found = ["a/b/c/d/deep", "one", "org/one", "org/set/two", "org/zone/far"]
        assert [row["id"] for row in rows] == found
        assert rows[3]["row_error"].startswith("org/set/two/task.toml:3: environment.gpus")
        assert tasks_in(tasks / "a" / "b" / "c" / "d" / "deep" / "tests") == []

    def test_it_needs_to_be_named_as_what_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"holds Harbor tasks; add --rows=harbor"):
            take_snapshot(
                self.write(tmp_path),
                tmp_path / "r",
                columns={},
                rows=None,
                rules=INSIDE,
                max_samples=None,
                writes=True,
                say=print,
            )

    def test_an_edited_task_is_read_again(self, tmp_path: Path) -> None:
        tasks = self.write(tmp_path)

        def kept() -> Path:
            return take_snapshot(
                tasks,
                tmp_path / "r",
                columns={},
                rows="harbor",
                rules=INSIDE,
                max_samples=None,
                writes=True,
                say=print,
            ).path

        first = kept()
        assert kept() == first
        (tasks / "good-1" / "tests" / "test.sh").write_text("exit 1")
        assert kept() != first
        second = kept()
        (tasks / "good-1" / "tests" / "test.sh").chmod(0o755)
        assert kept() != second
        second = kept()
        (tasks / "good-1" / "solution").mkdir()
        (tasks / "good-1" / "solution" / "solve.sh").write_text("x")
        assert kept() == second

    def test_rows_of_a_first_start_stay_where_a_version_makes_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tasks = self.write(tmp_path)

        def kept(**more: Any) -> Path:
            return take_snapshot(
                tasks,
                tmp_path / "r",
                columns={},
                rows="harbor",
                rules=INSIDE,
                max_samples=None,
                writes=True,
                say=print,
                **more,
            ).path

        first = kept()
        kinds = tmp_path / "kinds" / "rows"
        kinds.mkdir(parents=True)
        text = presets("rows")["harbor"].read_text()
        (kinds / "harbor.yaml").write_text(text.replace("prompt:", 'hint: "x"\n  prompt:'))
        monkeypatch.setattr("batch_trajectories.basics.presets.CONFIGS", kinds.parent)
        assert kept() == first
        assert kept(fresh=True) != first
        (tasks / "good-1" / "instruction.md").write_text("Another.")
        assert kept() != first

    def test_look_says_which_can_be_used_and_why_the_others_cannot(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        shown = run(tmp_path, "look", "tasks", "--rows=0")
        assert shown.returncode == 0, shown.stderr
        assert "tasks: 5 of 12 rows can be used" in shown.stdout
        assert (
            "1 row: environment.gpus: GPUs are not supported; leave the key out if the task also "
            "runs without them (the first: gpus/task.toml:3)" in shown.stdout
        )
        assert "To run it: --dataset_file=tasks --rows=harbor" in shown.stdout
