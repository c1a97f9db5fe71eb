"""Harbor task directories as rows; configs/rows/harbor.yaml makes rows of a run of them.

A dataset is a directory of task directories, at any depth, or a single one. A row has
`id` (the path of the directory), `instruction`, `task` (what task.toml holds), `image`, `network`,
`check_network`, `check_user`, `limits`, `tests` (files by their path in the container),
`interpreter` (of tests/test.sh), `health` (the command that waits until services answer),
`collect` (what runs before the check), `mcp_servers` and `artifacts` (true if the task keeps
files); if the verifier has a container of its own also `verifier` (see `_verifier`); for audits
also `solution` (see `audit.reference`); of a task with several steps `user_turns`, the instructions
after the first (see `read_steps`). A task that needs an unsupported feature becomes a row
with `row_error`: it is refused before anything runs.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.dataset.row_conversation import ERROR_COLUMN

# The settings of task.toml (schema 1.4), read one at a time.

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

_MAX_SIZE = 1e15
_MEGABYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024, "": 1 / (1 << 20)}

_MAIN = "main"
"""The name of the only service of a task without a compose file."""
_PUBLISHED = "/logs/artifacts"

_HEALTH = {
    "interval_sec": 5,
    "timeout_sec": 30,
    "start_period_sec": 0,
    "start_interval_sec": 5,
    "retries": 3,
}
"""The numbers of a health check, with their defaults."""

_WAIT = """\
command={command}
limit=
! command -v timeout >/dev/null || limit="timeout {timeout_sec}"
began=$(date +%s)
failed=0
until $limit sh -c "$command" >/dev/null 2>&1; do
    if [ $(($(date +%s) - began)) -lt {start_period_sec:.0f} ]; then
        sleep {start_interval_sec}
        continue
    fi
    failed=$((failed + 1))
    if [ "$failed" -ge {retries} ]; then
        echo "the health check failed $failed times: $command" >&2
        exit 1
    fi
    sleep {interval_sec}
done
"""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_NETWORK_MODES = {"public": True, "no-network": False}


class TaskRefused(Exception):
    """A task cannot run; `keys` lead to the setting in task.toml that is the reason."""

    def __init__(self, why: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.keys = keys


def read_network(table: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Read whether an environment has a network. Raises `TaskRefused`, as all readers here do."""
    mode = table.get("network_mode")
    if mode is None:
        return default
    if not isinstance(mode, str) or mode not in _NETWORK_MODES:
        raise TaskRefused(
            f"{mode} is not supported; say public or no-network", (name, "network_mode")
        )
    return _NETWORK_MODES[mode]


def legacy_network(environment: Mapping[str, Any]) -> bool:
    """Read the network from the key of earlier schemas: allowed unless it is refused."""
    return environment.get("allow_internet", True) is not False


def read_limits(environment: Mapping[str, Any]) -> dict[str, float]:
    """Read the limits: CPUs, and megabytes of memory and disk by their new or old keys."""
    limits: dict[str, float] = {}
    if (cpus := environment.get("cpus")) is not None:
        if not isinstance(cpus, int | float) or isinstance(cpus, bool) or not cpus > 0:
            raise TaskRefused(f"{cpus!r} is not a number of CPUs", ("environment", "cpus"))
        limits["cpus"] = cpus
    for name, keys in {
        "memory_mb": ("memory_mb", "memory"),
        "disk_mb": ("storage_mb", "storage"),
    }.items():
        for key in keys:
            if (raw := environment.get(key)) is not None:
                size = _SIZE.fullmatch(str(raw).strip())
                unit = "m" if key.endswith("_mb") else size and size[2].lower()
                if size is None or not 0 < float(size[1]) < _MAX_SIZE:
                    raise TaskRefused(f"{raw!r} is not a size", ("environment", key))
                megabytes = max(1, int(float(size[1]) * _MEGABYTES[unit or ""]))
                if limits.get(name, megabytes) != megabytes:
                    raise TaskRefused(f"{raw!r} is not what `{keys[0]}` says", ("environment", key))
                limits[name] = megabytes
    return limits


def is_separate(verifier: Mapping[str, Any]) -> bool:
    """Whether the verifier has a container of its own."""
    default = "separate" if "environment" in verifier else "shared"
    return bool(verifier.get("environment_mode", default) == "separate")


def read_verifier_network(verifier: Mapping[str, Any], *, default: bool) -> bool:
    """Read whether the verifier's container has a network; `default` if it copies the task's."""
    if (environment := verifier.get("environment")) is None:
        return default
    return read_network(environment, "verifier.environment", default=legacy_network(environment))


def read_hooks(verifier: Mapping[str, Any], agent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the commands that run in the conversation's container before the check."""
    commands = []
    for hook in _tables(verifier.get("collect"), ("verifier", "collect")):
        if hook.get("service", _MAIN) != _MAIN:
            raise TaskRefused("services of compose are not supported", ("verifier", "collect"))
        if (user := hook.get("user")) is not None and user != agent.get("user"):
            raise TaskRefused(f"another user ({user}) is not supported", ("verifier", "collect"))
        commands.append({"command": hook.get("command"), "timeout_s": hook.get("timeout_sec", 60)})
    return commands


def read_mcp_servers(environment: Mapping[str, Any], *, has_network: bool) -> list[dict[str, Any]]:
    """Read the MCP servers for the agent. If several have the same name, the last counts."""
    keys = ("environment", "mcp_servers")
    servers = {}
    for raw in _tables(environment.get("mcp_servers"), keys):
        name, args = raw.get("name"), raw.get("args", [])
        transport = raw.get("transport", "sse")
        transport = "streamable-http" if transport == "http" else transport
        if not isinstance(name, str) or not name:
            raise TaskRefused("each needs a `name`", keys)
        if raw.get("headers"):
            raise TaskRefused(f"{name}: headers are not supported: no key enters a sandbox", keys)
        if transport == "stdio":
            if not isinstance(raw.get("command"), str) or not raw["command"]:
                raise TaskRefused(f"{name}: stdio needs `command`", keys)
            if not isinstance(args, list) or not all(isinstance(item, str) for item in args):
                raise TaskRefused(f"{name}: `args` must be a list of texts", keys)
            server = {"command": raw["command"], "args": args}
        elif transport in ("sse", "streamable-http"):
            url = raw.get("url")
            host = urlsplit(url).hostname if isinstance(url, str) else None
            if host is None:
                raise TaskRefused(f"{name}: {transport} needs `url`", keys)
            if not has_network and host not in _LOOPBACK:
                raise TaskRefused(f"{name}: {host} needs a network, which the task has not", keys)
            server = {"url": url}
        else:
            raise TaskRefused(f"{name}: the transport {transport!r} is not known", keys)
        servers[name] = {"name": name, "transport": transport, **server}
    return [*servers.values()]


def read_artifacts(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read which files of the agent's container are kept; their place on the host is ignored."""
    found = []
    entries = task.get("artifacts", [])
    for raw in entries if isinstance(entries, list) else [entries]:
        entry = {"source": raw} if isinstance(raw, str) else raw
        if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
            raise TaskRefused("must be a list of paths, or of tables with `source`", ("artifacts",))
        if entry.get("service", _MAIN) != _MAIN:
            raise TaskRefused("services of compose are not supported", ("artifacts",))
        exclude = entry.get("exclude", [])
        if not isinstance(exclude, list) or not all(isinstance(text, str) for text in exclude):
            raise TaskRefused("`exclude` must be a list of patterns", ("artifacts",))
        if ".." in entry["source"].split("/"):
            raise TaskRefused(f"{entry['source']!r} must not contain `..`", ("artifacts",))
        found.append({"path": entry["source"], "exclude": exclude})
    return found


def add_published(artifacts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add /logs/artifacts, which a verifier's container always gets."""
    if any(entry["path"].rstrip("/") == _PUBLISHED for entry in artifacts):
        return [*artifacts]
    return [{"path": _PUBLISHED}, *artifacts]


def health_command(raw: Any) -> str:
    """The command that waits until a health check passes, as Docker's HEALTHCHECK does."""
    keys = ("environment", "healthcheck")
    if not isinstance(raw, dict) or not isinstance(raw.get("command"), str):
        raise TaskRefused("must be a table with `command`", keys)
    numbers = {}
    for key, default in _HEALTH.items():
        numbers[key] = value = raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
            raise TaskRefused(f"{value!r} is not a number of seconds or retries", (*keys, key))
    return _WAIT.format(command=shlex.quote(raw["command"]), **numbers)


def _tables(raw: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    tables = [] if raw is None else raw
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise TaskRefused("must be a list of tables", keys)
    return tables


def read_variables(table: Mapping[str, Any]) -> dict[str, Any]:
    """Read the `env` of a table of the verifier."""
    env = table.get("env", {})
    if not isinstance(env, dict):
        raise TaskRefused('`env` must be a table: NAME = "value"', ("verifier",))
    return env


_STEP_KEYS = {"name", "min_reward", "agent", "verifier"}
"""The keys of a step that can be followed; `agent` and `verifier` may have `timeout_sec`."""


def read_steps(task: Mapping[str, Any]) -> list[str]:
    """Read the names of a task's steps, which are folders of `steps/`; empty without steps.

    The steps become one conversation: each instruction is the next message of the user, and the
    tests of the last step give the reward. Tasks whose reward depends on an earlier step, or whose
    steps set up or configure anything, are refused.
    """
    steps = _tables(task.get("steps"), ("steps",))
    for step in steps:
        name = step.get("name")
        if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
            raise TaskRefused("each needs a `name`, which is that of its folder", ("steps",))
        if unknown := sorted(step.keys() - _STEP_KEYS):
            raise TaskRefused(f"{name}: `{unknown[0]}` of a step is not supported", ("steps",))
        for table in ("agent", "verifier"):
            settings = step.get(table, {})
            if not isinstance(settings, dict) or settings.keys() - {"timeout_sec"}:
                raise TaskRefused(f"{name}: only `{table}.timeout_sec` is supported", ("steps",))
    names = [step["name"] for step in steps]
    if len(set(names)) < len(names):
        raise TaskRefused("two have the same name", ("steps",))
    if any("min_reward" in step for step in steps[:-1]):
        raise TaskRefused("`min_reward` before the last step is not supported", ("steps",))
    if len(steps) > 1 and task.get("multi_step_reward_strategy") != "final":
        raise TaskRefused(
            "only the reward of the last step is supported; say "
            'multi_step_reward_strategy = "final" if the other rewards do not count',
            ("steps",),
        )
    return names


def with_step_limits(task: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the time limits of a task by those of its steps: the agent's sum, the last check."""
    steps = task.get("steps") or [{}]
    agent, verifier = dict(task.get("agent", {})), dict(task.get("verifier", {}))
    limits = [step.get("agent", {}).get("timeout_sec", agent.get("timeout_sec")) for step in steps]
    if all(type(limit) in (int, float) for limit in limits):
        agent["timeout_sec"] = sum(limits)
    last = steps[-1].get("verifier", {})
    return {**task, "agent": agent, "verifier": {**verifier, **last}}


def to_json(value: Any) -> Any:
    """Make a TOML value JSON: dates become ISO 8601 text."""
    match value:
        case dict():
            return {key: to_json(member) for key, member in value.items()}
        case list():
            return [to_json(item) for item in value]
        case str() | int() | float():
            return value
    return value.isoformat()


TASK_FILE = "task.toml"

_ENVIRONMENT = "environment"
_TESTS = "tests"
_STEPS = "steps"
_DOCKERFILE = "Dockerfile"
_TEST = "test.sh"
_SOLVE = "solve.sh"
_SHELL = "/bin/sh"
_MAX_FILES_BYTES = 64 << 20
_BUILD_TIMEOUT_S = 600.0

_COMPOSE = re.compile(r"(docker-)?compose([.-][\w.-]+)?\.ya?ml")


_ACCELERATORS = "leave the key out if the task also runs without them"
_HOSTS = 'say network_mode = "public" or "no-network"'

_UNSUPPORTED: dict[tuple[str, ...], tuple[str, str]] = {
    ("environment", "gpus"): ("GPUs", _ACCELERATORS),
    ("environment", "gpu_types"): ("GPUs", _ACCELERATORS),
    ("environment", "tpu"): ("TPUs", _ACCELERATORS),
    ("environment", "skills_dir"): (
        "skills of a task",
        "name them as `files` of the agent, and leave the key out",
    ),
    ("environment", "allowed_hosts"): ("lists of allowed hosts", _HOSTS),
    ("agent", "allowed_hosts"): ("lists of allowed hosts", _HOSTS),
    ("verifier", "allowed_hosts"): ("lists of allowed hosts", _HOSTS),
    ("verifier", "environment", "gpus"): ("GPUs", _ACCELERATORS),
    ("verifier", "environment", "gpu_types"): ("GPUs", _ACCELERATORS),
    ("verifier", "environment", "tpu"): ("TPUs", _ACCELERATORS),
    ("verifier", "environment", "healthcheck"): (
        "health checks of verifiers",
        "wait at the beginning of tests/test.sh",
    ),
    ("verifier", "environment", "allowed_hosts"): ("lists of allowed hosts", _HOSTS),
}
"""Keys of task.toml that must be empty, each with its meaning and advice."""


class HarborTask(NamedTuple):
    """A task directory."""

    path: Path
    folder: str = ""
    """The folder of the task in the dataset's directory, with a slash at its end."""

    @property
    def id(self) -> str:
        """The id of the task in its dataset."""
        return self.folder + self.path.name

    @property
    def dockerfiles(self) -> dict[str, Path]:
        """Dockerfiles for `build_images`, by image names, which change with the files.

        Raises `OSError`.
        """
        row = self.row()
        wanted = {row.get("image"): _ENVIRONMENT, row.get("verifier", {}).get("image"): _TESTS}
        found = {}
        for image, folder in wanted.items():
            dockerfile = self.path / folder / _DOCKERFILE
            if image and dockerfile.is_file() and image == self._built_image(folder):
                found[image] = dockerfile
        return found

    def _built_image(self, folder: str) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", self.path.name.lower()).strip("-") or "task"
        if folder == _TESTS:
            name += "-verifier"
        digest = blake2b(digest_size=6)
        for file in sorted(_files_in(self.path / folder)):
            relative = file.relative_to(self.path).as_posix()
            status = file.lstat().st_mode
            if not stat.S_ISREG(status) and not stat.S_ISLNK(status):
                raise TaskRefused(f"{relative} is neither a file nor a directory")
            content = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            mode = stat.S_IMODE(status) & 0o111
            digest.update(os.fsencode(f"{relative}\0{mode:o}\0{len(content)}\0"))
            digest.update(content)
        return f"localhost/harbor/{name}:{digest.hexdigest()}"

    @property
    def build_timeout_s(self) -> float:
        """Time limit for building the image."""
        raw = self._settings().get("environment", {}).get("build_timeout_sec", _BUILD_TIMEOUT_S)
        return float(raw) if isinstance(raw, int | float) and raw > 0 else _BUILD_TIMEOUT_S

    def row(self, *, with_solution: bool = False) -> dict[str, Any]:
        """The row of the task; or its id, and the reason why it cannot run."""
        try:
            row = self._row()
            if with_solution and (solution := self._solution()) is not None:
                row["solution"] = solution
            return row
        except TaskRefused as refused:
            reason = str(refused)
            keys = refused.keys
        except UnicodeDecodeError as error:
            reason, keys = f"not UTF-8: {error.reason}", ()
        except OSError as error:
            reason, keys = f"{error.filename}: cannot read it: {error.strerror or error}", ()
        place = f"{self.id}/{TASK_FILE}"
        if keys:
            line = _find_line(self.path / TASK_FILE, keys)
            place += f":{line}: {'.'.join(keys)}" if line else f": {'.'.join(keys)}"
        return {"id": self.id, ERROR_COLUMN: f"{place}: {reason}"}

    def _row(self) -> dict[str, Any]:
        task = self._settings()
        for table in ("environment", "agent", "verifier"):
            if not isinstance(task.get(table, {}), dict):
                raise TaskRefused("must be a table", (table,))
        self._refuse_unsupported(task)
        steps = read_steps(task)
        if steps:
            task = with_step_limits(task)
        elif (self.path / _STEPS).exists():
            raise TaskRefused("steps/ is there, but task.toml names no [[steps]]")
        environment, agent, verifier = (
            task.get(name, {}) for name in ("environment", "agent", "verifier")
        )
        by_default = read_network(environment, "environment", default=legacy_network(environment))
        image = self._image(environment, _ENVIRONMENT)
        row: dict[str, Any] = {
            "id": self.id,
            "task": to_json(task),
            "image": image,
            "network": read_network(agent, "agent", default=by_default),
            "check_network": read_network(verifier, "verifier", default=by_default),
            "limits": read_limits(environment),
        }
        if collect := read_hooks(verifier, agent):
            row["collect"] = collect
        if (health := environment.get("healthcheck")) is not None:
            row["health"] = health_command(health)
        if servers := read_mcp_servers(environment, has_network=row["network"]):
            row["mcp_servers"] = servers
        artifacts = read_artifacts(task)
        if is_separate(verifier):
            row["verifier"] = self._verifier(task, image, artifacts)
            by_default = read_verifier_network(verifier, default=by_default)
            row["check_network"] = read_network(verifier, "verifier", default=by_default)
            if not self._brings_tests(verifier.get("environment", {})):
                row["tests"] = self._tests(steps)
            user = verifier.get("user")
        else:
            row |= {"tests": self._tests(steps), "interpreter": self._interpreter(steps)}
            if artifacts:
                row["artifacts"] = True
            user = verifier.get("user", "root" if agent.get("user") else None)
        if user is not None:
            row["check_user"] = user
        folders = [f"{_STEPS}/{name}/" for name in steps] or [""]
        for folder in folders if steps else ():
            if (self.path / folder / "workdir").exists():
                raise TaskRefused(f"{folder}workdir: files of a step are not supported", ("steps",))
        (row["instruction"], canary), *later = map(self._instruction, folders)
        if later:
            row["user_turns"] = [text for text, _ in later]
        return {**row, "canary": canary} if canary else row

    def _settings(self) -> dict[str, Any]:
        text = self._content(TASK_FILE).decode()
        try:
            return tomllib.loads(text)
        except ValueError as error:  # also of integers that are too long for Python
            raise TaskRefused(f"not TOML: {error}") from error
        except RecursionError as error:
            raise TaskRefused("not TOML: nested too deeply") from error

    def _refuse_unsupported(self, task: Mapping[str, Any]) -> None:
        for keys, (what, remedy) in _UNSUPPORTED.items():
            value: Any = task
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value:
                raise TaskRefused(f"{what} are not supported; {remedy}", keys)
        environment = task.get("environment", {})
        verifier = task.get("verifier", {})
        for table, keys in (
            (environment, ("environment", "os")),
            (verifier.get("environment"), ("verifier", "environment", "os")),
        ):
            system = table.get("os", "linux") if isinstance(table, dict) else "linux"
            if str(system).lower() != "linux":
                raise TaskRefused(f"{system} is not supported", keys)
        mode = verifier.get("environment_mode", "shared")
        keys = ("verifier", "environment_mode")
        if mode not in ("shared", "separate"):
            raise TaskRefused(f"{mode} verifiers are not supported", keys)
        if "environment" in verifier and not is_separate(verifier):
            raise TaskRefused("a shared verifier has no environment of its own", keys)
        version = str(task.get("schema_version", task.get("version", "1")))
        if version.partition(".")[0] != "1":
            raise TaskRefused(f"version {version} of the format is not known", ("schema_version",))
        self._refuse_compose(_ENVIRONMENT)
        if (self.path / "trajectory.json").exists():
            raise TaskRefused(
                "trajectory.json: tasks that continue a conversation are not supported; remove the "
                "file if the instruction says enough without it"
            )

    def _refuse_compose(self, folder: str) -> None:
        for path in sorted((self.path / folder).glob("*")):
            if _COMPOSE.fullmatch(path.name):
                raise TaskRefused(
                    f"{folder}/{path.name}: compose is not supported; have the ENTRYPOINT of one "
                    "image start the services"
                )

    def _image(self, environment: Mapping[str, Any], folder: str) -> str:
        """The image that an environment names, or that is built from the Dockerfile in `folder`."""
        if image := environment.get("docker_image"):
            if not isinstance(image, str):
                raise TaskRefused(f"{image!r} is not the name of an image", ("docker_image",))
            return image
        if not (self.path / folder / _DOCKERFILE).is_file():
            raise TaskRefused(f"no image: neither environment.docker_image nor {folder}/Dockerfile")
        return self._built_image(folder)

    def _verifier(
        self, task: Mapping[str, Any], image: str, artifacts: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """The verifier's own container.

        Keys: `image`, `workdir`, `limits`, `env`, and `artifacts`, the files that it gets from the
        conversation's container. Without an environment of its own it is a fresh copy of the
        task's.
        """
        own = task["verifier"].get("environment", {})
        if not isinstance(own, dict):
            raise TaskRefused("must be a table", ("verifier", "environment"))
        self._refuse_compose(_TESTS)
        environment = own if "environment" in task["verifier"] else task.get("environment", {})
        brings_tests = self._brings_tests(own)
        return {
            "image": self._image(own, _TESTS) if brings_tests else image,
            "workdir": environment.get("workdir"),
            "limits": read_limits(environment),
            "env": {**read_variables(environment), **read_variables(task["verifier"])},
            "artifacts": add_published(artifacts),
        }

    def _brings_tests(self, environment: Mapping[str, Any]) -> bool:
        """Whether a verifier's container has an image of its own, with the tests in it."""
        return bool(environment.get("docker_image")) or (self.path / _TESTS / _DOCKERFILE).is_file()

    def _instruction(self, folder: str) -> tuple[str, str]:
        """The instruction in a folder, and the canary lines before it, not for the model."""
        name = f"{folder}instruction.md"
        if not (self.path / name).exists():
            raise TaskRefused(f"{name} is missing")
        lines = self._content(name).decode().splitlines(keepends=True)
        first = 0
        while first < len(lines) and (not lines[first].strip() or _is_canary(lines[first])):
            first += 1
        canary = "".join(filter(_is_canary, lines[:first])).strip()
        text = "".join(lines[first:] if canary else lines).strip()
        if not text:
            raise TaskRefused(f"{name} is empty")
        return text, canary

    def _content(self, name: str) -> bytes:
        """The content of a file. Refuses links, which could lead to any file of this machine."""
        path = self.path
        for part in Path(name).parts:
            path /= part
            if path.is_symlink():
                link = path.relative_to(self.path).as_posix()
                raise TaskRefused(f"{link} is a link; copy the tasks without links (cp -rL)")
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TaskRefused(f"{name} is neither a file nor a directory")
        return path.read_bytes()

    def _tests(self, steps: Sequence[str]) -> dict[str, Any]:
        """The files of tests/, which are for the check only; the last step's replace the task's."""
        test = self._find_test(steps)
        directory = (self.path / test).parent
        if not (self.path / test).is_file():
            windows = (directory / "test.bat").exists() or (directory / "test.ps1").exists()
            raise TaskRefused(
                f"{test} is missing" + ("; windows is not supported" if windows else "")
            )
        files = self._files(_TESTS, program=_TEST)
        if steps:
            files |= self._files(f"{_STEPS}/{steps[-1]}/{_TESTS}", program=_TEST, target=_TESTS)
        return files

    def _find_test(self, steps: Sequence[str]) -> str:
        """The script of the check: that of the last step, or the task's if the step has none."""
        own = f"{_STEPS}/{steps[-1]}/{_TESTS}/{_TEST}" if steps else ""
        return own if own and (self.path / own).is_file() else f"{_TESTS}/{_TEST}"

    def _solution(self) -> dict[str, Any] | None:
        """The solution: files of solution/, and the command that runs them; None without one."""
        if not (self.path / "solution" / _SOLVE).is_file():
            return None
        settings = self._settings().get("solution", {})
        if not isinstance(settings, dict):
            raise TaskRefused("must be a table", ("solution",))
        env = settings.get("env", {})
        files = self._files("solution", program=_SOLVE)
        return {"files": files, "command": f"/solution/{_SOLVE}", "env": env}

    def _files(self, folder: str, *, program: str, target: str | None = None) -> dict[str, Any]:
        """The files of a folder of the task by their paths below `target` in the container.

        `target` is None if it is the folder's own name.
        """
        directory = self.path / folder
        files: dict[str, Any] = {}
        size = 0
        for path in _files_in(directory):
            relative = path.relative_to(directory).as_posix()
            if (shown := valid_utf8(relative)) != relative:
                raise TaskRefused(f"{folder}/{shown}: its name is not UTF-8")
            content = self._content(f"{folder}/{relative}")
            size += len(content)
            if size > _MAX_FILES_BYTES:
                raise TaskRefused(f"{folder}/ has more than {_MAX_FILES_BYTES >> 20} MiB")
            is_executable = relative == program or path.stat().st_mode & 0o111 != 0
            files[f"/{target or folder}/{relative}"] = _to_content(
                content, is_executable=is_executable
            )
        return files

    def _interpreter(self, steps: Sequence[str]) -> str:
        """The interpreter of tests/test.sh; a shell if its first line does not begin with `#!`."""
        test = self._find_test(steps)
        first = self._content(test).partition(b"\n")[0]
        if not first.startswith(b"#!"):
            return _SHELL
        if first.endswith(b"\r"):
            raise TaskRefused(f"{test}: line 1 ends with a carriage return; remove it")
        words = first[2:].decode(errors="replace").split()
        if not words:
            return _SHELL
        # The variables of the verifier decide where `env` looks for a program.
        arguments = [word for word in words[1:] if not word.startswith("-")]
        if (
            words[0].endswith("/env")
            and arguments
            and not self._has_path()
            and "=" not in arguments[0]
        ):
            return arguments[0]
        return words[0]

    def _has_path(self) -> bool:
        """Whether the verifier has a PATH of its own."""
        env = self._settings().get("verifier", {}).get("env")
        return isinstance(env, dict) and "PATH" in env


def tasks_in(directory: Path) -> list[HarborTask]:
    """The tasks of a dataset; none if the directory is not one. Raises `OSError`."""
    if (directory / TASK_FILE).is_file():
        return [HarborTask(directory.absolute())]
    return list(_tasks_beneath(directory, "", {directory.resolve()}))


def _tasks_beneath(directory: Path, folder: str, read: set[Path]) -> Iterator[HarborTask]:
    """Yield the tasks below a directory; follow links, but read each directory once."""
    for path in sorted(directory.iterdir()):
        if (path / TASK_FILE).is_file():
            yield HarborTask(path, folder)
        elif path.is_dir() and (place := path.resolve()) not in read:
            read.add(place)
            yield from _tasks_beneath(path, f"{folder}{path.name}/", read)


def list_files(tasks: Iterable[HarborTask], *, with_solutions: bool = False) -> list[Path]:
    """The files that the rows of tasks depend on."""
    left_out = () if with_solutions else ("solution",)
    files = []
    for task in tasks:
        for path in _files_in(task.path):
            if path.relative_to(task.path).parts[0] not in left_out and path.is_file():
                files.append(path)
    return files


def _files_in(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory, sorted; do not follow links."""
    for root, folders, names in os.walk(directory):
        folders.sort()
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name) for name in sorted([*names, *links]))


def _find_line(path: Path, keys: tuple[str, ...]) -> int | None:
    """The line that sets a key or begins its table; None if it is not found."""
    *tables, last = keys
    table = ""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for number, line in enumerate(lines, start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.\-\"' ]+?)\s*\]", line):
            table = re.sub(r"[\"' ]", "", header[1])
            if table == ".".join(keys) or table.startswith(".".join(keys) + "."):
                return number
        elif (key := re.match(r"\s*([\w.\-]+)\s*=", line)) and (
            ".".join(filter(None, (table, key[1]))) == ".".join([*tables, last])
        ):
            return number
    return None


def _is_canary(line: str) -> bool:
    return line.lstrip().startswith(("#", "<!--", "//")) and "canary" in line.lower()


def _to_content(content: bytes, *, is_executable: bool) -> Any:
    more = {"executable": True} if is_executable else {}
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode(), **more}
    return {"text": text, **more} if more else text
