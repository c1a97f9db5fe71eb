"""A directory that follows a mirror: a run that continues elsewhere, or a copy for reading.

A note in the directory says how far it has followed. After a crash, the parts behind that note are
fetched again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.bucket import Bucket, call_with_retries
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.mirror.tail import (
    DIRECTORY,
    RESTORE,
    Extent,
    LogPart,
    extend_extents,
    part_name,
    unpack_part,
)
from batch_trajectories.records.files import (
    list_directory,
    make_directory,
    open_no_follow,
    replace_file,
)
from batch_trajectories.records.journal import read_note
from batch_trajectories.records.names import INFLIGHT, MIRROR_NOTE, RUN_FILE


class Copy:
    """A directory, and how much of a mirror's log it contains."""

    def __init__(self, path: Path, bucket: Bucket) -> None:
        """Raises `RunDirError` if the directory belongs to another mirror."""
        self.path = path
        self.bucket = bucket
        note = read_note(path) or {"url": bucket.url, "number": 0, "files": {}}
        if note["number"] and note["url"] != bucket.url:
            raise RunDirError(
                f"{path}: it has another mirror, {note['url']}; use that one, or remove "
                f"{path / MIRROR_NOTE} to have a new one here"
            )
        self.number: int = note["number"]
        """The number of the last part in the directory; 0 if it has none."""
        self.extents = {name: Extent(*extent) for name, extent in note["files"].items()}
        self.fetched: set[str] = set(note.get("fetched", ()))
        """Journals that another machine has written."""
        self.last: LogPart | None = None
        """The last part without its pieces; None if it was not read."""

    def parts(self) -> Iterator[LogPart]:
        """Yield the parts of the log that this directory lacks; `apply` each before the next."""
        for name, content in self.bucket.read_after(DIRECTORY, part_name(self.number)):
            if name != part_name(self.number + 1):
                raise RunDirError(f"{self._part_url(self.number + 1)}: missing; {RESTORE}")
            yield unpack_part(content, self._part_url(self.number + 1))

    def apply(self, part: LogPart, *, writes: bool) -> None:
        """Count the next part; with `writes`, write its files here. Raises `RunDirError`."""
        if part.is_new and writes:
            for name in self.extents:
                (self.path / name).unlink(missing_ok=True)
        self.extents = extend_extents(self.extents, part, self._part_url(self.number + 1))
        for piece in part.pieces if writes else ():
            path = self.path / piece.name
            if path.parent != self.path:
                make_directory(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | (0 if piece.at else os.O_TRUNC)
            with os.fdopen(open_no_follow(path, flags), "wb") as file:
                file.seek(piece.at)
                file.write(piece.content)
                file.truncate()
            if piece.name.startswith("inflight/"):
                self.fetched.add(piece.name)
        for name in part.gone if writes else ():
            (self.path / name).unlink(missing_ok=True)
        self.number += 1
        self.last = part._replace(pieces=())

    def catch_up(self) -> None:
        """Fetch the new parts of the log, and save how far it has followed.

        Raises `RunDirError` and `BucketFailed`.
        """
        before = self.number
        for part in self.parts():
            self.apply(part, writes=True)
        if self.number > before:
            os.sync()  # the note must not name files that are not on the disk
            self.save()

    def save(self, **more: Any) -> None:
        """Write the note in the directory; `more` are further entries."""
        note = {
            "url": self.bucket.url,
            "number": self.number,
            "files": {name: [*extent] for name, extent in self.extents.items()},
            "fetched": sorted(self.fetched & self.extents.keys()),
            **more,
        }
        if self.last is not None:
            note["last"] = {"holder": self.last.holder, "is_end": self.last.is_end}
        replace_file(self.path / MIRROR_NOTE, orjson.dumps(note) + b"\n")

    def _part_url(self, number: int) -> str:
        return f"{self.bucket.url}/{DIRECTORY}/{part_name(number)}"


def run_url(mirror: str, run_name: str) -> str:
    """Return the URL of a run's mirror, below the URL that `--mirror` names."""
    return f"{mirror.rstrip('/')}/{run_name}"


def download_run(mirror: str, run_dir: Path) -> None:
    """Download a run to a directory of its own name, unless that has the run already.

    A start then finds the dataset and config of the first start. That start takes the lease.
    """
    if (run_dir / RUN_FILE).exists():
        return
    copy = Copy(run_dir, Bucket(run_url(mirror, run_dir.name)))
    make_directory(run_dir, is_inside=False, parents=True)
    with _hold_lock(run_dir):
        call_with_retries(copy.catch_up)


def update_copy(url: str) -> Path:
    """Update the copy of a mirrored run in the user's cache; return its directory.

    Raises `RunDirError` if there is no run, and `BucketFailed`.
    """
    url = url.rstrip("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = blake2b(url.encode(), digest_size=6).hexdigest()
    path = cache / "batch-trajectories" / "mirrors" / key / url.rpartition("/")[2]
    bucket = Bucket(url)
    make_directory(path, is_inside=False, parents=True)
    with _hold_lock(path):
        copy = Copy(path, bucket)
        call_with_retries(copy.catch_up)
    if not list_directory(path / INFLIGHT) and not (path / RUN_FILE).exists():
        raise RunDirError(f"{url}: no run here; give the URL of --mirror, '/' and the run's name")
    return path


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this directory, after other processes that write parts to it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
