"""A source as JSONL, written once into the run directory: the dataset of the run from then on.

    dataset-KEY.jsonl  the rows
    dataset-KEY.json   where they come from: revision, columns, files with sizes and hashes; written
                       last, so that rows without it were left half written by a crash

KEY is a digest of what was read and how: a source that has changed gets other files, and a start
that is refused leaves those of a running one alone. For a dataset of the hub, later starts use the
revision that the first start found, and need no network. A start with `fresh` asks the hub again;
a new revision is appended to KEY.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b, file_digest
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize

import msgspec
import orjson
from msgspec.structs import replace

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import DatasetError, RunLocked
from batch_trajectories.basics.text import valid_utf8
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.source import DataSource, download_file, parse_source
from batch_trajectories.records.files import (
    link_file,
    lock_directory,
    make_directory,
    open_temporary,
    read_json,
    replace_json,
    storage_error,
    sync_directory,
    temporary_path,
)
from batch_trajectories.records.names import RUN_FILE

if TYPE_CHECKING:
    from batch_trajectories.dataset.file_rows import Row
    from batch_trajectories.dataset.rows_file import RowsFile


ROW_FILTER_KEY = "only_sound"
"""The key, in a description, of the facts about a filter of rows."""

_FORMAT = 1
"""The version of the snapshot's layout; raise it when a source is written in another way."""

_BEING_WRITTEN = "another process is starting this run. Wait for it, or stop it; then try again."


class RowFilter(Protocol):
    """Decides which rows are kept, and counts them."""

    digest: str
    """A digest of everything that the decisions depend on."""

    def accepts(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row is kept."""

    def to_json(self) -> dict[str, Any]:
        """Facts for the description of the dataset; they include `digest`."""


class DatasetSnapshot(msgspec.Struct, frozen=True, weakref=True):
    """The JSONL file of a dataset; one in a temporary directory is removed with this object."""

    path: Path
    source: dict[str, Any] | None = None
    """The description of the rows' source; None if the file is the user's own."""


def take_snapshot(
    name: Path,
    run_dir: Path,
    *,
    columns: Mapping[str, str],
    rows: str | None,
    rules: RowRules,
    max_samples: int | None,
    writes: bool,
    fresh: bool = False,
    with_solutions: bool = False,
    only: RowFilter | None = None,
    say: Callable[[str], object],
) -> DatasetSnapshot:
    """Make sure that the dataset is a JSONL file: the user's own, or one in the run directory.

    Reads the source only if the run directory lacks its rows, and stops after `max_samples` rows
    that `rules` can use. Without `writes`, missing rows go into a temporary directory. `fresh`: ask
    the hub for the current revision. `with_solutions`: rows have their solutions, which only audits
    read. `only` is a filter of rows. Raises `DatasetError`, `StorageError`, and `EnvironmentStop`
    if the hub cannot be reached.
    """
    source = replace(parse_source(name), with_solutions=with_solutions)
    if source.tasks and rows is None:
        msg = f"{name}: this directory holds Harbor tasks; add --rows=harbor"
        raise DatasetError(msg)
    rows_file = None if rows is None else _rows_file(rows, with_solutions=with_solutions)
    if source.plain_file is not None and not columns and rows_file is None and only is None:
        return DatasetSnapshot(source.plain_file)
    before = _sizes_and_times(source)
    recipe = _Recipe(
        source=source,
        files=_describe_files(source),
        columns=columns,
        kind=rows,
        rows_file=rows_file,
        only=only,
    )
    key = recipe.key()
    if rows_file is not None and rows_file.is_ours and not fresh:
        key = recipe.key_of_first_start(run_dir) or key
    stem, revision = _find_snapshot(run_dir, key)
    if source.hub is not None and (fresh or revision is None):
        from batch_trajectories.dataset.source import fetch_revision

        before_fresh, revision = revision, fetch_revision(source.hub)
        if before_fresh not in (None, revision):
            stem = f"dataset-{key}{revision}"
    for file_stem in (stem, *([f"{stem}-{max_samples}"] if max_samples else [])):
        note = _read_description(run_dir / f"{file_stem}.json")
        path = run_dir / f"{file_stem}.jsonl"
        if note and _is_as_written(path, note):
            return DatasetSnapshot(path, note)
    writer = _Writer(recipe, rules, max_samples, revision=revision, before=before, say=say)
    return writer.write_in_run(run_dir, stem) if writes else writer.write_temporary(stem)


def rows_of_source(
    source: DataSource, left_out: Omissions, revision: str | None = None
) -> Iterator[Row]:
    """Read the rows of a source: dicts, or lines of JSON as they are in the file.

    Adds the names of columns with values that JSON cannot hold to `left_out`.
    """
    if source.hub is not None:
        from batch_trajectories.dataset.source import fetch_revision, hub_rows

        yield from hub_rows(source.hub, revision or fetch_revision(source.hub), left_out)
    elif source.saved is not None:
        from batch_trajectories.dataset.source import saved_rows

        yield from saved_rows(source.saved, left_out)
    yield from (task.row(with_solution=source.with_solutions) for task in source.tasks)
    from batch_trajectories.dataset.file_rows import rows_of_file

    for file in source.files:
        yield from rows_of_file(file, left_out)
    for stored in source.stored:
        assert source.bucket is not None
        with download_file(source.bucket, stored) as file:
            yield from rows_of_file(file, left_out)


def snapshot_source(path: Path) -> dict[str, Any] | None:
    """The description of the source of a run's dataset; None if the file is the user's own."""
    return (
        _read_description(path.with_suffix(".json")) if path.name.startswith("dataset-") else None
    )


def source_name(path: Path) -> str:
    """The name that the user gave the dataset of a run; `path` is its file, or our copy of it."""
    source = snapshot_source(path)
    return str(path) if source is None else str(source["source"])


def move_snapshot(path: Path, directory: Path) -> None:
    """Give a new run in `directory` the dataset of a run that was moved aside.

    The old run keeps it, unless it has another one.
    """
    link_snapshot(path, directory)
    if any(file.stem != path.stem for file in path.parent.glob("dataset-*.json")):
        path.unlink()
        path.with_suffix(".json").unlink()


def link_snapshot(path: Path, directory: Path) -> None:
    """Link the files of a dataset into `directory`; they never change."""
    for file in (path, path.with_suffix(".json")):
        link_file(file, directory)


def remove_other_snapshots(run_dir: Path, path: Path) -> None:
    """Remove the datasets of earlier starts. The caller holds the lock of the run."""
    for file in run_dir.glob("dataset-*.json*"):
        if file.stem != path.stem:
            file.unlink()


class _Recipe(msgspec.Struct, frozen=True):
    """Everything that decides which rows a dataset has, and in which form."""

    source: DataSource
    files: list[dict[str, Any]]
    """Names, sizes and hashes of the source's files."""
    columns: Mapping[str, str]
    """New names of columns, with the old ones."""
    kind: str | None
    """The value of `--rows`."""
    rows_file: RowsFile | None
    only: RowFilter | None

    def key(self) -> str:
        """12 hex digits over what is read and how. Where local files are does not count."""
        place = self.source.name if self.source.hub else self.files
        decides = [_FORMAT, place, sorted(self.columns.items())]
        if self.rows_file is not None:
            decides.append(self.rows_file.digest)
        if self.only is not None:
            decides.append(self.only.digest)
        return blake2b(orjson.dumps(decides), digest_size=6).hexdigest()

    def key_of_first_start(self, run_dir: Path) -> str | None:
        """The key under which an earlier version stored the same source; None without such files.

        A version may make other rows of a kind; a run keeps the rows of its first start.
        """
        key = self.key()
        if any(run_dir.glob(f"dataset-{key}*.json")):
            return key
        run = _read_description(run_dir / RUN_FILE) or {}
        kind_of_run = run.get("config", {}).get("rows")  # which earlier versions did not note here
        for path in sorted(run_dir.glob("dataset-*.json")):
            if self._has_made(_read_description(path) or {}, kind_of_run):
                return path.stem.split("-")[1][: len(key)]
        return None

    def _has_made(self, stored: Mapping[str, Any], kind_of_run: str | None) -> bool:
        """Whether a description is of rows that were made of the same source in the same way."""
        return (
            (not self.source.hub or stored.get("source") == self.source.name)
            and stored.get("kind", kind_of_run) == self.kind
            and stored.get("columns") == dict(self.columns)
            and stored.get("files") == self.files
            and stored.get(ROW_FILTER_KEY, {}).get("digest") == (self.only and self.only.digest)
        )

    def describe(self, revision: str | None) -> dict[str, Any]:
        """The description that is stored beside the rows, without facts of the written file."""
        return {
            "source": self.source.name,
            "revision": revision,
            "columns": dict(self.columns),
            **({"kind": self.kind} if self.rows_file else {}),
            "files": self.files,
        }


class _Writer:
    """Writes the rows of a recipe until there are enough that can be used."""

    def __init__(
        self,
        recipe: _Recipe,
        rules: RowRules,
        max_samples: int | None,
        *,
        revision: str | None,
        before: list[tuple[int, int]],
        say: Callable[[str], object],
    ) -> None:
        """`before` are the `_sizes_and_times` of the source before its files were hashed."""
        self._recipe = recipe
        self._source = recipe.source
        self._only = recipe.only
        self._renaming = ColumnRenamer(recipe.columns, recipe.rows_file)
        self._rules = rules
        self._max_samples = max_samples
        self._revision = revision
        self._before = before
        self._say = say

    def write_in_run(self, run_dir: Path, stem: str) -> DatasetSnapshot:
        """Write the dataset into a run directory, which no other process may do meanwhile."""
        try:
            make_directory(run_dir, is_inside=False, parents=True)
            with lock_directory(run_dir, f"{run_dir}: {_BEING_WRITTEN}"):
                for leftover in run_dir.glob(".dataset-*.tmp"):
                    leftover.unlink()  # of a start that was killed; it may fill the disk
                return self._write(run_dir, stem)
        except OSError as error:
            raise storage_error(run_dir, error) from error

    def write_temporary(self, stem: str) -> DatasetSnapshot:
        """Write the dataset into a temporary directory, which goes with the returned object."""
        directory = Path(mkdtemp(prefix="batch-trajectories-"))
        try:
            dataset = self._write(directory, stem)
        except BaseException:
            rmtree(directory, ignore_errors=True)
            raise
        finalize(dataset, rmtree, directory, ignore_errors=True)
        return dataset

    def _write(self, directory: Path, stem: str) -> DatasetSnapshot:
        """Write the rows, then their description."""
        left_out = Omissions()
        rows = rows_of_source(self._source, left_out, self._revision)
        path, written = self._write_rows(rows, directory, stem)
        if _sizes_and_times(self._source) != self._before:
            path.unlink()
            raise DatasetError(
                f"{self._source.name}: changed while it was read; run the same command again"
            )
        if self._only is not None:
            written[ROW_FILTER_KEY] = self._only.to_json()
        note = self._recipe.describe(self._revision) | written
        replace_json(path.with_suffix(".json"), note)
        for message in left_out.describe(self._source.name):
            self._say(message)
        return DatasetSnapshot(path, note)

    def _write_rows(
        self, rows: Iterator[Row], directory: Path, stem: str
    ) -> tuple[Path, dict[str, Any]]:
        """Write the rows; return the file, and the facts of it that its description has."""
        path = directory / f"{stem}.jsonl"
        temporary = temporary_path(path)
        digest = blake2b(digest_size=32)
        count = size = usable = 0
        is_cut = False
        work = LongWork(f"reading {self._source.name}", unit="rows")
        try:
            try:
                with open_temporary(temporary, path) as file, work:
                    for row in rows:
                        line = self._renaming.line(row) + b"\n"
                        if not self._is_accepted(line):
                            continue
                        file.write(line)
                        digest.update(line)
                        count, size = count + 1, size + len(line)
                        if self._max_samples is not None and self._is_usable(line):
                            usable += 1
                            if usable == self._max_samples:
                                is_cut = next(rows, None) is not None
                                break
                        work.advance()
                    if not is_cut:
                        self._renaming.check(self._source.name)
                    file.flush()
                    os.fsync(file.fileno())
                if is_cut:
                    path = directory / f"{stem}-{self._max_samples}.jsonl"
                try:
                    temporary.replace(path)
                except FileNotFoundError:  # a start that took the lock of the run has removed it
                    raise RunLocked(f"{directory}: {_BEING_WRITTEN}") from None
                sync_directory(directory)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise storage_error(path, error) from error
        return path, {"rows": count, "bytes": size, "blake2b": digest.hexdigest()}

    def _is_accepted(self, line: bytes) -> bool:
        if self._only is None:
            return True
        try:
            columns = exact_json.loads(line)
        except exact_json.JSONDecodeError:
            return True  # the scan names the line and the reason
        return not isinstance(columns, dict) or self._only.accepts(columns)

    def _is_usable(self, line: bytes) -> bool:
        try:
            columns = exact_json.loads(line)
            if not isinstance(columns, dict):
                return False
            self._rules.read(columns)
        except ValueError:
            return False
        return True


def _rows_file(name: str, *, with_solutions: bool) -> RowsFile:
    from batch_trajectories.dataset.rows_file import load_rows_file

    return load_rows_file(name, with_solutions=with_solutions)


def _local_files(source: DataSource) -> list[Path]:
    """The files of a source that are on this machine."""
    if source.saved is not None:
        return sorted(path for path in source.saved.rglob("*") if path.is_file())
    if source.tasks:
        from batch_trajectories.dataset.harbor import list_files

        return list_files(source.tasks, with_solutions=source.with_solutions)
    return [file.path for file in source.files]


def _sizes_and_times(source: DataSource) -> list[tuple[int, int]]:
    try:
        stats = [path.stat() for path in _local_files(source)]
    except OSError:
        return []  # the reader of the file says what is wrong with it
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _describe_files(source: DataSource) -> list[dict[str, Any]]:
    """Name, size and hash of each file of a source; for files in a bucket, the version."""
    if source.stored:
        return [
            {"path": file.name, "bytes": file.size, "version": file.version}
            for file in source.stored
        ]
    root = source.saved or Path(source.name)
    digests = []
    for path in _local_files(source):
        name = path.name if path == root else path.relative_to(root).as_posix()
        try:
            with path.open("rb") as file:
                digest = file_digest(file, _hash).hexdigest()
                digests.append({"path": valid_utf8(name), "bytes": file.tell(), "blake2b": digest})
                if source.tasks and os.fstat(file.fileno()).st_mode & 0o111:
                    digests[-1]["executable"] = True  # it decides what an image is built of
        except FileNotFoundError:
            raise DatasetError(f"{path}: no such dataset file") from None
        except OSError as error:
            raise DatasetError(
                f"{path}: cannot read the dataset: {error.strerror or error}"
            ) from error
    return digests


def _find_snapshot(run_dir: Path, key: str) -> tuple[str, str | None]:
    """The stem of the files with a key, and their revision; None if there are no files yet.

    If there are several, the oldest: a later start with `fresh` was interrupted before it used its
    own.
    """
    stored = {
        path: description
        for path in run_dir.glob(f"dataset-{key}*.json")
        if (description := _read_description(path)) is not None
    }
    if not stored:
        return f"dataset-{key}", None
    oldest = min(stored, key=lambda path: (path.stat().st_mtime_ns, _stem(path)))
    return _stem(oldest), stored[oldest]["revision"]


def _stem(path: Path) -> str:
    """The name of a file of the dataset, without a maximum number of rows and suffixes."""
    return "-".join(path.stem.split("-")[:2])


def _is_as_written(path: Path, stored: Mapping[str, Any]) -> bool:
    try:
        with path.open("rb") as file:
            digest = file_digest(file, _hash).hexdigest()
            return (file.tell(), digest) == (stored["bytes"], stored["blake2b"])
    except OSError:
        return False


def _read_description(path: Path) -> dict[str, Any] | None:
    stored = read_json(path)
    return stored if stored is not None and "blake2b" in stored else None  # it is written again


def _hash() -> blake2b:
    return blake2b(digest_size=32)


# Columns under other names.


class ColumnRenamer:
    """Renames the columns of rows by `{new: old}`, then applies a rows file."""

    def __init__(self, names: Mapping[str, str], rows_file: RowsFile | None = None) -> None:
        self._names = names
        self._rows_file = rows_file
        self._seen: set[str] = set()
        self._columns: dict[str, None] = {}

    def line(self, row: bytes | dict[str, Any]) -> bytes:
        """Make a line of JSON of a row, without a newline; a line that is no JSON object stays."""
        if not self._names and self._rows_file is None:
            return row if isinstance(row, bytes) else exact_json.dumps(row)
        if isinstance(row, bytes):
            try:
                columns = exact_json.loads(row)
            except exact_json.JSONDecodeError:
                return row  # the scan names the line and the reason
            if not isinstance(columns, dict):
                return row
            row = columns
        row = self.rename(row) if self._names else row
        return exact_json.dumps(row if self._rows_file is None else self._rows_file.row(row))

    def rename(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Give the columns their new names; leave out a column whose name another one takes."""
        if not self._seen.issuperset(self._names.values()):
            self._seen |= columns.keys() & set(self._names.values())
            self._columns.update(dict.fromkeys(columns))
        new = {name: columns[old] for name, old in self._names.items() if old in columns}
        moved = set(self._names.values())
        rest = {name: value for name, value in columns.items() if name not in moved}
        return {**rest, **new}

    def check(self, source: str) -> None:
        """Raise `DatasetError` if no row had a column that was to be renamed."""
        for new, old in self._names.items():
            if old not in self._seen and self._columns:
                hint = did_you_mean(old, self._columns) or "they are " + ", ".join(self._columns)
                raise DatasetError(f"--columns {new}={old}: {source} has no column {old!r}; {hint}")
