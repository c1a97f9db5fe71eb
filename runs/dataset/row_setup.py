"""How a row sets up its workspace: files, commands, and a check at the end.

Columns, read if the run has `row_setup`: `files` ({path: text, or {"base64": …}}), `setup` (a
command or a list of them), `cwd` (where shells start), and `check` (a command, or {"command",
"files"}; its files are written when it runs, so the model never sees them).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

_HOME = "/workspace"
_ROOT = PurePosixPath(".")

COLUMNS = ("files", "setup", "cwd", "check")
TELLTALE_COLUMNS = ("check", "files", "setup")
"""Those with names that other datasets hardly use: rows that have them may need `row_setup`."""


class Check(NamedTuple):
    """The command that judges a workspace when its conversation has ended."""

    command: str
    files: Mapping[str, bytes]


class RowSetup(NamedTuple):
    """How one row sets up its workspace."""

    files: Mapping[str, bytes]
    commands: tuple[str, ...]
    start_dir: str
    check: Check | None


def read_row_setup(columns: Mapping[str, Any]) -> RowSetup:
    """Read the columns of a row. Raises `ValueError` with the reason if they are invalid."""
    commands = columns.get("setup") or ()
    if isinstance(commands, str):
        commands = (commands,)
    if not isinstance(commands, list | tuple) or not all(isinstance(c, str) for c in commands):
        msg = "`setup` must be a command or a list of commands"
        raise ValueError(msg)
    files = _files(columns.get("files"), "files")
    start_dir = _directory(columns.get("cwd"))
    return RowSetup(files, tuple(commands), start_dir, _check(columns.get("check")))


def _files(raw: Any, name: str) -> dict[str, bytes]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        msg = f"`{name}` must be an object that maps paths to contents"
        raise ValueError(msg)
    files = {}
    for path, content in raw.items():
        inside = _inside(path)
        if inside is None or inside == _ROOT:
            msg = f"`{name}`: {path!r} is not a path in the workspace"
            raise ValueError(msg)
        files[str(inside)] = _content(content, f"{name}.{path}")
    for path in files:
        if beneath := files.keys() & set(map(str, PurePosixPath(path).parents)):
            msg = f"`{name}`: {min(beneath)!r} is a file, so {path!r} cannot be in it"
            raise ValueError(msg)
    return files


def _content(raw: Any, place: str) -> bytes:
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace")
    if isinstance(raw, dict) and raw.keys() == {"base64"} and isinstance(raw["base64"], str):
        try:
            return base64.b64decode(raw["base64"], validate=True)
        except binascii.Error as error:
            msg = f"`{place}`: not base64: {error}"
            raise ValueError(msg) from error
    msg = f'`{place}` must be text or {{"base64": …}}'
    raise ValueError(msg)


def _directory(raw: Any) -> str:
    inside = _inside("." if raw is None else raw)
    if inside is None:
        msg = "`cwd` must be a directory in the workspace: a relative path, or one in /workspace"
        raise ValueError(msg)
    return str(inside)


def _inside(raw: Any) -> PurePosixPath | None:
    """The path relative to the workspace; None if it is outside."""
    if not isinstance(raw, str) or not raw or "\0" in raw:
        return None
    path = PurePosixPath(raw)
    if path.is_absolute():
        if not path.is_relative_to(_HOME):
            return None
        path = path.relative_to(_HOME)
    return None if ".." in path.parts else path


def _check(raw: Any) -> Check | None:
    if raw is None:
        return None
    if isinstance(raw, str):
        return Check(raw, {})
    command = raw.get("command") if isinstance(raw, dict) else None
    if isinstance(command, str) and raw.keys() <= {"command", "files"}:
        return Check(command, _files(raw.get("files"), "check.files"))
    msg = "`check` must be a command, or an object with `command` and `files`"
    raise ValueError(msg)
