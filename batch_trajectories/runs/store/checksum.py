"""JSON lines with a checksum as their last member, to detect damage.

    {"id":"p1", … ,"schema_version":2,"crc32":"5f3a9c01"}

The checksum is the CRC-32 of all bytes before it. It detects every change within 32 adjacent bits,
and all but one in four billion of the others. It does not protect against forgery. It costs a few
percent of an export; SHA-256 would cost twice as much.

Lines of earlier versions have no checksum and stay readable. A line that ends almost like a
checksum counts as one whose checksum was damaged.
"""

from __future__ import annotations

from operator import eq
from typing import Any
from zlib import crc32

from batch_trajectories.basics import exact_json

KEY = "crc32"
_MEMBER = b',"crc32":"'
_CLOSE = b'"}\n'
_DIGITS = 8
_TAIL = len(_MEMBER) + _DIGITS + len(_CLOSE)
_NEARLY = len(_MEMBER) - 2
_BLANK = b" \t\r\n"
_CHANGED = "it was changed since it was written: its checksum does not match"


class DamagedLine(ValueError):
    """A line is not what was written."""


def with_checksum(line: bytes) -> bytes:
    """A line of a file: the JSON object `line`, which is not empty, and its checksum."""
    body = line[:-1]
    return b'%b,"crc32":"%08x"}\n' % (body, crc32(body))


def without_checksum(line: bytes) -> bytes:
    """A line as it was before `with_checksum`, and a newline; unchanged if it has no checksum."""
    end = _end_of(line) - _TAIL
    return line[:end] + b"}\n" if line.startswith(_MEMBER, end) else line


def check_seal(line: bytes) -> bool:
    """Whether a line has a checksum. Raises `DamagedLine` if it does not match."""
    end = len(line) if line.endswith(_CLOSE) else _end_of(line)
    tail = end - _TAIL
    has_checksum = line.startswith(_MEMBER, tail)
    if has_checksum:
        written = line[tail + len(_MEMBER) : end - len(_CLOSE)]
        if b"%08x" % crc32(memoryview(line)[:tail]) != written:
            raise DamagedLine(_CHANGED)
    elif sum(map(eq, line[max(tail, 0) :], _MEMBER)) >= _NEARLY:
        raise DamagedLine(_CHANGED)
    return has_checksum


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, without its checksum.

    Raises `DamagedLine` if the line is not as it was written.
    """
    has_checksum = check_seal(line)
    try:
        parsed = exact_json.loads(line)
    except exact_json.JSONDecodeError as error:
        raise DamagedLine(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise DamagedLine("not a JSON object")
    if parsed.pop(KEY, None) is not None and not has_checksum:
        raise DamagedLine(_CHANGED)
    content: dict[str, Any] = parsed
    return content


def is_whole(line: bytes) -> bool:
    """Whether a line is a JSON object, and its checksum matches if it has one."""
    try:
        read_object(line)
    except DamagedLine:
        return False
    return True


def _end_of(line: bytes) -> int:
    """The length of a line with one newline and no other blanks at its end."""
    return len(line) if line.endswith(_CLOSE) else len(line.rstrip(_BLANK)) + 1
