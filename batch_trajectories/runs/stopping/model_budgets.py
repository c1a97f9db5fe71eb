"""What the conversations of each model of a cascade may cost: `--model_budgets`.

A limit on what begins, not on calls: conversations in flight end, as with `--max_cost_usd`. One
whose cost is unknown counts as the dearest known one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from batch_trajectories.basics.text import plural
from batch_trajectories.runs.store.records import lines_from


class _Paid(msgspec.Struct, gc=False):
    model: str | None = None
    cost_usd: float | None = None


class ModelBudgets:
    """The budgets of some models, and what their conversations have cost."""

    def __init__(self, budgets: Mapping[str, float], run_dir: Path) -> None:
        """`budgets` are in dollars; the records of `run_dir` count, replaced ones, too."""
        self._budgets = budgets
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._dearest: dict[str, float] = {}
        """The most that a conversation of a model is known to have cost."""
        self._unknown: Counter[str] = Counter()
        """Conversations of unknown cost."""
        self._waiting: dict[str, set[int]] = {}
        for paid in _paid_in(run_dir) if budgets else ():
            self.add(paid.model, paid.cost_usd)

    def add(self, model: str | None, usd: float | None) -> None:
        """A conversation of a model has ended."""
        if model is None or model not in self._budgets:
            return
        if usd is None:
            self._unknown[model] += 1
        else:
            self._spent[model] += usd
            self._dearest[model] = max(usd, self._dearest.get(model, 0.0))

    def allows(self, model: str | None, number: int) -> bool:
        """Whether a sample may begin; one that may not waits for another start."""
        if model is None or model not in self._budgets:
            return True
        if self._counted(model) < self._budgets[model]:
            return True
        self._waiting.setdefault(model, set()).add(number)
        return False

    def problem(self) -> str | None:
        """Which budgets are used up, and what waits for them; None if nothing does."""
        said = [
            f"{model} has cost ${self._spent[model]:.4f}{self._besides(model)} of "
            f"${self._budgets[model]:g} (model_budgets), and {plural(len(numbers), 'prompt')} "
            "would need it"
            for model, numbers in self._waiting.items()
        ]
        return "; ".join(said) or None

    def _counted(self, model: str) -> float:
        """Dollars, with one of unknown cost as the dearest known one, else as the whole budget."""
        each = self._dearest.get(model) or self._budgets[model]
        return self._spent[model] + self._unknown[model] * each

    def _besides(self, model: str) -> str:
        unknown = self._unknown[model]
        return f" and {plural(unknown, 'conversation')} of unknown cost" if unknown else ""


def _paid_in(run_dir: Path) -> Iterator[_Paid]:
    decode = msgspec.json.Decoder(_Paid).decode
    return (decode(line) for _, line in lines_from(run_dir / "records.jsonl", 0))
