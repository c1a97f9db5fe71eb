"""The time that a conversation may take: how long it was worked on, and calls cut at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

_MARGIN_S = 0.01
"""So much later a call is cut, so that what it took is beyond the limit whatever is rounded."""


@dataclass(slots=True)
class TimeAtWork:
    """How long model calls and tools took together; what ran side by side counts once.

    Pauses between two starts and the time of a call that a crash took are not in it: no event
    tells of them, so a conversation that is taken up again counts on from where it was.
    """

    seconds: float = 0.0
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, began: float, ended: float) -> None:
        """Count from `began` to `ended`, epoch seconds."""
        if self._spans and ended <= self._spans[-1][0]:
            self.seconds += ended - began  # the clock was set back
            return
        while self._spans and self._spans[-1][1] >= began:
            before = self._spans.pop()
            self.seconds -= before[1] - before[0]
            began, ended = min(began, before[0]), max(ended, before[1])
        self.seconds += ended - began
        self._spans.append((began, ended))


class Deadline:
    """Cuts off what runs inside its `async with` once `left_s` have passed, as `TimeoutError`."""

    def __init__(self, left_s: float) -> None:
        import asyncio  # here, because --help imports this module and has no use for it

        self._timeout = asyncio.timeout(max(left_s, 0.0) + _MARGIN_S)
        self.waited_s = 0.0
        """Time that did not count; see `waiting`."""

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def has_passed(self) -> bool:
        """Whether it has cut off what ran inside."""
        return self._timeout.expired()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is waited for inside is a turn among other conversations: it does not count."""
        import asyncio

        clock = asyncio.get_running_loop()
        came, when = clock.time(), self._timeout.when()
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            waited_s = clock.time() - came
            self.waited_s += waited_s
            if when is not None:
                self._timeout.reschedule(when + waited_s)
