"""The index of a run: columns of its records in files, each for a range of records.jsonl.

    rows-BEGIN-END.arrow     columns of the records whose lines are in these bytes
    text-BEGIN-END.sqlite    their words, for the search in whole conversations

in a directory of the user's cache, not of the run, which may be read-only, or somebody's else: what
is opened here, this program has written. All of it is derived and can be deleted. A file has its
name only once it is whole, so what is there can be used while the rest is made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batch_trajectories.basics.parts import Advance, run_in_processes
from batch_trajectories.engine.run_dir import read_run_json
from batch_trajectories.export.training_files import run_style
from batch_trajectories.records.files import DamagedLine, lock_directory, make_directory
from batch_trajectories.records.names import RECORDS_FILE, SCORES_FILE
from batch_trajectories.records.record_types import decode_record
from batch_trajectories.records.records import read_lines
from batch_trajectories.records.scores import Scores
from batch_trajectories.view.index.columns import (
    FORMAT,
    SCHEMA,
    LinePlace,
    column_values,
    make_batch,
)

RANGE_BYTES = 8 << 20
"""The bytes of records.jsonl in one part of a new index."""

_BATCH_ROWS = 1 << 16
_SMALL_BYTES = 256 << 10
"""Parts of this size are merged with any that follow."""

_UNREADABLE = b"unreadable"


class IndexPart(NamedTuple):
    """A file of the index, by its name."""

    begin: int
    end: int
    path: Path


class Origin(NamedTuple):
    """The sources of an index; if they differ, another index is needed."""

    device: int
    inode: int
    """The inode of records.jsonl, which `repair` replaces."""
    scores: int
    """The size of scores.jsonl."""

    @property
    def name(self) -> str:
        """The name of the directory with this index."""
        return f"{FORMAT}-{self.device:x}-{self.inode:x}-{self.scores:x}"

    @property
    def name_of_texts(self) -> str:
        """The name of the directory with the index's texts, which do not depend on scores."""
        return f"texts-{FORMAT}-{self.device:x}-{self.inode:x}"


def find_origin(run_dir: Path) -> Origin | None:
    """Find the sources of the index of a run; None without records."""
    try:
        status = (run_dir / RECORDS_FILE).stat()
    except FileNotFoundError:
        return None
    try:
        scores = (run_dir / SCORES_FILE).stat().st_size
    except FileNotFoundError:
        scores = 0
    return Origin(status.st_dev, status.st_ino, scores)


def make_cache(run_dir: Path) -> Path:
    """The directory for the indexes of a run, created if need be.

    Below the user's cache, or the directory for temporary files where that cannot be written.
    """
    for directory in _possible_caches(run_dir):
        try:
            make_directory(directory, is_inside=False, parents=True)
            if directory.parent.parent.stat().st_uid != os.geteuid():
                continue  # somebody else's could hold anything
        except OSError:
            continue
        return directory
    raise OSError(f"no cache directory and no {gettempdir()} can be written; set XDG_CACHE_HOME")


def find_cache(run_dir: Path) -> Path | None:
    """The directory with the indexes of a run; None if there is none."""
    found = next((path for path in _possible_caches(run_dir) if path.is_dir()), None)
    return found if found is None or found.stat().st_uid == os.geteuid() else None


def _possible_caches(run_dir: Path) -> list[Path]:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = blake2b(os.fsencode(run_dir.resolve()), digest_size=8).hexdigest()
    temporary = Path(gettempdir()) / f"batch-trajectories-{os.geteuid()}"
    return [place / "view" / key for place in (base / "batch-trajectories", temporary)]


def remove_old(cache: Path, origin: Origin) -> None:
    """Remove what is no part of the indexes of this origin."""
    for path in cache.iterdir():
        if path.is_dir() and path.name not in (origin.name, origin.name_of_texts):
            shutil.rmtree(path, ignore_errors=True)


def parts_in(directory: Path, kind: str = "rows") -> list[IndexPart]:
    """The whole files of a kind, in order, without those that a merged one has replaced."""
    found = []
    suffix = "arrow" if kind == "rows" else "sqlite"
    for path in directory.glob(f"{kind}-*.{suffix}"):
        begin, end = path.stem.removeprefix(f"{kind}-").split("-")
        found.append(IndexPart(int(begin), int(end), path))
    found.sort(key=lambda part: (part.begin, -part.end))
    kept: list[IndexPart] = []
    for part in found:
        if not kept or part.begin >= kept[-1].end:
            kept.append(part)
    return kept


def missing_in(parts: Sequence[IndexPart], size: int) -> list[tuple[int, int]]:
    """The ranges of the first `size` bytes that no part covers."""
    gaps, at = [], 0
    for part in parts:
        if part.begin > at:
            gaps.append((at, part.begin))
        at = part.end
    return [*gaps, (at, size)] if size > at else gaps


def split_ranges(
    records: Path, gaps: Sequence[tuple[int, int]], size: int = RANGE_BYTES
) -> list[tuple[int, int]]:
    """Gaps cut at the ends of lines, into ranges of about `size`; torn ends are left out."""
    ranges = []
    with records.open("rb") as file:
        for begin, end in gaps:
            while begin < end:
                cut = min(begin + size, end)
                stop = _find_line_end(file.fileno(), cut, end)
                if stop is None or stop <= begin:
                    break
                ranges.append((begin, stop))
                begin = stop
    return ranges


def _find_line_end(fd: int, at: int, end: int) -> int | None:
    """The end of the line that the byte before `at` is in; None without a newline up to `end`."""
    place = at - 1
    while place < end:
        block = os.pread(fd, min(1 << 16, end - place), place)
        if not block:
            return None
        if (newline := block.find(b"\n")) >= 0:
            return place + newline + 1
        place += len(block)
    # A line that is still being written: what is before it counts.
    return _last_line_end(fd, at)


def _last_line_end(fd: int, at: int) -> int | None:
    block = os.pread(fd, min(at, RANGE_BYTES), max(0, at - RANGE_BYTES))
    newline = block.rfind(b"\n")
    return None if newline < 0 else max(0, at - RANGE_BYTES) + newline + 1


def extend(run_dir: Path, cache: Path, origin: Origin, *, upto: int | None = None) -> None:
    """Make the parts that the index of a run lacks, for records up to a byte (None: all).

    Raises `RunLocked` if another process makes them, `RunDirError` and `OSError`.
    """
    directory = cache / origin.name
    make_directory(directory, is_inside=False)
    with lock_directory(directory, f"{directory}: another process makes this index"):
        records = run_dir / RECORDS_FILE
        size = records.stat().st_size if upto is None else upto
        ranges = split_ranges(records, missing_in(parts_in(directory), size))
        maker = _RowsMaker(run_dir, directory, origin)

        def do(some: Sequence[tuple[int, int]], advance: Advance) -> None:
            for begin, end in some:
                maker.make(begin, end)
                advance(1)

        run_in_processes(ranges, do, doing=f"index of {run_dir.name}", enough=2)
        merge(directory)


class _RowsMaker:
    """Makes parts with columns."""

    def __init__(self, run_dir: Path, directory: Path, origin: Origin) -> None:
        self._records = run_dir / RECORDS_FILE
        self._directory = directory
        self._style = run_style(read_run_json(run_dir)["config"])
        self._scores = Scores(run_dir) if origin.scores else None

    def make(self, begin: int, end: int) -> None:
        """Make the part of one range."""
        values: list[dict[str, Any]] = []
        unreadable = 0
        for offset, line in read_lines(self._records, begin):
            if offset >= end:
                break
            try:
                values.append(self._values(line, offset))
            except DamagedLine:
                unreadable += 1
        try:
            batch = make_batch(values)
        except (pa.ArrowException, OverflowError, TypeError):
            storable = [one for one in values if _is_storable(one)]
            unreadable += len(values) - len(storable)
            batch = make_batch(storable)
        write_part(self._directory, begin, end, drop_replaced([batch]), unreadable)

    def _values(self, line: bytes, offset: int) -> dict[str, Any]:
        record = decode_record(line)
        places: Sequence[int] = ()
        if self._scores is not None:
            places = self._scores.find_offsets(record)
            record = self._scores.extend_record(record)
        try:
            return column_values(record, LinePlace(offset, len(line), places), self._style)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedLine(str(error)) from error  # a field that is no part of the type


def _is_storable(values: dict[str, Any]) -> bool:
    try:
        make_batch([values])
    except (pa.ArrowException, OverflowError, TypeError):
        return False
    return True


def write_part(
    directory: Path, begin: int, end: int, batches: Iterator[pa.RecordBatch] | list[Any], bad: int
) -> Path:
    """Write a part; it has its name once it is whole."""
    path = directory / f"rows-{begin}-{end}.arrow"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    schema = SCHEMA.with_metadata({_UNREADABLE: str(bad).encode()})
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def open_part(path: Path) -> tuple[list[pa.RecordBatch], int]:
    """The batches of a part, whose memory is the file, and the number of unreadable lines."""
    reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
    bad = int((reader.schema.metadata or {}).get(_UNREADABLE, b"0"))
    return [reader.get_batch(n) for n in range(reader.num_record_batches)], bad


def find_first_merged(sizes: Sequence[int]) -> int:
    """The number of the part from which on parts of these sizes are merged.

    After that each part is more than twice as large as all after it together, so there are few.
    """
    first, after = len(sizes), 0
    for number in range(len(sizes) - 1, -1, -1):
        # A large one does not end the search: a new index has hundreds of that size before it.
        if sizes[number] <= max(2 * after, _SMALL_BYTES):
            first = number
        after += sizes[number]
    return first


def merge(directory: Path) -> None:
    """Merge the parts from the first one on that is not much larger than all after it together.

    Readers that have the old files open keep them. In a part no task has two records.
    """
    parts = parts_in(directory)
    gaps = [n for n in range(1, len(parts)) if parts[n - 1].end != parts[n].begin]
    parts = parts[gaps[-1] if gaps else 0 :]
    first = find_first_merged([part.path.stat().st_size for part in parts])
    some = parts[first:]
    if len(some) < 2:
        return
    opened = [open_part(part.path) for part in some]
    bad = sum(count for _, count in opened)
    batches = _rebatch(drop_replaced([batch for part, _ in opened for batch in part]))
    write_part(directory, some[0].begin, some[-1].end, batches, bad)
    for part in some:
        part.path.unlink()


def drop_replaced(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches without the rows that a later one of the same task replaces."""
    keys = pa.chunked_array([batch.column("key") for batch in batches], pa.binary(16))
    if pc.count_distinct(keys).as_py() == len(keys):
        yield from batches
        return
    counts = pc.value_counts(keys)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    seen: set[bytes] = set()
    kept: list[pa.RecordBatch] = []
    for batch in reversed(batches):
        column = batch.column("key")
        flags = [True] * len(column)
        places = pc.indices_nonzero(pc.is_in(column, value_set=repeated)).to_pylist()
        for place in reversed(places):
            key = column[place].as_py()
            flags[place] = key not in seen
            seen.add(key)
        kept.append(batch.filter(pa.array(flags, pa.bool_())))
    yield from reversed(kept)


def _rebatch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of a good size, one in memory at a time."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if held and rows + batch.num_rows > _BATCH_ROWS:
            yield _join_batches(held)
            held, rows = [], 0
        held.append(batch)
        rows += batch.num_rows
    yield _join_batches(held)


def _join_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    schema = SCHEMA
    plain = [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches]
    return plain[0] if len(plain) == 1 else pa.concat_batches(plain)
