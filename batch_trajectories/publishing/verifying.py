"""Tells whether a received publication is what was published. It is data: nothing in it is run.

Its manifest names the files. Names that lead out of the directory, links, and what is no plain file
are refused by name before anything is read. A file is read only if it has the size that the
manifest gives, and never as a whole.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
from pydantic import BaseModel, Field, ValidationError

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import plural, valid_utf8
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.basics.yaml_file import YamlFileError, read_yaml
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.source import HUB_PREFIX
from batch_trajectories.engine.run_dir import package_versions
from batch_trajectories.export.dataset.checking import find_wrong_sums
from batch_trajectories.export.dataset.recipe_origin import active_parts
from batch_trajectories.publishing.published_config import (
    CONFIG_FILE,
    RECIPE_FILE,
    describe_acting,
    find_foreign_options,
)
from batch_trajectories.publishing.reproduce_script import SCRIPT_NAME, reproduce_script
from batch_trajectories.records.names import MANIFEST_FILE

_MAX_MANIFEST_BYTES = 64 << 20
_MAX_SCRIPT_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 40
"""The largest file that is read. A forged one can have any size and take no place on the disk."""

_BLOCK = 1 << 20

_PROGRAM = "batch-trajectories"

_HUB_FILES = (".gitattributes",)
_CACHE_OF_THE_HUB = ".cache/huggingface"
"""Files that a download from the hub adds; no loader of datasets reads them."""


class _File(BaseModel, strict=True):
    path: str = Field(max_length=1000)
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Format(BaseModel, strict=True):
    format: str
    rows: int
    used: int
    rejected: int
    files: list[_File]


class _NeedEntry(BaseModel, strict=True):
    name: str
    what: str


class _Prompts(BaseModel, strict=True):
    published: str


class _Facts(BaseModel, strict=True):
    format: int
    license: str
    versions: dict[str, str]
    prompts: _Prompts
    needs: list[_NeedEntry]


class _Run(BaseModel, strict=True):
    config_digest: str
    dataset_sha256: str


class _Manifest(BaseModel, strict=True):
    """The keys of a publication's manifest that this program reads."""

    kind: str
    run: _Run
    tasks: int
    discarded: int
    failed: int
    pending: int
    rejected: int
    selected: int
    formats: list[_Format]
    other_files: list[_File]
    publication: _Facts


@dataclass(frozen=True, slots=True)
class Publication:
    """A received publication, of which only the manifest has been read."""

    directory: Path
    manifest: _Manifest
    raw: Mapping[str, Any]
    """The manifest with all its keys."""
    sha256: str
    """The digest of manifest.json, which stands for all files."""

    @property
    def row_files(self) -> list[_File]:
        """The files of rows."""
        return [file for part in self.manifest.formats for file in part.files]

    @property
    def files(self) -> list[_File]:
        """All files but the manifest."""
        return [*self.row_files, *self.manifest.other_files]

    def describe(self) -> str:
        """Lines about a publication that is whole."""
        facts = self.manifest.publication
        rows = sum(file.rows for file in self.row_files)
        made_by = facts.versions.get(_PROGRAM, "an unknown version")
        here = package_versions([_PROGRAM])[_PROGRAM]
        lines = [
            f"{self.directory}: as published: {plural(len(self.files) + 1, 'file')}, "
            f"{plural(rows, 'row')}, license {facts.license}",
            f"sha256 of {MANIFEST_FILE}: {self.sha256}",
            f"made by {_PROGRAM} {made_by}; this is {here}",
        ]
        if any(file.path == CONFIG_FILE for file in self.files):
            options = read_yaml(self.directory / CONFIG_FILE, "config file")
            lines.append(f"{SCRIPT_NAME} would start a run with {describe_acting(options)}")
        lines += [f"to make it again, bring {need.name}: {need.what}" for need in facts.needs]
        return "\n".join(map(_on_one_line, lines))


def is_publication(path: Path) -> bool:
    """Whether a directory has a manifest, so that it is no run."""
    return path.is_dir() and (path / MANIFEST_FILE).exists()


def read_publication(directory: Path) -> Publication:
    """Read the manifest of a publication. Raises `ConfigError` that names what is wrong."""
    file = directory / MANIFEST_FILE
    try:
        with _open(directory, MANIFEST_FILE) as opened:
            if (size := os.fstat(opened.fileno()).st_size) > _MAX_MANIFEST_BYTES:
                raise ConfigError(f"{file}: {size:,} bytes are too many for a manifest")
            content = opened.read(_MAX_MANIFEST_BYTES)
        raw = orjson.loads(content)
        manifest = _Manifest.model_validate(raw)
    except FileNotFoundError:
        raise ConfigError(f"{directory}: no publication here (it has no {MANIFEST_FILE})") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{file}: cannot read it: {error}") from error
    except ValidationError as error:
        if isinstance(raw, dict) and raw.get("kind") == "dataset" and "publication" not in raw:
            raise ConfigError(
                f"{directory}: a dataset, but no publication; `export RUN --check` compares it "
                "with its run"
            ) from None
        raise ConfigError(
            f"{file}: not the manifest of a publication: {mistakes_in(error)[0].describe()}"
        ) from error
    found = Publication(directory, manifest, raw, hashlib.sha256(content).hexdigest())
    seen: set[str] = set()
    for one in found.files:
        if problem := _problem_of_name(one.path):
            raise ConfigError(f"{file}: lists {one.path!r}, {problem}")
        if one.path in seen or one.path == MANIFEST_FILE:
            raise ConfigError(f"{file}: lists {one.path!r} twice")
        seen.add(one.path)
    return found


def find_problems(found: Publication, *, expected: str | None = None) -> Iterator[str]:
    """List what differs from the publication, a line each; `expected`: the manifest's digest."""
    if expected is not None and expected.lower() != found.sha256:
        yield f"{MANIFEST_FILE}: its sha256 is {found.sha256}, not {expected}"
    listed = {one.path: one for one in found.files}
    whole: set[str] = set()
    strange = [*_strange_entries(found.directory, listed)]
    yield from strange
    total = sum(one.bytes for one in found.files)
    with LongWork("verify", total=total, unit="B") as work:
        for path, file in listed.items():
            problem = _problem_of_file(found.directory, file, work)
            if problem is None:
                whole.add(path)
            else:
                yield f"{path}: {problem}"
    yield from find_wrong_sums(found.raw)
    for name, find in _SMALL_FILES.items():
        if name in whole:
            yield from find(found, found.directory / name)


def find_missing(found: Publication, given: str) -> Iterator[str]:
    """The options that the job needs and that are not `given`, the words of a command line."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in given.split()}
    for need in found.manifest.publication.needs:
        if need.name in RunConfig.model_fields and need.name not in names:
            yield _on_one_line(f"give --{need.name}=...: {need.what}")


def find_differences(found: Publication, other: Publication) -> Iterator[str]:
    """List the differences from the rows of another publication, a line each."""
    ours, theirs = found.manifest.run, other.manifest.run
    if ours.dataset_sha256 != theirs.dataset_sha256:
        yield "other prompts were used"
    if ours.config_digest != theirs.config_digest:
        yield f"another config: {theirs.config_digest}, published is {ours.config_digest}"
    made = {one.path: one for one in other.row_files}
    for file in found.row_files:
        if (again := made.pop(file.path, None)) is None:
            yield f"{file.path}: published, and the run made no such file"
        elif again.sha256 != file.sha256:
            yield f"{file.path}: other rows ({again.rows:,}; published are {file.rows:,})"
    yield from (f"{path}: made by the run, and not published" for path in made)


def count_lines(path: Path) -> int:
    """The number of lines of a file, a last one without a newline included."""
    with path.open("rb") as file:
        return _read_content(file).lines


def _problem_of_name(name: str) -> str | None:
    """The reason why no file of a publication may have this name; None if one may."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        return "which leads out of the directory"
    if "" in parts or "." in parts or "\\" in name or not name.isprintable():
        return "which is no plain name of a file"
    if any(part.startswith(".") for part in parts):
        return "which is hidden"
    return None


def _strange_entries(directory: Path, listed: Mapping[str, _File]) -> Iterator[str]:
    """Entries of a directory, at any depth, that are links, no plain files, or not listed."""
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(directory / folder) as opened:
                entries = sorted(opened, key=lambda one: one.name)
        except OSError as error:
            yield f"{_on_one_line(folder)}: {error.strerror or error}"
            continue
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                yield f"{_on_one_line(name)}: a link; a publication has none"
            elif entry.is_dir(follow_symlinks=False):
                if name != _CACHE_OF_THE_HUB:
                    pending.append(name)
            elif not entry.is_file(follow_symlinks=False):
                yield f"{_on_one_line(name)}: not a plain file"
            elif name not in listed and name not in (MANIFEST_FILE, *_HUB_FILES):
                yield f"{_on_one_line(name)}: not in the manifest, so somebody has added it"


def _on_one_line(text: str) -> str:
    """A text of the publisher's, which must not look like several lines of this program."""
    return valid_utf8(" ".join(text.splitlines()))


def _problem_of_file(directory: Path, file: _File, work: LongWork) -> str | None:
    """Describe the problem of a listed file; None if it is as published."""
    try:
        with _open(directory, file.path) as opened:
            if (size := os.fstat(opened.fileno()).st_size) != file.bytes:
                return f"{size:,} bytes, published were {file.bytes:,}; not read"
            if size > _MAX_FILE_BYTES:
                return f"{size:,} bytes are too many; not read"
            content = _read_content(opened, work)
    except OSError as error:
        return error.strerror or str(error)
    if (content.size, content.sha256) != (file.bytes, file.sha256):
        return f"its content is not what was published (sha256 {content.sha256})"
    if file.path.endswith(".jsonl") and content.lines != file.rows:
        return f"{content.lines:,} rows, but the manifest says {file.rows:,}"
    if file.path.endswith(".parquet"):
        return _problem_of_parquet(directory / file.path, file.rows)
    return None


def _problem_of_parquet(path: Path, rows: int) -> str | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        count = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        return f"not a Parquet file: {error}"
    return None if count == rows else f"{count:,} rows, but the manifest says {rows:,}"


def _open(directory: Path, name: str) -> BinaryIO:
    """Open a plain file below a directory, without following a link. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *folders, last = name.split("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for folder in folders:
            inner = os.open(folder, flags | os.O_DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        opened = os.open(last, flags, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(0, "not a plain file")
    return os.fdopen(opened, "rb", buffering=0)


class _Content(NamedTuple):
    """Facts about the content of a file."""

    size: int
    sha256: str
    lines: int
    """The number of lines, a last one without a newline included."""


def _read_content(file: BinaryIO, work: LongWork | None = None) -> _Content:
    """Read a file in blocks; return the facts about its content."""
    digest, size, lines, last = hashlib.sha256(), 0, 0, b"\n"
    while block := file.read(_BLOCK):
        digest.update(block)
        size += len(block)
        lines += block.count(b"\n")
        last = block[-1:]
        if work is not None:
            work.advance(len(block))
    return _Content(size, digest.hexdigest(), lines + (last != b"\n"))


def _problems_of_config(found: Publication, file: Path) -> Iterator[str]:
    """Options of run.yaml that `publish` does not write."""
    try:
        options = read_yaml(file, "config file")
    except YamlFileError as error:
        yield str(error)
        return
    if isinstance(options, dict):
        yield from find_foreign_options(options)
    else:
        yield f"{CONFIG_FILE}: not a config file"


def _problems_of_recipe(found: Publication, file: Path) -> Iterator[str]:
    """Functions, files and directories in recipe.yaml that the needs do not name."""
    try:
        recipe = read_yaml(file, "recipe")
    except YamlFileError as error:
        yield str(error)
        return
    named = {need.name for need in found.manifest.publication.needs}
    for key, value in active_parts(recipe if isinstance(recipe, dict) else {}).items():
        values = value if isinstance(value, list) else [value]
        local = [str(one) for one in values if not str(one).startswith(HUB_PREFIX)]
        if any("/" in one for one in local):
            yield f"{RECIPE_FILE}: {key}: a path; a publication has names only"
        elif local and key not in named:
            yield f"{RECIPE_FILE}: {key}: {local[0]!r} is not among what is to be brought"


def _problems_of_script(found: Publication, file: Path) -> Iterator[str]:
    """Whether reproduce.sh is another text than `publish` writes."""
    facts = found.manifest.publication
    small = file.stat().st_size < _MAX_SCRIPT_BYTES
    if not small or file.read_bytes() != reproduce_script(facts.prompts.published):
        yield (
            f"{SCRIPT_NAME}: not the script that this version of the program writes "
            f"(made by {facts.versions.get(_PROGRAM, 'an unknown version')}); read it before you "
            "start it"
        )


_SMALL_FILES: Mapping[str, Callable[[Publication, Path], Iterator[str]]] = {
    CONFIG_FILE: _problems_of_config,
    RECIPE_FILE: _problems_of_recipe,
    SCRIPT_NAME: _problems_of_script,
}
"""The functions that find problems in the files that decide which job is started."""
