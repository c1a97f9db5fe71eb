"""Finds chat templates by name, directory or file.

Templates of models have licenses of their own, so none is copied here: names are those of the
training library `trl`, where it is installed. A template is data of others: it is rendered in a
sandbox, and `judging` bounds its time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.export.templates.token_counts import TEMPLATES, TOKENIZER

ALL = "all"


class ChatTemplate(NamedTuple):
    """A chat template, and the tokenizer beside it."""

    name: str
    path: Path
    """A Jinja file or a tokenizer_config.json."""
    tokenizer: Path | None = None
    """Its tokenizer.json."""


def find(given: str) -> list[ChatTemplate]:
    """The templates that names and paths with commas mean; `all`: those of `trl`.

    A directory is that of a tokenizer, or one of Jinja files. Raises `ConfigError`.
    """
    found = [one for name in given.split(",") if name.strip() for one in _find(name.strip())]
    if not found:
        raise ConfigError("--parity needs a template: a name, a directory, a file or `all`")
    return [*dict.fromkeys(found)]


def _find(name: str) -> Iterator[ChatTemplate]:
    path = Path(name)
    if path.is_dir():
        yield from _in_directory(path)
        return
    if path.is_file():
        yield ChatTemplate(path.stem if path.suffix == ".jinja" else path.parent.name, path)
        return
    known = {one.name: one for one in _bundled(name)}
    if name == ALL:
        yield from known.values()
    elif name in known:
        yield known[name]
    else:
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"--parity: no file, directory or template is named {name!r}; "
            f"{f'{hint} ' if hint else ''}the names are {', '.join(known)}"
        )


def _in_directory(path: Path) -> Iterator[ChatTemplate]:
    tokenizer = path / TOKENIZER
    for file in TEMPLATES:
        if (path / file).is_file():
            name = path.resolve().name
            yield ChatTemplate(name, path / file, tokenizer if tokenizer.is_file() else None)
            return
    files = sorted(path.glob("*.jinja"))
    if not files:
        raise ConfigError(
            f"--parity: {path} has none of {', '.join(TEMPLATES)}, and no Jinja files"
        )
    yield from (ChatTemplate(file.stem, file) for file in files)


def _bundled(name: str) -> Iterator[ChatTemplate]:
    """The templates that the installed `trl` brings."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"--parity={name}: names of templates are those of the package trl, which is not "
            "installed: pip install trl, or give the directory of a tokenizer or a Jinja file"
        )
    yield from _in_directory(Path(spec.origin).parent / "chat_templates")
