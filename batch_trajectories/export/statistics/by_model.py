"""Counts the cost and the passes of each model of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batch_trajectories.export.statistics.counts import KeyCounts
from batch_trajectories.records.record_types import Record


class ByModel:
    """Cost and passes by model, of the records added so far."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, KeyCounts[str]] = defaultdict(KeyCounts)
        self._dollars: defaultdict[str, float] = defaultdict(float)

    def add(self, record: Record, passed: bool | None) -> None:
        """Count a record; `passed` is None if nothing judged it."""
        counts = self._counts[model := record.model or ""]
        counts["records"] += 1
        counts["judged"] += passed is not None
        counts["passed"] += passed is True
        counts["unknown"] += record.cost_usd is None
        self._dollars[model] += record.cost_usd or 0.0

    def merge(self, other: ByModel) -> None:
        """Add the records of `other`."""
        for model, counts in other._counts.items():
            self._counts[model].merge(counts)
            self._dollars[model] += other._dollars[model]

    def to_json(self, order: Sequence[str] = ()) -> list[dict[str, Any]]:
        """A dictionary per model; empty with fewer than two models.

        Models of `order`, as in a cascade, come first, then the others by name. Keys: `model`,
        `records`, `judged`, `passed`, `cost_usd` (without the tasks of `cost_unknown`; None if no
        cost is known) and `passed_per_dollar`, which is None if nothing was paid or a cost is
        unknown.
        """
        if len(self._counts) < 2:
            return []
        ranks = {model: n for n, model in enumerate(order)}
        ordered = sorted(self._counts, key=lambda model: (ranks.get(model, len(ranks)), model))
        return [self._figures(model) for model in ordered]

    def _figures(self, model: str) -> dict[str, Any]:
        counts, dollars = self._counts[model], self._dollars[model]
        is_known = dollars > 0 and not counts["unknown"]
        return {
            "model": model,
            **{name: counts[name] for name in ("records", "judged", "passed")},
            "cost_usd": None if counts["unknown"] and not dollars else dollars,
            "cost_unknown": counts["unknown"],
            "passed_per_dollar": counts["passed"] / dollars if is_known else None,
        }


def as_text(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format the figures as a table."""
    width = max([30, *(len(one["model"]) for one in models)]) + 2
    if models:
        yield f"{'model':<{width}}{'tasks':>10}{'passed':>10}{'dollars':>12}{'passed per $':>14}"
    for one in models:
        per_dollar = one["passed_per_dollar"]
        dollars = "unknown"
        if one["cost_usd"] or not one["cost_unknown"]:
            dollars = f"{one['cost_usd']:,.4f}"
        yield (
            f"{one['model']:<{width}}{one['records']:>10,}{one['passed']:>10,}{dollars:>12}"
            f"{'-' if per_dollar is None else f'{per_dollar:,.4g}':>14}"
        )
