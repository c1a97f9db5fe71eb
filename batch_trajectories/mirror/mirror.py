"""The mirror of a run: its lease, and the thread that sends what the run has written.

The lease is the log itself. Who works on the run creates the next part, at most one a second, and
an empty one after ten seconds without news. Creating fails where the number is taken: then another
start has the lease, and this one ends (`RunLocked`). A start takes it where the last part gives it
back or its process is known to have ended, and else after 45 seconds without a new part, by its own
clock: no clocks are compared.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics.bucket import Bucket, BucketFailed, patiently
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import EnvironmentStop, RunDirError, RunLocked
from batch_trajectories.mirror.copies import Copy, url_of_run
from batch_trajectories.mirror.tail import (
    DIRECTORIES,
    DIRECTORY,
    LogPart,
    Tail,
    Unsent,
    is_name,
    name_of,
    pack_part,
    unpack_part,
)
from batch_trajectories.records.files import listed, make_directory
from batch_trajectories.records.journal import boot_id, read_note
from batch_trajectories.records.names import (
    LOCK_FILE,
    MIRROR_NOTE,
    MIRRORED_DATASET,
    QUARANTINE,
    RUN_FILE,
)

log = logging.getLogger(__name__)

SEND_EVERY_S = 1.0
SIGN_EVERY_S = 10.0
"""An empty part shows that the holder works."""
STALE_S = 45.0
"""Without a new part for so long, another start takes the lease."""
LAG_S = 30.0
"""What the mirror may lack, in seconds of the run; then the run stops."""
_FAILURES = 3
"""So many requests in a row must fail, or end that late: the machine may have slept in one."""
_CLOSE_S = 30.0
_LOOK_EVERY_S = 2.0
_NOTE_EVERY_S = 30.0
_PART_BYTES = 8 << 20


class Mirror:
    """The mirror of the run in a directory that this process has locked."""

    def __init__(self, url: str, run_dir: Path, *, stale_s: float = STALE_S) -> None:
        """`url` is that of `--mirror`. Raises what `Bucket` and `Copy` raise."""
        self._run_dir = run_dir
        self._stale_s = stale_s
        self._bucket = Bucket(url_of_run(url, run_dir.name))
        self._copy = Copy(run_dir, self._bucket)
        self._token = uuid.uuid4().hex
        self._holder = _this_process(self._token)
        note = read_note(run_dir)
        self._has_note = note is not None and note["number"] > 0
        self._token_before = note and note.get("token")
        # Not where the note came with a copy of the directory, which goes on in another way.
        is_here = note is not None and note.get("place") == _place_of(run_dir)
        self._own_tokens = {self._token_before, note.get("taking")} if note and is_here else set()
        """Of starts that worked in this directory."""
        self._fence = 0
        self._pending: _Pending | None = None
        """A part that may have been created."""
        self._even_at = self._sent_at = self._noted_at = time.monotonic()
        """When the mirror last had all; when a part was created; when the note was written."""
        self._failures = 0
        self._tail: Tail | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._holds = False
        self.problem: EnvironmentStop | RunLocked | None = None
        """Why the run must stop: the bucket fails, or another start has the lease."""

    # The lease.

    def take(self, *, fresh: bool = False) -> None:
        """Wait for the lease, take it, and bring the directory to where the mirror is.

        With `fresh` the mirror begins again, as the directory does. Raises `BucketFailed`,
        `RunDirError`, and `RunLocked` where this machine cannot know which of the two is newer.
        """
        heard, has_said = time.monotonic(), False
        while True:
            if patiently(partial(self._catch_up, fresh=fresh)):
                heard = time.monotonic()
            last = self._copy.last
            if last is not None and last.holder["token"] == self._token:
                break  # a failed request had taken it
            is_silent = time.monotonic() - heard >= self._stale_s
            if last is None or last.is_end or is_silent or _has_ended(last.holder):
                self._fence = 1 if last is None else last.fence + 1
                part = self._part(is_new=fresh)
                self._own_tokens.add(self._token)
                self._save(taking=self._token)
                create = partial(self._bucket.create, self._next_name(), pack_part(part))
                if patiently(create):
                    self._copy.take(part, writes=False)
                    break
                continue
            if not has_said:
                has_said = True
                say(
                    f"{self._bucket.url}: {_named(last.holder)} works on this run; waiting until "
                    f"it ends, or is silent for {self._stale_s:g} s"
                )
            time.sleep(min(_LOOK_EVERY_S, self._stale_s / 4))
        self._holds = True
        self._token_before = self._token
        self._save()

    def _catch_up(self, *, fresh: bool) -> bool:
        """Read new parts; bring those of others to the directory. Return whether there were any."""
        before = self._copy.number
        if before and self._copy.last is None:
            content = self._bucket.read(f"{DIRECTORY}/{name_of(before)}")
            if content is None:
                raise RunDirError(
                    f"{self._bucket.url}: its parts were removed; remove "
                    f"{self._run_dir / MIRROR_NOTE} to make a new mirror of this run"
                )
            last = unpack_part(content, f"{self._bucket.url}: part {before}")
            self._copy.last = last._replace(pieces=())
        wrote = False
        for part in self._copy.parts():
            is_ours = fresh or part.holder["token"] in self._own_tokens
            if not is_ours and not wrote:
                if self._sets_aside():
                    return True  # the directory is empty now, and all parts are read again
                wrote = True
            self._copy.take(part, writes=not is_ours)
        if wrote:
            os.sync()  # the note must not say more than is there
            self._save()
        return self._copy.number > before

    def _sets_aside(self) -> bool:
        """Whether the directory had what the mirror lacks, which is now in its quarantine.

        Another machine has continued without it. Raises `RunDirError` if the directory was never
        mirrored: nothing says which of the two is newer.
        """
        unsent = Tail(self._run_dir, dict(self._copy.extents), {}).unsent(1)
        if not (self._run_dir / RUN_FILE).exists() or not (unsent.pieces or unsent.gone):
            return False
        if not self._has_note:
            raise RunDirError(
                f"{self._run_dir}: this run and its mirror {self._bucket.url} were not made by one "
                "another; use another --run_name or --mirror, or move this directory away"
            )
        name = f"{time.strftime('before-mirror-%Y%m%d-%H%M%S')}-{self._token[:6]}"
        aside = self._run_dir / QUARANTINE / name
        make_directory(aside.parent)
        make_directory(aside)
        for path in listed(self._run_dir):
            if is_name(path.name) and path.name != aside.parent.name:
                path.rename(aside / path.name)
        make_directory(self._run_dir / DIRECTORIES[0])
        say(
            f"{self._run_dir}: another machine has continued this run from {self._bucket.url}. "
            f"What this directory had not sent is in {aside}; this start continues from the mirror"
        )
        self._copy.number, self._copy.extents, self._copy.last = 0, {}, None
        self._copy.fetched = set()
        self._own_tokens = set()
        self._save()
        return True

    def _save(self, **more: str) -> None:
        place = _place_of(self._run_dir)
        self._copy.save(token=self._token_before, place=place, **more)

    def _part(self, unsent: Unsent | None = None, **more: bool) -> LogPart:
        pieces, gone = ([], []) if unsent is None else (unsent.pieces, unsent.gone)
        return LogPart(
            fence=self._fence, holder=self._holder, at=time.time(), pieces=pieces, gone=gone, **more
        )

    def _next_name(self) -> str:
        return f"{DIRECTORY}/{name_of(self._copy.number + 1)}"

    # Sending.

    def start(self, dataset: Path, *, requests_per_s: int) -> None:
        """Send all that is there, then begin to follow the run in a thread.

        `dataset` is the JSONL file of the run. Raises what `Bucket.create` raises, and `RunLocked`.
        """
        outside = {} if dataset.parent == self._run_dir else {MIRRORED_DATASET: dataset}
        self._tail = Tail(self._run_dir, self._copy.extents, outside)
        while not patiently(self._send):
            time.sleep(1 / requests_per_s)
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopping.wait(SEND_EVERY_S):
            why = ""
            try:
                self._send()
            except RunLocked as error:
                self.problem = error
                return
            except Exception as error:
                if not isinstance(error, BucketFailed | OSError):
                    log.exception("mirror: a bug in this program")
                log.warning("mirror: %s", error)
                why = str(error)
            else:
                if self._lag_s() > LAG_S:
                    why = "the bucket is too slow"
            self._failures = self._failures + 1 if why else 0
            lag_s = self._lag_s()
            if self._failures >= _FAILURES and lag_s > LAG_S and self.problem is None:
                self.problem = EnvironmentStop(
                    f"the mirror {self._bucket.url} lacks the last {lag_s:.0f} s of the run: "
                    f"{why}. They are in {self._run_dir}; run the same command again there to "
                    "continue."
                )

    def _lag_s(self) -> float:
        return time.monotonic() - self._even_at

    def _send(self, *, is_end: bool = False) -> bool:
        """Create the next part if there is news; return whether the mirror has all then.

        Raises `BucketFailed`, after which the same part is sent again: it may have been created.
        Raises `RunLocked` if another start has the lease.
        """
        assert self._tail is not None
        if self._pending is None:
            now = time.monotonic()
            unsent = self._tail.unsent(_PART_BYTES)
            is_news = bool(unsent.pieces or unsent.gone)
            if not is_news and not is_end and now - self._sent_at < SIGN_EVERY_S:
                self._even_at = now
                return True
            is_last = is_end and unsent.is_all
            content = pack_part(self._part(unsent, is_end=is_last))
            self._pending = _Pending(content, unsent, now, is_last)
        content, unsent, looked_at, is_last = self._pending
        if not self._bucket.create(self._next_name(), content):
            there = self._bucket.read(self._next_name())
            if there != content:
                raise RunLocked(self._taken_by(there))
        self._pending = None
        self._holds = not is_last
        self._tail.sent(unsent)
        self._copy.number += 1
        self._copy.extents = self._tail.extents
        self._sent_at = time.monotonic()
        if unsent.is_all:
            self._even_at = looked_at
        if is_last or self._sent_at - self._noted_at >= _NOTE_EVERY_S:
            self._noted_at = self._sent_at
            self._save()
        return unsent.is_all

    def _taken_by(self, content: bytes | None) -> str:
        holder: Mapping[str, Any] = {}
        if content is not None:
            holder = unpack_part(content, self._bucket.url).holder
        return (
            f"{self._bucket.url}: {_named(holder)} has taken over this run while this process was "
            "silent. What this one had not sent is in its run directory only, and is set aside "
            "there when the run is continued here."
        )

    def close(self) -> None:
        """Send the rest and give the lease back.

        Raises `BucketFailed` or `RunLocked` where that fails; where the run stops for another error
        or for this, says so only.
        """
        is_raising = sys.exc_info()[1] is not None
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._send_rest()
        except (BucketFailed, RunLocked) as error:
            if not is_raising and self.problem is None:
                raise
            say(str(error))

    def _send_rest(self) -> None:
        if isinstance(self.problem, RunLocked):
            return
        deadline = time.monotonic() + (_CLOSE_S if self.problem is None else 0.0)
        if self._tail is None:
            self._tail = Tail(self._run_dir, self._copy.extents, {})
        while self._holds:
            try:
                self._send(is_end=True)
            except BucketFailed as error:
                if time.monotonic() > deadline:
                    raise BucketFailed(
                        f"{error}. The end of the run is in {self._run_dir} only; run the same "
                        "command again there to send it."
                    ) from None
                time.sleep(SEND_EVERY_S)


class _Pending(NamedTuple):
    """A part on its way."""

    content: bytes
    unsent: Unsent
    looked_at: float
    """When what is unsent was looked up."""
    is_last: bool


def _this_process(token: str) -> dict[str, Any]:
    """Names this process, also for others on this machine; see `_has_ended`."""
    pid = os.getpid()
    named = {"pid": pid, "host": socket.gethostname(), "started": round(time.time(), 3)}
    return {**named, "token": token, **_birth(pid)}


def _birth(pid: int) -> dict[str, Any]:
    """What tells a process from earlier and other ones with its number; {} if that is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[0] == "Z" or not boot_id():
            return {}  # a "Z" has ended, and its parent has not asked how
        return {
            "boot": boot_id(),
            "pids": Path("/proc/self/ns/pid").stat().st_ino,
            "born": int(stat[19]),
        }
    except (OSError, ValueError, IndexError):
        return {}


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Whether the process that holds the lease ran on this machine and has ended."""
    mine = _birth(os.getpid())
    if not mine or any(mine[name] != holder.get(name) for name in ("boot", "pids")):
        return False
    return _birth(holder["pid"]).get("born") != holder.get("born")


def _named(holder: Mapping[str, Any]) -> str:
    return f"the process {holder.get('pid')} on host {holder.get('host')}"


def _place_of(run_dir: Path) -> list[int]:
    """Tells a directory from copies of it."""
    return [path.stat().st_ino for path in (run_dir, run_dir / LOCK_FILE)]
