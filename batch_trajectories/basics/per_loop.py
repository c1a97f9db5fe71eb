"""A resource that the conversations of one event loop share, from the first user to the last."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One `T` per event loop, created at first use.

    Each user calls `open` and `close`; the last `close` releases it.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[object]]) -> None:
        """`end` releases what `make` returned."""
        self._make, self._end = make, end
        self._loops: dict[asyncio.AbstractEventLoop, T] = {}
        self._users = Counter[asyncio.AbstractEventLoop]()

    def shared(self) -> T:
        """The `T` of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = self._make()
        return self._loops[loop]

    def open(self) -> None:
        """Count one more user in the running loop."""
        self._users[asyncio.get_running_loop()] += 1

    async def close(self) -> None:
        """Count one user less in the running loop; the last one releases its `T`."""
        loop = asyncio.get_running_loop()
        self._users[loop] -= 1
        if self._users[loop] <= 0:
            del self._users[loop]
            if (client := self._loops.pop(loop, None)) is not None:
                await self._end(client)
