"""Writes row files of an export, by split and in shards, hashed and counted for the manifest.

A target opens the files. `Staging` publishes them together once all are written. `HashOnlyTarget`
only hashes and counts bytes, to check an export by making it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from batch_trajectories.records.files import make_directory, open_temporary, sync_directory

_BUFFER_BYTES = 1 << 18
"""Bytes of rows that are collected before they are written."""


class Written(NamedTuple):
    """A finished file."""

    path: str
    rows: int
    size: int
    """Bytes."""
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """The entry of the file in a manifest."""
        return {"path": self.path, "rows": self.rows, "bytes": self.size, "sha256": self.sha256}


class FileTarget(Protocol):
    """Opens files of an export."""

    def open(self, path: str) -> BinaryIO:
        """Open a new file; `path` is relative to the export."""

    def rename(self, path: str, final: str) -> None:
        """Give a written file its final path."""


class _NullFile(io.BytesIO):
    def write(self, content: Any) -> int:
        return len(content)


class HashOnlyTarget:
    """A target whose files are only hashed and counted."""

    def open(self, path: str) -> BinaryIO:
        """Open a file that discards its content."""
        return _NullFile()

    def rename(self, path: str, final: str) -> None:
        """Do nothing."""


class Staging:
    """A target whose files are moved to their final paths together, once all are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._root = directory / f".export.{os.getpid()}.tmp"
        self._paths: dict[str, str] = {}
        self._files: list[BinaryIO] = []

    def __enter__(self) -> Staging:
        make_directory(self._directory, is_inside=False, parents=True)
        for left in self._directory.glob(".export.*.tmp"):
            shutil.rmtree(left)  # of a killed export; the directory is locked
        self._root.mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # disk full; the content is discarded anyway
                file.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def open(self, path: str) -> BinaryIO:
        """Open a new file, which `publish` moves to its final path."""
        temporary = self._root / path
        make_directory(temporary.parent, parents=True)
        self._paths[path] = path
        self._files = [file for file in self._files if not file.closed]
        self._files.append(open_temporary(temporary, self._directory / path))
        return self._files[-1]

    def rename(self, path: str, final: str) -> None:
        """Publish the file opened as `path` at `final`."""
        self._paths[path] = final

    def paths(self) -> list[str]:
        """The final paths of the files."""
        return list(self._paths.values())

    def publish(self) -> None:
        """Move all files to their final paths. They survive a power loss when this returns."""
        folders = set()
        for path, final in self._paths.items():
            target = self._directory / final
            # Made one by one, as each of them can be a link that leads out of the export.
            for above in reversed(Path(final).parents[:-1]):
                make_directory(self._directory / above)
            temporary = self._root / path
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
            folders.add(target.parent)
        for folder in folders:
            sync_directory(folder)


class HashingFile(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        """Whether the file can be written: always."""
        return True

    def write(self, content: Any) -> int:
        """Append bytes; they are dropped if the file is closed."""
        if self._file.closed:  # a library flushes when its writer is discarded
            return memoryview(content).nbytes
        self._sha256.update(content)
        size = self._file.write(content)
        self.size += size
        return size

    def tell(self) -> int:
        """The number of bytes so far."""
        return self.size

    def finish(self) -> str:
        """Close the file and return the hash."""
        self._file.close()
        return self._sha256.hexdigest()


class RowWriter(Protocol):
    """A writer of the rows of one file."""

    def write(self, line: bytes) -> None:
        """Append one row, given as its line of JSON."""

    def finish(self) -> None:
        """Write buffered rows."""


MakeWriter = Callable[[HashingFile], RowWriter]
"""A function that begins a file of rows."""


class RowLines:
    """Writes rows as lines, many of which are hashed and written at once."""

    def __init__(self, file: HashingFile) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append one row."""
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _BUFFER_BYTES:
            self.finish()

    def finish(self) -> None:
        """Write buffered rows."""
        self._file.write(b"".join(self._lines))
        self._lines, self._size = [], 0


@dataclass
class _Shards:
    """The files of one split; only the last of them is open."""

    done: list[Written] = field(default_factory=list)
    """The finished files, by their temporary paths."""
    file: HashingFile | None = None
    writer: RowWriter | None = None
    path: str = ""
    rows: int = 0
    size: int = 0
    """Bytes of rows as JSON, whatever the format of the file."""


class SplitFiles:
    """The rows of one format, by split and in shards."""

    def __init__(
        self,
        target: FileTarget,
        folder: str,
        suffix: str,
        make: MakeWriter,
        *,
        shard_bytes: int | None,
        name: str | None = None,
    ) -> None:
        """A split has a folder of its own if it has shards, or if `name` is given.

        `name` begins the names of its files; None: the name of the split.
        """
        self._target = target
        self._folder = folder
        self._suffix = suffix
        self._make = make
        self._shard_bytes = shard_bytes
        self._file_name = name
        self._splits: dict[str, _Shards] = {}

    def write(self, split: str, line: bytes) -> None:
        """Append a row to a split, in a new shard if this one would get too large."""
        if (shards := self._splits.get(split)) is None:
            shards = self._splits[split] = _Shards()
        full = self._shard_bytes is not None and shards.size + len(line) > self._shard_bytes
        if shards.rows and full:
            self._close(shards)
        if (writer := shards.writer) is None:
            shards.path = f"{self._folder}/{split}-{len(shards.done):05}.{self._suffix}"
            shards.file = HashingFile(self._target.open(shards.path))
            writer = shards.writer = self._make(shards.file)
        writer.write(line)
        shards.rows += 1
        shards.size += len(line)

    def finish(self) -> dict[str, list[Written]]:
        """Close and rename all files; returns them by split."""
        return {split: self._name(split, shards) for split, shards in self._splits.items()}

    def _close(self, shards: _Shards) -> None:
        assert shards.file is not None
        assert shards.writer is not None
        shards.writer.finish()
        digest = shards.file.finish()
        shards.done.append(
            Written(path=shards.path, rows=shards.rows, size=shards.file.size, sha256=digest)
        )
        shards.writer = shards.file = None
        shards.rows = shards.size = 0

    def _name(self, split: str, shards: _Shards) -> list[Written]:
        self._close(shards)
        written = []
        count = len(shards.done)
        for number, shard in enumerate(shards.done):
            final = f"{self._folder}/{split}.{self._suffix}"
            if self._shard_bytes is not None or self._file_name is not None:
                # A folder of its own, for loaders that are given a folder and read all in it.
                name = f"{self._file_name or split}-{number:05}-of-{count:05}.{self._suffix}"
                final = f"{self._folder}/{split}/{name}"
            self._target.rename(shard.path, final)
            written.append(shard._replace(path=final))
        return written


# Rows as Arrow tables: each kind of file has one explicit schema, so all shards have the same.

_BATCH_BYTES = 1 << 20
"""Bytes of JSON in a batch; as objects they take several times as much memory."""

_GROUP_BATCHES = 16
"""Batches in a row group, which is held in memory too."""


class RowTables:
    """Writes rows in groups of Arrow tables."""

    def __init__(self, writer: Any, make_table: Callable[[list[dict[str, Any]]], Any]) -> None:
        """`make_table` makes a table of rows and may change the rows."""
        self._writer = writer
        self._make_table = make_table
        self._lines: list[bytes] = []
        self._buffered = 0
        self._tables: list[Any] = []

    def write(self, line: bytes) -> None:
        """Append one row."""
        self._lines.append(line)
        self._buffered += len(line)
        if self._buffered >= _BATCH_BYTES:
            self._end_table()
            if len(self._tables) >= _GROUP_BATCHES:
                self._end_group()

    def finish(self) -> None:
        """Write the buffered rows and end the file."""
        self._end_table()
        self._end_group()
        self._writer.close()

    def _end_table(self) -> None:
        if self._lines:
            self._tables.append(self._make_table(list(map(json.loads, self._lines))))
        self._lines = []
        self._buffered = 0

    def _end_group(self) -> None:
        import pyarrow as pa

        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables))
        self._tables = []
