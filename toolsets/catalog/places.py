"""Imports what an option names by MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class OwnToolError(ValueError):
    """A user's own tools cannot be used; the message says where and why."""


def import_place(place: str, option: str) -> Any:
    """Import MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE; modules in the current directory are found too.

    Raises `OwnToolError` naming the `option` that holds the place.
    """
    file, _, attribute = place.rpartition(":")
    try:
        if file.endswith(".py"):
            return getattr(_import_file(Path(file)), attribute)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        return pkgutil.resolve_name(place)
    except (Exception, SystemExit) as error:  # a user's module may do anything when imported
        raise OwnToolError(
            f"{option}: cannot import {place!r}: {type(error).__name__}: {error}"
        ) from error


def import_function(place: str, option: str) -> Callable[..., Any]:
    """The same for a function."""
    function: Callable[..., Any] = import_place(place, option)
    if not callable(function):
        raise OwnToolError(f"{option}: {place!r} is not callable; give MODULE:FUNCTION")
    return function


def _import_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
