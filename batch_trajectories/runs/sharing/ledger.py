"""The ledger of runs that share limits, in a directory or a bucket.

Its entries are objects with the numbers 1, 2, ... as names. Each holds the whole state: who shares
the limits, and what each may spend and use. An entry is created under the next number, which fails
where another run was first; that run then reads it and decides anew. So the state only changes
from one that its writer has read.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from batch_trajectories.basics.buckets.bucket import Bucket
from batch_trajectories.basics.errors import EnvironmentStop, RunDirError
from batch_trajectories.basics.validation import is_url
from batch_trajectories.runs.config.amounts import Cost
from batch_trajectories.runs.store.checksum import DamagedLine, read_object, with_checksum
from batch_trajectories.runs.store.files import make_directory, replace_file

_FORMAT = 1


class Member(msgspec.Struct, frozen=True, gc=False):
    """A run that shares the limits."""

    name: str
    start: str
    """The start of the run that wrote this last."""
    beat: int = 0
    """How often it has written."""
    beat_s: float = 0.0
    """It writes at least so often, as long as it works."""
    is_open: bool = True
    """It works, as far as is known."""
    waits: bool = False
    """It has no call in flight, and needs more of the budget than there is."""
    usd: float = 0.0
    tokens: int = 0
    """What it may have spent over all its starts, and may still spend."""
    share: float = 0.0
    """The part of the rates that it may use, from 0 to 1."""
    limit_usd: float | None = None
    limit_tokens: int = 0
    """The budget that it knows of, 0 where it has none; None in entries of earlier versions."""

    @property
    def limit(self) -> Cost | None:
        """The budget that it knows of; None if that is unknown."""
        return None if self.limit_usd is None else Cost(self.limit_usd, self.limit_tokens)

    @property
    def account(self) -> Cost:
        """What it may spend, with what it has spent."""
        return Cost(self.usd, self.tokens)


class _Entry(msgspec.Struct):
    format: int
    members: dict[str, Member]


class Ledger:
    """The state, and the number of the entry that it comes from."""

    def __init__(self, place: str) -> None:
        """`place` is a URL or a path. Raises what `Bucket` raises."""
        self._objects = Bucket(place) if is_url(place) else _Directory(Path(place))
        self._place = place
        self.number = 0
        self.members: dict[str, Member] = {}

    def refresh(self) -> None:
        """Read the newest entry. Raises `EnvironmentStop` and `RunDirError`."""
        # No number is left out: the last is found by steps that double, then halve.
        number, step, newest = self.number, 1, None
        while (content := self._objects.read(_name_of(number + step))) is not None:
            number, step, newest = number + step, step * 2, content
        while step > 1:
            step //= 2
            if (content := self._objects.read(_name_of(number + step))) is not None:
                number, newest = number + step, content
        if newest is not None:
            self.members = self._read(newest, number)
            self.number = number

    def append(self, members: dict[str, Member]) -> bool:
        """Make this the state; False where another run has changed it. Raises `EnvironmentStop`.

        After an error it is unknown whether it was made: read it again.
        """
        content = with_checksum(msgspec.json.encode(_Entry(_FORMAT, members)))
        if not self._objects.create(_name_of(self.number + 1), content):
            return False
        self.number += 1
        self.members = members
        return True

    def _read(self, content: bytes, number: int) -> dict[str, Member]:
        try:
            entry = msgspec.convert(read_object(content), _Entry)
        except (DamagedLine, msgspec.ValidationError) as error:
            raise RunDirError(f"{self._place}/{_name_of(number)}: damaged: {error}") from None
        if entry.format != _FORMAT:
            raise RunDirError(
                f"{self._place}/{_name_of(number)}: written by another version of this program"
            )
        return entry.members


def _name_of(number: int) -> str:
    return f"{number:012}"


class _Directory:
    """A directory, also on a network file system: does what `Bucket` does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, name: str, content: bytes) -> bool:
        """Create a file; False if there is one. Raises `EnvironmentStop`."""
        path = self._path / name
        whole = self._path / f".{uuid.uuid4().hex}"
        try:
            make_directory(self._path, is_inside=False, parents=True)
            replace_file(whole, content)
            try:
                os.link(whole, path)
            except FileExistsError:
                return False
            finally:
                whole.unlink()
        except OSError as error:
            raise EnvironmentStop(f"{path}: {error.strerror or error}") from None
        return True

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if there is none. Raises `EnvironmentStop`."""
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnvironmentStop(f"{self._path / name}: {error.strerror or error}") from None
