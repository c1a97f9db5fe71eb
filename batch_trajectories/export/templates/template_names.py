"""Finds chat templates by name, directory or file.

A name is that of a template of the trainer TRL (`qwen3`) or Axolotl (`axolotl:qwen3`), or of a
model on the hub (`hf:ORG/MODEL`). If the trainer is not installed, `shipped/` has copies of those
templates whose licenses allow it. Templates are foreign code: they are rendered in a sandbox, and
`parity` bounds their time and memory.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics.errors import ConfigError, EnvironmentStop
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.basics.validation import did_you_mean

TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
TOKENIZER = "tokenizer.json"
ALL = "all"
HUB_PREFIX = "hf:"

_SHIPPED = Path(__file__).with_name("shipped")
_HUB_NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_OWN_CODE = {"llamafactory": "LLaMA-Factory", "llama_factory": "LLaMA-Factory", "swift": "ms-swift"}
"""Trainers that build prompts by their own code, by the prefixes that a user may try."""

NOT_COVERED = (
    "not covered: LLaMA-Factory, and ms-swift without `--template_backend jinja`, which build "
    "prompts by their own code; the templates of Unsloth's get_chat_template"
)
"""The trainers for which no template here proves anything, for people."""

_OTHERS = "hf:ORG/MODEL, the directory of a tokenizer or a Jinja file"
"""The things that users can give instead of the name of a template, as a text for them."""


class _Trainer(NamedTuple):
    """A package with chat templates."""

    title: str
    package: str
    prefix: str
    """The beginning of the names of the trainer's templates."""
    folder: str
    """The directory of the templates inside the package of the trainer."""


_TRAINERS = (
    _Trainer("TRL", "trl", "", "chat_templates"),
    _Trainer("Axolotl", "axolotl", "axolotl:", "utils/chat_templates/templates"),
)


class ChatTemplate(NamedTuple):
    """A chat template, and the tokenizer beside it."""

    name: str
    path: Path
    """A Jinja file or a tokenizer_config.json."""
    tokenizer: Path | None = None
    """The tokenizer.json of the model; None if unknown."""
    source: str = ""
    """The origin of a template that was given by name; "" for a path."""


def find_templates(given: str) -> list[ChatTemplate]:
    """The templates that a list of names and paths, with commas, stands for.

    `all` stands for those of TRL, `axolotl:all` for those of Axolotl. A directory may hold a
    tokenizer, or Jinja files. Raises `ConfigError`, and `EnvironmentStop` if the hub cannot be
    reached.
    """
    found = [one for name in given.split(",") if name.strip() for one in _find(name.strip())]
    if not found:
        raise ConfigError("--parity needs a template: a name, a directory, a file or `all`")
    return [*dict.fromkeys(found)]


def describe_missing(given: str) -> Iterator[str]:
    """Say which templates `all` does not stand for, since their trainer is not installed."""
    for trainer in _TRAINERS:
        if f"{trainer.prefix}{ALL}" in map(str.strip, given.split(",")) and not _folder(trainer):
            withheld = [name for name in _read_withheld() if _find_trainer(name) is trainer]
            number = len([*_copies(trainer)])
            yield (
                f"{trainer.prefix}{ALL}: {plural(number, 'template')} of {trainer.title} that are "
                f"shipped; without {first_few(withheld, 5)} (pip install {trainer.package})"
            )


def _find(name: str) -> Iterator[ChatTemplate]:
    path = Path(name)
    if path.is_dir():
        yield from _find_in_directory(path)
    elif path.is_file():
        yield ChatTemplate(path.stem if path.suffix == ".jinja" else path.parent.name, path)
    elif name.startswith(HUB_PREFIX):
        yield from _find_on_hub(name)
    else:
        trainer = _find_trainer(name)
        known = {one.name: one for one in (*_copies(trainer), *_find_installed(trainer))}
        if name == f"{trainer.prefix}{ALL}":
            yield from map(_check_copy, known.values())
        elif name in known:
            yield _check_copy(known[name])
        else:
            raise _unknown(name, known)


def _unknown(name: str, known: Mapping[str, ChatTemplate]) -> ConfigError:
    if reason := _read_withheld().get(name):
        package = _find_trainer(name).package
        return ConfigError(
            f"--parity: {name!r} is not shipped, since {reason}: pip install {package}, or give "
            f"{_OTHERS}"
        )
    trainer = _OWN_CODE.get(name.partition(":")[0].lower())
    if trainer and ":" in name:
        return ConfigError(
            f"--parity={name}: {trainer} builds prompts by its own code, for which no chat "
            f"template stands; for the template of the model, give {_OTHERS}"
        )
    hint = did_you_mean(name, known)
    return ConfigError(
        f"--parity: no file, directory or template is named {name!r}; "
        f"{f'{hint} ' if hint else ''}the names are {', '.join(known)}; or give {_OTHERS}"
    )


def _find_in_directory(path: Path, name: str = "", source: str = "") -> Iterator[ChatTemplate]:
    tokenizer = path / TOKENIZER
    for file in TEMPLATES:
        if (path / file).is_file():
            beside = tokenizer if tokenizer.is_file() else None
            yield ChatTemplate(name or path.resolve().name, path / file, beside, source)
            return
    files = sorted(path.glob("*.jinja"))
    if not files:
        raise ConfigError(
            f"--parity: {path} has none of {', '.join(TEMPLATES)}, and no Jinja files"
        )
    yield from (ChatTemplate(file.stem, file) for file in files)


# Templates of trainers, installed or copied.


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((_SHIPPED / "templates.toml").read_text(encoding="utf-8"))


def _read_withheld() -> Mapping[str, str]:
    """The names of the templates that are not copied, each with the reason."""
    return {name: group["reason"] for group in _table()["withheld"] for name in group["names"]}


def _find_trainer(name: str) -> _Trainer:
    """The trainer of a template's name: names without a prefix are of the first one."""
    return next(one for one in reversed(_TRAINERS) if name.startswith(one.prefix))


def _copies(trainer: _Trainer) -> Iterator[ChatTemplate]:
    """The copies of a trainer's templates."""
    for one in _table()["template"]:
        if one["package"] != trainer.package:
            continue
        source = f"copy of {trainer.title} {one['version']}, {one['license']}"
        yield ChatTemplate(one["name"], _SHIPPED / one["file"], source=source)


def _check_copy(template: ChatTemplate) -> ChatTemplate:
    """Return the template. Raises `ConfigError` if it is a copy that was changed."""
    digests = {_SHIPPED / one["file"]: one["sha256"] for one in _table()["template"]}
    path = template.path
    if path in digests and (
        not path.is_file() or sha256(path.read_bytes()).hexdigest() != digests[path]
    ):
        raise ConfigError(
            f"{path}: it is not the template that was shipped; install this program again"
        )
    return template


def _find_installed(trainer: _Trainer) -> Iterator[ChatTemplate]:
    folder = _folder(trainer)
    if folder is None:
        return
    try:
        source = f"{trainer.title} {version(trainer.package)}, installed"
    except PackageNotFoundError:
        source = f"{trainer.title}, installed"
    for file in sorted(folder.glob("*.jinja")):
        yield ChatTemplate(f"{trainer.prefix}{file.stem}", file, source=source)


def _folder(trainer: _Trainer) -> Path | None:
    """The directory of an installed trainer's templates; None if it is not installed."""
    spec = find_spec(trainer.package)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / trainer.folder
    return folder if folder.is_dir() else None


# Templates of models on the hub.


def _find_on_hub(name: str) -> Iterator[ChatTemplate]:
    """The template of a model: from the cache of the hub, else fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if (match := _HUB_NAME.fullmatch(name)) is None:
        raise ConfigError(f"--parity={name}: not a model of the hub; write hf:ORG/MODEL[@REVISION]")
    for is_cached in (True, False):
        try:
            folder = Path(
                snapshot_download(
                    match["repo"],
                    revision=match["revision"],
                    allow_patterns=[*TEMPLATES, TOKENIZER],
                    local_files_only=is_cached,
                )
            )
        except LocalEntryNotFoundError as error:
            if is_cached:
                continue
            raise EnvironmentStop(
                f"--parity={name}: it is not in the cache, and the hub cannot be reached: {error}"
            ) from error
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ConfigError(f"--parity={name}: the hub refuses it: {error}") from error
        if any((folder / file).is_file() for file in TEMPLATES):
            commit = folder.name if _COMMIT.fullmatch(folder.name) else "an unknown revision"
            yield from _find_in_directory(folder, name, f"hf:{match['repo']}@{commit}")
            return
    raise ConfigError(f"--parity={name}: this model has none of {', '.join(TEMPLATES)}")
