"""The limits on the calls of a run, dealt out to its workers as shares that never sum to more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.models.model import url_of
from runs.amounts import EndpointLimits
from runs.executors.base import WorkerHandle
from runs.protocol.messages import pack
from runs.supervisor.limiter import Limiter, share_out

_TURN_S = 1.0
"""How long a worker keeps what could as well be another's."""

_BUSY = 0.85
"""From this share of a core on, a worker is what limits its calls."""

_LATELY = 0.2
"""What one heartbeat counts for in the average."""


class RunLimits:
    """Hears what the workers' calls meet, and tells each how many it may have in flight."""

    def __init__(self, bounds: Mapping[str, EndpointLimits]) -> None:
        """`bounds` by endpoint (see `ModelSettings.endpoint`)."""
        self._endpoints = {
            endpoint: _EndpointLimits(endpoint, of_one) for endpoint, of_one in bounds.items()
        }
        self._busy = 0.0
        """How much of a core the workers have used lately, on the average."""
        self._heartbeats = self._busy_heartbeats = 0

    def on_busy(self, busy: float) -> None:
        """A worker says how much of a core it has used lately."""
        self._heartbeats += 1
        self._busy_heartbeats += busy >= _BUSY
        self._busy += (busy - self._busy) * _LATELY

    def on_load(self, worker: WorkerHandle, endpoint: str, load: dict[str, int]) -> None:
        """A worker says what its calls did since it said so last, and how many wait."""
        self._endpoints[endpoint].on_load(worker, load)

    def on_refusal(self, endpoint: str, retry_after_s: float | None, sent_at: float) -> None:
        """The endpoint refused a call (429) that was sent at `sent_at`, by the machine's clock."""
        limiter = self._endpoints[endpoint].limiter
        limiter.on_refusal(retry_after_s, sent_at=sent_at, now=time.monotonic())

    def share(self, workers: Sequence[WorkerHandle]) -> None:
        """Tell the workers their shares, where these have changed."""
        ready = [worker for worker in workers if worker.ready]
        for of_one in self._endpoints.values():
            of_one.share(ready)

    def describe(self) -> str:
        """For the progress line; "" while nothing but the user's own bounds limits the calls."""
        busy = f"workers at {self._busy:.0%} of a core" if self._busy >= _BUSY else ""
        return ", ".join(filter(None, (self._describe_endpoints(), busy)))

    def _describe_endpoints(self) -> str:
        probed = [one for one in self._endpoints.values() if one.limiter.is_probed]
        if len(self._endpoints) == 1:
            return "".join(f"limit {one.limiter.limit} (endpoint)" for one in probed)
        return ", ".join(f"limit {one.limiter.limit} ({one.url})" for one in probed)

    def report(self) -> list[dict[str, Any]]:
        """What limited the calls of this start, for the summary: one object per endpoint.

        Keys: `endpoint` (its base URL), `limit` and `ceiling` (calls in flight), `in_flight_max`,
        `replies`, `refused` (429s), `failed` (attempts that were waited out otherwise) and
        `limited_by`: "endpoint", "rate" (rpm, tpm), "workers" (they used up their cores),
        "concurrency" (the user's bounds), or "tools" where calls never came near any of these.
        """
        is_busy = self._busy_heartbeats > self._heartbeats / 2
        return [one.report(is_busy=is_busy) for one in self._endpoints.values()]


@dataclass(slots=True)
class _Share:
    """What one worker does with its share of an endpoint, and what it was told of it."""

    in_flight: int = 0
    waiting: int = 0
    told: int = 0
    """The permits that it was told last."""
    most_told: int = 0
    """The most of those that it has not confirmed to be replaced."""
    messages: int = 0
    """How often it was told."""
    cool_down_until: float = float("-inf")

    @property
    def may_have(self) -> int:
        """The most calls that it can have in flight until it is heard of again."""
        return max(self.in_flight, self.most_told)


class _EndpointLimits:
    """The limits of one endpoint."""

    def __init__(self, endpoint: str, bounds: EndpointLimits) -> None:
        self._endpoint = endpoint
        self.url = url_of(endpoint)
        self.limiter = Limiter(start=bounds.start, ceiling=bounds.ceiling)
        self._bounds = bounds
        self._shares: dict[WorkerHandle, _Share] = {}
        self._in_flight_max = self._replies = self._failed = 0
        self._is_paced = False

    def on_load(self, worker: WorkerHandle, load: dict[str, int]) -> None:
        share = self._shares.setdefault(worker, _Share())
        share.in_flight, share.waiting = load["in_flight"], load["waiting"]
        if load["told"] == share.messages:
            share.most_told = share.told
        in_flight = sum(one.in_flight for one in self._shares.values())
        self._in_flight_max = max(self._in_flight_max, in_flight)
        self._replies += load["replies"]
        self._failed += load["failures"]
        if (
            share.waiting
            and share.in_flight < share.told
            and (self._bounds.rpm or self._bounds.tpm)
        ):
            self._is_paced = True
        if load["failures"]:
            self.limiter.on_failures(load["failures"])
        if load["replies"]:
            is_needed = any(one.waiting for one in self._shares.values())
            self.limiter.on_replies(load["replies"], is_needed=is_needed)

    def share(self, ready: Sequence[WorkerHandle]) -> None:
        for gone in self._shares.keys() - set(ready):
            del self._shares[gone]
        shares = [self._shares.setdefault(worker, _Share()) for worker in ready]
        demands = [share.in_flight + share.waiting for share in shares]
        limit = self.limiter.limit
        parts = share_out(limit, demands, turn=int(time.monotonic() / _TURN_S))
        told = [(share.told, share.cool_down_until) for share in shares]
        for share, wanted in zip(shares, parts, strict=True):
            share.told = min(share.told, wanted)
        # What one gives back is another's only when nothing of it is in flight any more.
        free = limit - sum(share.may_have for share in shares)
        for share, wanted in zip(shares, parts, strict=True):
            more = min(wanted - share.told, share.may_have - share.told + max(0, free))
            before = share.may_have
            share.told += more
            share.most_told = max(share.most_told, share.told)
            free -= share.may_have - before
            share.cool_down_until = self.limiter.cool_down_until
        for worker, share, before_ in zip(ready, shares, told, strict=True):
            if (share.told, share.cool_down_until) != before_ or not share.messages:
                share.messages += 1
                self._tell(worker, share, share.told / limit)

    def _tell(self, worker: WorkerHandle, share: _Share, part: float) -> None:
        worker.send(
            pack(
                "limits",
                limits={
                    "endpoint": self._endpoint,
                    "permits": share.told,
                    "number": share.messages,
                    "cool_down_s": max(0.0, share.cool_down_until - time.monotonic()),
                    "rpm": self._bounds.rpm and self._bounds.rpm * part,
                    "tpm": self._bounds.tpm and self._bounds.tpm * part,
                },
            )
        )

    def report(self, *, is_busy: bool) -> dict[str, Any]:
        near = self._in_flight_max >= 0.9 * self._bounds.ceiling
        by = "workers" if is_busy else "concurrency" if near else "tools"
        if self.limiter.is_probed:
            by = "endpoint"
        elif self._is_paced:
            by = "rate"
        return {
            "endpoint": self.url,
            "limit": self.limiter.limit,
            "ceiling": self._bounds.ceiling,
            "in_flight_max": self._in_flight_max,
            "replies": self._replies,
            "refused": self.limiter.refused,
            "failed": self._failed,
            "limited_by": by,
        }
