"""Keys that the parent gets by `key_command` and sends to its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.models.connection import Connection
from agent.models.errors import ModelError


class ParentKeys:
    """The keys of one worker, by command. Needs a running event loop."""

    def __init__(self, send: Callable[..., None]) -> None:
        """`send(type, **fields)` reaches the parent."""
        self._send = send
        self._keys: dict[str, ParentKey] = {}

    def of(self, connection: Connection) -> ParentKey:
        """The key of an endpoint with a `key_command`."""
        return self._of(connection.command_id)

    def on_key(self, command: str, number: int, problem: str, key: str) -> None:
        """The parent has a key, or says why it has none."""
        self._of(command).set(number, problem, key)

    def _of(self, command: str) -> ParentKey:
        if (key := self._keys.get(command)) is None:
            key = self._keys[command] = ParentKey(command, self._send)
        return key


class ParentKey:
    """See `RenewableKey`."""

    def __init__(self, command: str, send: Callable[..., None]) -> None:
        self._command = command
        self._send = send
        self._key, self._number, self._problem = "", 0, ""
        self._is_asked_for = False
        self._heard = asyncio.Event()

    def set(self, number: int, problem: str, key: str) -> None:
        """Take what the parent says, and wake those who wait for it."""
        self._key, self._number, self._problem = key or self._key, number, problem
        self._is_asked_for = False
        self._heard.set()
        self._heard = asyncio.Event()

    async def get(self) -> str:
        """See `RenewableKey`."""
        while not self._key:
            await self._heard.wait()
        return self._key

    async def renew(self, rejected: str) -> bool:
        """See `RenewableKey`; all calls that were rejected together share one question."""
        if self._key != rejected:
            return True
        heard = self._heard
        if not self._is_asked_for:
            self._is_asked_for = True
            self._send("key_rejected", command=self._command, number=self._number)
        await heard.wait()
        if self._problem and self._key == rejected:
            raise ModelError("auth", self._problem, was_sent=False)
        return self._key != rejected
