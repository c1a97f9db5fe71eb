"""Reads the reference solution of a row, which only audits use.

Rows files make the column `reference` (by their key of this name): an object with any of

    patch    a diff for `git apply`; `reverse`: true applies it backwards
    commit   the commit that solved the task, as R2E-Gym has it (`parsed_commit_content`)
    files    {path: content}, as in the column `files`
    command  run after patch and files are applied; `env` are its variables

Other rows have the columns `solution` (files) or `solution_command`. With --check_expected, the
answer `expected` is the solution.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from batch_trajectories.dataset.columns import Files, ValuePermissions, Variables, read_value

COLUMN = "reference"
_KEYS = frozenset(("patch", "reverse", "commit", "files", "command", "env"))


class SolvedFile(NamedTuple):
    """The new text that a solution puts into a file."""

    texts: list[str]
    """Texts that the solved file contains; for a patch, each hunk with its context."""
    added: list[str]
    """The lines that the solution adds."""


class Reference(NamedTuple):
    """The reference solution of a task."""

    patch: str | None = None
    is_reversed: bool = False
    files: Mapping[str, bytes] = {}
    removed: tuple[str, ...] = ()
    """Files that the solution removes."""
    command: str | None = None
    env: Mapping[str, str] = {}

    def texts(self) -> dict[str, SolvedFile]:
        """The new text of each file that the solution changes, by path."""
        patch = self.patch or ""
        made = dict(_solved_files(patch, is_reversed=self.is_reversed))
        texts = {path: content.decode(errors="replace") for path, content in self.files.items()}
        return made | {path: SolvedFile([text], text.splitlines()) for path, text in texts.items()}


def read_reference(
    columns: Mapping[str, Any], *, inside: bool, variables: Collection[str] = ()
) -> Reference | None:
    """Read the solution from the columns of a row; None without one. Raises `ValueError`.

    `inside`: the workspace is a directory of the row's image. `variables` are the variables of this
    machine that the row may name.
    """
    permissions = ValuePermissions(in_image=inside, variables=variables)
    raw = columns.get(COLUMN)
    name = COLUMN
    if not isinstance(raw, dict) or not raw.keys() <= _KEYS:
        # A column of this name in a dataset of another kind may hold anything.
        solution, command = columns.get("solution"), columns.get("solution_command")
        raw, name = {}, "solution"
        if isinstance(solution, dict):
            raw["files"] = solution
        if isinstance(command, str):
            raw["command"] = command
    raw = {key: value for key, value in raw.items() if value is not None}
    patch, command = raw.get("patch"), raw.get("command")
    files, removed = _read_commit(raw.get("commit"), permissions)
    files |= read_value(Files, raw.get("files", {}), name, permissions)
    if not isinstance(patch, str | None) or not isinstance(command, str | None):
        raise ValueError(f"`{name}`: patch and command must be text")
    if not (patch and patch.strip()) and not files and not removed and not command:
        return None
    env = read_value(Variables, raw.get("env", {}), f"{name}.env", permissions)
    return Reference(
        patch=patch or None,
        is_reversed=raw.get("reverse") is True,
        files=files,
        removed=removed,
        command=command,
        env=env,
    )


def _read_commit(
    raw: Any, permissions: ValuePermissions
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files that a commit writes, and the paths that it removes."""
    changes = raw.get("file_diffs") if isinstance(raw, dict) else None
    files: dict[str, str] = {}
    removed = []
    for change in changes if isinstance(changes, list) else ():
        try:
            path, content = change["header"]["file"]["path"], change["new_file_content"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"`{COLUMN}.commit`: a file lacks {error}") from error
        if isinstance(content, str) and content:
            files[path] = content
        else:
            removed.append(path)
    return read_value(Files, files, f"{COLUMN}.commit", permissions), tuple(removed)


def _solved_files(patch: str, *, is_reversed: bool) -> Iterator[tuple[str, SolvedFile]]:
    """The files of a patch, each with the new text of its hunks that add lines."""
    mark = "-" if is_reversed else "+"
    for section in re.split(r"^diff ", patch, flags=re.MULTILINE):
        header, *hunks = re.split(r"^@@[^\n]*\n", section, flags=re.MULTILINE)
        made = SolvedFile([], [])
        for hunk in hunks:
            lines = hunk.splitlines()
            if new := [line[1:] for line in lines if line.startswith(mark)]:
                texts = [line[1:] for line in lines if line[:1] in (mark, " ", "")]
                made.texts.append("\n".join(texts))
                made.added.extend(new)
        name = re.search(
            rf"^{'---' if is_reversed else r'[+]{3}'} (?:[ab]/)?([^\t\n]*)", header, re.M
        )
        if made.texts:
            yield name[1] if name else "", made
