"""Builds the programs that run inside a sandbox as one text each, and finds the Python for them."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.inside.boot import BOOT, make_frame

LOCALE = {"LC_CTYPE": "C.UTF-8"}
"""UTF-8 for commands. With LANG, each program would open twelve more files: a fifth of `ls`."""

_HOST = "/.host"
_PT_INTERP = 3
_PACKAGE = "toolsets.sandbox.inside"
_LOADER = """\
import sys
sources = {sources!r}
class Loader:
    def find_spec(self, name, path=None, target=None):
        if name in sources:
            return type(sys.__spec__)(name, self, is_package=not sources[name])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(sources[name], name, "exec"), module.__dict__)
sys.meta_path.insert(0, Loader())
from {package}.{main} import main
main()
"""


@cache
def program(main: str) -> str:
    """Return the source of a program that runs `main` of a module in `inside`.

    It can import the other modules there.
    """
    parents = [_PACKAGE.rsplit(".", dots)[0] for dots in range(_PACKAGE.count(".") + 1)]
    sources = dict.fromkeys(parents, "")
    for path in (Path(__file__).parent / "inside").glob("*.py"):
        if path.stem != "__init__":
            sources[f"{_PACKAGE}.{path.stem}"] = path.read_text()
    return _LOADER.format(sources=sources, package=_PACKAGE, main=main)


class Command(NamedTuple):
    """A command and its standard input."""

    argv: list[str]
    stdin: bytes


def make_forward_command(terms: Mapping[str, Any], *, in_image: bool) -> Command:
    """Return the command that starts another one and forwards its connections.

    See `inside.forward`. In an image the command needs the mounts of `inside_python`.
    """
    text = make_frame(program("forward")) + make_frame(json.dumps(terms))
    python = inside_python().command if in_image else ("python3",)
    return Command([*python, "-I", "-S", "-c", BOOT, "0"], text)


def python_prefix() -> Path:
    """Return where the running Python is installed, even in a virtual environment."""
    return Path(sys.base_prefix)


def python_bin() -> Path:
    """Return the directory with the running Python's `python3`."""
    return python_prefix() / "bin"


class InsidePython(NamedTuple):
    """The command and the mounts that run this machine's Python in a container."""

    command: tuple[str, ...]
    """The command that starts Python, by its own loader and with its own libraries."""
    mounts: tuple[tuple[str, str], ...]
    """Directories of this machine, each with its path in the container."""


@cache
def inside_python() -> InsidePython:
    """Return how to run this machine's Python in a container."""
    # With its own libraries: the image may have another C library, or none.
    prefix, binary = python_prefix().resolve(), Path(sys.executable).resolve()
    loader = _find_loader(binary).resolve()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]).parent for line in maps if ".so" in line}
    libraries = {place for place in loaded if place.is_relative_to("/usr")}
    libraries |= {loader.parent, prefix / "lib"}
    path = ":".join(sorted(f"{_HOST}{place}" for place in libraries))
    mounts = [("/usr", f"{_HOST}/usr")]
    if not prefix.is_relative_to("/usr"):
        mounts.append((str(prefix), f"{_HOST}{prefix}"))
    command = (f"{_HOST}{loader}", "--library-path", path, f"{_HOST}{binary}")
    return InsidePython(command, tuple(mounts))


def _find_loader(binary: Path) -> Path:
    """Return the loader that a 64-bit ELF program names."""
    raw = binary.read_bytes()
    start, size, count = (
        *struct.unpack_from("<Q", raw, 32),
        *struct.unpack_from("<HH", raw, 54),
    )
    for at in range(start, start + size * count, size):
        if struct.unpack_from("<I", raw, at)[0] == _PT_INTERP:
            offset = struct.unpack_from("<Q", raw, at + 8)[0]
            length = struct.unpack_from("<Q", raw, at + 32)[0]
            return Path(os.fsdecode(raw[offset : offset + length - 1]))
    raise SandboxError(f"{binary} is linked statically, so containers without Python cannot run it")
