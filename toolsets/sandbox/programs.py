"""The programs that run inside a sandbox, as one text that needs no file there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from toolsets.sandbox.inside.boot import BOOT, framed

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
    """The source of a program that runs `main` of that module, and has the others to import."""
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


def forwarding(terms: Mapping[str, Any]) -> Command:
    """The command that starts another one and forwards its connections; see `inside.forward`."""
    text = framed(program("forward")) + framed(json.dumps(terms))
    return Command(["python3", "-I", "-S", "-c", BOOT, "0"], text)
