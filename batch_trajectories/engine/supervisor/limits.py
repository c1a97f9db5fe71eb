"""The division of each endpoint's limit on calls among the workers of a run.

The shares never exceed the limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.models.model import endpoint_url
from batch_trajectories.basics.text import plural
from batch_trajectories.config.endpoints import EndpointLimits
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import Load, SetLimits
from batch_trajectories.engine.supervisor.limiter import Limiter

if TYPE_CHECKING:
    from batch_trajectories.engine.shared_limits import SharedLimits

_TURN_S = 1.0
"""Seconds for which a worker keeps an uneven remainder."""

_BUSY = 0.85
"""Share of a core from which on the worker itself, and no endpoint, limits its calls."""

_LIMITS = {
    "conversations": "the number of conversations in progress",
    "between_calls": "the work between calls (workspaces, checks, rewards)",
}
"""The limits that need more than their name in a sentence."""

_HEARTBEAT_WEIGHT = 0.2
"""The weight of a heartbeat in the moving average."""


class RunLimits:
    """Collects the results of the workers' calls, and limits their calls in flight."""

    def __init__(
        self, limits: Mapping[str, EndpointLimits], shared: SharedLimits | None = None
    ) -> None:
        """`limits` by endpoint (see `ModelSettings.endpoint`); with `shared`, several runs share
        the rates."""
        self._endpoints = {
            endpoint: _SharedLimit(endpoint, user_limits, shared)
            for endpoint, user_limits in limits.items()
        }
        self._busy = 0.0
        """The share of a core that workers have used lately, on average."""
        self._heartbeats = self._busy_heartbeats = 0
        self._conversations_max = self._tool_calls = 0

    def on_busy(self, busy: float) -> None:
        """Count the share of a core that a worker has used."""
        self._heartbeats += 1
        self._busy_heartbeats += busy >= _BUSY
        self._busy += (busy - self._busy) * _HEARTBEAT_WEIGHT

    def on_conversations(self, in_progress: int) -> None:
        """Remember the most conversations that were in progress at once."""
        self._conversations_max = max(self._conversations_max, in_progress)

    def on_tool_calls(self, count: int) -> None:
        """Count the tool calls of a conversation that has ended."""
        self._tool_calls += count

    def on_load(self, worker: WorkerHandle, endpoint: str, load: Load) -> None:
        """Count a worker's calls since its last report, and its waiting calls."""
        self._endpoints[endpoint].on_load(worker, load)

    def on_refusal(self, endpoint: str, retry_after_s: float | None, sent_at: float) -> None:
        """Count a call that the endpoint refused (429); it was sent at `sent_at` (monotonic)."""
        limiter = self._endpoints[endpoint].limiter
        limiter.on_refusal(retry_after_s, sent_at=sent_at, now=time.monotonic())

    def pause(self, *, is_paused: bool) -> None:
        """Let no call begin while `is_paused`."""
        for endpoint in self._endpoints.values():
            endpoint.is_paused = is_paused

    def refuse_without_endpoints(self) -> None:
        """Raise `ValueError` if the run calls no endpoint."""
        if not self._endpoints:
            raise ValueError(
                "this run calls no endpoint, so it has no rpm and no max_in_flight; nothing was "
                "changed"
            )

    def change(self, rpm: float | None, in_flight: int | None) -> None:
        """Change the user's limits of each endpoint; None leaves one."""
        for endpoint in self._endpoints.values():
            endpoint.change(rpm, in_flight)

    def follow_conversations(self, before: int, now: int) -> None:
        """Set the ceiling of endpoints that only the number of conversations limits."""
        for endpoint in self._endpoints.values():
            endpoint.follow_conversations(before, now)

    def share(self, workers: Sequence[WorkerHandle]) -> None:
        """Send the workers those of their shares that have changed."""
        ready = [worker for worker in workers if worker.ready]
        for endpoint in self._endpoints.values():
            endpoint.share(ready)

    def pause_s(self) -> float:
        """Seconds until calls may be sent again; 0 unless all endpoints have asked for a pause."""
        now = time.monotonic()
        until = [shared.limiter.cool_down_until - now for shared in self._endpoints.values()]
        return max(0.0, min(until, default=0.0))

    def describe(self) -> str:
        """Text for the progress line; "" while only the user's own limits apply."""
        pause = f"paused by the endpoint for {pause_s:.0f} s" if (pause_s := self.pause_s()) else ""
        busy = f"workers at {self._busy:.0%} of a core" if self._busy >= _BUSY else ""
        return ", ".join(filter(None, (self._describe_endpoints(), pause, busy)))

    def _describe_endpoints(self) -> str:
        probed = [shared for shared in self._endpoints.values() if shared.limiter.is_probed]
        if len(self._endpoints) == 1:
            return "".join(f"limit {shared.limiter.limit} (endpoint)" for shared in probed)
        return ", ".join(f"limit {shared.limiter.limit} ({shared.url})" for shared in probed)

    def report(self) -> list[dict[str, Any]]:
        """The limits on the calls of this start, for the summary: one object per endpoint.

        Keys: `endpoint` (its base URL), `limit` and `ceiling` (calls in flight), `in_flight_max`,
        `replies`, `refused` (429s), `failed` (other attempts that were retried) and `limited_by`:
        "endpoint", "rate" (rpm, tpm), "workers" (they used up their cores), "concurrency" (the
        user's limits). If calls never came near any of these: "conversations" if fewer of them were
        in progress than calls may be in flight, "tools" if there were tool calls, and
        "between_calls" (workspaces, checks, rewards) without any.
        """
        is_busy = self._busy_heartbeats > self._heartbeats / 2
        return [
            shared.report(self._other_limit(shared, is_busy)) for shared in self._endpoints.values()
        ]

    def _other_limit(self, shared: _SharedLimit, is_busy: bool) -> str:
        """The limit on calls to an endpoint that refuses none and has no rate."""
        if is_busy:
            return "workers"
        if shared.is_near_ceiling(shared.in_flight_max):
            return "concurrency"
        if not shared.is_near_ceiling(self._conversations_max):
            return "conversations"
        return "tools" if self._tool_calls else "between_calls"


def describe_calls(report: Mapping[str, Any]) -> str:
    """A sentence about one endpoint of `RunLimits.report`."""
    return (
        f"{report['endpoint']} answered {plural(report['replies'], 'call')}, refused "
        f"{report['refused']:,} (429) and failed {report['failed']:,} in other ways. At most "
        f"{report['in_flight_max']:,} were in flight at once, limited by "
        f"{_LIMITS.get(report['limited_by'], report['limited_by'])}."
    )


@dataclass(slots=True)
class _Share:
    """A worker's share of an endpoint's limit, and its use."""

    in_flight: int = 0
    waiting: int = 0
    permits: int = 0
    """The permits that were sent last."""
    max_permits: int = 0
    """The maximum over all permits that may still be in effect at the worker."""
    messages: int = 0
    """Number of messages with permits so far."""
    cool_down_until: float = float("-inf")
    rates: tuple[float, float | None] = (1.0, None)
    """The part of the rates that this run may use, and until when."""

    @property
    def possible(self) -> int:
        """The most calls that the worker can have in flight until its next report."""
        return max(self.in_flight, self.max_permits)


class _SharedLimit:
    """The limit of one endpoint, and the workers' shares of it."""

    def __init__(self, endpoint: str, limits: EndpointLimits, shared: SharedLimits | None) -> None:
        self._endpoint = endpoint
        self._shared = shared if limits.rpm or limits.tpm else None
        self.url = endpoint_url(endpoint)
        self.limiter = Limiter(start=limits.start, ceiling=limits.ceiling)
        self._limits = limits
        self._shares: dict[WorkerHandle, _Share] = {}
        self._replies = self._failed = 0
        self.in_flight_max = 0
        """The most calls in flight at once that workers have reported."""
        self._is_paced = self._has_news = False
        self.is_paused = False
        """No call may begin."""

    def follow_conversations(self, before: int, now: int) -> None:
        """Set the ceiling if it was the number of conversations, or is above it now."""
        if self._limits.ceiling == before or self._limits.ceiling > now:
            self.change(None, now)

    def change(self, rpm: float | None, in_flight: int | None) -> None:
        if rpm is not None:
            self._limits = self._limits._replace(rpm=rpm)
        if in_flight is not None:
            self._limits = self._limits._replace(ceiling=in_flight)
            self.limiter.cap(in_flight)
        self._has_news = True

    def on_load(self, worker: WorkerHandle, load: Load) -> None:
        share = self._shares.setdefault(worker, _Share())
        share.in_flight, share.waiting = load.in_flight, load.waiting
        if load.limits_number == share.messages:
            share.max_permits = share.permits
        in_flight = sum(each.in_flight for each in self._shares.values())
        self.in_flight_max = max(self.in_flight_max, in_flight)
        self._replies += load.replies
        self._failed += load.failures
        has_rate = self._limits.rpm or self._limits.tpm
        if has_rate and share.waiting and share.in_flight < share.permits:
            self._is_paced = True
        if load.overloads:
            self.limiter.on_failures(load.overloads)
        if load.replies:
            is_needed = any(each.waiting for each in self._shares.values())
            self.limiter.on_replies(load.replies, is_needed=is_needed)

    def share(self, ready: Sequence[WorkerHandle]) -> None:
        for gone in self._shares.keys() - set(ready):
            del self._shares[gone]
        shares = [self._shares.setdefault(worker, _Share()) for worker in ready]
        demands = [share.in_flight + share.waiting for share in shares]
        limit = 0 if self.is_paused else self.limiter.limit
        parts = divide_calls(limit, demands, turn=int(time.monotonic() / _TURN_S))
        sent = [(share.permits, share.cool_down_until, share.rates) for share in shares]
        rates = (1.0, None) if self._shared is None else self._shared.share
        for share, wanted in zip(shares, parts, strict=True):
            share.permits = min(share.permits, wanted)
        # A permit that one worker gives up is free only when no call can be using it any more.
        free = limit - sum(share.possible for share in shares)
        for share, wanted in zip(shares, parts, strict=True):
            possible = share.possible
            share.permits += min(wanted - share.permits, possible - share.permits + max(0, free))
            share.max_permits = max(share.max_permits, share.permits)
            free -= share.possible - possible
            share.cool_down_until = self.limiter.cool_down_until
            share.rates = rates
        for worker, share, before in zip(ready, shares, sent, strict=True):
            now = share.permits, share.cool_down_until, share.rates
            if now != before or self._has_news or not share.messages:
                share.messages += 1
                self._send(worker, share, share.permits / max(1, limit))
        self._has_news = False

    def _send(self, worker: WorkerHandle, share: _Share, part: float) -> None:
        part_of_run, until = share.rates
        part *= part_of_run
        now = time.monotonic()
        rates_s = None if until is None else max(0.0, until - now)
        if not part_of_run:
            rates_s = 0.0
        worker.send(
            SetLimits(
                endpoint=self._endpoint,
                permits=share.permits,
                number=share.messages,
                cool_down_s=max(0.0, share.cool_down_until - now),
                rpm=self._limits.rpm and self._limits.rpm * part,
                tpm=self._limits.tpm and self._limits.tpm * part,
                rates_s=rates_s,
            )
        )

    def is_near_ceiling(self, number: int) -> bool:
        """Whether as many calls in flight would be near the user's limit."""
        return number >= 0.9 * self._limits.ceiling

    def report(self, other_limit: str) -> dict[str, Any]:
        """See `RunLimits.report`; `other_limit` is for calls that no endpoint or rate limits."""
        by = "rate" if self._is_paced else other_limit
        if self.limiter.is_probed:
            by = "endpoint"
        return {
            "endpoint": self.url,
            "limit": self.limiter.limit,
            "ceiling": self._limits.ceiling,
            "in_flight_max": self.in_flight_max,
            "replies": self._replies,
            "refused": self.limiter.refused,
            "failed": self._failed,
            "limited_by": by,
        }


def divide_calls(limit: int, demands: Sequence[int], *, turn: int = 0) -> list[int]:
    """Divide `limit` calls among workers that want `demands` calls in flight.

    No worker gets more than it wants while another wants more. The rest is divided, too, so
    workers can start calls at once. The shares sum to `limit`. An uneven remainder goes to other
    workers with each `turn`, so even a limit below the number of workers starves none.
    """
    shares = [0] * len(demands)
    left = limit
    for wanted in (demands, [limit] * len(demands)):
        open_ = [n for n in range(len(shares)) if shares[n] < wanted[n]]
        while left and open_:
            each, extra = divmod(left, len(open_))
            shift = turn % len(open_)
            for place, n in enumerate(open_[shift:] + open_[:shift]):
                more = min(wanted[n] - shares[n], each + (place < extra))
                shares[n] += more
                left -= more
            open_ = [n for n in open_ if shares[n] < wanted[n]]
    return shares
