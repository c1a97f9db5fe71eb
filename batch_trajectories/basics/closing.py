"""Closes several resources, each of them also if another one fails to close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def close_all(*closings: Callable[[], Awaitable[object]]) -> None:
    """Call and await each, in order, whatever those before it raise.

    Raises the first failure at the end, but a cancellation rather than another failure; the others
    are logged.
    """
    failures: list[BaseException] = []
    for close in closings:
        try:
            await close()
        except BaseException as error:
            failures.append(error)
    if not failures:
        return
    raised = next((one for one in failures if isinstance(one, asyncio.CancelledError)), failures[0])
    for failure in failures:
        if failure is not raised:
            log.error(
                "Another resource did not close either; the traceback says why.", exc_info=failure
            )
    raise raised
