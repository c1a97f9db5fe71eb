"""Which replica of an endpoint answers a conversation. Decides only; `fleet` does the rest.

A conversation goes to the replica that ranks highest for its id (rendezvous hashing), so that all
processes of all starts agree without asking one another. A replica that has more than its share
takes no new conversations: hashing alone would send the longest queue its next one. From its first
request on a conversation stays where it is, until its replica is gone.
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
"""`draining`: it takes no new conversations, and keeps those that it has."""

MOST_LOAD = 1.25
"""The conversations that a replica may have, as a multiple of the mean."""

LIVE_S = 120.0
"""A conversation without a request for so long is no load any more; its tools may be at work."""

KEPT_S = 3600.0
"""After so long without a request it is forgotten where a conversation was: nothing is cached."""

LOOK_EVERY_S = 10.0
"""How often the health of a replica is asked for while nothing is wrong."""

_FIRST_LOOK_S = 0.5
_LAST_LOOK_S = 30.0
"""Between two looks at a replica that is down: doubling from the first to the last."""

_MOST_FAILURES = 3
FAILING_S = 5.0
"""So many calls that fail in a row take a replica out, however well it says it is, if the first was
so long ago: one that is only full refuses many at once."""

LOST_S = 60.0
"""Once a replica has answered no look for so long, its calls in flight are given up: a machine that
is gone ends no connection."""

UNWELL = frozenset({500, 502, 503, 504})
"""Statuses of a health path by which a server says that it should get no requests. Any other status
is of a server that is there, and perhaps has no such path."""


GONE = 0
"""In place of a status: nothing listens there."""


@dataclass(slots=True)
class _Replica:
    url: str
    state: State = "up"
    live: int = 0
    """How many conversations are here that count as load."""
    failures: int = 0
    """Calls that failed in a row."""
    failing_since: float = 0.0
    is_unwell: bool = False
    """What it last said of its health."""
    looks: int = 0
    """How often it was looked at in vain since it was up."""
    silent_since: float | None = None
    """Since when no look was answered; None: the last one was."""
    look_at: float = 0.0
    """When to look at it again."""
    tried_at: float = -math.inf


@dataclass(slots=True)
class _Home:
    replica: int
    in_flight: int = 0
    used_at: float = 0.0


class Replicas:
    """What is known of the replicas of one endpoint, and where its conversations are."""

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
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        """By conversation, the latest request last."""
        self._live: OrderedDict[str, _Home] = OrderedDict()
        """Those that count as load, in the same order."""
        self._calls = [0] * len(urls)

    def state(self, number: int) -> State:
        """What is known of a replica."""
        return self._replicas[number].state

    def choose(self, conversation: str, avoid: Iterable[int] = ()) -> int:
        """The replica for the next request of a conversation, which `leave` ends.

        "" is a request of no conversation. `avoid` are those that this request has not reached.
        """
        now = self._now()
        self._forget(now)
        avoided = frozenset(avoid)
        home = self._homes.get(conversation)
        if home is not None and home.replica not in avoided and self._keeps(home.replica):
            number = home.replica
        else:
            number = self._place(conversation, avoided)
            if conversation:
                home = self._move(conversation, number)
        self._calls[number] += 1
        self._replicas[number].tried_at = now
        if home is not None and conversation:
            home.in_flight += 1
            self._touch(conversation, home, now)
        return number

    def leave(
        self, number: int, conversation: str, error: ModelError | None, *, is_answered: bool = True
    ) -> bool:
        """A request has ended; return whether the replica has to be looked at now.

        Without an error, and not `is_answered`, it was broken off, which says nothing.
        """
        self._calls[number] -= 1
        home = self._homes.get(conversation)
        if home is not None and home.in_flight:
            home.in_flight -= 1
            self._touch(conversation, home, self._now())
        replica = self._replicas[number]
        if error is None and not is_answered:
            return False
        if error is None:
            replica.failures = 0
            if not replica.is_unwell:
                self._is_up(replica)
            return False
        if not is_of_the_replica(error):
            return False
        now = self._now()
        replica.failing_since = replica.failing_since if replica.failures else now
        replica.failures += 1
        is_gone = error.kind == "connection" and error.is_by_load  # it was not sent
        is_failing = replica.failures >= _MOST_FAILURES and now >= replica.failing_since + FAILING_S
        if is_gone or replica.is_unwell or is_failing:
            replica.state = "down"
        elif replica.state == "up":
            replica.state = "draining"
        replica.look_at = min(replica.look_at, now)
        return True

    def looked(self, number: int, status: int | None) -> None:
        """The health of a replica: a status, `GONE`, or None where it did not answer in time."""
        replica = self._replicas[number]
        replica.look_at = self._now() + LOOK_EVERY_S
        replica.is_unwell = status in UNWELL
        if status not in (None, GONE):
            replica.silent_since = None
        elif replica.silent_since is None:
            replica.silent_since = self._now()
        if status is None and replica.state == "up":
            # A busy server may just be late.
            replica.state, replica.look_at = "draining", self._now() + _FIRST_LOOK_S
        elif status in (None, GONE):
            self._is_down(replica)
        elif not replica.is_unwell:
            if replica.state == "down":
                replica.failures = 0
            self._is_up(replica)
        elif replica.failures or replica.state == "down":
            self._is_down(replica)
        else:
            replica.state = "draining"

    def is_lost(self, number: int) -> bool:
        """Whether the calls in flight at a replica are to be given up."""
        since = self._replicas[number].silent_since
        return since is not None and self._now() >= since + LOST_S

    def due(self) -> list[int]:
        """The replicas to look at now."""
        now = self._now()
        return [n for n, one in enumerate(self._replicas) if one.look_at <= now]

    def next_look_s(self) -> float:
        """Seconds until one has to be looked at."""
        return max(0.0, min(one.look_at for one in self._replicas) - self._now())

    def _keeps(self, number: int) -> bool:
        """Whether the conversations of a replica stay there: always, while no other is left."""
        if self._replicas[number].state != "down":
            return True
        return all(one.state == "down" for one in self._replicas)

    def _place(self, conversation: str, avoided: frozenset[int]) -> int:
        """The replica for a new conversation, or for one whose replica is gone."""
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
        others = sum(self._replicas[n].live for n in places)
        most = math.ceil(MOST_LOAD * max(others + 1, self._expected) / len(places))
        ranked = sorted(places, key=lambda n: _rank(self._replicas[n].url, conversation))
        return next((n for n in ranked if self._replicas[n].live < most), ranked[0])

    def _move(self, conversation: str, number: int) -> _Home:
        old = self._homes.pop(conversation, None)
        if old is not None and self._live.pop(conversation, None) is not None:
            self._replicas[old.replica].live -= 1
        # What is in flight still belongs to the old home, whose end finds the new one.
        home = _Home(number, in_flight=old.in_flight if old is not None else 0)
        self._homes[conversation] = self._live[conversation] = home
        self._replicas[number].live += 1
        return home

    def _touch(self, conversation: str, home: _Home, now: float) -> None:
        home.used_at = now
        self._homes.move_to_end(conversation)
        if conversation not in self._live:
            self._live[conversation] = home
            self._replicas[home.replica].live += 1
        self._live.move_to_end(conversation)

    def _forget(self, now: float) -> None:
        """Forget what was not used for long; what is in flight comes to the end again."""
        while self._live:
            conversation, home = next(iter(self._live.items()))
            if home.used_at > now - LIVE_S:
                break
            if home.in_flight:
                self._touch(conversation, home, now)
                continue
            del self._live[conversation]
            self._replicas[home.replica].live -= 1
        while self._homes:
            conversation, home = next(iter(self._homes.items()))
            if home.used_at > now - KEPT_S or conversation in self._live:
                break
            del self._homes[conversation]

    def _is_up(self, replica: _Replica) -> None:
        replica.state, replica.looks = "up", 0

    def _is_down(self, replica: _Replica) -> None:
        pause_s = min(_FIRST_LOOK_S * 2 ** min(replica.looks, 10), _LAST_LOOK_S)
        replica.state, replica.looks = "down", replica.looks + 1
        replica.look_at = self._now() + pause_s


def _rank(url: str, conversation: str) -> bytes:
    """The lower, the better; as good as random, and the same everywhere."""
    return blake2b(f"{url}\0{conversation}".encode(), digest_size=8).digest()


def is_of_the_replica(error: ModelError) -> bool:
    """Whether a failure says something of the server, and not of the request or of its limits."""
    if error.retry_after_s is not None:
        return False
    return error.kind in ("connection", "timeout", "malformed", "overloaded")
