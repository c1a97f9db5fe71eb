"""The rewards of a record, for rows, filters and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runs.store.checks import Judgement, judgement_of, rewards_of
from runs.store.rewards import BY_TURN, MAIN


def reward_of(record: Mapping[str, Any], name: str | None = None) -> float | None:
    """The reward of a record with this name; without a name the one that `judgement_of` gives."""
    return judgement_of(record, name).reward


def turn_rewards_of(record: Mapping[str, Any], name: str | None = None) -> list[float | None]:
    """The rewards of the turns of the run's model; an empty list without any of this name.

    Without a name they are those named `reward`, else the first.
    """
    by_turn = rewards_of(record).by_turn
    if name is None:
        name = MAIN if MAIN in by_turn else next(iter(by_turn), MAIN)
    return list(by_turn.get(name, ()))


def judged(record: Mapping[str, Any], name: str | None) -> Judgement:
    """Whether a record passed its check, with the reward of this name."""
    found = judgement_of(record)
    return found if name is None else Judgement(found.passed, reward_of(record, name))


def reward_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards of a record for the metadata of its row; empty if it has none.

    `reward` counts where no name is given; `rewards` are all by name, if there are others.
    """
    check = record.get("check")
    if not record.get("scores") and not (isinstance(check, dict) and "rewards" in check):
        reward = reward_of(record)
        return {} if reward is None else {"reward": reward}
    named, by_turn = rewards_of(record)
    facts: dict[str, Any] = {}
    if (reward := reward_of(record)) is not None:
        facts["reward"] = reward
    if named.keys() - {MAIN}:
        facts["rewards"] = dict(named)
    if by_turn:
        facts[BY_TURN] = dict(by_turn)
    return facts
