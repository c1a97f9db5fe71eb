"""Rows of Arrow tables as JSON has them.

Arrow cannot tell an absent value from null, so nulls are absent, in objects at any depth. Dates
and times are ISO 8601 text, decimals text. Bytes (images, audio) are left out.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 256
"""Few enough that a batch of rows of a megabyte each fits in memory."""

_ABSENT = object()


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a Parquet file. Raises `DatasetError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from rows_of(file.iter_batches(batch_size=BATCH_ROWS))
    except (OSError, pa.ArrowException) as error:
        msg = f"{path}: cannot read it as Parquet: {error}"
        raise DatasetError(msg) from error


def rows_of(tables: Iterable[pa.Table | pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """The rows of tables, as what JSON can hold."""
    for table in tables:
        for row in table.to_pylist():
            yield _object(row)


def _object(members: dict[str, Any]) -> dict[str, Any]:
    plain = ((name, _plain(value)) for name, value in members.items())
    return {name: value for name, value in plain if value is not _ABSENT}


def _plain(value: Any) -> Any:
    match value:
        case None | bytes():
            return _ABSENT
        case bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _ABSENT
        case dict():
            return _object(value)
        case list() if value and isinstance(value[0], tuple):  # how pyarrow gives a map
            return _object(dict(value))
        case list():
            return [None if item is _ABSENT else item for item in map(_plain, value)]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return str(value)
