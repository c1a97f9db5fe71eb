"""What the name of a dataset means.

`hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]` is a dataset of the hub, a directory with a
`dataset_info.json` or `dataset_dict.json` one written by `save_to_disk`; any other directory is
read file by file, in the order of their paths. The kind of a file follows from its suffix; a file
with a suffix that is not listed here is JSONL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runs.errors import DatasetError

HUB_PREFIX = "hf:"

FileKind = Literal["lines", "list", "csv", "tsv", "parquet"]
"""`lines` is JSONL, `list` a JSON array of rows."""

Compression = Literal["gzip", "zstd"]

_KINDS: dict[str, FileKind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "list",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that `save_to_disk` writes: the first for one split, the second for several."""

_HUB = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[^:@]+))?(?::(?P<split>[^@]+))?"
    r"(?:@(?P<revision>.+))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A dataset of the hub; what is None is for the hub's default."""

    repository: str
    config: str | None
    split: str | None
    revision: str | None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with rows."""

    path: Path
    kind: FileKind
    compression: Compression | None = None


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where rows come from: exactly one of `files`, `saved` and `hub`."""

    name: str
    """As the user gave it."""
    files: tuple[SourceFile, ...] = ()
    saved: Path | None = None
    """A directory written by `save_to_disk`."""
    hub: HubName | None = None

    @property
    def plain_file(self) -> Path | None:
        """The file, if it is one of uncompressed JSONL, which a run reads where it is."""
        if len(self.files) != 1:
            return None
        (file,) = self.files
        return file.path if file.kind == "lines" and file.compression is None else None


def source_of(name: Path) -> DataSource:
    """What a user names as the dataset. Raises `DatasetError` where it cannot be one."""
    text = str(name)
    if text.startswith(HUB_PREFIX):
        return DataSource(text, hub=_hub_name(text))
    if not name.is_dir():
        return DataSource(text, files=(_source_file(name),))
    if any((name / file).is_file() for file in _SAVED):
        return DataSource(text, saved=name)
    files = tuple(
        _source_file(path)
        for path in sorted(name.rglob("*"))
        if path.is_file() and _kind_of(path) and not _is_hidden(path.relative_to(name))
    )
    if not files:
        msg = (
            f"{name}: no dataset in this directory: no file ends in "
            f"{', '.join(_KINDS)} (or one of these and {' or '.join(_COMPRESSIONS)})"
        )
        raise DatasetError(msg)
    return DataSource(text, files=files)


def _hub_name(text: str) -> HubName:
    found = _HUB.fullmatch(text.removeprefix(HUB_PREFIX))
    if found is None:
        msg = f"{text}: not a dataset of the hub; write hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]"
        raise DatasetError(msg)
    name = HubName(**found.groupdict())
    if name.split is not None and not re.fullmatch(r"[\w.-]+", name.split):
        msg = (
            f"{text}: {name.split!r} is not the name of a split; --max_samples takes the first rows"
        )
        raise DatasetError(msg)
    return name


def _source_file(path: Path) -> SourceFile:
    compression, rest = _compression_of(path)
    kind = _KINDS.get(rest.suffix.lower(), "lines")
    if kind == "list" and compression is None and not _begins_a_list(path):
        kind = "lines"  # JSONL is often named .json
    return SourceFile(path, kind, compression)


def _kind_of(path: Path) -> FileKind | None:
    return _KINDS.get(_compression_of(path)[1].suffix.lower())


def _compression_of(path: Path) -> tuple[Compression | None, Path]:
    """How a file is compressed, and its name without the suffix that says so."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    return compression, path if compression is None else path.with_suffix("")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _begins_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError:
        return False  # reading the file says what is wrong with it
