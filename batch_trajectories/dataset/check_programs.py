"""Finds programs of the workspace that the command of a check runs.

The model can write any file of the workspace. A check that runs a program from there trusts a
program that the model may have written. Only the text of the command is examined; `check_tasks`
tests the rest.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

_COMMAND_ENDS = re.compile(r"&&|\|\||[;|&\n(){}`]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WRAPPERS = frozenset({"!", "command", "env", "exec", "if", "nice", "sudo", "then", "time"})
_NUMBER_WRAPPERS = frozenset({"timeout"})
_INTERPRETERS = re.compile(r"(\.|source|(ba|da|k|z)?sh|python[\d.]*|node|perl|ruby|deno|bun)")
_WORKSPACE_IN_PATH = re.compile(r"\$PWD|\$\(pwd\)|(^|:)[^/$:~]")
"""A directory of the workspace in a value of PATH."""
_RULE_FILES: Mapping[str, tuple[str, ...]] = {
    "make": ("GNUmakefile", "makefile", "Makefile"),
    "npm": ("package.json",),
    "pnpm": ("package.json",),
    "yarn": ("package.json",),
    "just": ("justfile", "Justfile"),
    "tox": ("tox.ini", "pyproject.toml", "setup.cfg"),
    "nox": ("noxfile.py",),
}
"""Programs that run what one of these files says."""


def programs_of_workspace(check: Any) -> list[str]:
    """The programs and scripts that the column `check` runs from the workspace, in order.

    Files that the check brings itself do not count, nor does a check that runs in another place.
    """
    place = check.get("in") if isinstance(check, Mapping) else None
    command = check.get("command") if isinstance(check, Mapping) else check
    if not isinstance(command, str) or place == "fresh" or _has_image(check):
        return []
    own_files = check.get("files") if isinstance(check, Mapping) else None
    files = [posixpath.normpath(str(path)) for path in own_files or ()]
    found = []
    for part in _COMMAND_ENDS.split(command):
        found += [name for name in _programs_in(part.split()) if not _is_brought(name, files)]
    return list(dict.fromkeys(found))


def _has_image(check: Any) -> bool:
    return isinstance(check, Mapping) and check.get("image") is not None


def _programs_in(words: list[str]) -> list[str]:
    """The programs of one simple command: a path, a script, or a file with rules."""
    words = [word.strip("'\"") for word in words]
    for word in words:
        name, is_assigned, value = word.partition("=")
        if name == "PATH" and is_assigned and _WORKSPACE_IN_PATH.search(value):
            return [value]
    while words and (
        _ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS or words[0] in _NUMBER_WRAPPERS
    ):
        if words.pop(0) in _NUMBER_WRAPPERS:
            while words and (words[0][:1] == "-" or words[0][:1].isdigit()):
                words.pop(0)
    if not words:
        return []
    program, *rest = words
    if _is_in_workspace(program):
        return [program]
    if program in _RULE_FILES:
        return [_RULE_FILES[program][-1]]
    if not _INTERPRETERS.fullmatch(program):
        return []
    for word in rest:
        if word[:1] != "-":
            is_script = _is_in_workspace(word) or (word[:1] not in "/$~" and "." in word)
            return [word] if is_script else []
        if word in ("-c", "-e", "-m", "-lc"):
            return []
    return []


def _is_in_workspace(word: str) -> bool:
    return "/" in word and word[:1] not in "/$~<>" and "://" not in word


def _is_brought(name: str, files: list[str]) -> bool:
    name = posixpath.normpath(name)
    names = next((names for names in _RULE_FILES.values() if name in names), (name,))
    return any(file == one or file.endswith(f"/{one}") for file in files for one in names)
