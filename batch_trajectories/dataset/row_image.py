"""The container image that a row names, and how its conversation works in it.

`docker_image`, `image` or `image_name` names the image. The other columns are read only if the
workspace is a directory of the image: `workdir`, `user`, `env` ({NAME: TEXT}, where `${NAME}` is a
variable of this machine that the run allows), `network` (the row needs it; the run decides) and
`limits` ({memory_mb, disk_mb, cpus}, which lower the limits of the run).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.column_names import IMAGE_COLUMNS
from batch_trajectories.dataset.row_files import absolute_path
from toolsets.sandbox.base import ImageSpec

_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
"""No name of an image may look like an option of the container engine."""

_USER = re.compile(r"[A-Za-z0-9_][\w.-]*(:[A-Za-z0-9_][\w.-]*)?")

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", re.ASCII)

_LEAST_CPUS = 0.01
"""As for container engines."""


class RowLimits(NamedTuple):
    """What a row needs at most; None: as much as the run allows."""

    memory_mb: int | None = None
    disk_mb: int | None = None
    cpus: float | None = None


def read_image(
    columns: Mapping[str, Any], *, inside: bool, network: bool, variables: Collection[str]
) -> ImageSpec | None:
    """The image of a row, None if it names none. Raises `ValueError` with the reason.

    `inside`: the workspace is a directory of the image. `network`: the run allows the network.
    `variables`: the variables of this machine that `env` may name.
    """
    reference = _reference(columns)
    if not inside:
        return None if reference is None else ImageSpec(reference)
    workdir = columns.get("workdir")
    if workdir is not None and (path := absolute_path(workdir)) is None:
        shown = clip(repr(workdir), max_chars=200)
        raise ValueError(f"`workdir`: {shown} is not an absolute path without `..`")
    user = read_user(columns.get("user"), "user")
    env = read_env(columns.get("env"), "env", variables)
    wants_network = read_flag(columns.get("network"), "network")
    if reference is None:
        return None
    return ImageSpec(
        reference,
        workdir=None if workdir is None else path,
        user=user,
        env=env,
        network=network and wants_network is not False,
    )


def image_columns(columns: Mapping[str, Any]) -> list[str]:
    """The column that names the image of a row, and those that precede it."""
    place = next((n for n, name in enumerate(IMAGE_COLUMNS) if columns.get(name) is not None), 1)
    return list(IMAGE_COLUMNS[: max(2, place + 1)])


def read_limits(raw: Any, column: str = "limits") -> RowLimits:
    """The column `limits`, or what is like it. Raises `ValueError` with the reason."""
    if raw is None:
        return RowLimits()
    if not isinstance(raw, dict) or (unknown := raw.keys() - {*RowLimits._fields}):
        names = f" (got {', '.join(sorted(map(str, unknown)))})" if isinstance(raw, dict) else ""
        raise ValueError(f"`{column}` must be an object with memory_mb, disk_mb and cpus{names}")
    limits = {}
    for name, value in raw.items():
        least, unit = (_LEAST_CPUS, "CPUs") if name == "cpus" else (1, "megabytes")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value < 2**31):
            shown = clip(repr(value), max_chars=50)
            raise ValueError(
                f"`{column}.{name}`: {shown} is not a number of {unit}, {least} or more"
            )
        limits[name] = int(value) if value is not None and name != "cpus" else value
    return RowLimits(**limits)


def read_user(raw: Any, name: str) -> str | None:
    """A user: `name`, `uid`, `name:group` or `uid:gid`. Raises `ValueError` with the reason."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        raw = str(raw)
    if raw is None or (isinstance(raw, str) and _USER.fullmatch(raw)):
        return raw
    shown = clip(repr(raw), max_chars=200)
    raise ValueError(f"`{name}`: {shown} is not a user: give NAME, UID, NAME:GROUP or UID:GID")


def read_env(raw: Any, name: str, variables: Collection[str]) -> dict[str, str]:
    """Variables, with those of this machine filled in. Raises `ValueError` with the reason."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ValueError(f"`{name}` must be an object that maps names of variables to texts")
    env = {}
    for key, value in raw.items():
        place = f"{name}.{key}"
        if not _NAME.fullmatch(key):
            raise ValueError(f"`{name}`: {key!r} is not the name of a variable")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"`{place}` must be text without NUL")
        env[key] = _filled_in(value, place, variables)
    return env


def read_flag(raw: Any, name: str) -> bool | None:
    """True, false or absent. Raises `ValueError` with the reason."""
    if raw is None or isinstance(raw, bool):
        return raw
    raise ValueError(f"`{name}` must be true or false")


def add_asked(largest: dict[str, int], columns: Mapping[str, Any]) -> None:
    """Add what a row asks for that the run may refuse.

    `network`, `check.network` and `artifacts` are numbers of rows, those of `limits` the largest
    that any row has, with `limits.cpus` rounded up.
    """
    check = columns.get("check")
    wishes = {"network": columns, "check.network": check if isinstance(check, dict) else {}}
    for name, place in wishes.items():
        if place.get("network") is True:
            largest[name] = largest.get(name, 0) + 1
    if columns.get("artifacts") is True:
        largest["artifacts"] = largest.get("artifacts", 0) + 1
    for name, size in read_limits(columns.get("limits"))._asdict().items():
        if size is not None:
            largest[f"limits.{name}"] = max(math.ceil(size), largest.get(f"limits.{name}", 0))


def _reference(columns: Mapping[str, Any]) -> str | None:
    for name in IMAGE_COLUMNS:
        image = columns.get(name)
        if image is not None and (not isinstance(image, str) or not _IMAGE.fullmatch(image)):
            raise ValueError(
                f"`{name}`: {clip(repr(image), max_chars=200)} is not a valid image name"
            )
        if image is not None:
            return str(image)
    return None


def _filled_in(text: str, place: str, variables: Collection[str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name in variables and name in os.environ:
            return os.environ[name]
        if default is not None:
            return default
        if name in variables:
            raise ValueError(f"`{place}`: the variable {name} is not set on this machine")
        raise ValueError(
            f"`{place}` names the variable {name} of this machine; allow it: --env_from={name}"
        )

    return _VARIABLE.sub(value_of, text)
