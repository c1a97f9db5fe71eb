"""Rows as Arrow tables: each kind of file has one explicit schema, so all shards have the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_BATCH_BYTES = 1 << 20
"""Bytes of JSON in a batch; as objects they take several times as much memory."""

_GROUP_BATCHES = 16
"""Batches in a row group, which is held in memory too."""


class RowTables:
    """Rows that are written in groups of tables."""

    def __init__(self, writer: Any, table_of: Callable[[list[dict[str, Any]]], Any]) -> None:
        """`table_of` makes a table of rows, which it may change."""
        self._writer = writer
        self._table_of = table_of
        self._lines: list[bytes] = []
        self._held = 0
        self._tables: list[Any] = []

    def write(self, line: bytes) -> None:
        """Append one row."""
        self._lines.append(line)
        self._held += len(line)
        if self._held >= _BATCH_BYTES:
            self._end_table()
            if len(self._tables) >= _GROUP_BATCHES:
                self._end_group()

    def finish(self) -> None:
        """Write what is held."""
        self._end_table()
        self._end_group()
        self._writer.close()

    def _end_table(self) -> None:
        if self._lines:
            self._tables.append(self._table_of(list(map(json.loads, self._lines))))
        self._lines = []
        self._held = 0

    def _end_group(self) -> None:
        import pyarrow as pa

        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables))
        self._tables = []
