"""Fetches many images in their order, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from toolsets.images.names import ImageError
from toolsets.images.registry.pulling import Manifest, Puller
from toolsets.images.store import ImageStore

_PLANNED_AT_A_TIME = 8
_PLANNED_AHEAD = 256
"""Number of images whose layers are known before they are fetched. Registries count requests for
manifests, so not all of a large dataset are asked for at once."""
_IMAGES_AT_A_TIME = 6


class Fetched(NamedTuple):
    """The result of fetching one image."""

    reference: str
    manifest: Manifest | None = None
    """The manifest; None if the image was here, another process fetches it, or it failed."""
    error: str | None = None
    was_here: bool = False


async def fetch_all(
    puller: Puller,
    store: ImageStore,
    references: Iterable[str],
    report: Callable[[Fetched], object],
) -> None:
    """Fetch images that a store lacks; an image that fails does not stop the others.

    Raises `HostError` if the machine fails, such as if its disk is full.
    """
    queue: asyncio.Queue[tuple[str, asyncio.Task[Manifest | ImageError | None]] | None]
    queue = asyncio.Queue(_PLANNED_AHEAD)
    planning = asyncio.Semaphore(_PLANNED_AT_A_TIME)

    async def plan(reference: str) -> Manifest | ImageError | None:
        try:
            return await puller.plan(reference)
        except ImageError as error:  # told in the order of the images
            return error
        finally:
            planning.release()

    async def plan_all(group: asyncio.TaskGroup) -> None:
        rest = iter(references)
        while (reference := await asyncio.to_thread(_take, rest)) is not None:
            if await asyncio.to_thread(store.has, reference):
                report(Fetched(reference, was_here=True))
                continue
            await planning.acquire()
            await queue.put((reference, group.create_task(plan(reference))))
        await queue.put(None)

    async def pull_some() -> None:
        while (item := await queue.get()) is not None:
            reference, planned = item
            manifest = await planned
            if isinstance(manifest, ImageError):
                report(Fetched(reference, error=str(manifest)))
                continue
            try:
                await puller.pull(reference)
            except ImageError as error:
                report(Fetched(reference, error=str(error)))
            else:
                report(Fetched(reference, manifest))
        await queue.put(None)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(plan_all(group))
            for _ in range(_IMAGES_AT_A_TIME):
                group.create_task(pull_some())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _take(rest: Iterator[str]) -> str | None:
    return next(rest, None)
