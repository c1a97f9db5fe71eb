"""The dollar budget of a judge's calls, over all starts.

The worst case of a call is reserved before it and settled after it, both on disk, so a call whose
reply a crash has lost counts as spent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from agent.models.admission import CostEstimate
from agent.models.errors import ModelError
from agent.models.model import Completion
from batch_trajectories.basics.errors import RunError
from batch_trajectories.runs.config.amounts import Cost
from batch_trajectories.runs.supervisor.budget import BudgetLog

LOG = "judge_budget.jsonl"


class OutOfBudget(RunError):
    """What is left of the budget is less than the next call may cost."""

    exit_code = 3


class JudgeBudget:
    """Lets calls through while the budget covers them; see `CallAdmission`."""

    has_answered = False

    def __init__(self, run_dir: Path, budget_usd: float, *, known_usd: float) -> None:
        """`known_usd` is the cost of the replies on disk."""
        self._log = BudgetLog(run_dir, run_dir / "quarantine", name=LOG)
        self._budget_usd = budget_usd
        self._left_usd = budget_usd - max(known_usd, self._log.balance.usd)
        self._in_flight = 0
        self._settled = asyncio.Event()

    async def enter(self, claim: Callable[[], CostEstimate]) -> _Permit:
        """Reserve the worst case of a call.

        Waits while calls in flight may leave enough of theirs, else raises `OutOfBudget`.
        """
        worst_usd = claim().usd
        assert worst_usd is not None, "the price and the reply limit were checked at the start"
        while worst_usd > self._left_usd:
            if not self._in_flight:
                raise OutOfBudget(
                    f"--max_judge_cost_usd={self._budget_usd:g}: ${max(self._left_usd, 0.0):.4f} "
                    f"is left, and the next call may cost ${worst_usd:.4f}. Finished scores are "
                    "saved; raise the budget and run the same command again to continue."
                )
            self._settled.clear()
            await self._settled.wait()
        self._left_usd -= worst_usd
        self._in_flight += 1
        self._log.append("lent", Cost(worst_usd))
        return _Permit(self, worst_usd)

    def settle(self, worst_usd: float, outcome: Completion | ModelError | None) -> None:
        """A call is over: return what it did not spend."""
        spent_usd = worst_usd
        if isinstance(outcome, ModelError):
            spent_usd = worst_usd if outcome.may_have_cost else 0.0
        elif outcome is not None and outcome.cost_usd is not None:
            spent_usd = outcome.cost_usd
        self._left_usd += worst_usd - spent_usd
        self._in_flight -= 1
        self._settled.set()
        self._log.append("returned", Cost(worst_usd - spent_usd))

    def close(self) -> None:
        """Close the log."""
        self._log.close()


class _Permit:
    """One call whose worst case is reserved."""

    def __init__(self, budget: JudgeBudget, worst_usd: float) -> None:
        self._budget = budget
        self._worst_usd = worst_usd
        self.sent_at = time.monotonic()

    def leave(self, outcome: Completion | ModelError | None) -> None:
        """See `Permit`."""
        self._budget.settle(self._worst_usd, outcome)
