"""Rows of Arrow tables as JSON has them.

Arrow cannot tell an absent value from null, so nulls are absent, in objects at any depth. Dates
and times are ISO 8601 text, decimals text. Bytes (images, audio) are left out, and so are NaN and
infinite numbers (null in lists); `Omissions` names their columns. Values of Arrow's type for JSON
(`arrow.json`, and Parquet's logical type) are parsed, at any depth: `datasets` stores columns of
mixed JSON that way. In these, null stays null. If such a text is not JSON, a line with the reason
stands for the row; the other rows are read.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.dataset.lines import DAMAGED

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 256
"""Maximum rows of a batch; large rows come in smaller ones."""

_SLICE_BYTES = 16 << 20

_READ_BYTES = 1 << 20
"""Bytes read of a column at a time. By default pyarrow reads a whole row group."""

_ABSENT = object()


class Omissions(msgspec.Struct):
    """The columns of a source with values that its rows lack, because JSON cannot hold them."""

    bytes: set[str] = msgspec.field(default_factory=set)
    """Columns with bytes, or parts of columns, such as `image.bytes`."""
    numbers: set[str] = msgspec.field(default_factory=set)
    """Columns with numbers that are NaN or infinite. Their other values are kept."""

    def describe(self, source: str) -> list[str]:
        """Messages that name the columns of a source; none if nothing was left out."""
        messages = []
        if self.bytes:
            names = ", ".join(sorted(self.bytes))
            messages.append(f"{source}: left out, because they hold bytes: {names}")
        if self.numbers:
            names = ", ".join(sorted(self.numbers))
            messages.append(
                f"{source}: NaN and infinite numbers are left out (null in lists), because JSON "
                f"has none; they are in: {names}"
            )
        return messages


class _NotJson(str):
    """The reason why a value whose type is JSON cannot be parsed."""

    __slots__ = ()


def parquet_rows(path: Path, left_out: Omissions) -> Iterator[bytes | dict[str, Any]]:
    """Read the rows of a Parquet file. See `table_rows`. Raises `DatasetError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_READ_BYTES) as file:
            yield from table_rows(_read_batches(file), str(path), left_out)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path}: cannot read it as Parquet: {error}") from error


def _read_batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Batches of each row group by itself: pyarrow would begin the next one too early."""
    for n in range(file.num_row_groups):
        group = file.metadata.row_group(n)
        rows = rows_per_batch(group.total_byte_size // max(1, group.num_rows))
        yield from file.iter_batches(batch_size=rows, row_groups=[n])


def rows_per_batch(row_bytes: int) -> int:
    """Number of rows of this size in a batch."""
    return max(1, min(BATCH_ROWS, _SLICE_BYTES // max(1, row_bytes)))


def table_rows(
    tables: Iterable[pa.Table | pa.RecordBatch], place: str, left_out: Omissions
) -> Iterator[bytes | dict[str, Any]]:
    """Yield the rows of tables as JSON objects, or for a damaged row a line with `DAMAGED`.

    Adds the names of columns with values that JSON cannot hold to `left_out`. Raises
    `DatasetError`, which names `place` and the column.
    """
    schema = None
    names: dict[int, str] = {}
    done = 0
    for table in chain.from_iterable(map(_slices, tables)):
        if table.schema != schema:
            schema = table.schema
            for name in schema.names:
                if schema.names.count(name) > 1:
                    raise DatasetError(f"{place}: two columns have the name {name!r}")
            left_out.bytes.update(
                name for field in schema for name in _byte_columns(field.type, field.name)
            )
            names = {n: field.name for n, field in enumerate(schema) if not _is_bytes(field.type)}
        columns = [
            _values(table.column(n), name, place, done + 1, left_out) for n, name in names.items()
        ]
        for cells in zip(*columns, strict=True) if columns else [()] * table.num_rows:
            members = {
                name: cell
                for name, cell in zip(names.values(), cells, strict=True)
                if cell is not _ABSENT
            }
            damaged = next((name for name, cell in members.items() if type(cell) is _NotJson), None)
            yield members if damaged is None else _damaged_line(damaged, members[damaged])
        done += table.num_rows


def _slices(table: pa.Table | pa.RecordBatch) -> Iterator[pa.Table | pa.RecordBatch]:
    """Slices of at most `_SLICE_BYTES`, or single rows: all rows as objects could fill memory."""
    rows = max(1, table.num_rows * _SLICE_BYTES // max(1, table.nbytes))
    for first in range(0, table.num_rows, rows):
        yield table.slice(first, rows)


def _byte_columns(kind: pa.DataType, name: str) -> Iterator[str]:
    """Yield the names of the parts of a column that hold bytes, such as `image.bytes`."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_bytes(kind):
        yield name
    for n in range(kind.num_fields):
        field = kind.field(n)
        inner = f"{name}.{field.name}" if pa.types.is_struct(kind) else name
        yield from _byte_columns(field.type, inner)


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _values(
    column: pa.Array | pa.ChunkedArray, name: str, place: str, first: int, left_out: Omissions
) -> list[Any]:
    """The values of a column; `first` is the number of its first row."""
    read = _json_reader(column.type) or _plain
    may_have_nan = _may_have_floats(column.type)
    values = []
    try:
        for value in column.to_pylist(maps_as_pydicts="strict"):
            if may_have_nan and _has_nan(value):
                left_out.numbers.add(name)
                may_have_nan = False
            try:
                values.append(read(value))
            except exact_json.JSONDecodeError as error:
                values.append(_NotJson(error))
    except MemoryError:
        raise
    except Exception as error:  # also of the libraries of time zones
        raise DatasetError(
            f"{place}: column {name!r}, rows from {first}: cannot read it: {error}"
        ) from error
    return values


def _may_have_floats(kind: pa.DataType) -> bool:
    """Whether values of a type are floats or contain some."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _may_have_floats(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _may_have_floats(kind.storage_type)
    parts = (kind.field(n).type for n in range(kind.num_fields))
    return bool(pa.types.is_floating(kind)) or any(map(_may_have_floats, parts))


def _has_nan(value: Any) -> bool:
    """Whether a value is or contains a number that is NaN or infinite."""
    # Not `exact_json.infinite_number_in`, which also names the place: for columns of embeddings it
    # takes twenty times as long and more.
    match value:
        case float():
            return not math.isfinite(value)
        case dict():
            return any(map(_has_nan, value.values()))
        case list():
            with contextlib.suppress(TypeError):  # other values than numbers are looked at singly
                if math.isfinite(sum(value)):
                    return False
            return any(map(_has_nan, value))
        case _:
            return False


def _damaged_line(column: str, why: str) -> bytes:
    """The line that stands for a row with a torn value."""
    reason = f"column {column!r}: its type is JSON, but its text is not: {why}"
    return DAMAGED + " ".join(reason.split()).encode()


def _json_reader(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """The function that reads values of a type that contains JSON; None for other types."""
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return _parse_json
    if isinstance(kind, pa.BaseExtensionType):
        return _json_reader(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _json_reader(kind.value_type)
    if pa.types.is_map(kind):
        read_item = _json_reader(kind.item_type)
        return None if read_item is None else lambda value: _plain_object(value, {}, read_item)
    if pa.types.is_struct(kind):
        readers = (
            (field.name, _json_reader(field.type))
            for field in map(kind.field, range(kind.num_fields))
        )
        member_readers = {name: read for name, read in readers if read is not None}
        if not member_readers:
            return None
        return lambda value: _plain_object(value, member_readers, _plain)
    if kind.num_fields == 1:  # all kinds of lists
        read_element = _json_reader(kind.field(0).type)
        return None if read_element is None else lambda value: _plain_list(value, read_element)
    return None


def _parse_json(value: str | None) -> Any:
    parsed = None if value is None else exact_json.loads(value)
    return _ABSENT if parsed is None else parsed


def _plain_object(
    value: Any, members: dict[str, Callable[[Any], Any]], other: Callable[[Any], Any]
) -> Any:
    """An object, whose members with these names are read by functions of their own."""
    if value is None:
        return _ABSENT
    plain = ((str(name), members.get(name, other)(member)) for name, member in value.items())
    return {name: member for name, member in plain if member is not _ABSENT}


def _plain_list(value: Any, read: Callable[[Any], Any]) -> Any:
    if value is None:
        return _ABSENT
    return [None if item is _ABSENT else item for item in map(read, value)]


def _plain(value: Any) -> Any:
    match value:
        case None | bytes():
            return _ABSENT
        case bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _ABSENT
        case dict():
            return _plain_object(value, {}, _plain)
        case list():
            return _plain_list(value, _plain)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return str(value)
