"""Copies of the rows as Parquet, arguments as JSON text.

The files hold no metadata of a library, so any reader opens them.
"""

from __future__ import annotations

from typing import Any

from batch_trajectories.export.conversation.row_json import write_json
from batch_trajectories.export.rows.format import Copies, Format
from batch_trajectories.export.rows.messages import stringify_arguments
from batch_trajectories.export.rows.row_files import HashingFile, MakeWriter, RowTables


def parquet_writer(format: Format, lists_tools: bool) -> MakeWriter:
    """A function that begins Parquet files of a format, with tools as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa, format)
    messages = [name for name, kind in format.columns.items() if kind == "messages"]

    def make_table(rows: list[dict[str, Any]]) -> Any:
        for row in rows:
            for name in messages:
                row[name] = stringify_arguments(row[name])
            if isinstance(row.get("tools"), list):
                row["tools"] = write_json(row["tools"])
        return pa.Table.from_pylist(rows, schema=schema)

    def begin(file: HashingFile) -> RowTables:
        writer = pq.ParquetWriter(
            file, schema, compression="zstd", store_schema=False, write_statistics=True
        )
        return RowTables(writer, make_table)

    return begin


def _schema(pa: Any, format: Format) -> Any:
    text = pa.string()
    function = pa.struct([("name", text), ("arguments", text)])
    calls = pa.list_(pa.struct([("id", text), ("type", text), ("function", function)]))
    message = [(name, text) for name in ("role", "content", "reasoning_content")]
    message += [("tool_calls", calls), ("tool_call_id", text), ("name", text)]
    message += [("weight", pa.int64()), ("loss", pa.bool_())]
    types = {
        "string": text,
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "turns": pa.list_(pa.struct([("from", text), ("value", text)])),
        "messages": pa.list_(pa.struct(message)),
    }
    return pa.schema([(name, types[kind]) for name, kind in format.columns.items()])


FORMAT = Copies(name="parquet", suffix="parquet", writer=parquet_writer, packages=("pyarrow",))
