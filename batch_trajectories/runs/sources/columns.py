"""Which columns of a source become which columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.basics.validation import did_you_mean

if TYPE_CHECKING:
    from batch_trajectories.runs.sources.rows_file import RowsFile


class Renaming:
    """Renames the columns of row after row: `{new: old}`; then a rows file makes rows of them."""

    def __init__(self, names: Mapping[str, str], rows_file: RowsFile | None = None) -> None:
        self._names = names
        self._rows_file = rows_file
        self._seen: set[str] = set()
        self._columns: dict[str, None] = {}

    def line(self, row: bytes | dict[str, Any]) -> bytes:
        """The row as a line of JSON, without a newline; what is no JSON object stays as it is."""
        if not self._names and self._rows_file is None:
            return row if isinstance(row, bytes) else exact_json.dumps(row)
        if isinstance(row, bytes):
            try:
                columns = exact_json.loads(row)
            except exact_json.JSONDecodeError:
                return row  # the scan names the line and the reason
            if not isinstance(columns, dict):
                return row
            row = columns
        row = self.renamed(row) if self._names else row
        return exact_json.dumps(row if self._rows_file is None else self._rows_file.row(row))

    def renamed(self, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns under their new names.

        A column whose name another one takes is left out.
        """
        if not self._seen.issuperset(self._names.values()):
            self._seen |= columns.keys() & set(self._names.values())
            self._columns.update(dict.fromkeys(columns))
        new = {name: columns[old] for name, old in self._names.items() if old in columns}
        moved = set(self._names.values())
        rest = {name: value for name, value in columns.items() if name not in moved}
        return {**rest, **new}

    def check(self, source: str) -> None:
        """Raise `DatasetError` where no row had a column that was to be renamed."""
        for new, old in self._names.items():
            if old not in self._seen and self._columns:
                hint = did_you_mean(old, self._columns) or "they are " + ", ".join(self._columns)
                raise DatasetError(f"--columns {new}={old}: {source} has no column {old!r}; {hint}")
