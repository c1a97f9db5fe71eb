"""The outcomes of a run's samples, from its index and journals: a byte per sample."""

from __future__ import annotations

from array import array
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.dataset.scan import Scan
from batch_trajectories.runs.stopping.rule import (
    RUNNING,
    UNJUDGED,
    UNKNOWN,
    outcome_of,
    rule_of,
)
from batch_trajectories.runs.store.failures import is_settled
from batch_trajectories.runs.store.index import Index
from batch_trajectories.runs.store.scores import with_later_checks

NOT_NEEDED, ENDED, TO_RUN = range(3)
"""What is with a sample: it is not needed (so far), has a record that stays, or must run."""


class Samples(NamedTuple):
    """The samples of a run by task number."""

    outcomes: bytearray
    """See `runs.stopping.rule`."""
    states: bytearray
    """`NOT_NEEDED`, `ENDED` or `TO_RUN`."""
    met: int
    """Prompts that have as many as are asked for."""
    used_up: int
    """Other prompts whose samples have all ended."""

    @property
    def not_needed(self) -> int:
        """Number of samples that are no tasks."""
        return self.states.count(NOT_NEEDED)

    def is_task(self, number: int) -> bool:
        """Whether a sample has a record or must run."""
        return self.states[number] != NOT_NEEDED

    def must_run(self, number: int) -> bool:
        """Whether it must run, or run again."""
        return self.states[number] == TO_RUN


def samples_of(
    run_dir: Path,
    config: RunConfig,
    scan: Scan,
    index: Index,
    rows: array[int],
    *,
    begun: Container[bytes],
) -> Samples:
    """Which samples are needed, given the records in these rows.

    `begun` are the tasks with journaled events. Of several verdicts the last counts, also one that
    `check` gave later.
    """
    rule = rule_of(config)
    index = with_later_checks(run_dir, index)
    outcomes, states = bytearray(len(rows)), bytearray(len(rows))
    endings = zip(index.endings(rows), index.passed(rows), strict=True)
    for number, (ending, passed) in enumerate(endings):
        if ending is not None:
            states[number] = ENDED
        if ending is not None and ending.status != "failed":
            outcomes[number] = outcome_of(passed)
        elif ending is not None and is_settled(index.entry(rows[number]), config.max_attempts):
            outcomes[number] = UNJUDGED
        elif scan.key(number) in begun:
            outcomes[number] = RUNNING
    met = used_up = 0
    for first in range(0, len(rows), scan.num_samples):
        of_prompt = outcomes[first : first + scan.num_samples]
        for sample in rule.to_run(of_prompt):
            states[first + sample] = TO_RUN
        if rule.is_met(of_prompt):
            met += 1
        else:
            used_up += UNKNOWN not in of_prompt and RUNNING not in of_prompt
    return Samples(outcomes, states, met, used_up)
