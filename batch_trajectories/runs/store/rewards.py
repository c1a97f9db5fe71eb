"""Rewards by name: numbers for a whole conversation, and for each turn of the run's model.

A check prints them, a function returns them and a judge writes them in one form:

    0.5                                     one reward
    {"reward": 0.5, "format": 1}            rewards by name
    {"format": [0, 1, null]}                a reward per turn, null where there is none
    {"reward": 0.5, "turn_rewards": [0, 1]} both; the list has the name `reward`
    {"turn_rewards": {"format": [0, 1]}}    per turn, by name
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batch_trajectories.basics.text import clip, plural

MAIN = "reward"
"""The name of the reward that counts where no name is given."""
BY_TURN = "turn_rewards"

MAX_REWARDS = 100
_NAME_CHARS = 100


class Rewards(NamedTuple):
    """Rewards by name."""

    named: Mapping[str, float]
    """Those of the whole conversation."""
    by_turn: Mapping[str, Sequence[float | None]]
    """Those of each turn of the run's model; None for a turn without one."""

    def to_json(self) -> dict[str, Any]:
        """As records and scores.jsonl hold them."""
        by_turn = {BY_TURN: dict(self.by_turn)} if self.by_turn else {}
        return {"rewards": dict(self.named), **by_turn}


def parse_rewards(value: Any, *, name: str, turns: int | None) -> Rewards:
    """Read rewards in the form above; a number or list without a name gets `name`.

    A list must have `turns` items, unless that is None. Raises `ValueError` with what is wrong.
    """
    if not isinstance(value, Mapping):
        value = {name: value}
    elif not value:
        raise ValueError("is an empty object; give a number, or an object of named numbers")
    named: dict[str, float] = {}
    by_turn: dict[str, Sequence[float | None]] = {}
    for key, item in value.items():
        if key == BY_TURN:
            lists = item if isinstance(item, Mapping) else {MAIN: item}
            by_turn |= {_name(one): _per_turn(one, items, turns) for one, items in lists.items()}
        elif isinstance(item, list | tuple):
            by_turn[_name(key)] = _per_turn(key, item, turns)
        else:
            named[_name(key)] = number_in(item)
    if len(named) + len(by_turn) > MAX_REWARDS:
        raise ValueError(f"holds {len(named) + len(by_turn)} rewards; the limit is {MAX_REWARDS}")
    return Rewards(named, by_turn)


def printed_rewards(value: Any, *, turns: int | None) -> Rewards | None:
    """Rewards in an object that a program printed, which may hold other things as well.

    Of its values only numbers and `turn_rewards` count, of more than `MAX_REWARDS` numbers only
    `reward`; None if there are none. Raises `ValueError` for wrong `turn_rewards`, and for a
    `reward` that is not finite.
    """
    if not isinstance(value, Mapping):
        return None
    if isinstance(main := value.get(MAIN), float):
        finite_number(main)
    numbers = {key: item for key, item in value.items() if _is_reward(key, item)}
    if len(numbers) > MAX_REWARDS:
        numbers = {MAIN: numbers[MAIN]} if MAIN in numbers else {}
    found = {**numbers, **({BY_TURN: value[BY_TURN]} if BY_TURN in value else {})}
    return parse_rewards(found, name=MAIN, turns=turns) if found else None


def number_in(value: Any) -> float:
    """A finite number. Raises `ValueError` with what it is instead."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"holds {_shown(value)}, which is not a number")
    return finite_number(value)


def finite_number(value: Any) -> float:
    """The same for text as well."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"holds {_shown(value)}, which is not a finite number")
    return number


def _is_reward(name: Any, value: Any) -> bool:
    try:
        _name(name)
        number_in(value)
    except ValueError:
        return False
    return True


def _name(name: Any) -> str:
    if isinstance(name, str) and name.strip() and len(name) <= _NAME_CHARS:
        return name
    raise ValueError(f"names a reward {_shown(name)}; give a text of 1 to {_NAME_CHARS} characters")


def _per_turn(name: Any, items: Any, turns: int | None) -> list[float | None]:
    if not isinstance(items, list | tuple):
        raise ValueError(f"{name!r}: {_shown(items)} is not a list with a reward for each turn")
    if turns is not None and len(items) != turns:
        has = plural(len(items), "reward")
        raise ValueError(f"{name!r} has {has}, and the conversation {plural(turns, 'turn')}")
    return [None if item is None else number_in(item) for item in items]


def _shown(value: Any) -> str:
    return clip(repr(value), max_chars=100)
