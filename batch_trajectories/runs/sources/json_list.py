"""The elements of a JSON array, one at a time, each as a line of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.runs.dataset.lines import MAX_LINE_BYTES

_BLOCK = 1 << 16

_MOST_MORE = 8 << 20
"""Characters that are read beyond a large element at most."""

_BLANKS = re.compile(r"[ \t\r\n]*")

_MARGIN = 16
"""An error this near the end of what was read may only mean that more follows."""

_decoder = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where a value ends. Its text is taken, so numbers need not be read."""


def elements(path: Path, text: TextIO) -> Iterator[bytes]:
    """Read the elements. Raises `DatasetError`, which names the file and the line."""
    buffer, position, line = "", 0, 1
    begun = False
    while True:
        position = _after_blanks(buffer, position)
        if not begun and buffer[position : position + 1] == "[":
            begun = True
            position += 1
            continue
        if begun and buffer[position : position + 1] == "]":
            rest = buffer[position + 1 :]
            while not rest.strip() and (rest := text.read(_BLOCK)):
                pass
            if rest.strip():
                raise _refusal(path, line + buffer.count("\n", 0, position), "more follows its end")
            return
        try:
            end = _end_of_element(buffer, position)
        except _Unreadable as error:
            wrong = error
        else:
            yield buffer[position:end].replace("\r", " ").replace("\n", " ").encode()
            position = _after_blanks(buffer, end)
            position += buffer[position] == ","
            continue
        line += buffer.count("\n", 0, position)
        buffer = buffer[position:]
        position = 0
        more = ""
        if wrong.is_final:
            pass
        elif len(buffer) >= MAX_LINE_BYTES:
            wrong = _Unreadable(f"an element is longer than {MAX_LINE_BYTES >> 20} MiB")
        else:
            # As much again each time: what is incomplete is read again from its beginning.
            more = text.read(max(_BLOCK, min(len(buffer), _MOST_MORE)))
        if not more and not begun and not buffer:
            return  # an empty file
        if not more:
            raise _refusal(path, line + buffer.count("\n", 0, wrong.at), wrong.reason)
        buffer += more


class _Unreadable(Exception):
    """What is wrong with an element, and where, counted from its beginning."""

    def __init__(self, reason: str, at: int = 0, *, is_final: bool = True) -> None:
        self.reason = reason
        self.at = at
        self.is_final = is_final
        """It stays wrong, whatever follows what was read."""


def _end_of_element(buffer: str, position: int) -> int:
    """Where an element ends that is in `buffer` together with what follows it."""
    near = len(buffer) - _MARGIN
    try:
        _, end = _decoder.raw_decode(buffer, position)
    except RecursionError:
        raise _Unreadable("an element is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _Unreadable(
            error.msg,
            error.pos - position,
            is_final=error.pos < near and not error.msg.startswith("Unterminated"),
        ) from None
    after = _after_blanks(buffer, end)
    if buffer[after : after + 1] in (",", "]"):
        return end
    raise _Unreadable("Expecting ',' delimiter", after - position, is_final=after < near)


def _after_blanks(buffer: str, position: int) -> int:
    found = _BLANKS.match(buffer, position)
    return position if found is None else found.end()


def _refusal(path: Path, line: int, reason: str) -> DatasetError:
    return DatasetError(f"{path}:{line}: not a JSON array of rows: {reason}")
