"""Counted reasons of failures, without the values that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from batch_trajectories.basics.text import without_values

_MOST_CHARS = 90
_MOST_SHOWN = 10
_MOST_KEPT = 1000


class Reasons:
    """Counts reasons that are alike but for their values; keeps a limited number of them."""

    def __init__(self, about: str = "") -> None:
        """Each reason is shown after `about`."""
        self._about = about
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        """Count a reason."""
        plain = "".join(c if c.isprintable() else " " for c in reason)
        text = f"{self._about}{without_values(' '.join(plain.split()), '…')[:_MOST_CHARS]}"
        self._count(text, 1)

    def merge(self, other: Reasons) -> None:
        """Add the counts of `other`."""
        for text, count in other._counts.items():
            self._count(text, count)

    def to_json(self) -> dict[str, int]:
        """The counts by reason, the most frequent first, rare ones together at the end."""
        known = ((text, count) for text, count in self._counts.items() if text != self._other)
        ordered = sorted(known, key=lambda item: (-item[1], item[0]))
        shown = dict(islice(ordered, _MOST_SHOWN))
        if rest := self._counts.total() - sum(shown.values()):
            shown[self._other] = rest
        return shown

    def _count(self, text: str, count: int) -> None:
        if text not in self._counts and len(self._counts) >= _MOST_KEPT:
            text = self._other
        self._counts[text] += count

    @property
    def _other(self) -> str:
        return f"{self._about}other reasons"


def lines_of(reasons: Mapping[str, int]) -> Iterator[str]:
    """The counts as lines for a person."""
    return (f"  {count:>9,}  {reason}" for reason, count in reasons.items())
