"""Endpoints that do not answer, for the user to see: why, and until when they are tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_FORGET_S = 90.0
"""News of an outage comes at least once a minute while it lasts."""

_MOST_CHARS = 200


class _Outage(NamedTuple):
    words: str
    heard_at: float
    ends_at: float
    """When the first call is given up, about."""


class Outages:
    """What is known of the endpoints of a run, by their base URLs."""

    def __init__(self, proven: Iterable[str], *, say: Callable[[str], None]) -> None:
        """`proven` have answered in earlier starts; `say` reaches the user."""
        self._say = say
        self._answered = set(proven)
        self._outages: dict[str, _Outage] = {}
        self._told = False

    def note(self, url: str, words: str, left_s: float) -> None:
        """A call failed, and is tried again for `left_s`; of the first the user is told at once."""
        now = time.monotonic()
        known = self._outages.get(url)
        ends_at = now + left_s
        if known is not None and now < known.ends_at:
            ends_at = min(ends_at, known.ends_at)
        self._outages[url] = _Outage(words[:_MOST_CHARS], now, ends_at)
        if not self._told and url not in self._answered:
            self._told = True
            self._say(f"waiting for {url}: no call has succeeded yet (check --base_url): {words}")

    def on_replies(self, url: str) -> None:
        """Calls were answered."""
        self._answered.add(url)
        self._outages.pop(url, None)

    def are_all(self) -> bool:
        """Whether calls fail and none has ever been answered."""
        return bool(self._outages) and not self._answered

    def describe(self) -> str:
        """For the progress line; "" while all is well."""
        now = time.monotonic()
        for url, outage in list(self._outages.items()):
            if now - outage.heard_at > _FORGET_S:
                del self._outages[url]
        return ", ".join(
            f"waiting for {url}: {outage.words}"
            f" (giving up in {max(0.0, outage.ends_at - now):.0f} s)"
            for url, outage in self._outages.items()
        )
