"""The programs that run inside a sandbox, as one text, and the Python that runs them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

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


def python_prefix() -> Path:
    """Return where the running Python is installed, also when this is a virtual environment."""
    return Path(sys.base_prefix)


def python_bin() -> Path:
    """Return the directory that holds that Python's `python3`."""
    return python_prefix() / "bin"
