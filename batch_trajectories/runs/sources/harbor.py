"""Harbor task directories as rows; configs/rows/harbor.yaml makes rows of a run of them.

A dataset is a directory of task directories, at most three levels deep, or a single one. A row has
`id` (the path of the directory), `instruction`, `task` (what task.toml holds), `image`, `network`,
`check_network`, `check_user`, `limits`, `tests` (files by their path in the container),
`interpreter` (of tests/test.sh) and `artifacts` (true if the task collects files); for audits also
`solution` (see `runs.audit.reference`). A task that needs what is not supported becomes a row with
`row_error`: it is refused before anything runs.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.runs.dataset.column_names import ERROR_COLUMN

TASK_FILE = "task.toml"

_TEST = "test.sh"
_SOLVE = "solve.sh"
_SHELL = "/bin/sh"
_MAX_FOLDERS = 2
"""Between a dataset and its tasks."""
_MAX_FILES_BYTES = 64 << 20
_BUILD_TIMEOUT_S = 600.0

_COMPOSE = re.compile(r"(docker-)?compose([.-][\w.-]+)?\.ya?ml")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_MAX_SIZE = 1e15
_MEGABYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024, "": 1 / (1 << 20)}

_UNSUPPORTED: dict[tuple[str, ...], str] = {
    ("environment", "gpus"): "GPUs",
    ("environment", "gpu_types"): "GPUs",
    ("environment", "tpu"): "TPUs",
    ("environment", "mcp_servers"): "MCP servers of a task",
    ("environment", "skills_dir"): "skills of a task",
    ("environment", "healthcheck"): "services with a health check",
    ("environment", "allowed_hosts"): "lists of allowed hosts",
    ("agent", "allowed_hosts"): "lists of allowed hosts",
    ("verifier", "allowed_hosts"): "lists of allowed hosts",
    ("verifier", "environment"): "separate verifiers",
    ("steps",): "tasks of several steps",
}
"""What a task may name in task.toml, if it is empty, and what it means."""

_NETWORK_MODES = {"public": True, "no-network": False}


class _Refused(Exception):
    """A task cannot run: where, and why."""

    def __init__(self, why: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.keys = keys


class HarborTask(NamedTuple):
    """A task directory."""

    path: Path
    folder: str = ""
    """Where it is in the dataset's directory, with a slash at its end."""

    @property
    def id(self) -> str:
        """What it is called among all."""
        return self.folder + self.path.name

    @property
    def dockerfile(self) -> Path:
        """What its image is built from, if it names none."""
        return self.path / "environment" / "Dockerfile"

    @property
    def built_image(self) -> str:
        """The name of the image that `build-images` builds; it changes with its sources."""
        name = re.sub(r"[^a-z0-9]+", "-", self.path.name.lower()).strip("-") or "task"
        digest = blake2b(digest_size=6)
        for file in sorted(_files_in(self.path / "environment")):
            relative = file.relative_to(self.path).as_posix()
            status = file.lstat().st_mode
            if not stat.S_ISREG(status) and not stat.S_ISLNK(status):
                raise _Refused(f"{relative} is neither a file nor a directory")
            content = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            mode = stat.S_IMODE(status) & 0o111
            digest.update(os.fsencode(f"{relative}\0{mode:o}\0{len(content)}\0"))
            digest.update(content)
        return f"localhost/harbor/{name}:{digest.hexdigest()}"

    @property
    def build_timeout_s(self) -> float:
        """How long its image may take to be built."""
        raw = self._settings().get("environment", {}).get("build_timeout_sec", _BUILD_TIMEOUT_S)
        return float(raw) if isinstance(raw, int | float) and raw > 0 else _BUILD_TIMEOUT_S

    def row(self, *, with_solution: bool = False) -> dict[str, Any]:
        """The row of the task, or its id and why it cannot run."""
        try:
            row = self._row()
            if with_solution and (solution := self._solution()) is not None:
                row["solution"] = solution
            return row
        except _Refused as refused:
            reason = str(refused)
            keys = refused.keys
        except UnicodeDecodeError as error:
            reason, keys = f"not UTF-8: {error.reason}", ()
        except OSError as error:
            reason, keys = f"{error.filename}: cannot read it: {error.strerror or error}", ()
        place = f"{self.id}/{TASK_FILE}"
        if keys:
            line = _line_of(self.path / TASK_FILE, keys)
            place += f":{line}: {'.'.join(keys)}" if line else f": {'.'.join(keys)}"
        return {"id": self.id, ERROR_COLUMN: f"{place}: {reason}"}

    def _row(self) -> dict[str, Any]:
        task = self._settings()
        for table in ("environment", "agent", "verifier"):
            if not isinstance(task.get(table, {}), dict):
                raise _Refused("must be a table", (table,))
        self._refuse_unsupported(task)
        environment, agent, verifier = (
            task.get(name, {}) for name in ("environment", "agent", "verifier")
        )
        by_default = _network(environment, "environment", default=_old_network(environment))
        tests = self._tests()
        row: dict[str, Any] = {
            "id": self.id,
            "task": _jsonable(task),
            "image": self._image(environment),
            "network": _network(agent, "agent", default=by_default),
            "check_network": _network(verifier, "verifier", default=by_default),
            "limits": _limits(environment),
            "tests": tests,
            "interpreter": self._interpreter(),
        }
        if task.get("artifacts") or verifier.get("collect"):
            row["artifacts"] = True
        if (user := verifier.get("user", "root" if agent.get("user") else None)) is not None:
            row["check_user"] = user
        row["instruction"], canary = self._instruction()
        return {**row, "canary": canary} if canary else row

    def _settings(self) -> dict[str, Any]:
        text = self._content(TASK_FILE).decode()
        try:
            return tomllib.loads(text)
        except ValueError as error:  # also of integers that are too long for Python
            raise _Refused(f"not TOML: {error}") from error
        except RecursionError as error:
            raise _Refused("not TOML: nested too deeply") from error

    def _refuse_unsupported(self, task: Mapping[str, Any]) -> None:
        for keys, what in _UNSUPPORTED.items():
            value: Any = task
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value:
                raise _Refused(f"{what} are not supported", keys)
        environment = task.get("environment", {})
        if str(system := environment.get("os", "linux")).lower() != "linux":
            raise _Refused(f"{system} is not supported", ("environment", "os"))
        mode = task.get("verifier", {}).get("environment_mode", "shared")
        if mode != "shared":
            keys = ("verifier", "environment_mode")
            raise _Refused(f"{mode} verifiers are not supported", keys)
        version = str(task.get("schema_version", task.get("version", "1")))
        if version.partition(".")[0] != "1":
            raise _Refused(f"version {version} of the format is not known", ("schema_version",))
        for path in sorted((self.path / "environment").glob("*")):
            if _COMPOSE.fullmatch(path.name):
                raise _Refused(f"environment/{path.name}: compose is not supported")
        if (self.path / "steps").exists():
            raise _Refused("steps/: tasks of several steps are not supported")
        if (self.path / "trajectory.json").exists():
            raise _Refused("trajectory.json: tasks that continue a conversation are not supported")

    def _image(self, environment: Mapping[str, Any]) -> str:
        if image := environment.get("docker_image"):
            return str(image)
        if not self.dockerfile.is_file():
            raise _Refused("no image: neither environment.docker_image nor environment/Dockerfile")
        return self.built_image

    def _instruction(self) -> tuple[str, str]:
        """The instruction, and the canary lines before it, which are not for the model."""
        if not (self.path / "instruction.md").exists():
            raise _Refused("instruction.md is missing")
        lines = self._content("instruction.md").decode().splitlines(keepends=True)
        first = 0
        while first < len(lines) and (not lines[first].strip() or _is_canary(lines[first])):
            first += 1
        canary = "".join(filter(_is_canary, lines[:first])).strip()
        text = "".join(lines[first:] if canary else lines).strip()
        if not text:
            raise _Refused("instruction.md is empty")
        return text, canary

    def _content(self, name: str) -> bytes:
        """What a file of the task holds; a link could lead to any file of this machine."""
        path = self.path / name
        if path.is_symlink():
            raise _Refused(f"{name} is a link; copy the tasks without links (cp -rL)")
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _Refused(f"{name} is neither a file nor a directory")
        return path.read_bytes()

    def _tests(self) -> dict[str, Any]:
        """The files of tests/, which are for the check only."""
        directory = self.path / "tests"
        if not (directory / _TEST).is_file():
            windows = (directory / "test.bat").exists() or (directory / "test.ps1").exists()
            raise _Refused(
                "tests/test.sh is missing" + ("; windows is not supported" if windows else "")
            )
        return self._files("tests", program=_TEST)

    def _solution(self) -> dict[str, Any] | None:
        """What solves the task: files of solution/, and the command that runs them."""
        if not (self.path / "solution" / _SOLVE).is_file():
            return None
        env = self._settings().get("solution", {}).get("env", {})
        files = self._files("solution", program=_SOLVE)
        return {"files": files, "command": f"/solution/{_SOLVE}", "env": env}

    def _files(self, folder: str, *, program: str) -> dict[str, Any]:
        """The files of a folder of the task by their paths in the container."""
        directory = self.path / folder
        files: dict[str, Any] = {}
        size = 0
        for path in _files_in(directory):
            relative = path.relative_to(directory).as_posix()
            if (shown := valid_utf8(relative)) != relative:
                raise _Refused(f"{folder}/{shown}: its name is not UTF-8")
            content = self._content(f"{folder}/{relative}")
            size += len(content)
            if size > _MAX_FILES_BYTES:
                raise _Refused(f"{folder}/ has more than {_MAX_FILES_BYTES >> 20} MiB")
            is_executable = relative == program or path.stat().st_mode & 0o111 != 0
            files[f"/{folder}/{relative}"] = _as_content(content, is_executable=is_executable)
        return files

    def _interpreter(self) -> str:
        """What tests/test.sh needs to be in the image; without a first line `#!` it is a shell."""
        first = self._content(f"tests/{_TEST}").partition(b"\n")[0]
        if not first.startswith(b"#!"):
            return _SHELL
        if first.endswith(b"\r"):
            raise _Refused(f"tests/{_TEST}: line 1 ends with a carriage return; remove it")
        words = first[2:].decode(errors="replace").split()
        return words[0] if words else _SHELL


def tasks_in(directory: Path) -> list[HarborTask]:
    """The tasks of a dataset; none if the directory is not one. Raises `OSError`."""
    if (directory / TASK_FILE).is_file():
        return [HarborTask(directory.absolute())]
    return list(_tasks_beneath(directory, ""))


def _tasks_beneath(directory: Path, folder: str) -> Iterator[HarborTask]:
    for path in sorted(directory.iterdir()):
        if (path / TASK_FILE).is_file():
            yield HarborTask(path, folder)
        elif folder.count("/") < _MAX_FOLDERS and path.is_dir() and not path.is_symlink():
            yield from _tasks_beneath(path, f"{folder}{path.name}/")


def files_of(tasks: Iterable[HarborTask], *, with_solutions: bool = False) -> list[Path]:
    """The files that decide the rows of tasks."""
    left_out = () if with_solutions else ("solution",)
    files = []
    for task in tasks:
        for path in _files_in(task.path):
            if path.relative_to(task.path).parts[0] not in left_out and path.is_file():
                files.append(path)
    return files


def _files_in(directory: Path) -> Iterator[Path]:
    """All but directories, sorted; links are not followed."""
    for root, folders, names in os.walk(directory):
        folders.sort()
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name) for name in sorted([*names, *links]))


def _line_of(path: Path, keys: tuple[str, ...]) -> int | None:
    """The line that sets a key, or its table begins at; None if it is written otherwise."""
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


def _network(table: Mapping[str, Any], name: str, *, default: bool) -> bool:
    mode = table.get("network_mode")
    if mode is None:
        return default
    if not isinstance(mode, str) or mode not in _NETWORK_MODES:
        raise _Refused(f"{mode} is not supported", (name, "network_mode"))
    return _NETWORK_MODES[mode]


def _old_network(environment: Mapping[str, Any]) -> bool:
    return environment.get("allow_internet", True) is not False


def _limits(environment: Mapping[str, Any]) -> dict[str, float]:
    """CPUs; memory and disk in megabytes, under their names of today and of before."""
    limits: dict[str, float] = {}
    if (cpus := environment.get("cpus")) is not None:
        if not isinstance(cpus, int | float) or isinstance(cpus, bool) or not cpus > 0:
            raise _Refused(f"{cpus!r} is not a number of CPUs", ("environment", "cpus"))
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
                    raise _Refused(f"{raw!r} is not a size", ("environment", key))
                limits[name] = max(1, int(float(size[1]) * _MEGABYTES[unit or ""]))
                break
    return limits


def _is_canary(line: str) -> bool:
    return line.lstrip().startswith(("#", "<!--", "//")) and "canary" in line.lower()


def _as_content(content: bytes, *, is_executable: bool) -> Any:
    more = {"executable": True} if is_executable else {}
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode(), **more}
    return {"text": text, **more} if more else text


def _jsonable(value: Any) -> Any:
    """Dates of TOML as ISO 8601 text."""
    match value:
        case dict():
            return {key: _jsonable(member) for key, member in value.items()}
        case list():
            return [_jsonable(item) for item in value]
        case str() | int() | float():
            return value
    return value.isoformat()
