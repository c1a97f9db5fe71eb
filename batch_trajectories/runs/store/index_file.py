"""Which bytes of `records.idx` can be trusted; see `runs.store.index` for its rows."""

from __future__ import annotations

from itertools import accumulate
from zlib import crc32

from batch_trajectories.runs.store.index import (
    CHUNK,
    ENDINGS,
    FORMAT,
    LENGTHS,
    MARK,
    OFFSETS,
    ROW_BYTES,
    VERSION,
    are_whole,
    column_of,
    endings_in,
)


def mark_for(size: int, checksum: int) -> bytes:
    """Row 0 of an index whose first `size` bytes, without this row, have this CRC-32."""
    return (b"%b %016x %08x" % (FORMAT, size, checksum)).ljust(ROW_BYTES - 1) + b"\n"


def is_index(content: bytes) -> bool:
    """Whether this is an index of this version."""
    return content.startswith(FORMAT) and content[ROW_BYTES - 1 : ROW_BYTES] == b"\n"


def is_earlier_index(content: bytes) -> bool:
    """Whether an earlier version of this program wrote this index; it is made again.

    Those of this format are, if they have an ending that was cut.
    """
    earlier = (b"batch records index %d," % version for version in range(1, VERSION))
    if content.startswith(tuple(earlier)):
        return True
    whole_rows = memoryview(content)[: len(content) // ROW_BYTES * ROW_BYTES]
    return is_index(content) and not are_whole(endings_in(whole_rows))


def checked_bytes(content: bytes) -> int:
    """How many bytes of an index match its checksum; 0 if it is damaged or not an index."""
    if content.startswith(MARK):
        return len(content)
    try:
        size, checksum = (int(word, 16) for word in content[len(FORMAT) : ROW_BYTES].split())
    except ValueError:
        return 0
    is_valid = (
        content.startswith(mark_for(size, checksum))
        and size <= len(content)
        and crc32(memoryview(content)[ROW_BYTES:size]) == checksum
    )
    return size if is_valid else 0


def valid_rows(content: bytes, records_size: int) -> tuple[int, int]:
    """How many bytes of an index are valid, and how many of `records_size` bytes they cover.

    Each record must begin where the one before it ends. 0, 0 if the index is damaged or not an
    index.
    """
    checked = checked_bytes(content)
    if checked < ROW_BYTES:
        return 0, 0
    view = memoryview(content)[: checked // ROW_BYTES * ROW_BYTES]
    offsets, lengths = column_of(view, OFFSETS), column_of(view, LENGTHS)
    covered, valid = 0, 1
    for start in range(1, len(offsets), CHUNK):
        sizes = lengths[start : start + CHUNK].tolist()
        *begins, end = accumulate(sizes, initial=covered)
        if offsets[start : start + CHUNK].tolist() == begins and end <= records_size:
            covered, valid = end, start + len(sizes)
            continue
        for row, size in enumerate(sizes, start):
            if offsets[row] != covered or covered + size > records_size:
                break
            covered, valid = covered + size, row + 1
        break
    while valid > 1 and not lengths[valid - 1]:
        valid -= 1  # the row of an ending without the record that it was made for
    rows = view[: valid * ROW_BYTES]
    endings = endings_in(rows)
    are_known = all(map(any, endings)) and are_whole(endings) and len(set(endings)) == len(endings)
    numbers = column_of(rows, ENDINGS)
    for start in range(1, valid, CHUNK):
        are_known = are_known and max(numbers[start : start + CHUNK].tolist()) < len(endings)
    return (valid * ROW_BYTES, covered) if are_known else (0, 0)
