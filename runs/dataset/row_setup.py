"""How a row sets up its workspace: files, commands, and a check at the end.

Columns, read if the run has `row_setup`: `files` ({path: text, or {"base64": …}}), `setup` (a
command or a list of them), `cwd` (where shells start), and `check` (see
`runs.dataset.row_check`). Where the workspace is a directory of an image, paths may be absolute,
and `hide` lists the paths of the image that are away until the check.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from runs.dataset.row_check import Check, CheckPlace, read_check
from runs.dataset.row_files import absolute_path, read_directory, read_files

COLUMNS = ("files", "setup", "cwd", "check")
TELLTALE_COLUMNS = ("check", "files", "setup")
"""Those with names that other datasets hardly use: rows that have them may need `row_setup`."""


class RowSetup(NamedTuple):
    """How one row sets up its workspace."""

    files: Mapping[str, bytes]
    commands: tuple[str, ...]
    start_dir: str
    check: Check | None
    hidden: tuple[str, ...] = ()
    """Paths of the image that are away until the check."""


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
        msg = "`setup` must be a command or a list of commands"
        raise ValueError(msg)
    check = read_check(
        columns.get("check"), inside=inside, network=check_network, variables=variables
    )
    hidden = _hidden(columns.get("hide")) if inside else ()
    if inside and check is not None:
        check = check._replace(where=check.where or check_in)
        if hidden and check.where == "same":
            msg = "`hide`: what is hidden is there again only in a fresh check: --check_in=fresh"
            raise ValueError(msg)
    return RowSetup(
        read_files(columns.get("files"), "files", inside=inside),
        tuple(commands),
        read_directory(columns.get("cwd"), "cwd"),
        check,
        hidden,
    )


def _hidden(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    paths = [absolute_path(path) for path in raw] if isinstance(raw, list) else [None]
    if None in paths or "/" in paths:
        msg = "`hide` must be a list of absolute paths of the image, without `..`"
        raise ValueError(msg)
    return tuple(map(str, paths))
