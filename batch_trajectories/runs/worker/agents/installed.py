"""Programs that the user installed: where they are, and what of the machine they need to run.

A sandbox shows /usr. A program elsewhere (npm's or pip's, an own directory) is shown read-only
with what it is installed with, at the same path.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")


class NotInstalled(ValueError):
    """A program was not found; the message names it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A program of this machine."""

    path: str
    """Its absolute path."""
    binds: Mapping[str, str]
    """What it needs besides the system, by its path in a sandbox."""
    directories: Sequence[str]
    """For its PATH: where it and its interpreter are."""

    @property
    def shims(self) -> str | None:
        """A directory of pyenv, asdf or the like that it or its interpreter is in.

        Scripts in it look for the real program with all that the version manager has installed,
        which a sandbox does not show.
        """
        return next((place for place in self.directories if Path(place).name == "shims"), None)


def find_program(name: str, more: Sequence[Path] = ()) -> Installed:
    """Find a program by its path or on the PATH. `more` are further paths to show.

    Raises `NotInstalled`.
    """
    located = shutil.which(name)
    if located is None:
        if "/" in name and Path(name).is_file():
            raise NotInstalled(f"the program {name!r} is not executable: chmod +x {name}")
        raise NotInstalled(f"the program {name!r} was not found; install it, or give its path")
    binds: list[Path] = []
    directories: list[str] = []
    program = _add(Path(located).absolute(), binds, directories)
    for path in more:
        if not path.exists():
            raise NotInstalled(f"{path} does not exist")
        binds.append(path.absolute())
    shown = {str(path): str(path) for path in dict.fromkeys(binds) if not _is_system(path)}
    return Installed(str(program), shown, tuple(dict.fromkeys(directories)))


def _add(path: Path, binds: list[Path], directories: list[str]) -> Path:
    """Note what the program at `path` needs; return where it is once its links are followed."""
    if environment := _environment_of(path):
        # A link to the interpreter is followed only for what it needs: by its own place the
        # interpreter finds the packages.
        binds.append(environment)
        base = (environment / "bin" / "python").resolve().parent
        binds.append(base.parent)
        directories += [str(environment / "bin"), str(base)]
        return path
    real = path.resolve()
    directories.append(str(real.parent))
    if environment := _environment_of(real):
        return _add(real, binds, directories)
    if packages := _npm_root(real):
        binds.append(packages)
    elif not _is_system(real):
        # An interpreter has a library beside its `bin`; any other program is a single file.
        is_tree = real.parent.name == "bin" and (real.parent.parent / "lib").is_dir()
        binds.append(real.parent.parent if is_tree else real)
    if interpreter := _interpreter(real):
        _add(interpreter, binds, directories)
    return real


def _environment_of(path: Path) -> Path | None:
    """The virtual environment that holds a file."""
    return next((above for above in path.parents if (above / "pyvenv.cfg").is_file()), None)


def _npm_root(path: Path) -> Path | None:
    """The outermost `node_modules` above a file: packages find those that they need in it."""
    return next((above for above in reversed(path.parents) if above.name == "node_modules"), None)


def _interpreter(path: Path) -> Path | None:
    """The program that the first line of a script names."""
    with path.open("rb") as file:
        first = file.readline(512)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        name = next((word for word in words[1:] if not word.startswith("-")), None)
        located = shutil.which(name) if name else None
        if located is None:
            raise NotInstalled(f"{path}: its interpreter {name!r} was not found")
        return Path(located).absolute()
    return Path(words[0]) if words else None


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(system) for system in _SYSTEM)
