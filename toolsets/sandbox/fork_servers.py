"""Processes that fork sandboxes, so that each sandbox starts fast; see `inside.fork_server`.

Each event loop has one such process per kind of sandbox, as long as a sandbox uses it. If a trial
shows that forked sandboxes do not work, each sandbox is launched by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno
from batch_trajectories.basics.per_loop import PerLoop
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.cgroup import Group
from toolsets.sandbox.channel import Channel, Gone, Launch, Reply
from toolsets.sandbox.inside.boot import BOOT
from toolsets.sandbox.programs import program

log = logging.getLogger(__name__)


class SandboxTemplate(msgspec.Struct, frozen=True, eq=False):
    """The command of a fork server, and the request for one of its sandboxes."""

    key: tuple[object, ...]
    """Sandboxes with equal keys come from the same server."""
    is_confined: bool
    """The server runs inside bubblewrap and separates the sandboxes that it forks."""
    launch: Callable[[Sequence[str], ExitStack], Launch]
    request: Mapping[str, Any]
    """The properties of one sandbox, as `inside.fork_server` takes them."""
    is_tried: bool = True
    """Whether the server first forks a sandbox on trial. The trial must not meet leftovers of
    commands."""


class _Servers:
    """The fork servers of one event loop."""

    def __init__(self) -> None:
        self._starting: dict[tuple[object, ...], asyncio.Task[Channel | None]] = {}
        self._replaced: set[Channel] = set()

    async def fork(
        self,
        template: SandboxTemplate,
        terms: Mapping[str, Any],
        group: Group | None,
        *,
        output_bytes: int,
    ) -> tuple[Channel, Reply] | None:
        """Fork a sandbox that serves on these terms; None if this kind cannot be forked.

        Returns the channel to the sandbox and its first reply. Raises `HostError`, and
        `SandboxError` if the sandbox did not start.
        """
        for _ in range(2):
            if (starting := self._starting.get(template.key)) is None:
                starting = asyncio.create_task(_start(template))
                self._starting[template.key] = starting
            try:
                server = await asyncio.shield(starting)
            except Exception:
                self._forget(template, starting)
                raise
            if server is None:
                return None
            channel = Channel(group, output_bytes=output_bytes)
            try:
                return channel, await channel.fork(server, {**template.request, "terms": terms})
            except Gone:
                # The server has ended or soon will. Its other sandboxes may still be in use.
                self._forget(template, starting)
                self._replaced.add(server)
        raise HostError("a sandbox did not start: the process that forks it has ended twice")

    def _forget(self, template: SandboxTemplate, starting: asyncio.Task[Channel | None]) -> None:
        """Forget a server, so that the next sandbox starts a new one."""
        if self._starting.get(template.key) is starting:
            del self._starting[template.key]

    async def close(self) -> None:
        """End all servers, and the sandboxes that they forked."""
        replaced = [partial(server.close, grace_s=0) for server in self._replaced]
        latest = [partial(_end, starting) for starting in self._starting.values()]
        await close_all(*replaced, *latest)


FORK_SERVERS = PerLoop(_Servers, _Servers.close)


async def _end(starting: asyncio.Task[Channel | None]) -> None:
    """End a server, even while it is being started."""
    starting.cancel()
    try:
        await asyncio.wait({starting})  # raises the cancellation of this task, and no other
    finally:
        is_there = starting.done() and not starting.cancelled() and starting.exception() is None
        server = starting.result() if is_there else None
        if server is not None:
            await server.close()


async def _start(template: SandboxTemplate) -> Channel | None:
    """Start a fork server and return its channel; None if sandboxes cannot be forked."""
    channel = Channel(None, output_bytes=0)
    try:
        with ExitStack() as stack:
            channel.launch(template.launch(["python3", "-I", "-c", BOOT, "0"], stack))
        terms = {
            "is_confined": template.is_confined,
            "trial": template.request if template.is_tried else None,
        }
        reply = await channel.begin(terms, program("fork_server"))
    except SandboxError as error:
        problem = str(error)
    else:
        if reply.refused is None:
            return channel
        await channel.close()
        if reply.refused in HOST_ERRNOS:
            raise HostError(f"cannot start a sandbox: {describe_errno(reply.refused)}")
        problem = os.strerror(reply.refused)
    log.warning(
        "Sandboxes start by themselves, which is slower, because none can be forked here: %s",
        problem,
    )
    return None
