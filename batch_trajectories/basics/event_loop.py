"""Runs a coroutine in a process whose signal handlers raise exceptions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from batch_trajectories.basics.process import STOPPING

T = TypeVar("T")


def run_coroutine(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. A signal that stops the program cancels it.

    After that, the handler of the signal is called, which usually raises. Call this in the main
    thread.
    """
    # A handler that raises inside the event loop interrupts the step that happens to run. Nothing
    # then wakes the task of that step, and the loop waits for it without end.
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
        raise  # cancelled by somebody else, or the handler did not raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # The coroutine may have ended in spite of the cancellation.
    for number in received[:1]:
        handlers[number](number, None)
    return result
