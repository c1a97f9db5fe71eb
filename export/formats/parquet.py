"""Parquet twins of row files: the same rows under one explicit schema, for any reader.

Nothing is inferred, so all shards have one schema; the files hold no metadata of a library, which
older readers would refuse.
"""

from __future__ import annotations

import json
from typing import Any

from export.formats.openai_chat import with_arguments_as_text
from export.row_files import Hashing, MakeWriter, RowWriter
from runs.errors import missing

_MESSAGES = frozenset({"messages", "prompt", "completion", "chosen", "rejected"})

_BATCH_BYTES = 1 << 20
"""JSON bytes of rows that are held as objects, which take several times as much memory."""

_GROUP_BATCHES = 16
"""Batches in a row group, which is held in memory too."""


def parquet_writer(format_name: str) -> MakeWriter:
    """What begins Parquet files of a format. Raises `ConfigError` without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing("the format parquet", "parquet") from error
    schema = _schema(pa, format_name)

    class Twin:
        def __init__(self, file: Hashing) -> None:
            self._writer = pq.ParquetWriter(
                file, schema, compression="zstd", store_schema=False, write_statistics=True
            )
            self._rows: list[dict[str, Any]] = []
            self._held = 0
            self._batches: list[Any] = []

        def write(self, line: bytes) -> None:
            row = json.loads(line)
            for name in _MESSAGES.intersection(row):
                row[name] = with_arguments_as_text(row[name])
            self._rows.append(row)
            self._held += len(line)
            if self._held >= _BATCH_BYTES:
                self._end_batch()
                if len(self._batches) >= _GROUP_BATCHES:
                    self._end_group()

        def finish(self) -> None:
            self._end_batch()
            self._end_group()
            self._writer.close()

        def _end_batch(self) -> None:
            if self._rows:
                self._batches.append(pa.RecordBatch.from_pylist(self._rows, schema=schema))
            self._rows = []
            self._held = 0

        def _end_group(self) -> None:
            if self._batches:
                self._writer.write_table(pa.Table.from_batches(self._batches))
            self._batches = []

    def make(file: Hashing) -> RowWriter:
        return Twin(file)

    return make


def _schema(pa: Any, format_name: str) -> Any:
    text = pa.string()
    turns = pa.list_(pa.struct([("from", text), ("value", text)]))
    function = pa.struct([("name", text), ("arguments", text)])
    calls = pa.list_(pa.struct([("id", text), ("type", text), ("function", function)]))
    messages = pa.list_(
        pa.struct(
            [
                ("role", text),
                ("content", text),
                ("reasoning_content", text),
                ("tool_calls", calls),
                ("tool_call_id", text),
                ("name", text),
            ]
        )
    )
    if format_name == "dpo":
        compared = [(name, messages) for name in ("prompt", "chosen", "rejected")]
        return pa.schema([("id", text), *compared, ("tools", text), ("metadata", text)])
    if format_name == "kto":
        judged = [("prompt", messages), ("completion", messages), ("label", pa.bool_())]
        return pa.schema([("id", text), *judged, ("tools", text), ("metadata", text)])
    end = [
        ("num_turns", pa.int64()),
        ("num_tool_calls", pa.int64()),
        ("has_reasoning", pa.bool_()),
        ("metadata", text),
    ]
    head = ("messages", messages) if format_name == "openai" else ("conversations", turns)
    own = [("partial", pa.bool_()), ("api_calls", pa.int64())] if format_name == "hermes" else []
    columns = [("id", text), head, ("tools", text), ("completed", pa.bool_()), *own, *end]
    return pa.schema(columns)
