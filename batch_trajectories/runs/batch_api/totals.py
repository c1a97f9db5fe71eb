"""Totals of a run's batches over all its starts, from `batches.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from batch_trajectories.basics.text import plural
from batch_trajectories.runs.batch_api.batch_log import read_lines


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The totals; `summary.json` has them under `batches`."""

    batches: int
    """Batches whose results were fetched."""
    calls: int
    """Their replies."""
    failed: int
    """Their calls without a reply: failed or expired."""
    live: int
    """Calls that were made live instead, for any reason; without those of killed starts."""
    cost_usd: float
    """Cost of the replies with a known price."""
    saved_usd: float
    """How much more these would have cost live."""
    unpriced: int
    """Replies of unknown price."""
    waited_s: float
    """Seconds with a batch under way."""
    waiting: int
    """Calls in unfinished batches, as far as known."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json and `--json`."""
        return asdict(self)

    def describe(self) -> str:
        """For a person, on one line."""
        summary = (
            f"batches {self.batches:,}: {plural(self.calls, 'call')} for ${self.cost_usd:,.4f}, "
            f"${self.saved_usd:,.4f} saved, {timedelta(seconds=round(self.waited_s))} waited"
        )
        summary += f", {plural(self.live, 'call')} live instead" if self.live else ""
        summary += f", {plural(self.waiting, 'call')} waiting" if self.waiting else ""
        return summary + (f" (price of {self.unpriced:,} unknown)" if self.unpriced else "")


def compute_batch_totals(run_dir: Path) -> BatchTotals | None:
    """The totals of a run's batches; None if it has none."""
    calls: dict[str, int] = {}
    under_way: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    collected: dict[str, dict[str, Any]] = {}
    live = 0
    is_empty = True
    for line in read_lines(run_dir / "batches.jsonl"):
        is_empty = False
        match line.get("kind"):
            case "gathered":
                calls[line["wave"]] = len(line["items"])
            case "sending":
                under_way[line["wave"]] = line["at"]
            case "live":
                live += line["calls"]
            case "collected" | "failed" | "void" as kind:
                since = under_way.pop(line["wave"], line["at"])
                if kind == "collected":
                    # Results that were lost are fetched again: the last line counts.
                    collected[line["wave"]] = line
                    times.append((since, line["at"]))
    if is_empty:
        return None
    lines = collected.values()
    return BatchTotals(
        batches=len(collected),
        calls=sum(line["replies"] for line in lines),
        failed=sum(line["failed"] for line in lines),
        live=live,
        cost_usd=sum(line["cost_usd"] for line in lines),
        saved_usd=sum(line["saved_usd"] for line in lines),
        unpriced=sum(line["unpriced"] for line in lines),
        waited_s=_covered(times),
        waiting=sum(calls.get(job, 0) for job in under_way),
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The total time that the spans cover."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
