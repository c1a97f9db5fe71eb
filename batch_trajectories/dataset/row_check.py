"""The check of a row: how the workspace is judged when its conversation has ended.

`check` is a command, or an object:

    command      what judges; exit code 0 passes, unless one of the next two is given
    reward_file  a path or a list of paths; the first that the command wrote holds the reward
    tests        what the tests printed must say; see `Outcomes`
    files        written when the conversation has ended, so the model never sees them
    timeout_s    default: --command_timeout_s
    env          variables, as in the column `env`
    in           `same`: the workspace as the model left it; `fresh`: the image with only the diff
    image        the check runs in this image, which has of the workspace only the `artifacts`
    workdir      of that image
    limits       of that image's container, as in the column `limits`; default: those of the row
    artifacts    paths, or {path, exclude: [PATTERN, ...]}; those that do not exist are left out
    collect      commands, or {command, timeout_s}, that run first, where the model worked; what
                 they end with does not count
    from_image   patterns of files that a fresh check takes from the image, whatever the diff says:
                 a name, or a path in the repository with `/`; `*` stands for any characters.
                 `python` stands for `PYTHON_FILES`
    user         default: that of the row
    network      true: the check needs the network, which --check_network allows
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.row_files import read_files, read_path
from batch_trajectories.dataset.row_image import (
    RowLimits,
    read_env,
    read_flag,
    read_image,
    read_limits,
    read_user,
)
from toolsets.sandbox.base import ImageSpec

CheckPlace = Literal["same", "fresh"]
"""`image` is a third one, where the check names its own."""

PYTHON_FILES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.egg-info/*",
    ".venv/*",
    "venv/*",
)
"""What pytest or each Python runs or reads by itself, and can make tests report success."""

_INSIDE_KEYS = (
    "in",
    "user",
    "network",
    "from_image",
    "image",
    "workdir",
    "limits",
    "artifacts",
    "collect",
)
"""Keys that need an image: elsewhere the check runs as the conversation did."""
_KEYS = frozenset(("command", "reward_file", "tests", "files", "timeout_s", "env", *_INSIDE_KEYS))

_TESTS_KEYS = frozenset(("log", "patterns", "pass", "passed", "expected"))
_PASSED = ("PASSED", "XFAIL")


class Outcomes(NamedTuple):
    """What the output of a check's command must say of its tests.

    Each of `patterns` is a regular expression with the groups `name` and `status`, searched in
    every line.
    """

    patterns: tuple[str, ...]
    log: str | None = None
    """The file that holds the output; None: what the command prints."""
    must_pass: tuple[str, ...] = ()
    """Names of tests that must have a status of `passed`; the key `pass`."""
    passed: tuple[str, ...] = _PASSED
    expected: Mapping[str, str] | None = None
    """The status of each test that ran; no other tests may have run."""


class Artifact(NamedTuple):
    """A file or directory of the workspace that a check in another image gets."""

    path: str
    exclude: tuple[str, ...] = ()
    """Patterns of what is left out beneath it, as those of `tar --exclude`."""


class Collect(NamedTuple):
    """A command that runs before a check, where the model worked."""

    command: str
    timeout_s: float | None = None


class Check(NamedTuple):
    """How a workspace is judged; see above."""

    command: str
    files: Mapping[str, bytes] = {}
    reward_files: tuple[str, ...] = ()
    tests: Outcomes | None = None
    timeout_s: float | None = None
    env: Mapping[str, str] = {}
    where: CheckPlace | None = None
    """None where there is no image; the key `in`."""
    user: str | None = None
    network: bool = False
    from_image: tuple[str, ...] = ()
    """Patterns of files that are not as the diff says."""
    image: ImageSpec | None = None
    """The image that it runs in; None: that of the conversation."""
    artifacts: tuple[Artifact, ...] = ()
    collect: tuple[Collect, ...] = ()
    limits: RowLimits | None = None
    """Of the container of `image`; None: those of the row."""


def read_check(
    raw: Any, *, inside: bool, network: bool, variables: Collection[str]
) -> Check | None:
    """Read the column `check`. Raises `ValueError` with the reason if it is invalid.

    See `runs.dataset.row_setup.read_row_setup`.
    """
    if raw is None:
        return None
    if isinstance(raw, str):
        raw = {"command": raw}
    command = raw.get("command") if isinstance(raw, dict) else None
    if not isinstance(command, str) or not raw.keys() <= _KEYS:
        unknown = sorted(map(str, raw.keys() - _KEYS)) if isinstance(raw, dict) else []
        msg = "`check` must be a command, or an object with `command` and any of " + ", ".join(
            f"`{name}`" for name in sorted(_KEYS - {"command"})
        )
        raise ValueError(msg + (f" (got `{unknown[0]}`)" if unknown else ""))
    if not command.strip():
        msg = "`check.command` is empty, so every conversation would pass"
        raise ValueError(msg)
    if not inside:
        for name in _INSIDE_KEYS:
            if raw.get(name) is not None:
                msg = f"`check.{name}` needs --workspace=image"
                raise ValueError(msg)
    where = raw.get("in")
    if where not in (None, "same", "fresh"):
        msg = f"`check.in` must be same or fresh (got {clip(repr(where), max_chars=50)})"
        raise ValueError(msg)
    image = _image(raw)
    collect = _collect(raw.get("collect"))
    if image is not None and where is not None:
        raise ValueError(f"`check.image` does not go with `in: {where}`: leave one of them out")
    wants_network = read_flag(raw.get("network"), "check.network")
    return Check(
        command=command,
        files=read_files(raw.get("files"), "check.files", inside=inside),
        reward_files=_reward_files(raw.get("reward_file"), inside=inside),
        tests=_tests(raw.get("tests"), inside=inside),
        timeout_s=_timeout(raw.get("timeout_s"), "timeout_s"),
        env=read_env(raw.get("env"), "check.env", variables),
        where=where,
        user=read_user(raw.get("user"), "check.user"),
        network=network and wants_network is True,
        from_image=_from_image(raw.get("from_image")),
        image=image,
        artifacts=_artifacts(raw.get("artifacts"), image),
        collect=collect,
        limits=None if raw.get("limits") is None else read_limits(raw["limits"], "check.limits"),
    )


def _image(raw: Mapping[str, Any]) -> ImageSpec | None:
    if (reference := raw.get("image")) is None:
        for name in ("workdir", "limits", "artifacts"):
            if raw.get(name) is not None:
                raise ValueError(f"`check.{name}` needs `check.image`: the image that it is for")
        return None
    columns = {"docker_image": reference, "workdir": raw.get("workdir")}
    try:
        return read_image(columns, inside=True, network=False, variables=())
    except ValueError as error:
        raise ValueError(f"`check.image`: {error}") from error


def _artifacts(raw: Any, image: ImageSpec | None) -> tuple[Artifact, ...]:
    artifacts = []
    for item in raw if isinstance(raw, list) else [] if raw is None else [raw]:
        entry = {"path": item} if isinstance(item, str) else item
        if not isinstance(entry, dict) or not entry.keys() <= {"path", "exclude"}:
            raise ValueError("`check.artifacts` must be a list of paths, or of {path, exclude}")
        path = read_path(entry.get("path"), "check.artifacts", inside=True)
        exclude = tuple(_texts(entry.get("exclude"), "check.artifacts.exclude"))
        artifacts.append(Artifact(path, exclude))
    if image is not None and not artifacts:
        raise ValueError("`check.artifacts` is missing: what the image gets of the workspace")
    return tuple(artifacts)


def _collect(raw: Any) -> tuple[Collect, ...]:
    commands = []
    for item in raw if isinstance(raw, list) else [] if raw is None else [raw]:
        entry = {"command": item} if isinstance(item, str) else item
        if not isinstance(entry, dict) or not entry.keys() <= {"command", "timeout_s"}:
            raise ValueError("`check.collect` must be commands, or {command, timeout_s}")
        if not isinstance(command := entry.get("command"), str) or not command.strip():
            raise ValueError("`check.collect`: a command is missing")
        timeout_s = _timeout(entry.get("timeout_s"), "collect.timeout_s")
        commands.append(Collect(command, timeout_s))
    return tuple(commands)


def _from_image(raw: Any) -> tuple[str, ...]:
    return PYTHON_FILES if raw == "python" else tuple(_texts(raw, "check.from_image"))


def _reward_files(raw: Any, *, inside: bool) -> tuple[str, ...]:
    if raw is None:
        return ()
    paths = raw if isinstance(raw, list) else [raw]
    if not paths:
        raise ValueError("`check.reward_file` is an empty list; leave it out, or name a file")
    return tuple(read_path(path, "check.reward_file", inside=inside) for path in paths)


def _timeout(raw: Any, name: str) -> float | None:
    if raw is None:
        return None
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if not is_number or not math.isfinite(raw) or raw <= 0:
        shown = clip(repr(raw), max_chars=50)
        raise ValueError(f"`check.{name}`: {shown} is not a number of seconds above 0")
    return float(raw)


def _tests(raw: Any, *, inside: bool) -> Outcomes | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or not raw.keys() <= _TESTS_KEYS:
        raise ValueError(f"`check.tests` must be an object with {', '.join(sorted(_TESTS_KEYS))}")
    must_pass = tuple(_texts(raw.get("pass"), "check.tests.pass"))
    expected = raw.get("expected")
    if expected is not None and not (
        isinstance(expected, dict) and all(isinstance(v, str) for v in expected.values())
    ):
        raise ValueError("`check.tests.expected` must be an object that maps tests to their status")
    if bool(must_pass) == bool(expected):
        raise ValueError(
            "`check.tests` needs the tests in `pass` or in `expected`, and not in both"
        )
    log = raw.get("log")
    return Outcomes(
        patterns=tuple(map(_pattern, _texts(raw.get("patterns"), "check.tests.patterns")))
        or _no_pattern(),
        log=None if log is None else read_path(log, "check.tests.log", inside=inside),
        must_pass=must_pass,
        passed=tuple(_texts(raw.get("passed"), "check.tests.passed")) or _PASSED,
        expected=expected,
    )


def _texts(raw: Any, name: str) -> list[str]:
    """A list of texts, or of lists of texts."""
    texts: list[str] = []
    for item in raw if isinstance(raw, list) else [] if raw is None else [raw]:
        texts += item if isinstance(item, list) else [item]
    if not all(isinstance(item, str) for item in texts):
        raise ValueError(f"`{name}` must be a list of texts")
    return texts


def _pattern(text: str) -> str:
    import regex

    try:
        groups = regex.compile(text).groupindex.keys()
    except regex.error as error:
        shown = clip(repr(text), max_chars=200)
        raise ValueError(
            f"`check.tests.patterns`: {shown} is not a regular expression: {error}"
        ) from error
    if not {"name", "status"} <= groups:
        shown = clip(repr(text), max_chars=200)
        raise ValueError(
            f"`check.tests.patterns`: {shown} lacks the group (?P<name>…) or (?P<status>…)"
        )
    return text


def _no_pattern() -> tuple[str, ...]:
    raise ValueError(
        "`check.tests.patterns` is missing: how a line of output names a test and its status"
    )
