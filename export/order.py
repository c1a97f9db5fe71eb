"""What an export must remember of all records, kept in a file so that memory does not grow.

Records lie in the order in which they were finished, and rows come in the order of the dataset;
and of two conversations that say the same only one is kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from batch.prompts import Task
from batch.records import iter_index

_ASKED_AT_ONCE = 64
"""Tasks that are looked up together: their rows of the dataset are held meanwhile."""


class RecordOrder:
    """Where the records of a run lie, by task key, and what was seen so far."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._found = 0

    def find(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, tuple[int, int] | None]]:
        """Each task with offset and length of its record, if there is one; ask for each once."""
        left = iter(tasks)
        while some := list(islice(left, _ASKED_AT_ONCE)):
            keys = [task.key for task in some]
            marks = ",".join("?" * len(keys))
            found = {
                key: (offset, length)
                for key, offset, length in self._database.execute(
                    f"SELECT key, offset, length FROM records WHERE key IN ({marks})",
                    keys,
                )
            }
            self._found += len(found)
            for task, key in zip(some, keys, strict=True):
                yield task, found.get(key)

    def places(self) -> Iterator[tuple[int, int]]:
        """Offset and length of every record that counts, in the order of the file."""
        yield from self._database.execute("SELECT offset, length FROM records ORDER BY offset")

    def unasked(self) -> int:
        """Records that were never asked for."""
        (total,) = self._database.execute("SELECT count(*) FROM records").fetchone()
        return int(total) - self._found

    def is_new(self, digest: bytes) -> bool:
        """Whether `digest` was not asked about before."""
        cursor = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return cursor.rowcount == 1


@contextmanager
def record_order(run_dir: Path) -> Iterator[RecordOrder]:
    """The order of a run's records, gone when it is closed."""
    # A database without a name lies in a temporary file, which has no name either.
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA cache_size = -8192")
        database.execute(
            "CREATE TABLE records (key BLOB PRIMARY KEY, offset INTEGER, length INTEGER)"
            " WITHOUT ROWID"
        )
        database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        database.execute("BEGIN")  # one transaction, never committed: nothing is to be kept
        database.executemany(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
            ((key, entry.offset, entry.length) for key, entry in iter_index(run_dir)),
        )
        yield RecordOrder(database)
