"""What a run has spent in all: every reply that came, whatever became of its row since.

Computed from what lies in the run directory, never accumulated: all records of the index, those
that later attempts replaced and those of rows that are gone included; the journals of
conversations that have not ended; and what was set aside as unreadable, as far as its price can
still be read. What was charged for a call whose reply never came stands nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from runs.store.files import listed
from runs.store.index import Index
from runs.store.journal import Journaled, cost_of_damaged, damaged_replies, under_way
from runs.store.records import load_index
from runs.store.settled import Settled

_RECORD_COST = re.compile(rb'"cost_usd":(null|[0-9.eE+-]+),"model_returned"')
"""That of a record itself, and of its inner conversations: the last one counts."""

_RECORD = re.compile(r"records\.jsonl\.line\d+(\.\d+)?")
_SEGMENT = re.compile(r"worker-\d+-\d+\.jsonl(\.line\d+)?(\.\d+)?")


class Spent(NamedTuple):
    """Dollars, and how many records and replies there are whose price is not known."""

    usd: float
    unknown: int


def spent_by(run_dir: Path, max_attempts: int) -> Spent:
    """What the run in `run_dir` has spent in all; writes nothing."""
    # In this order: what ends meanwhile has its record by then.
    journaled = under_way(run_dir / "inflight")
    index = load_index(run_dir)
    return sum_up_spending(run_dir, index, journaled, Settled(index, max_attempts))


def sum_up_spending(
    run_dir: Path, index: Index, journaled: Journaled, settled: Container[bytes]
) -> Spent:
    """The same, where these are known; `settled` are the tasks whose record holds their journal."""
    usd, unknown = index.costs()
    unended = (one.costs for key, one in journaled.tasks.items() if key not in settled)
    set_aside = _set_aside(run_dir / "quarantine", journaled.damaged)
    for cost in chain(chain.from_iterable(unended), set_aside):
        usd += cost or 0.0
        unknown += cost is None
    return Spent(usd, unknown)


def _set_aside(quarantine: Path, damaged: set[bytes]) -> Iterator[float | None]:
    """What each record and each reply cost that was set aside, None where that is unreadable.

    `damaged` are replies whose lines still stand in journals: of these there may be copies.
    """
    records, replies = set(), set(damaged)
    for file in listed(quarantine):
        if _RECORD.fullmatch(file.name):
            records.add(file.read_bytes())
        elif _SEGMENT.fullmatch(file.name):
            # What is whole in a segment stands in records: else it would not have been set aside.
            replies |= damaged_replies(file.read_bytes())
    for record in sorted(records):  # so that the sum has the same last digits each time
        yield _last(_RECORD_COST.findall(record))
    for reply in sorted(replies):
        yield cost_of_damaged(reply)


def _last(costs: list[bytes]) -> float | None:
    try:
        return float(costs[-1])
    except (IndexError, ValueError):
        return None
