"""Running a coroutine in a process whose signals have handlers that raise."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from batch_trajectories.basics.process import STOPPING

T = TypeVar("T")


def run_coroutine(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. A signal that stops the program cancels it.

    Then the handler that the signal has is called, which usually raises. Must be called in the main
    thread.
    """
    # A handler that raises within the event loop ends whatever step it meets. Its task is then
    # woken by nobody, and the loop waits for this task without end.
    handlers = {
        number: handler for number in STOPPING if callable(handler := signal.getsignal(number))
    }
    received: list[signal.Signals] = []

    async def run() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, cancel, number)
        return await main

    try:
        result = asyncio.run(run())
    except asyncio.CancelledError:
        for number in received[:1]:
            handlers[number](number, None)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received[:1]:
        handlers[number](number, None)
    return result
