"""A cache of pages and search results in a directory: the same request gives the same result.

Several processes may use one directory. The first one to store a key wins; the others get its
value. Temporary files that a crash left are removed by the next store in their shard. Entries are
not synced: one that a power loss damaged is unreadable, counts as missing and is stored again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.locked import locked
from batch_trajectories.basics.text import valid_utf8

_SHARDS = 16
_LOCK = ".lock"
_TEMPORARY = ".tmp"


class WebCache:
    """JSON values by key. It blocks on the disk: do not call it in the event loop."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """The directory, of at most `max_bytes`, is created when something is stored."""
        self._directory = directory
        self._max_shard_bytes = max_bytes // _SHARDS

    def get(self, key: str) -> Any | None:
        """The value of `key`; None if there is none."""
        try:
            entry = orjson.loads(self._path(key).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return entry.get("value") if isinstance(entry, dict) else None

    def put(self, key: str, value: Any) -> Any:
        """Store `value` unless `key` has a value already; return the value of `key`.

        A value that is too large for the cache is not stored.
        """
        content = orjson.dumps({"key": valid_utf8(key), "value": value})
        if len(content) > self._max_shard_bytes:
            return value
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent / _LOCK):
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

        Temporary files are removed, too: the holder of the lock has none yet.
        """
        entries = []
        with os.scandir(shard) as scan:
            for entry in scan:
                if entry.name.endswith(_TEMPORARY):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name != _LOCK:
                    entries.append((entry.stat(), entry.path))
        entries.sort(key=lambda pair: pair[0].st_mtime_ns)
        size = sum(stat.st_size for stat, _ in entries)
        for stat, path in entries:
            if size <= max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            size -= stat.st_size
