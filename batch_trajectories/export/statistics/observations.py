"""The share of a conversation's tokens that the model did not write: what tools and users said."""

from __future__ import annotations

from itertools import pairwise

from batch_trajectories.records.record_types import Record


def compute_observation_share(record: Record) -> float | None:
    """The share of observations among all tokens of a conversation, from 0 to 1.

    Observations are results of tools and later messages of users. Endpoints do not count them, but
    the input of a call is that of the call before, its output, and what was observed since. None if
    a count is unknown, if the input of a call is smaller than that (compaction, reasoning that is
    not sent again), and for agents that are commands, whose calls can belong to several
    conversations.
    """
    if record.agent is not None or not record.own_turns:
        return None
    counts: list[tuple[int, int]] = []
    for turn in record.own_turns:
        usage = turn.usage
        if usage is None or usage.input_tokens is None or usage.output_tokens is None:
            return None
        counts.append((usage.input_tokens, usage.output_tokens))
    observed = [later - (given + made) for (given, made), (later, _) in pairwise(counts)]
    total = sum(counts[-1])
    if not total or any(tokens < 0 for tokens in observed):
        return None
    return sum(observed) / total
