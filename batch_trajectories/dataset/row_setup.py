"""How a row sets up its workspace: files, commands, and a check at the end.

Columns, read if the run has `row_setup`: `files` ({path: text, or {"base64": …}}), `setup` (a
command or a list of them), `cwd` (where shells start), and `check` (see
`runs.dataset.row_check`). Where the workspace is a directory of an image, paths may be absolute,
`hide` lists the paths of the image that are away until the check, and of the history of its
repository only what leads to `base_commit` stays, unless the row has `keep_history`. These two are
not part of a row's identity: they change what the model could see, not what it is asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.row_check import Check, CheckPlace, read_check
from batch_trajectories.dataset.row_files import absolute_path, read_directory, read_files
from batch_trajectories.dataset.row_image import read_flag

_COMMIT = re.compile(r"[^-\s][^\s]*")
"""No name of a commit may look like an option of git."""


class RowSetup(NamedTuple):
    """How one row sets up its workspace."""

    files: Mapping[str, bytes]
    commands: tuple[str, ...]
    start_dir: str
    check: Check | None
    hidden: tuple[str, ...] = ()
    """Paths of the image that are away until the check."""
    base_commit: str | None = None
    """The commit whose history stays, as git names one; "": no history; None: all of it."""


def read_row_setup(
    columns: Mapping[str, Any],
    *,
    inside: bool = False,
    check_in: CheckPlace = "same",
    check_network: bool = False,
    variables: Collection[str] = (),
) -> RowSetup:
    """Read the columns of a row. Raises `ValueError` with the reason if they are invalid.

    `inside`: the workspace is a directory of the row's image. `check_in`: where checks run that do
    not say it. `check_network`: the run allows checks the network. `variables`: the variables of
    this machine that rows may name.
    """
    commands = columns.get("setup") or ()
    if isinstance(commands, str):
        commands = (commands,)
    if not isinstance(commands, list | tuple) or not all(isinstance(c, str) for c in commands):
        raise ValueError("`setup` must be a command or a list of commands")
    check = read_check(
        columns.get("check"), inside=inside, network=check_network, variables=variables
    )
    hidden = _hidden(columns.get("hide")) if inside else ()
    if inside and check is not None:
        if check.image is None:
            check = check._replace(where=check.where or check_in)
        if hidden and check.where == "same":
            raise ValueError(
                "`hide`: what is hidden is there again only in a fresh check: --check_in=fresh"
            )
    return RowSetup(
        files=read_files(columns.get("files"), "files", inside=inside),
        commands=tuple(commands),
        start_dir=read_directory(columns.get("cwd"), "cwd"),
        check=check,
        hidden=hidden,
        base_commit=_base_commit(columns) if inside else None,
    )


def _base_commit(columns: Mapping[str, Any]) -> str | None:
    raw = columns.get("base_commit")
    if raw is not None and not (isinstance(raw, str) and (not raw or _COMMIT.fullmatch(raw))):
        shown = clip(repr(raw), max_chars=200)
        raise ValueError(f"`base_commit`: {shown} is not a commit as git names one")
    return None if read_flag(columns.get("keep_history"), "keep_history") else raw


def _hidden(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    paths = [absolute_path(path) for path in raw] if isinstance(raw, list) else [None]
    if None in paths or "/" in paths:
        raise ValueError("`hide` must be a list of absolute paths of the image, without `..`")
    return tuple(map(str, paths))
