"""Copies of the rows as directories for `datasets.load_from_disk`.

The directories hold messages and tools as `Json` (datasets 4.7), so that rows load exactly as they
are in the JSON lines.
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

from batch_trajectories.export.rows.format import Copies, Format
from batch_trajectories.export.rows.row_files import HashingFile, MakeWriter, RowTables


def datasets_writer(format: Format, lists_tools: bool) -> MakeWriter:
    """A function that begins Arrow files of a directory that `datasets` loads."""
    import pyarrow as pa

    columns = format.list_columns(lists_tools=lists_tools)
    schema = _schema(columns)
    as_json = [name for name, kind in columns.items() if kind == "messages"]

    def make_table(rows: list[dict[str, Any]]) -> Any:
        for row in rows:
            for name in as_json:
                value = row[name]
                items = json.loads(value) if isinstance(value, str) else value
                row[name] = [orjson.dumps(item).decode() for item in items]
        return _table(rows, schema)

    def begin(file: HashingFile) -> RowTables:
        return RowTables(pa.ipc.new_stream(file, schema), make_table)

    return begin


def datasets_frame(
    format: Format, files: Iterable[Mapping[str, Any]], lists_tools: bool
) -> dict[str, dict[str, Any]]:
    """The JSON files of a directory that `datasets` loads, by path, as `datasets` writes them.

    `files` are the Arrow files as a manifest lists them. The fingerprint of a split, by which
    `datasets` finds cached results, is a hash of the split's content.
    """
    import datasets

    columns = format.list_columns(lists_tools=lists_tools)
    one_row = _table([{}], _schema(columns))  # some versions save no empty table
    splits: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        splits.setdefault(file["split"], []).append(file)
    frame: dict[str, dict[str, Any]] = {"dataset_dict.json": {"splits": list(splits)}}
    for split, written in splits.items():
        digest = hashlib.sha256("".join(file["sha256"] for file in written).encode()).hexdigest()
        rows = datasets.Dataset(one_row, split=datasets.NamedSplit(split), fingerprint=digest[:16])
        with tempfile.TemporaryDirectory() as folder, _hide_progress_bars():
            rows.save_to_disk(folder)
            for path in sorted(Path(folder).glob("*.json")):
                frame[f"{split}/{path.name}"] = orjson.loads(path.read_bytes())
        names = [Path(file["path"]).name for file in written]
        frame[f"{split}/state.json"]["_data_files"] = [{"filename": name} for name in names]
    return frame


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _schema(columns: Mapping[str, str]) -> Any:
    import datasets

    text = datasets.Value("string")
    types = {
        "turns": datasets.List({"from": text, "value": text}),
        "messages": datasets.List(datasets.Json()),
    }
    features = {name: types.get(kind) or datasets.Value(kind) for name, kind in columns.items()}
    return datasets.Features(features).arrow_schema


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    """A table of rows whose messages are lists of JSON texts."""
    import pyarrow as pa

    texts = pa.list_(pa.string())  # no Arrow function reads lists of its type for JSON
    is_json = [pa.types.is_list(f.type) and f.type.value_type == pa.json_() for f in schema]
    plain = [(f.name, texts if j else f.type) for f, j in zip(schema, is_json, strict=True)]
    return pa.Table.from_pylist(rows, schema=pa.schema(plain)).cast(schema)


FORMAT = Copies(
    name="hf",
    suffix="arrow",
    writer=datasets_writer,
    packages=("pyarrow", "datasets"),
    file_name="data",
    side_files=datasets_frame,
)
