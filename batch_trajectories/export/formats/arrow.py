"""Copies of row files that Arrow libraries read: Parquet, and directories of `datasets`.

Each format has one explicit schema, so all shards of a format have the same. Parquet files hold no
metadata of a library and arguments as JSON text, which any reader opens. Directories of `datasets`
hold messages and tools as `Json` (datasets 4.7), so that rows load as they are in the JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.export.conversation.row_json import write_json
from batch_trajectories.export.formats.columns import COLUMNS, columns_of
from batch_trajectories.export.formats.openai_chat import with_arguments_as_text
from batch_trajectories.export.formats.row_files import Hashing, MakeWriter

_BATCH_BYTES = 1 << 20
"""Bytes of JSON in a batch; as objects they take several times as much memory."""

_GROUP_BATCHES = 16
"""Batches in a row group, which is held in memory too."""


def parquet_writer(format_name: str) -> MakeWriter:
    """A function that begins Parquet files of a format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _parquet_schema(pa, format_name)
    messages = [name for name, kind in COLUMNS[format_name].items() if kind == "messages"]

    class ParquetRows(RowTables):
        def __init__(self, file: Hashing) -> None:
            super().__init__(
                pq.ParquetWriter(
                    file, schema, compression="zstd", store_schema=False, write_statistics=True
                )
            )

        def rows_table(self, rows: list[dict[str, Any]]) -> Any:
            for row in rows:
                for name in messages:
                    row[name] = with_arguments_as_text(row[name])
                if isinstance(row["tools"], list):
                    row["tools"] = write_json(row["tools"])
            return pa.Table.from_pylist(rows, schema=schema)

    return ParquetRows


def datasets_writer(format_name: str, *, lists_tools: bool) -> MakeWriter:
    """A function that begins Arrow files of a directory that `datasets` loads."""
    import pyarrow as pa

    columns = columns_of(format_name, lists_tools=lists_tools)
    schema = _datasets_schema(columns)
    as_json = [name for name, kind in columns.items() if kind == "messages"]

    class DatasetsRows(RowTables):
        def __init__(self, file: Hashing) -> None:
            super().__init__(pa.ipc.new_stream(file, schema))

        def rows_table(self, rows: list[dict[str, Any]]) -> Any:
            for row in rows:
                for name in as_json:
                    value = row[name]
                    items = json.loads(value) if isinstance(value, str) else value
                    row[name] = [orjson.dumps(item).decode() for item in items]
            return _datasets_table(rows, schema)

    return DatasetsRows


def datasets_frame(
    format_name: str, files: Iterable[Mapping[str, Any]], *, lists_tools: bool
) -> dict[str, dict[str, Any]]:
    """The other files of a directory that `datasets` loads, by path, as it writes them itself.

    `files` are the Arrow files as a manifest lists them. The fingerprint of a split, by which
    `datasets` finds cached results, is a hash of its content.
    """
    import datasets

    columns = columns_of(format_name, lists_tools=lists_tools)
    one_row = _datasets_table([{}], _datasets_schema(columns))  # some versions save no empty table
    splits: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        splits.setdefault(file["split"], []).append(file)
    frame: dict[str, dict[str, Any]] = {"dataset_dict.json": {"splits": list(splits)}}
    for split, written in splits.items():
        digest = hashlib.sha256("".join(file["sha256"] for file in written).encode()).hexdigest()
        rows = datasets.Dataset(one_row, split=datasets.NamedSplit(split), fingerprint=digest[:16])
        with tempfile.TemporaryDirectory() as folder, _without_progress_bars():
            rows.save_to_disk(folder)
            for path in sorted(Path(folder).glob("*.json")):
                frame[f"{split}/{path.name}"] = orjson.loads(path.read_bytes())
        names = [Path(file["path"]).name for file in written]
        frame[f"{split}/state.json"]["_data_files"] = [{"filename": name} for name in names]
    return frame


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


class RowTables:
    """Rows that are written in groups of tables."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lines: list[bytes] = []
        self._held = 0
        self._tables: list[Any] = []

    def rows_table(self, rows: list[dict[str, Any]]) -> Any:
        """A table of rows, which it may change."""
        raise NotImplementedError

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
            self._tables.append(self.rows_table(list(map(json.loads, self._lines))))
        self._lines = []
        self._held = 0

    def _end_group(self) -> None:
        import pyarrow as pa

        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables))
        self._tables = []


def _parquet_schema(pa: Any, format_name: str) -> Any:
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
    columns = columns_of(format_name, lists_tools=False)
    return pa.schema([(name, types[kind]) for name, kind in columns.items()])


def _datasets_schema(columns: Mapping[str, str]) -> Any:
    import datasets

    text = datasets.Value("string")
    types = {
        "turns": datasets.List({"from": text, "value": text}),
        "messages": datasets.List(datasets.Json()),
    }
    features = {name: types.get(kind) or datasets.Value(kind) for name, kind in columns.items()}
    return datasets.Features(features).arrow_schema


def _datasets_table(rows: list[dict[str, Any]], schema: Any) -> Any:
    """A table of rows whose messages are lists of JSON texts."""
    import pyarrow as pa

    texts = pa.list_(pa.string())  # no Arrow function reads lists of its type for JSON
    is_json = [pa.types.is_list(f.type) and f.type.value_type == pa.json_() for f in schema]
    plain = [(f.name, texts if j else f.type) for f, j in zip(schema, is_json, strict=True)]
    return pa.Table.from_pylist(rows, schema=pa.schema(plain)).cast(schema)
