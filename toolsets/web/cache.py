"""What was fetched or found is kept in a directory, so that asking again gives the same.

Several processes may use one directory. Whoever stores first wins, and the others get what was
stored. A temporary file that a crash has left is removed by the next who stores beside it. Entries
are not synced: what a power loss tears is unreadable, counts as missing and is stored anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from toolsets.text import valid_utf8

_SHARDS = 16
_LOCK = ".lock"
_TEMPORARY = ".tmp"


class WebCache:
    """Values that JSON can hold, by key. Blocks on the disk, so not for the event loop."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """The directory is made when something is stored; `max_bytes` bounds what is kept."""
        self._directory = directory
        self._max_shard_bytes = max_bytes // _SHARDS

    def get(self, key: str) -> Any | None:
        """The value of `key`; None where there is none."""
        try:
            entry = orjson.loads(self._path(key).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return entry.get("value") if isinstance(entry, dict) else None

    def put(self, key: str, value: Any) -> Any:
        """Store `value` unless `key` has one already; return the value that `key` has now.

        A value that is too large for the cache is not stored.
        """
        content = orjson.dumps({"key": valid_utf8(key), "value": value})
        if len(content) > self._max_shard_bytes:
            return value
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent):
            if (stored := self.get(key)) is not None:
                return stored
            self._make_room(path.parent, self._max_shard_bytes - len(content))
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        return value

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(valid_utf8(key).encode()).hexdigest()
        return self._directory / digest[0] / digest

    def _make_room(self, shard: Path, max_bytes: int) -> None:
        """Remove the oldest entries of a locked shard until no more than `max_bytes` are left.

        Who holds the lock has no temporary file yet, so those that are there belong to nobody.
        """
        kept = []
        with os.scandir(shard) as entries:
            for entry in entries:
                if entry.name.endswith(_TEMPORARY):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name != _LOCK:
                    kept.append((entry.stat(), entry.path))
        kept.sort(key=lambda pair: pair[0].st_mtime_ns)
        size = sum(stat.st_size for stat, _ in kept)
        for stat, path in kept:
            if size <= max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            size -= stat.st_size


@contextmanager
def _locked(shard: Path) -> Iterator[None]:
    """Hold a shard for storing; a process that dies lets go of it."""
    descriptor = os.open(shard / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
