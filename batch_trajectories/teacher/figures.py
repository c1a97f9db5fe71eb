"""The file `teacher.jsonl` of a run: log-probabilities that teachers gave for its token ids.

A line holds the figures of one teacher for one segment, which is a row of `rl`. The file only
grows, and a line is durable before anything else is done with its reply. A crash can leave at most
an incomplete last line, which is ignored.

Keys of a line:

    teacher   name of the model at its server
    segment   `segment_key` of the token ids
    id        id of the record that the segment was first met in
    turns     numbers of its turns there
    top       number of most likely tokens at each place; 0: only the sampled ones
    tokens    number of sampled tokens
    logprobs, top_ids, top_logprobs   see `Figures`, as base64; null for a reply without figures
    error     why a paid reply has no figures; null for others
    tokenizer digest that student and teacher have in common; null if the user stated it
    server, model, usage, cost_usd, at   what gave the figures, and what they cost
"""

from __future__ import annotations

import os
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from agent.messages.tokens import ID_BYTES, pack_ids
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.basics.text import first_few
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    add_checksum,
    read_object,
    repair_command,
)
from batch_trajectories.records.names import TEACHER_FILE
from batch_trajectories.records.records import read_lines

_MAX_LISTED_TEACHERS = 5


class Figures(NamedTuple):
    """A teacher's log-probabilities of the sampled tokens of a segment.

    All are packed as little-endian numbers of 32 bits, the width in which servers compute
    log-probabilities: wider ones would only store zeros, narrower ones would be off by more than
    1e-4.
    """

    logprobs: bytes
    """A float for each sampled token."""
    top: int = 0
    """The number of most likely tokens at each place; 0: none were asked for."""
    top_ids: bytes = b""
    """Ids of the `top` most likely tokens, place after place, the most likely first."""
    top_logprobs: bytes = b""
    """A float for each of `top_ids`."""

    def select(self, places: Sequence[int], top: int) -> Figures:
        """The figures of some of the sampled tokens, by index, with the first `top` tokens."""
        return Figures(
            logprobs=_take(self.logprobs, places, stride=1, count=1),
            top=top,
            top_ids=_take(self.top_ids, places, stride=self.top, count=top),
            top_logprobs=_take(self.top_logprobs, places, stride=self.top, count=top),
        )


def _take(packed: bytes, places: Sequence[int], *, stride: int, count: int) -> bytes:
    """The first `count` of the `stride` numbers that each of `places` has."""
    step, size = stride * ID_BYTES, count * ID_BYTES
    if step == size and len(places) * step == len(packed):
        return packed
    return b"".join(packed[place * step : place * step + size] for place in places)


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack log-probabilities."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_floats(packed: bytes) -> tuple[float, ...]:
    """Unpack what `pack_floats` packed."""
    return struct.unpack(f"<{len(packed) // ID_BYTES}f", packed)


def segment_key(ids: Sequence[int], sampled: Sequence[int]) -> str:
    """Identifies token ids, and the places of those that the run's model sampled.

    The key depends on nothing else, so equal samples share their figures, and a run that was merged
    or copied still finds them.
    """
    digest = blake2b(pack_ids(ids), digest_size=16)
    digest.update(pack_ids(sampled))
    digest.update(struct.pack("<Q", len(ids)))
    return digest.hexdigest()


class _Place(NamedTuple):
    """The place of a line in a file."""

    file: int
    """Index of the file."""
    offset: int
    length: int
    top: int


class TeacherFigures:
    """The figures of one teacher in the files of some runs. Only their places are in memory."""

    def __init__(self, run_dirs: Iterable[Path], teacher: str, *, top: int = 0) -> None:
        """Find all figures that have at least the `top` most likely tokens.

        Raises `ConfigError` if there are none, and `RunDirError` for a damaged line.
        """
        self._top = top
        self._places: dict[bytes, _Place] = {}
        self._files: list[BinaryIO] = []
        paths = [run_dir / TEACHER_FILE for run_dir in run_dirs]
        name = plain_name(teacher)
        for number, path in enumerate(paths):
            for place, line in read_figure_lines(path):
                if line["teacher"] == name and line["error"] is None and line["top"] >= top:
                    key = bytes.fromhex(line["segment"])
                    self._places[key] = _Place(number, *place, line["top"])
        if not self._places:
            raise ConfigError(_none_found(paths, teacher, top))
        self._files = [_open(path) for path in paths]

    def find(self, ids: Sequence[int], sampled: Sequence[int]) -> Figures | None:
        """The figures of a segment; None if it was not scored. Raises `RunDirError`."""
        place = self._places.get(bytes.fromhex(segment_key(ids, sampled)))
        if place is None:
            return None
        file = self._files[place.file]
        content = os.pread(file.fileno(), place.length, place.offset)
        return figures_in(_read(content, f"{file.name}: at byte {place.offset}"))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def plain_name(teacher: str) -> str:
    """The name of a teacher without the kind of its server, such as `vllm:`."""
    kind, colon, name = teacher.partition(":")
    return name if colon and kind in ("vllm", "sglang") else teacher


def read_figure_lines(path: Path) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield each whole line of a teacher.jsonl with its offset and length. Raises `RunDirError`."""
    for number, (offset, content) in enumerate(read_lines(path, 0), start=1):
        yield (offset, len(content)), _read(content, f"{path}:{number}")


def _read(content: bytes, where: str) -> dict[str, Any]:
    try:
        line = read_object(content)
        bytes.fromhex(line["segment"])
        if line["error"] is None:
            found = figures_in(line)
            sizes = [len(found.top_ids), len(found.top_logprobs)]
            count = ID_BYTES * line["tokens"]
            if len(found.logprobs) != count or sizes != [found.top * count] * 2:
                raise DamagedLine("the lengths of its figures do not fit")
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError(
            f"{where}: not a line of figures ({error}); {repair_command(where)} sets it aside, and "
            "its segment can be scored again"
        ) from error
    return line


def figures_in(line: Mapping[str, Any]) -> Figures:
    """The figures that a line holds. Raises `ValueError` and `KeyError` for other lines."""
    packed = {
        name: b64decode(line[name], validate=True)
        for name in ("logprobs", "top_ids", "top_logprobs")
    }
    return Figures(top=line["top"], **packed)


def _open(path: Path) -> BinaryIO:
    return (path if path.exists() else Path(os.devnull)).open("rb")


def _none_found(paths: Sequence[Path], teacher: str, top: int) -> str:
    """The message that no run has figures of a teacher, with the next command."""
    known = {
        (line["teacher"], line["top"])
        for path in paths
        for _, line in read_figure_lines(path)
        if line["error"] is None
    }
    runs = " ".join(path.parent.name for path in paths)
    wanted = f" --top_logprobs={top}" if top else ""
    command = f"score {runs} --teacher={teacher} --base_url=URL{wanted}"
    names = [f"{name}, top {most}" for name, most in sorted(known)]
    there = f" It has: {first_few(names, _MAX_LISTED_TEACHERS)}." if names else ""
    return (
        f"teacher: {', '.join(map(str, paths))} has no figures of {teacher!r}"
        f"{f' with the {top} most likely tokens' if top else ''}.{there} Get them first: "
        f"python batch_runner.py {command}"
    )


class FigureFile:
    """The figures of a run, open for appending; see this module."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / TEACHER_FILE
        self._file: AppendFile | None = None

    def append(self, fields: Mapping[str, Any], figures: Figures | None) -> None:
        """Append a line, which is durable when this returns. `figures`: None for a bad reply."""
        packed: dict[str, str | None] = dict.fromkeys(("logprobs", "top_ids", "top_logprobs"))
        if figures is not None:
            packed = {name: b64encode(getattr(figures, name)).decode() for name in packed}
        line = add_checksum(exact_json.dumps({**fields, **packed, "at": time.time()}))
        if self._file is None:
            self._file = AppendFile(self.path)
        self._file.append(line)
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
