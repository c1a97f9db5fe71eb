"""Lines of JSON that end in a checksum of themselves, so that one that was changed is known.

    {"id":"p1", … ,"schema_version":2,"crc32":"5f3a9c01"}

The checksum is the CRC-32 of all bytes before its own member. It finds every change of up to 32
bits side by side, and of all others all but one in four billion; against forgery it does nothing,
and nothing here promises that. It costs a few percent of an export, SHA-256 twice as much.

Lines of earlier versions have no checksum and stay readable; of those nobody can tell. A line that
ends nearly as if it had one is taken for one whose checksum was hit.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any
from zlib import crc32

from toolsets import exact_json

_KEY = "crc32"
_MEMBER = b',"crc32":"'
_CLOSE = b'"}\n'
_DIGITS = 8
_TAIL = len(_MEMBER) + _DIGITS + len(_CLOSE)
_NEARLY = len(_MEMBER) - 2
_BLANK = b" \t\r\n"
_CHANGED = "it was changed since it was written: its checksum does not fit"


class DamagedLine(ValueError):
    """A line is not what was written."""


def with_checksum(line: bytes) -> bytes:
    """A line of a file: `line`, which is a JSON object that holds something, and its checksum."""
    body = line[:-1]
    return b'%b,"crc32":"%08x"}\n' % (body, crc32(body))


def without_checksum(line: bytes) -> bytes:
    """What `with_checksum` was given, and a newline; a line without a checksum is left alone."""
    end = _end_of(line) - _TAIL
    return line[:end] + b"}\n" if line.startswith(_MEMBER, end) else line


def read_object(line: bytes, loads: Callable[[bytes], Any] = exact_json.loads) -> dict[str, Any]:
    """What a line holds, without its checksum; `loads` parses it.

    Raises `DamagedLine` where the line is not what was written.
    """
    end = _end_of(line)
    tail = end - _TAIL
    is_sealed = line.startswith(_MEMBER, tail)
    if is_sealed:
        written = line[end - len(_CLOSE) - _DIGITS : end - len(_CLOSE)]
        if b"%08x" % crc32(memoryview(line)[:tail]) != written:
            raise DamagedLine(_CHANGED)
    elif sum(map(eq, line[max(tail, 0) :], _MEMBER)) >= _NEARLY:
        raise DamagedLine(_CHANGED)
    try:
        found = loads(line)
    except exact_json.JSONDecodeError as error:
        msg = f"no JSON: {error}"
        raise DamagedLine(msg) from error
    if not isinstance(found, dict):
        msg = "no JSON object"
        raise DamagedLine(msg)
    if found.pop(_KEY, None) is not None and not is_sealed:
        raise DamagedLine(_CHANGED)
    content: dict[str, Any] = found
    return content


def is_whole(line: bytes) -> bool:
    """Whether a line is a JSON object, with a checksum that fits if it has one."""
    try:
        read_object(line)
    except DamagedLine:
        return False
    return True


def _end_of(line: bytes) -> int:
    """How long a line is, or would be with its newline and nothing but that behind it."""
    return len(line) if line.endswith(_CLOSE) else len(line.rstrip(_BLANK)) + 1
