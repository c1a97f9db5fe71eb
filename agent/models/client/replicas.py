"""Decides which replica of an endpoint answers a conversation; `fleet` sends the requests.

A conversation goes to the replica that ranks highest for its id (rendezvous hashing), so that all
processes of all starts agree without asking one another. A replica with more than its share takes
no new conversations: hashing alone would overload some. After its first request a conversation
stays at its replica until that is gone.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from agent.models.connection import Share
from agent.models.errors import ModelError

State = Literal["up", "draining", "down"]
"""The state of a replica; `draining`: it takes no new conversations but keeps the ones it has."""

MAX_LOAD = 1.25
"""Maximum conversations of a replica, as a multiple of the mean."""

LIVE_S = 120.0
"""Seconds without a request after which a conversation, whose tools may be at work, is no load."""

FORGET_S = 3600.0
"""Seconds without a request after which it is forgotten which replica a conversation had.

By then its prompt is no longer cached there.
"""

CHECK_EVERY_S = 10.0
"""Seconds between two health checks of a replica while nothing is wrong."""

_FIRST_CHECK_S = 0.5
_LAST_CHECK_S = 30.0
"""Seconds between two checks of a replica that is down: doubling from the first to the last."""

_MAX_FAILURES = 3
FAILING_S = 5.0
"""A replica is down after `_MAX_FAILURES` failed calls in a row, if the first was at least
`FAILING_S` seconds ago, whatever its health check says. A replica that is only full also refuses
many calls, but all at once."""

LOST_S = 60.0
"""Seconds without an answer to a health check after which the calls in flight at a replica are
given up: a machine that is gone ends no connection."""

UNWELL = frozenset({500, 502, 503, 504})
"""Statuses of a health check by which a server asks for no requests.

Any other status shows a running server, even one that lacks the health path.
"""


GONE = 0
"""The value in place of a status if nothing listens there."""


@dataclass(slots=True)
class _Replica:
    url: str
    state: State = "up"
    live: int = 0
    """The number of conversations at this replica that count as load."""
    failures: int = 0
    """Calls that failed in a row."""
    failing_since: float = 0.0
    is_unwell: bool = False
    """The last health check had a status of `UNWELL`."""
    failed_checks: int = 0
    """Health checks that failed since the replica was up."""
    silent_since: float | None = None
    """The time of the first unanswered check; None if the last check was answered."""
    check_at: float = 0.0
    """The time of the next health check."""
    tried_at: float = -math.inf
    """The time of the last request."""


@dataclass(slots=True)
class _Assignment:
    """The replica of a conversation."""

    replica: int
    in_flight: int = 0
    used_at: float = 0.0


class Replicas:
    """The states of an endpoint's replicas, and the assignment of conversations to them."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        share: Share = Share(),  # noqa: B008 - a tuple
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = [_Replica(url) for url in urls]
        self._expected = share.conversations
        self._now = now
        self._assignments: OrderedDict[str, _Assignment] = OrderedDict()
        """Assignments by conversation; the one with the latest request is last."""
        self._live: OrderedDict[str, _Assignment] = OrderedDict()
        """The assignments that count as load, in the same order."""
        self._calls = [0] * len(urls)
        """Calls in flight, by replica."""

    def state(self, number: int) -> State:
        """The state of a replica."""
        return self._replicas[number].state

    def choose(self, conversation: str, avoid: Iterable[int] = ()) -> int:
        """Choose the replica for the next request of a conversation; `leave` ends the request.

        `conversation` is "" for a request of none. `avoid` are the replicas that this request could
        not reach.
        """
        now = self._now()
        self._forget(now)
        avoided = frozenset(avoid)
        assignment = self._assignments.get(conversation)
        if (
            assignment is not None
            and assignment.replica not in avoided
            and self._keeps_conversations(assignment.replica)
        ):
            number = assignment.replica
        else:
            number = self._choose_new(conversation, avoided)
            if conversation:
                assignment = self._move(conversation, number)
        self._calls[number] += 1
        self._replicas[number].tried_at = now
        if assignment is not None and conversation:
            assignment.in_flight += 1
            self._touch(conversation, assignment, now)
        return number

    def leave(
        self, number: int, conversation: str, error: ModelError | None, *, is_answered: bool = True
    ) -> bool:
        """End a request; returns whether the replica's health has to be checked now.

        Without an error, `is_answered` False means that the request was cancelled.
        """
        self._calls[number] -= 1
        assignment = self._assignments.get(conversation)
        if assignment is not None and assignment.in_flight:
            assignment.in_flight -= 1
            self._touch(conversation, assignment, self._now())
        replica = self._replicas[number]
        if error is None and not is_answered:
            return False  # a cancelled request shows nothing about the replica
        if error is None:
            replica.failures = 0
            if not replica.is_unwell:
                self._mark_reachable(replica)
            return False
        if not is_replica_failure(error):
            return False
        now = self._now()
        replica.failing_since = replica.failing_since if replica.failures else now
        replica.failures += 1
        is_gone = error.kind == "connection" and error.is_by_load  # it was not sent
        is_failing = replica.failures >= _MAX_FAILURES and now >= replica.failing_since + FAILING_S
        if is_gone or replica.is_unwell or is_failing:
            replica.state = "down"
        elif replica.state == "up":
            replica.state = "draining"
        replica.check_at = min(replica.check_at, now)
        return True

    def record_check(self, number: int, status: int | None) -> None:
        """Record a health check: its status, `GONE`, or None if no answer came in time."""
        replica = self._replicas[number]
        replica.check_at = self._now() + CHECK_EVERY_S
        replica.is_unwell = status in UNWELL
        if status not in (None, GONE):
            replica.silent_since = None
        elif replica.silent_since is None:
            replica.silent_since = self._now()
        if status is None and replica.state == "up":
            # A busy server may just be late.
            replica.state, replica.check_at = "draining", self._now() + _FIRST_CHECK_S
        elif status in (None, GONE):
            self._mark_unreachable(replica)
        elif not replica.is_unwell:
            if replica.state == "down":
                replica.failures = 0
            self._mark_reachable(replica)
        elif replica.failures or replica.state == "down":
            self._mark_unreachable(replica)
        else:
            replica.state = "draining"

    def is_lost(self, number: int) -> bool:
        """Whether a replica has been silent so long that its calls in flight are given up."""
        since = self._replicas[number].silent_since
        return since is not None and self._now() >= since + LOST_S

    def due(self) -> list[int]:
        """The replicas whose health has to be checked now."""
        now = self._now()
        return [n for n, one in enumerate(self._replicas) if one.check_at <= now]

    def next_check_s(self) -> float:
        """Seconds until the next health check is due."""
        return max(0.0, min(one.check_at for one in self._replicas) - self._now())

    def _keeps_conversations(self, number: int) -> bool:
        """Whether the conversations of a replica stay there; they do if all are down."""
        if self._replicas[number].state != "down":
            return True
        return all(one.state == "down" for one in self._replicas)

    def _choose_new(self, conversation: str, avoided: frozenset[int]) -> int:
        """Choose the replica for a new conversation, or for one whose replica is gone."""
        every = range(len(self._replicas))
        usable = [n for n in every if n not in avoided] or every
        for state in ("up", "draining"):
            if places := [n for n in usable if self._replicas[n].state == state]:
                break
        else:
            # All are down: one after the other, so that each is tried.
            return min(usable, key=lambda n: self._replicas[n].tried_at)
        if not conversation:
            return min(places, key=lambda n: (self._calls[n], self._replicas[n].live))
        live = sum(self._replicas[n].live for n in places)
        max_live = math.ceil(MAX_LOAD * max(live + 1, self._expected) / len(places))
        ranked = sorted(places, key=lambda n: _rank(self._replicas[n].url, conversation))
        return next((n for n in ranked if self._replicas[n].live < max_live), ranked[0])

    def _move(self, conversation: str, number: int) -> _Assignment:
        old = self._assignments.pop(conversation, None)
        if old is not None and self._live.pop(conversation, None) is not None:
            self._replicas[old.replica].live -= 1
        # Requests in flight are taken over, since `leave` finds the new assignment.
        assignment = _Assignment(number, in_flight=old.in_flight if old is not None else 0)
        self._assignments[conversation] = self._live[conversation] = assignment
        self._replicas[number].live += 1
        return assignment

    def _touch(self, conversation: str, assignment: _Assignment, now: float) -> None:
        assignment.used_at = now
        self._assignments.move_to_end(conversation)
        if conversation not in self._live:
            self._live[conversation] = assignment
            self._replicas[assignment.replica].live += 1
        self._live.move_to_end(conversation)

    def _forget(self, now: float) -> None:
        """Forget conversations without a request for long; requests in flight keep theirs."""
        while self._live:
            conversation, assignment = next(iter(self._live.items()))
            if assignment.used_at > now - LIVE_S:
                break
            if assignment.in_flight:
                self._touch(conversation, assignment, now)
                continue
            del self._live[conversation]
            self._replicas[assignment.replica].live -= 1
        while self._assignments:
            conversation, assignment = next(iter(self._assignments.items()))
            if assignment.used_at > now - FORGET_S or conversation in self._live:
                break
            del self._assignments[conversation]

    def _mark_reachable(self, replica: _Replica) -> None:
        replica.state, replica.failed_checks = "up", 0

    def _mark_unreachable(self, replica: _Replica) -> None:
        pause_s = min(_FIRST_CHECK_S * 2 ** min(replica.failed_checks, 10), _LAST_CHECK_S)
        replica.state, replica.failed_checks = "down", replica.failed_checks + 1
        replica.check_at = self._now() + pause_s


def _rank(url: str, conversation: str) -> bytes:
    """A rank, of which the lowest is best: as good as random, and equal in all processes."""
    return blake2b(f"{url}\0{conversation}".encode(), digest_size=8).digest()


def is_replica_failure(error: ModelError) -> bool:
    """Whether a failure is caused by the server, and not by the request or by rate limits."""
    if error.retry_after_s is not None:
        return False
    return error.kind in ("connection", "timeout", "malformed", "overloaded")
