"""The reference solution of a row, which only audits read.

Rows files make the column `reference` (their key of that name): an object with any of

    patch    a diff for `git apply`; `reverse`: true applies it backwards
    commit   what R2E-Gym knows of the commit that solved the task (`parsed_commit_content`)
    files    {path: content}, as in the column `files`
    command  run when patch and files are there; `env` are its variables

Other rows have the columns `solution` (files) or `solution_command`. With --check_expected, the
answer `expected` is the solution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from batch_trajectories.runs.dataset.row_files import read_files
from batch_trajectories.runs.dataset.row_image import read_env

COLUMN = "reference"
_KEYS = frozenset(("patch", "reverse", "commit", "files", "command", "env"))


class Reference(NamedTuple):
    """How a task is solved."""

    patch: str | None = None
    is_reversed: bool = False
    files: Mapping[str, bytes] = {}
    removed: tuple[str, ...] = ()
    """Files that the solution does not have."""
    command: str | None = None
    env: Mapping[str, str] = {}

    def texts(self) -> Iterator[list[str]]:
        """Texts that are in a solved workspace and in no other: of each file, all its parts.

        Of a patch, the lines that each hunk makes of a file, with those around them.
        """
        if self.patch is not None:
            yield from _made_by(self.patch, is_reversed=self.is_reversed)
        for content in self.files.values():
            yield [content.decode(errors="replace")]


def read_reference(
    columns: Mapping[str, Any], *, inside: bool, variables: Collection[str] = ()
) -> Reference | None:
    """Read the columns of a row; None where it has no solution. Raises `ValueError`.

    See `runs.dataset.row_setup.read_row_setup` for `inside` and `variables`.
    """
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
    patch, command = raw.get("patch"), raw.get("command")
    files, removed = _of_commit(raw.get("commit"), inside=inside)
    files |= read_files(raw.get("files"), name, inside=inside)
    if not isinstance(patch, str | None) or not isinstance(command, str | None):
        raise ValueError(f"`{name}`: patch and command must be text")
    if not (patch and patch.strip()) and not files and not removed and not command:
        return None
    env = read_env(raw.get("env"), f"{name}.env", variables)
    return Reference(patch or None, raw.get("reverse") is True, files, removed, command, env)


def _of_commit(raw: Any, *, inside: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a commit, and those that it removes."""
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
    return read_files(files, f"{COLUMN}.commit", inside=inside), tuple(removed)


def _made_by(patch: str, *, is_reversed: bool) -> Iterator[list[str]]:
    """Of each file of a patch, what its hunks that add lines make of it."""
    added, taken = ("-", "+") if is_reversed else ("+", "-")
    parts: list[str] = []
    hunk: list[str] | None = None
    has_added = False
    for line in [*patch.splitlines(), "diff "]:
        if line.startswith(("@@", "diff ")) or hunk is None:
            if hunk is not None and has_added:
                parts.append("\n".join(hunk))
            hunk, has_added = ([], False) if line.startswith("@@") else (None, False)
            if line.startswith("diff ") and parts:
                yield parts
                parts = []
        elif line.startswith(added):
            hunk.append(line[1:])
            has_added = True
        elif line.startswith(" ") or not line:
            hunk.append(line[1:])
        elif not line.startswith((taken, "\\")):
            hunk = None
