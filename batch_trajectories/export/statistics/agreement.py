"""Measures how far reviewers agree with each other, and with checks and judges.

For each pair it gives the number of records that both judged, the share with the same verdict, and
Cohen's kappa: 0 if they agree as often as by chance, 1 if they always agree, None if both gave one
verdict only. The verdict of a check or judge is keep if it passed the record; compared with it, a
reviewer's `reject` and `fix` both count as not keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from batch_trajectories.records.checks import THRESHOLD, judge_record
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import DISPUTED, agreed_verdict

_CHECK = "check"
_NOT_KEPT = "not kept"


class Agreement:
    """Counts of the labels of the records added so far."""

    def __init__(self) -> None:
        self._verdicts: Counter[str] = Counter()
        self._reviewers: Counter[str] = Counter()
        self._pairs: dict[tuple[str, str], Counter[tuple[str, str]]] = {}

    def add(self, record: Record) -> None:
        """Count one record."""
        if not record.labels:
            return
        if (verdict := agreed_verdict(record.labels)) is not None:
            self._verdicts[verdict] += 1
        given = {label.who: label.verdict for label in record.labels if label.verdict is not None}
        self._reviewers.update(given.keys())
        for one, other in combinations(sorted(given), 2):
            self._count(one, other, given[one], given[other])
        for judge, has_passed in _judges(record):
            judged = "keep" if has_passed else _NOT_KEPT
            for reviewer, verdict in given.items():
                reviewer_verdict = verdict if verdict == "keep" else _NOT_KEPT
                self._count(reviewer, judge, reviewer_verdict, judged)

    def merge(self, other: Agreement) -> None:
        """Add the records of `other`."""
        self._verdicts.update(other._verdicts)
        self._reviewers.update(other._reviewers)
        for pair, counts in other._pairs.items():
            self._pairs.setdefault(pair, Counter()).update(counts)

    def to_json(self) -> dict[str, Any]:
        """`labels`: `verdicts`, `reviewers` (number of records), `agreement`; {} without labels."""
        labels = {
            "verdicts": dict(sorted(self._verdicts.items())),
            "reviewers": dict(sorted(self._reviewers.items())),
            "agreement": [
                {"between": list(pair), **_agreement(counts)}
                for pair, counts in sorted(self._pairs.items())
            ],
        }
        return {"labels": labels} if self._verdicts else {}

    def _count(self, one: str, other: str, verdict: str, other_verdict: str) -> None:
        self._pairs.setdefault((one, other), Counter())[verdict, other_verdict] += 1


def _judges(record: Record) -> Iterator[tuple[str, bool]]:
    if record.check is not None and (verdict := judge_record(record).verdict) is not None:
        yield _CHECK, verdict
    for score in record.scores or ():
        reward = next(iter((score.rewards or {}).values()), None)
        if reward is not None and score.source != _CHECK:
            yield score.source, reward >= THRESHOLD


def _agreement(counts: Counter[tuple[str, str]]) -> dict[str, Any]:
    both = counts.total()
    observed = sum(count for (one, other), count in counts.items() if one == other) / both
    first, second = Counter[str](), Counter[str]()
    for (one, other), count in counts.items():
        first[one] += count
        second[other] += count
    by_chance = sum(count * second[name] for name, count in first.items()) / both**2
    kappa = None if by_chance == 1 else round((observed - by_chance) / (1 - by_chance), 4)
    return {"records": both, "same": round(observed, 4), "kappa": kappa}


def as_text(labels: Mapping[str, Any]) -> Iterator[str]:
    """Describe the labels, for a terminal."""
    counts = ", ".join(f"{name} {count:,}" for name, count in labels["verdicts"].items())
    disputed = " (reviewers differ)" if DISPUTED in labels["verdicts"] else ""
    yield f"labels: {counts}{disputed}; by " + ", ".join(
        f"{who} {count:,}" for who, count in labels["reviewers"].items()
    )
    for one in labels["agreement"]:
        kappa = "" if one["kappa"] is None else f", Cohen's kappa {one['kappa']:.2f}"
        yield (
            f"  {' and '.join(one['between'])}: the same verdict for {100 * one['same']:.1f}% of "
            f"{one['records']:,}{kappa}"
        )
