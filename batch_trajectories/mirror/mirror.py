"""The mirror of a run: its lease, and the thread that sends what the run has written.

The log itself is the lease. The process that works on the run creates the next part, at most one a
second, and an empty one after ten seconds without news. If that fails because the number is taken,
another start has the lease, and this one ends (`RunLocked`). A start takes the lease if the last
part gives it back, or if its process is known to have ended. Otherwise it waits until there was no
new part for 45 seconds, by its own clock; clocks of two machines are never compared.
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

from batch_trajectories.basics.bucket import Bucket, BucketFailed, call_with_retries
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import EnvironmentStop, RunDirError, RunLocked
from batch_trajectories.mirror.copies import Copy, run_url
from batch_trajectories.mirror.tail import (
    DIRECTORIES,
    DIRECTORY,
    LogPart,
    Tail,
    Unsent,
    is_name,
    pack_part,
    part_name,
    unpack_part,
)
from batch_trajectories.records.files import list_directory, make_directory
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
HEARTBEAT_S = 10.0
"""Seconds after which the holder writes an empty part, to show that it works."""
STALE_S = 45.0
"""Seconds without a new part after which another start takes the lease."""
LAG_S = 30.0
"""Maximum seconds of the run that the mirror may lack; beyond it the run stops."""
_MAX_FAILURES = 3
"""Number of requests in a row that must fail or end late, as the machine may have slept in one."""
_CLOSE_S = 30.0
_POLL_EVERY_S = 2.0
_NOTE_EVERY_S = 30.0
_PART_BYTES = 8 << 20


class Mirror:
    """The mirror of a run whose directory this process has locked."""

    def __init__(self, url: str, run_dir: Path, *, stale_s: float = STALE_S) -> None:
        """`url` is the value of `--mirror`. Raises what `Bucket` and `Copy` raise."""
        self._run_dir = run_dir
        self._stale_s = stale_s
        self._bucket = Bucket(run_url(url, run_dir.name))
        self._copy = Copy(run_dir, self._bucket)
        self._token = uuid.uuid4().hex
        self._holder = _describe_process(self._token)
        note = read_note(run_dir)
        self._has_note = note is not None and note["number"] > 0
        self._token_before = note and note.get("token")
        # A note that was copied with its directory names another place. Its tokens belong to the
        # original run, which continues in another way.
        is_here = note is not None and note.get("place") == _identify_directory(run_dir)
        self._own_tokens = {self._token_before, note.get("taking")} if note and is_here else set()
        """The tokens of starts that worked in this directory."""
        self._fence = 0
        self._pending: _Pending | None = None
        """A part that was requested and may have been created; None if there is none."""
        now = time.monotonic()
        self._complete_at = now
        """The monotonic time at which the mirror last had all changes."""
        self._sent_at = now
        """The monotonic time at which the latest part was created."""
        self._noted_at = now
        """The monotonic time at which the note was written."""
        self._failures_in_row = 0
        self._tail: Tail | None = None
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_lease = False
        self.problem: EnvironmentStop | RunLocked | None = None
        """The error that must stop the run: the bucket fails, or another start has the lease."""

    # The lease.

    def take(self, *, fresh: bool = False) -> None:
        """Wait for the lease, take it, and bring the directory up to date with the mirror.

        With `fresh` the mirror begins anew, as the directory does. Raises `BucketFailed`, and
        `RunDirError` if this machine cannot know which of the two is newer.
        """
        last_part_at = time.monotonic()
        has_said = False
        while True:
            if call_with_retries(partial(self._catch_up, fresh=fresh)):
                last_part_at = time.monotonic()
            last = self._copy.last
            if last is not None and last.holder["token"] == self._token:
                break  # an earlier request failed, but took the lease
            is_silent = time.monotonic() - last_part_at >= self._stale_s
            if last is None or last.is_end or is_silent or _has_ended(last.holder):
                self._fence = 1 if last is None else last.fence + 1
                part = self._make_part(is_new=fresh)
                self._own_tokens.add(self._token)
                self._save_note(taking=self._token)
                create = partial(self._bucket.create, self._next_name(), pack_part(part))
                if call_with_retries(create):
                    self._copy.apply(part, writes=False)
                    break
                continue
            if not has_said:
                has_said = True
                say(
                    f"{self._bucket.url}: {_describe_holder(last.holder)} works on this run; "
                    f"waiting until it ends, or is silent for {self._stale_s:g} s"
                )
            time.sleep(min(_POLL_EVERY_S, self._stale_s / 4))
        self._has_lease = True
        self._token_before = self._token
        self._save_note()

    def _catch_up(self, *, fresh: bool) -> bool:
        """Read new parts, and write those of other machines; return whether there were any."""
        before = self._copy.number
        if before and self._copy.last is None:
            content = self._bucket.read(f"{DIRECTORY}/{part_name(before)}")
            if content is None:
                raise RunDirError(
                    f"{self._bucket.url}: its parts were removed; remove "
                    f"{self._run_dir / MIRROR_NOTE} to make a new mirror of this run"
                )
            last = unpack_part(content, f"{self._bucket.url}: part {before}")
            self._copy.last = last._replace(pieces=())
        has_written = False
        for part in self._copy.parts():
            is_ours = fresh or part.holder["token"] in self._own_tokens
            if not is_ours and not has_written:
                if self._set_aside_unsent():
                    return True  # the directory is empty now, and all parts are read again
                has_written = True
            self._copy.apply(part, writes=not is_ours)
        if has_written:
            os.sync()  # the note must not name files that are not on the disk
            self._save_note()
        return self._copy.number > before

    def _set_aside_unsent(self) -> bool:
        """Move the directory's files to its quarantine if the mirror lacks changes in them.

        Returns whether it did: then another machine has continued without these changes. Raises
        `RunDirError` if the directory was never mirrored, as nothing says which one is newer.
        """
        unsent = Tail(self._run_dir, dict(self._copy.extents), {}).find_unsent(1)
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
        for path in list_directory(self._run_dir):
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
        self._save_note()
        return True

    def _save_note(self, **more: str) -> None:
        place = _identify_directory(self._run_dir)
        self._copy.save(token=self._token_before, place=place, **more)

    def _make_part(self, unsent: Unsent | None = None, **more: bool) -> LogPart:
        pieces, gone = ([], []) if unsent is None else (unsent.pieces, unsent.gone)
        return LogPart(
            fence=self._fence, holder=self._holder, at=time.time(), pieces=pieces, gone=gone, **more
        )

    def _next_name(self) -> str:
        return f"{DIRECTORY}/{part_name(self._copy.number + 1)}"

    # Sending.

    def start(self, dataset: Path) -> None:
        """Send all changes, then start a thread that follows the run.

        `dataset` is the JSONL file of the run. Raises what `Bucket.create` raises, and `RunLocked`.
        """
        outside = {} if dataset.parent == self._run_dir else {MIRRORED_DATASET: dataset}
        self._tail = Tail(self._run_dir, self._copy.extents, outside)
        while not call_with_retries(self._send):
            pass
        self._save_note()  # a start after a kill would read again all that was sent now
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop_requested.wait(SEND_EVERY_S):
            why = ""
            try:
                self._send()
            except RunLocked as error:
                self.problem = error
                return
            except Exception as error:
                if not isinstance(error, BucketFailed | OSError):
                    log.exception("A bug in this program: the mirror was not updated.")
                log.warning("The mirror was not updated, which is tried again: %s", error)
                why = str(error)
            else:
                if self._lag_s() > LAG_S:
                    why = "the bucket is too slow"
            self._failures_in_row = self._failures_in_row + 1 if why else 0
            lag_s = self._lag_s()
            if self._failures_in_row >= _MAX_FAILURES and lag_s > LAG_S and self.problem is None:
                self.problem = EnvironmentStop(
                    f"the mirror {self._bucket.url} lacks the last {lag_s:.0f} s of the run: "
                    f"{why}. They are in {self._run_dir}; run the same command again there to "
                    "continue."
                )

    def _lag_s(self) -> float:
        return time.monotonic() - self._complete_at

    def _send(self, *, is_end: bool = False) -> bool:
        """Create the next part if there are changes; return whether the mirror then has all.

        Raises `BucketFailed`; the next call then sends the same part, which may have been created.
        Raises `RunLocked` if another start has the lease.
        """
        assert self._tail is not None
        if self._pending is None:
            now = time.monotonic()
            unsent = self._tail.find_unsent(_PART_BYTES)
            has_changes = bool(unsent.pieces or unsent.gone)
            if not has_changes and not is_end and now - self._sent_at < HEARTBEAT_S:
                self._complete_at = now
                return True
            is_last = is_end and unsent.is_all
            self._pending = _Pending(
                content=pack_part(self._make_part(unsent, is_end=is_last)),
                unsent=unsent,
                looked_at=now,
                is_last=is_last,
            )
        pending = self._pending
        if not self._bucket.create(self._next_name(), pending.content):
            stored = self._bucket.read(self._next_name())
            if stored != pending.content:
                raise RunLocked(self._describe_loss(stored))
        self._pending = None
        self._has_lease = not pending.is_last
        self._tail.mark_sent(pending.unsent)
        self._copy.number += 1
        self._copy.extents = self._tail.extents
        self._sent_at = time.monotonic()
        if pending.unsent.is_all:
            self._complete_at = pending.looked_at
        if pending.is_last or self._sent_at - self._noted_at >= _NOTE_EVERY_S:
            self._noted_at = self._sent_at
            self._save_note()
        return pending.unsent.is_all

    def _describe_loss(self, content: bytes | None) -> str:
        holder: Mapping[str, Any] = {}
        if content is not None:
            holder = unpack_part(content, self._bucket.url).holder
        return (
            f"{self._bucket.url}: {_describe_holder(holder)} has taken over this run while this "
            "process was silent. What this one had not sent is in its run directory only, and is "
            "set aside there when the run is continued here."
        )

    def close(self) -> None:
        """Send the rest and give the lease back.

        Raises `BucketFailed` or `RunLocked` if that fails. Only prints the error if the run is
        stopping for another error, or for this one.
        """
        is_raising = sys.exc_info()[1] is not None
        self._stop_requested.set()
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
        while self._has_lease:
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
    """A part that is being created."""

    content: bytes
    unsent: Unsent
    looked_at: float
    """The monotonic time at which the changes were collected."""
    is_last: bool


def _describe_process(token: str) -> dict[str, Any]:
    """Return a description of this process, also for others on this machine."""
    pid = os.getpid()
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "started": round(time.time(), 3),
        "token": token,
        **_process_identity(pid),
    }


def _process_identity(pid: int) -> dict[str, Any]:
    """Return what distinguishes a process from others with its number; {} if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[0] == "Z" or not boot_id():
            return {}  # "Z": it has ended, and its parent has not waited for it yet
        return {
            "boot": boot_id(),
            "pids": Path("/proc/self/ns/pid").stat().st_ino,
            "born": int(stat[19]),
        }
    except (OSError, ValueError, IndexError):
        return {}


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Whether the process that holds the lease ran on this machine and has ended."""
    mine = _process_identity(os.getpid())
    if not mine or any(mine[name] != holder.get(name) for name in ("boot", "pids")):
        return False
    return _process_identity(holder["pid"]).get("born") != holder.get("born")


def _describe_holder(holder: Mapping[str, Any]) -> str:
    return f"the process {holder.get('pid')} on host {holder.get('host')}"


def _identify_directory(run_dir: Path) -> list[int]:
    """Return numbers that distinguish a directory from copies of it."""
    return [path.stat().st_ino for path in (run_dir, run_dir / LOCK_FILE)]
