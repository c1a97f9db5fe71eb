"""Rewards of records, for rows, filters and preferences."""

from __future__ import annotations

from typing import Any

from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.records.checks import (
    BY_TURN,
    MAIN,
    THRESHOLD,
    Judgement,
    judge_record,
    record_rewards,
)
from batch_trajectories.records.record_types import Record


def training_reward(record: Record, name: str | None = None) -> float | None:
    """The reward of a record with this name; None: the reward that `judge_record` gives."""
    return judge_record(record, name).reward


def judgement_with_reward(record: Record, name: str | None) -> Judgement:
    """The judgement of a record with the reward of this name; None: the usual reward."""
    judgement = judge_record(record)
    return judgement if name is None else judgement._replace(reward=training_reward(record, name))


def why_not_passed(judgement: Judgement) -> Rejected | None:
    """The reason why an export of passed conversations leaves one out; None if it is kept."""
    if judgement.error is not None:
        return Rejected(Reason.CHECK_FAILED, f"its check gave no result: {judgement.error}")
    if judgement.passed is False:
        by_check = judgement.verdict is False
        why = "it did not pass its check" if by_check else f"a reward below {THRESHOLD:g}"
        return Rejected(Reason.NOT_PASSED, f"{why}; reward {judgement.reward:g}")
    return None


def reward_facts(record: Record) -> dict[str, Any]:
    """The rewards of a record for the metadata of its row; empty if it has none.

    `reward` is the one that counts if no name is given; `rewards` has all by name, if there are
    others.
    """
    check = record.check
    if not record.scores and (check is None or check.rewards is None):
        reward = training_reward(record)
        return {} if reward is None else {"reward": reward}
    named, by_turn = record_rewards(record)
    facts: dict[str, Any] = {}
    if (reward := training_reward(record)) is not None:
        facts["reward"] = reward
    if named.keys() - {MAIN}:
        facts["rewards"] = dict(named)
    if by_turn:
        facts[BY_TURN] = dict(by_turn)
    return facts
