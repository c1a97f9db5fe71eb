"""What the batches of a run brought, over all its starts, from its `batches.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from runs.batch_api.batch_log import read_lines


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The sums; `summary.json` has them under `batches`."""

    batches: int
    """Batches whose results are here."""
    calls: int
    """Replies that they brought."""
    failed: int
    """Calls that had none: they failed, or expired."""
    live: int
    """Calls that were made live instead, for this or any other reason; not those of starts that
    were killed."""
    cost_usd: float
    """Of the replies whose price is known."""
    saved_usd: float
    """How much more these would have cost live."""
    unpriced: int
    """Replies whose price is unknown."""
    waited_s: float
    """Seconds in which some batch was under way."""
    waiting: int
    """Calls in batches that are not over, as far as is known."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json and `--json`."""
        return asdict(self)

    def describe(self) -> str:
        """For a person, on one line."""
        words = (
            f"batches {self.batches:,}: {self.calls:,} calls for ${self.cost_usd:,.4f}, "
            f"${self.saved_usd:,.4f} saved, {timedelta(seconds=round(self.waited_s))} waited"
        )
        words += f", {self.live:,} calls live instead" if self.live else ""
        words += f", {self.waiting:,} calls waiting" if self.waiting else ""
        return words + (f" (price of {self.unpriced:,} unknown)" if self.unpriced else "")


def sum_up(run_dir: Path) -> BatchTotals | None:
    """The sums of a run; None where it has no batches."""
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
                    collected[line["wave"]] = line  # results that were lost are fetched again
                    times.append((since, line["at"]))
    if is_empty:
        return None
    brought = collected.values()
    return BatchTotals(
        batches=len(collected),
        calls=sum(line["replies"] for line in brought),
        failed=sum(line["failed"] for line in brought),
        live=live,
        cost_usd=sum(line["cost_usd"] for line in brought),
        saved_usd=sum(line["saved_usd"] for line in brought),
        unpriced=sum(line["unpriced"] for line in brought),
        waited_s=_covered(times),
        waiting=sum(calls.get(job, 0) for job in under_way),
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time the spans cover together."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
