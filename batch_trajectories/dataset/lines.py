"""Read a dataset file line by line: usable rows, and bad rows with a reason.

Holds one line in memory, for files of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.row_conversation import json_type
from batch_trajectories.records.tasks import BadRow

MAX_LINE_BYTES = 256 << 20
"""A longer line is a bad row. This limits memory."""

_TOO_LONG = f"longer than {MAX_LINE_BYTES >> 20} MiB"

TOO_LONG = exact_json.dumps(_TOO_LONG)
"""Stands in a stored dataset for a row that was too long to be read; it is a bad row, too."""

DAMAGED = b"it cannot be read: "
"""Beginning of a line that stands for an unreadable row of a table; the reason follows."""

_BLOCK = 1 << 20


def _encoding_advice(name: str) -> str:
    return f"{name}; convert it to UTF-8 first (iconv -f {name} -t UTF-8)"


_ARROW = (
    "an Arrow file; give the directory that `save_to_disk` wrote, or write it as Parquet or JSONL"
)

_OTHER_KINDS = {
    b"\x1f\x8b": "gzip-compressed; end its name in .gz (as in .jsonl.gz), or unpack it (gzip -d)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; end its name in .zst, or unpack it (zstd -d)",
    b"\xfd7zXZ\x00": "xz-compressed; unpack it first (xz -d)",
    b"BZh": "bzip2-compressed; unpack it first (bzip2 -d)",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"PAR1": "Parquet; end its name in .parquet",
    b"ARROW1": _ARROW,
    b"\xff\xff\xff\xff": _ARROW,  # a stream of Arrow, as the cache of `datasets` holds
    **dict.fromkeys((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"), _encoding_advice("UTF-32")),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), _encoding_advice("UTF-16")),
    # JSON without a mark of its byte order.
    **dict.fromkeys((b"{\x00", b"[\x00"), _encoding_advice("UTF-16LE")),
    **dict.fromkeys((b"\x00{", b"\x00["), _encoding_advice("UTF-16BE")),
}
"""First bytes of files that are often given by mistake, with a message about each."""


class Row(NamedTuple):
    """A usable row: its line number in the file (from 1), its columns, and its byte offset."""

    line: int
    columns: dict[str, Any]
    offset: int


class ContentDigest:
    """The size and digest of the bytes read so far, from the beginning of a dataset file."""

    def __init__(self) -> None:
        self.size = 0
        self.is_at_line_end = True
        self._hash = blake2b(digest_size=32)

    def update(self, content: bytes) -> None:
        """Add the bytes that were read next."""
        self.size += len(content)
        self.is_at_line_end = content.endswith(b"\n")
        self._hash.update(content)

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def read_rows(path: Path, rules: RowRules, content: ContentDigest) -> Iterator[Row | BadRow]:
    """Read a JSONL file; skip blank lines. `content` includes each line before its row is yielded.

    Raises `DatasetError` if the file cannot be read.
    """
    for line, offset, text in _lines(path, content):
        if len(text) >= MAX_LINE_BYTES:
            yield BadRow(line, _TOO_LONG)
        elif text := text.strip():
            yield _read_row(line, offset, text, rules)


def read_row(file: BinaryIO, offset: int) -> dict[str, Any] | None:
    """The columns of the row at `offset`; None if there is no longer a row there."""
    file.seek(offset)
    try:
        columns = exact_json.loads(file.readline(MAX_LINE_BYTES).strip())
    except exact_json.JSONDecodeError:
        return None
    return columns if isinstance(columns, dict) else None


def refuse_other_kinds(path: Path, start: bytes) -> None:
    """Raise `DatasetError` if a file that should be text begins like another kind of file."""
    for beginning, reason in _OTHER_KINDS.items():
        if start.startswith(beginning):
            raise DatasetError(f"{path} is {reason}")


def is_unchanged(path: Path, size: int, digest: str, *, may_continue: bool) -> bool:
    """Whether the first `size` bytes of a file still have this `ContentDigest`.

    Unless it `may_continue`, the file must end there.
    """
    content = ContentDigest()
    if not path.is_file():  # opening a pipe could wait for ever
        return False
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(min(_BLOCK, size - content.size)):
                content.update(block)
            ends = not file.read(1)
    except OSError:
        return False
    return (ends or may_continue) and (content.size, content.hexdigest()) == (size, digest)


def _lines(path: Path, content: ContentDigest) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of each line."""
    try:
        if path.is_dir():
            raise DatasetError(f"{path} is a directory; give the JSONL file itself")
        if path.exists() and not path.is_file():
            raise DatasetError(
                f"{path} is a pipe or device; rows are read more than once, so give a plain file"
            )
        with path.open("rb", buffering=_BLOCK) as file:
            start = file.read(8)
            file.seek(0)
            refuse_other_kinds(path, start)
            if start.startswith(b"\xef\xbb\xbf"):
                content.update(file.read(3))
            number = 0
            while text := file.readline(MAX_LINE_BYTES):
                number += 1
                offset = content.size
                content.update(text)
                yield number, offset, text
                while not text.endswith(b"\n") and len(text) == MAX_LINE_BYTES:
                    text = file.readline(MAX_LINE_BYTES)
                    content.update(text)
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such dataset file") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot read the dataset: {error.strerror or error}") from error


def _read_row(line: int, offset: int, text: bytes, rules: RowRules) -> Row | BadRow:
    try:
        columns = columns_in(text)
        rules.read(columns)
    except ValueError as error:
        return BadRow(line, str(error))
    return Row(line, columns, offset)


def columns_in(text: bytes) -> dict[str, Any]:
    """The columns of a line. Raises `ValueError` with what is wrong with it."""
    try:
        columns = exact_json.loads(text)
    except exact_json.JSONDecodeError as error:
        raise ValueError(_why_not_json(text, error)) from error
    if not isinstance(columns, dict):
        is_too_long = text == TOO_LONG
        what = f"the line is {json_type(columns)}; it must be a JSON object"
        raise ValueError(_TOO_LONG if is_too_long else what)
    if exact_json.is_nested_too_deep(text):
        raise ValueError(f"nested deeper than {exact_json.MAX_NESTING} levels")
    return columns


def _why_not_json(text: bytes, error: exact_json.JSONDecodeError) -> str:
    if text.startswith(DAMAGED):
        return text.decode(errors="replace")
    try:
        text.decode()
    except UnicodeDecodeError as decoding:
        return f"not UTF-8: {decoding.reason} at byte {decoding.start}"
    if text[:1] == b"[" or text in (b"]", b"],"):
        return "not a JSON object: this looks like a JSON array; write one object per line"
    if text == b"{":
        return "not a JSON object: this looks like one over several lines; write one per line"
    return f"not JSON: {error}"
