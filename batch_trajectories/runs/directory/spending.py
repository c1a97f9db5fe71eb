"""All that a run has spent: the cost of every reply, even if its row is gone.

Computed from the run directory, never accumulated: from all records of the index, including those
that later attempts replaced and those of rows that are gone; from the journals of conversations
that have not ended; and from unreadable lines that were set aside, if their cost can still be
read. Charges for calls without a reply are unknown. What judges were paid for after the run, by
`score` and by exports of earlier versions, is computed from their replies in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from batch_trajectories.runs.store.files import listed
from batch_trajectories.runs.store.index import Index
from batch_trajectories.runs.store.journal import (
    Journaled,
    cost_of_damaged,
    damaged_replies,
    read_journaled_replies,
)
from batch_trajectories.runs.store.records import lines_from, load_index
from batch_trajectories.runs.store.settled import Settled

_RECORD_COST = re.compile(rb'"cost_usd":(null|[0-9.eE+-]+),"model_returned"')
"""The cost of a record and of its inner conversations; that of the record is last."""

_JUDGE_COST = re.compile(rb'"cost_usd":(null|[0-9.eE+-]+),"at":')
"""The cost of a judge's reply, in a line of one of its files; failed calls and functions have none.
It is read without parsing, so that damaged lines count, too."""

_JUDGE_FILES = ("scores.jsonl", "verdicts.jsonl")
_JUDGE_FILE = re.compile(r"(scores|verdicts)\.jsonl\..*")

_RECORD = re.compile(r"records\.jsonl\.line\d+(\.\d+)?")
_SEGMENT = re.compile(r"worker-\d+-\d+\.jsonl(\.line\d+)?(\.\d+)?")


class Spent(NamedTuple):
    """Dollars, and the number of records and replies of unknown cost."""

    usd: float
    unknown: int


def spent_by(run_dir: Path, max_attempts: int) -> Spent:
    """All that the run in `run_dir` has spent; writes nothing."""
    # In this order: a conversation that ends meanwhile is then in one of the two.
    journaled = read_journaled_replies(run_dir / "inflight")
    index = load_index(run_dir)
    return sum_up_spending(run_dir, index, journaled, Settled(index, max_attempts))


def sum_up_spending(
    run_dir: Path, index: Index, journaled: Journaled, settled: Container[bytes]
) -> Spent:
    """`spent_by`, from an index and journals that the caller has read.

    `settled` are the tasks whose records include their journals.
    """
    usd, unknown = index.costs()
    unended = (replies.costs for key, replies in journaled.tasks.items() if key not in settled)
    set_aside = _costs_set_aside(run_dir / "quarantine", journaled.damaged)
    for cost in chain(chain.from_iterable(unended), set_aside):
        usd += cost or 0.0
        unknown += cost is None
    return Spent(usd, unknown)


def spent_by_judges(run_dir: Path) -> Spent:
    """What the judges of the run in `run_dir` were paid; writes nothing."""
    set_aside = {
        file.read_bytes()
        for file in listed(run_dir / "quarantine")
        if _JUDGE_FILE.fullmatch(file.name)
    }
    lines = chain.from_iterable(lines_from(run_dir / name, 0) for name in _JUDGE_FILES)
    usd, unknown = 0.0, 0
    for line in chain((line for _, line in lines), sorted(set_aside)):
        if costs := _JUDGE_COST.findall(line):
            cost = _last(costs)
            usd += cost or 0.0
            unknown += cost is None
    return Spent(usd, unknown)


def _costs_set_aside(quarantine: Path, damaged: set[bytes]) -> Iterator[float | None]:
    """The cost of each record and reply that was set aside, None if unreadable.

    `damaged` are unreadable replies that are still in journals; the quarantine may have copies.
    """
    records, replies = set(), set(damaged)
    for file in listed(quarantine):
        if _RECORD.fullmatch(file.name):
            records.add(file.read_bytes())
        elif _SEGMENT.fullmatch(file.name):
            # Readable lines of the file are counted elsewhere: only damage is set aside.
            replies |= damaged_replies(file.read_bytes())
    for record in sorted(records):  # the same order gives the same rounding
        yield _last(_RECORD_COST.findall(record))
    for reply in sorted(replies):
        yield cost_of_damaged(reply)


def _last(costs: list[bytes]) -> float | None:
    try:
        return float(costs[-1])
    except (IndexError, ValueError):
        return None
