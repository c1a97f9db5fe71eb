"""A run's part of limits that several runs share, and the thread that keeps it.

Budget: a run has an account in the ledger, which is what it has spent and may still spend. It
raises its account by a part of what is left before it spends that, and lowers it only by what it
has not lent to its workers. The accounts never sum to more than the limit, so no spending does,
whoever is killed when. What a killed start had not spent comes back when the run is started again
in the same directory; elsewhere, all of its account counts as spent.

Rates: runs that work have equal parts. A run uses less before it writes so, and more once it has
written so. It uses none when it could not write for 25 seconds, by its own clock; after 45 seconds
others take it for dead. With more than 10 runs these times are longer, and entries about one per
second.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from batch_trajectories.basics.bucket import Bucket, call_with_retries
from batch_trajectories.basics.errors import EnvironmentStop, RunDirError, RunLocked
from batch_trajectories.basics.validation import is_url
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.records.files import (
    DamagedLine,
    add_checksum,
    make_directory,
    read_json,
    read_object,
    replace_file,
    replace_json,
)
from batch_trajectories.records.journal import boot_id
from batch_trajectories.records.names import LOCK_FILE, SHARED_NOTE

# The ledger of runs that share limits, in a directory or a bucket.
#
# Its entries are objects with the numbers 1, 2, ... as names. Each holds the whole state: who
# shares the limits, and what each may spend and use. An entry is created under the next number,
# which fails where another run was first; that run then reads it and decides anew. So the state
# only changes from one that its writer has read.

_FORMAT = 1


class Member(msgspec.Struct, frozen=True, gc=False):
    """A run that shares the limits."""

    name: str
    start: str
    """The start of the run that wrote this last."""
    beat: int = 0
    """Number of entries that the run has written."""
    beat_s: float = 0.0
    """Longest time in seconds between two entries, as long as the run works."""
    is_open: bool = True
    """The run works, as far as is known."""
    waits: bool = False
    """The run has no call in flight, and needs more of the budget than there is."""
    usd: float = 0.0
    tokens: int = 0
    """Tokens that the run may have spent over all its starts, and may still spend."""
    share: float = 0.0
    """The part of the rates that the run may use, from 0 to 1."""
    limit_usd: float | None = None
    limit_tokens: int = 0
    """The budget that the run knows, 0 without one; None in entries of earlier versions."""

    @property
    def limit(self) -> Cost | None:
        """The budget that the run knows; None if that is unknown."""
        return None if self.limit_usd is None else Cost(self.limit_usd, self.limit_tokens)

    @property
    def account(self) -> Cost:
        """The amount that the run may spend, including what it has spent."""
        return Cost(self.usd, self.tokens)


class _Entry(msgspec.Struct):
    format: int
    members: dict[str, Member]


class Ledger:
    """The state of the ledger, and the number of its entry."""

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
        while (content := self._objects.read(_member_name(number + step))) is not None:
            number, step, newest = number + step, step * 2, content
        while step > 1:
            step //= 2
            if (content := self._objects.read(_member_name(number + step))) is not None:
                number, newest = number + step, content
        if newest is not None:
            self.members = self._read(newest, number)
            self.number = number

    def append(self, members: dict[str, Member]) -> bool:
        """Make this the state; return False if another run has changed the state meanwhile.

        Raises `EnvironmentStop`. After an error it is unknown whether the change was made: read the
        ledger again.
        """
        content = add_checksum(msgspec.json.encode(_Entry(_FORMAT, members)))
        if not self._objects.create(_member_name(self.number + 1), content):
            return False
        self.number += 1
        self.members = members
        return True

    def _read(self, content: bytes, number: int) -> dict[str, Member]:
        try:
            entry = msgspec.convert(read_object(content), _Entry)
        except (DamagedLine, msgspec.ValidationError) as error:
            raise RunDirError(f"{self._place}/{_member_name(number)}: damaged: {error}") from None
        if entry.format != _FORMAT:
            raise RunDirError(
                f"{self._place}/{_member_name(number)}: written by another version of this program"
            )
        return entry.members


def _member_name(number: int) -> str:
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


log = logging.getLogger(__name__)

_BEAT_S = 10.0
_ENTRY_EVERY_S = 1.0
"""Seconds between entries; with many runs each one writes less often."""
_SURE_BEATS = 2.5
"""Number of beats after its last entry at which a run stops to use its part of the rates."""
_DEAD_BEATS = 4.5
"""Number of beats after its last entry at which others take a run for dead."""
_CHUNKS = 8
"""A run takes what is left of the budget, divided by the number of runs and this."""
_LOOK_EVERY_S = 2.0
_LAG_S = 60.0
"""A ledger that fails for so long stops the run."""
_FAILURES = 3
_CLOSE_S = 15.0
_TURN_S = 0.2
"""Runs that want to write at once try again within this."""
_SETTLE_S = 1.0
"""Workers use a smaller part of the rates after this."""


class SharedLimits:
    """One run's part of shared limits. Use it in the thread that made it."""

    def __init__(
        self,
        place: str,
        run_dir: Path,
        limit: Cost,
        *,
        parts: int,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`limit` is the budget of all runs, and `parts` how many runs there are, as far as is
        known; `say` shows warnings. Raises what `Ledger` raises."""
        self._say = say
        self._ledger = Ledger(place)
        self._place = place
        self._run_dir = run_dir
        self._limit = limit
        self._parts = parts
        self._start = uuid.uuid4().hex
        note = read_json(run_dir / SHARED_NOTE) or {}
        self._is_new = "id" not in note
        self._id = str(note.get("id") or uuid.uuid4().hex)
        self._is_same_disk = note.get("disk") == _identify_directory(run_dir)
        self._heard: dict[str, tuple[str, int, float]] = {}
        """Last start of each run, its beat, and the time when that beat was first seen."""
        self._wrote_at = self._fine_at = time.monotonic()
        self._failures = 0
        self._news = threading.Condition()
        """Guards the attributes below, which both threads use."""
        self._account = Cost()
        """The amount that this run has spent and may spend, as far as it knows."""
        self._need: Cost | None = None
        self._granted = Cost()
        self._waits = False
        self._share = self._share_until = 0.0
        self._is_stopping = self._is_asked = False
        self._thread: threading.Thread | None = None
        self.is_refused = False
        """The last request of this run is more than there is."""
        self.is_used_up = False
        """No budget can come back either: all runs that work wait for more."""
        self.left = Cost()
        """The budget that no run had at the last look at the ledger."""
        self.problem: EnvironmentStop | RunLocked | None = None
        """The reason why the run must stop."""

    def join(self, spent: Cost) -> Cost:
        """Open this run's account; return the amount that counts as spent by it, at least `spent`.

        Raises `EnvironmentStop` and `RunDirError`.
        """
        if self._is_new:
            # A start that is killed after its first entry is this member again, not another one.
            self._write_note()
        while True:
            call_with_retries(self._ledger.refresh)
            before = self._ledger.members.get(self._id)
            account = spent
            if before is not None and not self._is_same_disk:
                # What the last start had lent here and spent elsewhere is unknown.
                account = Cost(max(spent.usd, before.usd), max(spent.tokens, before.tokens))
            self._account = account
            beat = 0 if before is None else before.beat
            limit = self._limit
            me = Member(
                self._run_dir.name,
                self._start,
                beat,
                limit_usd=limit.usd,
                limit_tokens=limit.tokens,
            )
            if call_with_retries(partial(self._write, me, share=0.0, account=account)):
                self._compare_limits()
                return account

    def _compare_limits(self) -> None:
        """Say which run has another budget: each holds the sum of all below its own."""
        for name, other in self._ledger.members.items():
            if name != self._id and other.limit is not None and other.limit != self._limit:
                self._say(
                    f"warning: --shared_limits={self._place}: this run has the budget "
                    f"{_as_text(self._limit)}, but {other.name} has {_as_text(other.limit)}; "
                    "each keeps the sum of all below its own: give all runs the same "
                    "--max_run_cost_usd and --max_run_tokens"
                )
                return

    def begin(self) -> None:
        """Start the thread; call it once what `join` returned is on disk."""
        self._write_note()
        self._thread = threading.Thread(target=self._keep, name="shared limits", daemon=True)
        self._thread.start()

    def _write_note(self) -> None:
        """Say which member this run is, and that its disk knows all that it has spent."""
        replace_json(
            self._run_dir / SHARED_NOTE,
            {"id": self._id, "disk": _identify_directory(self._run_dir)},
        )

    def take(self) -> Cost:
        """The amount that was granted since the last call."""
        with self._news:
            granted, self._granted = self._granted, Cost()
            return granted

    def ask(self, need: Cost | None, *, returned: Cost, waits: bool) -> None:
        """Ask for at least `need`; return what this run no longer uses. See `Member.waits`."""
        with self._news:
            self._account -= returned
            is_new = need is not None and not self.is_refused
            self._is_asked |= is_new or waits != self._waits or returned != Cost()
            self._need = None if self._granted != Cost() else need
            self._waits = waits
            if need is None:
                self.is_refused = self.is_used_up = False
            if self._is_asked:
                self._news.notify()

    @property
    def share(self) -> tuple[float, float]:
        """The part of the rates that this run may use, and until when (monotonic clock)."""
        with self._news:
            return self._share, self._share_until

    def close(self, returned: Cost) -> str | None:
        """Leave, and return the unspent rest to the others; return the reason if that failed,
        else None."""
        with self._news:
            self._is_stopping = True
            self._account -= returned
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
        deadline = time.monotonic() + _CLOSE_S
        while not isinstance(self.problem, RunLocked):
            try:
                me = self._refresh()
                if self._write(replace(me, is_open=False), share=0.0, account=self._account):
                    return None
            except (RunLocked, RunDirError) as error:
                return str(error)
            except EnvironmentStop as error:
                if time.monotonic() > deadline:
                    return (
                        f"{error}. What this run has not spent of the shared budget comes back "
                        "when the same command runs here again."
                    )
                time.sleep(_SETTLE_S)
        return None

    # In the thread.

    def _keep(self) -> None:
        while not self._is_stopping and self.problem is None:
            try:
                while not self._look():
                    time.sleep(random.uniform(0, _TURN_S))  # others want to write, too
                self._fine_at = time.monotonic()
                self._failures = 0
            except RunLocked as error:
                self.problem = error
            except Exception as error:
                if not isinstance(error, EnvironmentStop | RunDirError):
                    log.exception("A bug in this program: the shared limits were not updated.")
                self._failures += 1
                log.warning(
                    "The limits shared with other runs were not updated, which is tried again: %s",
                    error,
                )
                if self._failures >= _FAILURES and time.monotonic() - self._fine_at > _LAG_S:
                    self.problem = EnvironmentStop(f"the shared limits cannot be kept: {error}")
            with self._news:
                if self._failures:
                    self._news.wait_for(lambda: self._is_stopping, _SETTLE_S)
                else:
                    self._news.wait_for(lambda: self._is_stopping or self._is_asked, _LOOK_EVERY_S)
                self._is_asked = False

    def _look(self) -> bool:
        """Read the ledger, and write what must change; False where others were faster."""
        me = self._refresh()
        others = self._others()
        n = 1 + sum(other.is_open for other in others.values())
        is_due = time.monotonic() - self._wrote_at >= me.beat_s
        if is_due:
            self._parts = 1  # those that begin together have begun
        share = self._fair_share(others, n)
        with self._news:
            account, need, waits = self._account, self._need, self._waits
            self.left = self._remaining_budget(others) - account
            grant = self._choose_grant(need, n)
            self.is_refused = need is not None and grant is None
            self.is_used_up = (
                self.is_refused
                and waits
                and all(other.waits for other in others.values() if other.is_open)
            )
        wanted = replace(me, waits=waits, is_open=True)
        account += grant or Cost()
        if me == wanted and share == me.share and account == me.account and not is_due:
            return True
        if not self._write(wanted, share=share, account=account):
            return False
        if grant is not None:
            with self._news:
                self._account += grant
                self._granted += grant
                self._need = None
        return True

    def _refresh(self) -> Member:
        self._ledger.refresh()
        me = self._ledger.members.get(self._id)
        if me is None or me.start != self._start:
            raise RunLocked(f"{self._place}: another start of {self._run_dir.name} shares limits")
        return me

    def _others(self) -> dict[str, Member]:
        """The other runs; those that have been silent for too long are closed."""
        now, others = time.monotonic(), {}
        for name, member in self._ledger.members.items():
            start, beat, at = self._heard.get(name, ("", 0, now))
            if (start, beat) != (member.start, member.beat):
                at = now
            self._heard[name] = (member.start, member.beat, at)
            if now - at > _DEAD_BEATS * member.beat_s:
                member = replace(member, is_open=False, share=0.0)
            if name != self._id:
                others[name] = member
        return others

    def _fair_share(self, others: dict[str, Member], n: int) -> float:
        """Compute this run's part of the rates; wait until a smaller part than before is in use."""
        free = 1.0 - sum(other.share for other in others.values())
        share = max(0.0, min(1 / max(n, self._parts), free))
        with self._news:
            is_less = share < self._share and time.monotonic() < self._share_until
            self._share = min(self._share, share)
            if is_less:
                self._news.wait_for(lambda: self._is_stopping, _SETTLE_S)
        return share

    def _remaining_budget(self, others: dict[str, Member]) -> Cost:
        return self._limit - sum((other.account for other in others.values()), Cost())

    def _choose_grant(self, need: Cost | None, n: int) -> Cost | None:
        """The amount to take of the rest; None if that is less than needed."""
        if need is None or not self.left.covers(need):
            return None
        parts = _CHUNKS * n
        return Cost(
            max(need.usd, self.left.usd / parts), max(need.tokens, self.left.tokens // parts)
        )

    def _write(self, me: Member, *, share: float, account: Cost) -> bool:
        """Write this run's state, and which others are dead; False where others were faster."""
        began = time.monotonic()
        others = self._others()
        beat_s = max(_BEAT_S, _ENTRY_EVERY_S * (1 + sum(one.is_open for one in others.values())))
        me = replace(
            me,
            beat=me.beat + 1,
            beat_s=beat_s,
            share=share,
            usd=account.usd,
            tokens=account.tokens,
        )
        if not self._ledger.append({**others, self._id: me}):
            return False
        with self._news:
            self._wrote_at = began
            self._share, self._share_until = share, began + _SURE_BEATS * beat_s
        return True


def _as_text(limit: Cost) -> str:
    parts = [f"${limit.usd:,.2f}"] if limit.usd else []
    parts += [f"{limit.tokens:,} tokens"] if limit.tokens else []
    return " and ".join(parts) or "none"


def _identify_directory(run_dir: Path) -> list[Any]:
    """Tells this directory from copies of it, and since a loss of power."""
    return [boot_id(), *(path.stat().st_ino for path in (run_dir, run_dir / LOCK_FILE))]
