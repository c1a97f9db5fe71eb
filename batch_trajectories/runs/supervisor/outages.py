"""Reports endpoints that do not answer: why, and how long they are retried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

_FORGET_S = 90.0
"""Workers report an outage at least once a minute while it lasts."""

_MAX_CHARS = 200


class _Outage(NamedTuple):
    words: str
    heard_at: float
    ends_at: float
    """Approximately when the first call is given up."""


class Outages:
    """The outages of a run's endpoints, by base URL."""

    def __init__(self, proven: Iterable[str], *, say: Callable[[str], None]) -> None:
        """`proven` have answered in earlier starts; `say` shows a message to the user."""
        self._say = say
        self._answered = set(proven)
        self._outages: dict[str, _Outage] = {}
        self._has_said = False

    def note(self, url: str, words: str, left_s: float) -> None:
        """A call failed and is retried for `left_s`; the first is reported at once."""
        now = time.monotonic()
        known = self._outages.get(url)
        ends_at = now + left_s
        if known is not None and now < known.ends_at:
            ends_at = min(ends_at, known.ends_at)
        self._outages[url] = _Outage(words[:_MAX_CHARS], now, ends_at)
        if not self._has_said and url not in self._answered:
            self._has_said = True
            self._say(f"waiting for {url}: no call has succeeded yet (see --base_url): {words}")

    def on_replies(self, url: str) -> None:
        """The endpoint has answered calls."""
        self._answered.add(url)
        self._outages.pop(url, None)

    def are_all(self) -> bool:
        """Whether calls fail and no endpoint has ever answered."""
        return bool(self._outages) and not self._answered

    def describe(self) -> str:
        """For the progress line; "" if there is no outage."""
        now = time.monotonic()
        for url, outage in list(self._outages.items()):
            if now - outage.heard_at > _FORGET_S:
                del self._outages[url]
        return ", ".join(
            f"waiting for {url}: {outage.words}"
            f" (giving up in {max(0.0, outage.ends_at - now):.0f} s)"
            for url, outage in self._outages.items()
        )
