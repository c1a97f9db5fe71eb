"""Finds the dataset that a user names, and reads datasets of the hub and of `save_to_disk`.

A name can be:

- `hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]`: a dataset of the hub;
- a directory with a `dataset_info.json` or `dataset_dict.json`: written by `save_to_disk`;
- a directory with Harbor task directories: a row for each task;
- any other directory: all its files with rows, in the order of their paths, without names that
  begin with `.` or `_`;
- a file: its kind follows from its suffix. If the suffix is not listed here, the file is JSONL, or
  a JSON array if it begins as one;
- a URL: an object, or all objects below it, as files; saved datasets and tasks are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson

from batch_trajectories.basics.errors import DatasetError, EnvironmentStop, RunError
from batch_trajectories.basics.exact_json import objects_among
from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.basics.validation import UrlPath, path_or_url
from batch_trajectories.dataset.arrow_rows import (
    BATCH_ROWS,
    Omissions,
    rows_per_batch,
    table_rows,
)

if TYPE_CHECKING:
    from batch_trajectories.basics.bucket import Bucket, StoredFile
    from batch_trajectories.dataset.harbor import HarborTask


HUB_PREFIX = "hf:"

FileKind = Literal["lines", "list", "csv", "tsv", "parquet"]
"""`lines` is JSONL, `list` a JSON array of rows."""

Compression = Literal["gzip", "zstd"]

_KINDS: dict[str, FileKind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "list",
    ".traj": "list",  # documents of SWE-agent
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


class HubName(msgspec.Struct, frozen=True):
    """A dataset of the hub; None stands for the hub's default."""

    repository: str
    config: str | None
    split: str | None
    revision: str | None


class SourceFile(msgspec.Struct, frozen=True):
    """A file with rows."""

    path: Path
    kind: FileKind
    compression: Compression | None = None


class DataSource(msgspec.Struct, frozen=True):
    """The source of rows: one of `files`, `saved`, `hub`, `tasks` and `stored`."""

    name: str
    """The name as the user gave it."""
    files: tuple[SourceFile, ...] = ()
    saved: Path | None = None
    """A directory written by `save_to_disk`."""
    hub: HubName | None = None
    tasks: tuple[HarborTask, ...] = ()
    bucket: Bucket | None = None
    stored: tuple[StoredFile, ...] = ()
    """Files in `bucket`."""
    with_solutions: bool = False
    """Whether the rows of tasks have their solutions."""

    @property
    def plain_file(self) -> Path | None:
        """The only file, if it is uncompressed JSONL, which needs no copy; otherwise None."""
        if len(self.files) != 1:
            return None
        (file,) = self.files
        return file.path if file.kind == "lines" and file.compression is None else None


def parse_source(name: Path) -> DataSource:
    """Find the dataset that a user names. Raises `DatasetError` if there is none."""
    text = str(name)
    if text.startswith(HUB_PREFIX):
        return DataSource(text, hub=_parse_hub_name(text))
    try:
        place = path_or_url(name)
    except ValueError as error:
        raise DatasetError(f"the URL of a dataset {error}") from None
    if isinstance(place, UrlPath):
        return _source_at_url(str(place))
    try:
        if not name.is_dir():
            return DataSource(text, files=(_source_file(name),))
        if any((name / file).is_file() for file in _SAVED):
            return DataSource(text, saved=name)
        from batch_trajectories.dataset.harbor import tasks_in

        if tasks := tasks_in(name):
            _refuse_odd_names(task.path for task in tasks)
            return DataSource(text, tasks=tuple(tasks))
        paths = sorted(_files_in(name))
        _refuse_odd_names(paths)
        files = tuple(map(_source_file, paths))
    except OSError as error:
        raise DatasetError(
            f"{error.filename or name}: cannot read the dataset: {error.strerror or error}"
        ) from error
    if not files:
        raise DatasetError(
            f"{name}: no dataset in this directory: no file ends in "
            f"{', '.join(_KINDS)} (or one of these and {' or '.join(_COMPRESSIONS)})"
        )
    return DataSource(text, files=files)


def _source_at_url(url: str) -> DataSource:
    """The object at a URL, or those below it that have rows. Raises `DatasetError`."""
    from batch_trajectories.basics.bucket import find_files  # a library

    bucket, stored = find_files(url)
    if not stored:
        raise DatasetError(f"{url}: no such object, and none below it")
    if bucket.url == url:
        names = [file.name for file in stored]
        if saved := [name for name in names if name.rpartition("/")[2] in (*_SAVED, "task.toml")]:
            raise DatasetError(
                f"{url}: has {saved[0]}; saved datasets and Harbor tasks are read from directories "
                "of this machine: copy it there"
            )
        stored = [
            file
            for file in stored
            if is_row_file(file.name) and not any(map(_is_hidden, file.name.split("/")))
        ]
        if not stored:
            raise DatasetError(f"{url}: no dataset below it: no object ends in {', '.join(_KINDS)}")
    return DataSource(url, bucket=bucket, stored=tuple(stored))


@contextmanager
def download_file(bucket: Bucket, stored: StoredFile) -> Iterator[SourceFile]:
    """Download a file of a bucket to a temporary directory, for a `with` block.

    Raises `DatasetError` if the file has changed.
    """
    with TemporaryDirectory(prefix="batch-trajectories-") as directory:
        path = Path(directory, stored.name.rpartition("/")[2])
        try:
            is_same = bucket.download(stored, path)
        except OSError as error:
            raise EnvironmentStop(
                f"{path}: cannot write: {error.strerror or error}; TMPDIR names another place"
            ) from error
        if not is_same:
            raise DatasetError(
                f"{bucket.url}/{stored.name}: changed while it was read; run the same command again"
            )
        yield _source_file(path)


def _refuse_odd_names(paths: Iterable[Path]) -> None:
    for path in paths:
        if (shown := valid_utf8(str(path))) != str(path):
            raise DatasetError(f"{shown}: its name is not UTF-8; rename it")


def _files_in(directory: Path) -> Iterator[Path]:
    """The files with rows, at any depth; links are followed, and each directory is read once."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set()
    for root, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        status = Path(root).stat()
        identity = (status.st_dev, status.st_ino)
        # Sorted, so that each start takes the same of two ways to a directory.
        folders[:] = [] if identity in seen else sorted(filterfalse(_is_hidden, folders))
        if identity not in seen:
            yield from (Path(root, name) for name in names if is_row_file(name))
        seen.add(identity)


def _parse_hub_name(text: str) -> HubName:
    match = _HUB.fullmatch(text.removeprefix(HUB_PREFIX))
    if match is None:
        raise DatasetError(
            f"{text}: not a dataset of the hub; write hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION]"
        )
    name = HubName(**match.groupdict())
    if name.split is not None and not re.fullmatch(r"[\w.-]+", name.split):
        raise DatasetError(
            f"{text}: {name.split!r} is not the name of a split; --max_samples takes the first rows"
        )
    return name


def _source_file(path: Path) -> SourceFile:
    if path.exists() and not path.is_file():
        raise DatasetError(
            f"{path} is a pipe or device; rows are read more than once, so give a plain file"
        )
    compression, rest = _split_compression(path)
    kind = _KINDS.get(rest.suffix.lower(), "lines")
    if kind == "parquet" and compression is not None:
        raise DatasetError(f"{path}: Parquet compresses its columns itself; unpack this file first")
    is_named = rest.suffix.lower() in _KINDS
    if kind == "list" and compression is None and not _begins_a_list(path):
        kind = "lines"  # JSONL is often named .json
    elif not is_named and compression is None and _begins_a_list(path):
        kind = "list"
    return SourceFile(path, kind, compression)


def is_row_file(name: str) -> bool:
    """Whether a file has rows, by its name."""
    return _split_compression(Path(name))[1].suffix.lower() in _KINDS and not _is_hidden(name)


def _split_compression(path: Path) -> tuple[Compression | None, Path]:
    """The compression of a file by its suffix, and its name without that suffix."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    return compression, path if compression is None else path.with_suffix("")


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _begins_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError:
        return False  # the reader of the file says what is wrong with it


# Datasets of the Hugging Face hub and directories written by `save_to_disk`, by `datasets`.
#
# The rows come as Arrow tables, so images and audio are never decoded. Code that a dataset brings
# along is never run.


def fetch_revision(name: HubName) -> str:
    """Ask the hub for the commit of a dataset's revision.

    Raises `DatasetError` if the hub has no such dataset, `EnvironmentStop` if it cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name.repository, revision=name.revision)
    except Exception as error:
        raise _hub_error(name.repository, error) from error
    return str(info.sha)


def hub_rows(name: HubName, revision: str, left_out: Omissions) -> Iterator[bytes | dict[str, Any]]:
    """Stream the rows of one split. See `table_rows`. Raises as `fetch_revision` does."""
    import datasets

    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    try:
        dataset = datasets.load_dataset(
            name.repository, name.config, split=name.split, revision=revision, streaming=True
        )
        if name.split is None:
            dataset = dataset[_choose_split(name.repository, list(dataset))]
        tables = dataset.with_format("arrow").iter(BATCH_ROWS)
        yield from table_rows(tables, f"hf:{name.repository}", left_out)
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise _hub_error(name.repository, error) from error


def saved_rows(path: Path, left_out: Omissions) -> Iterator[bytes | dict[str, Any]]:
    """Stream the rows of a directory written by `save_to_disk`. See `table_rows`.

    Raises `DatasetError`.
    """
    import datasets

    refuse_files_outside(path)
    try:
        dataset = datasets.load_from_disk(str(path))
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset[_choose_split(f"{path}/", list(dataset))]
        rows = rows_per_batch(dataset.data.nbytes // max(1, dataset.data.num_rows))
        yield from table_rows(dataset.with_format("arrow").iter(rows), str(path), left_out)
    except (RunError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(
            f"{path}: cannot read it as a dataset that was saved with `save_to_disk`: {error}"
        ) from error


def refuse_files_outside(path: Path) -> None:
    """Raise `DatasetError` if a directory of `save_to_disk` leads to files outside of itself.

    A directory that somebody else made can name any file of this machine, whose rows would then go
    to the model.
    """
    given = _json_object(path / "dataset_dict.json").get("splits")
    splits = [str(split) for split in given] if isinstance(given, list) else []
    for split in splits:
        _refuse_outside(path, path / "dataset_dict.json", split)
    for directory in (path, *(path / split for split in splits)):
        state = directory / "state.json"
        lists = (value for value in _json_object(state).values() if isinstance(value, list))
        for file in objects_among([item for items in lists for item in items]):
            _refuse_outside(directory, state, str(file.get("filename", "")))


def _refuse_outside(directory: Path, named_in: Path, name: str) -> None:
    if "\0" in name or not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise DatasetError(
            f"{named_in}: names {name!r}, which is outside of {directory}; only files inside are "
            "read: save the dataset again by `save_to_disk`"
        )


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, as `datasets` will report that itself."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _choose_split(place: str, splits: list[str]) -> str:
    """Return `train`, or the only split. Raises `DatasetError` if the user must choose."""
    if "train" in splits:
        return "train"
    if len(splits) == 1:
        return splits[0]
    how = f"give one of them as {place}SPLIT" if place.endswith("/") else "add :SPLIT to its name"
    raise DatasetError(f"{place}: it has the splits {', '.join(splits)}; {how}")


def _hub_error(repository: str, error: Exception) -> RunError:
    """The error that stops a run when the hub fails, or its data cannot be read."""
    from huggingface_hub.errors import HfHubHTTPError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404) or "gated" in type(error).__name__.lower():
        login = "" if os.environ.get("HF_TOKEN") else "; private and gated datasets need HF_TOKEN"
        return DatasetError(f"hf:{repository}: the hub refuses it: {error}{login}")
    is_network = isinstance(error, HfHubHTTPError | ConnectionError | TimeoutError)
    if is_network or "connect" in type(error).__name__.lower():
        return EnvironmentStop(
            f"hf:{repository}: cannot reach the hub: {error}. Run the same command again later."
        )
    return DatasetError(f"hf:{repository}: cannot read it: {error}")
