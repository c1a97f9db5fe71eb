"""Keys that change while they are used, and the command that prints them."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import subprocess
import threading
import time
from functools import lru_cache
from typing import Protocol

from agent.models.connection import Connection
from agent.models.errors import ModelError

log = logging.getLogger(__name__)

_MAX_S = 60.0
"""Maximum seconds for the command to print the key."""

_MAX_BYTES = 64 * 2**10
"""Maximum output of a command; keys have at most a few thousand bytes."""

_RETRY_S = 10.0
"""Seconds until a failed command is run again while its last key may still be valid."""


class KeyCommandError(Exception):
    """The command gave no key; the message has its name and the reason, but not its output."""


class RenewableKey(Protocol):
    """A key that is replaced from time to time."""

    async def get(self) -> str:
        """The current key. Raises `ModelError`."""
        ...

    async def renew(self, rejected: str) -> bool:
        """Replace the key that the endpoint rejected; returns whether there is another one.

        Raises `ModelError`.
        """
        ...


class CommandKey:
    """The key that a command prints; the command runs in this process. Safe for threads."""

    def __init__(self, command: tuple[str, ...], refresh_s: float) -> None:
        self._command = command
        self._refresh_s = refresh_s
        self._key = ""
        self._due_at = 0.0
        self._running = threading.Lock()

    @property
    def due_in_s(self) -> float:
        """Seconds until the command should run again."""
        return max(self._due_at - time.monotonic(), 0.0)

    def read(self, rejected: str | None = None) -> str:
        """The key; the command runs if the last key is too old or is `rejected`. Blocks.

        An old key is used on if the command fails. Raises `KeyCommandError` if there is none, or
        only the rejected one.
        """
        with self._running:
            if self._key and self._key != rejected and self.due_in_s > 0:
                return self._key
            try:
                self._key = run_key_command(self._command)
                self._due_at = time.monotonic() + self._refresh_s
            except KeyCommandError as error:
                if not self._key or self._key == rejected:
                    raise
                log.warning("The last key is used on, because there is no new one: %s", error)
                self._due_at = time.monotonic() + _RETRY_S
            return self._key

    async def get(self) -> str:
        """See `RenewableKey`."""
        if self._key and self.due_in_s > 0:
            return self._key
        return await self._read(None)

    async def renew(self, rejected: str) -> bool:
        """See `RenewableKey`."""
        return await self._read(rejected) != rejected

    async def _read(self, rejected: str | None) -> str:
        try:
            return await asyncio.to_thread(self.read, rejected)
        except KeyCommandError as error:
            raise ModelError("auth", str(error), was_sent=False) from error


@lru_cache(maxsize=64)
def command_key(command: tuple[str, ...], refresh_s: float) -> CommandKey:
    """The key of a command, one object for all models in this process."""
    return CommandKey(command, refresh_s)


def configured_key(connection: Connection) -> CommandKey:
    """The key of an endpoint with a `key_command`."""
    return command_key(connection.key_command, connection.key_refresh_s)


def run_key_command(command: tuple[str, ...]) -> str:
    """Run a command and return the key that it prints. Raises `KeyCommandError`."""
    name = f"key_command {command[0]!r}"
    try:
        exit_code, output, errors = _run(command)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise KeyCommandError(f"{name} cannot be run: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise KeyCommandError(f"{name} printed no key within {_MAX_S:g} s") from error
    if len(output) > _MAX_BYTES:
        raise KeyCommandError(f"{name} printed more than {_MAX_BYTES // 2**10} KiB")
    if exit_code != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1][:300]}" if lines else ""
        raise KeyCommandError(f"{name} failed with exit code {exit_code}{reason}")
    key = output.decode(errors="replace").strip()
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        what = "nothing" if not key else "something that is not one key on one line"
        raise KeyCommandError(f"{name} printed {what}")
    return key


def _run(command: tuple[str, ...]) -> tuple[int, bytes, bytes]:
    """Run a command; returns its exit code, its output, and the end of its error output.

    The command is killed once it has printed more than `_MAX_BYTES`. Raises `OSError`, `ValueError`
    and `subprocess.TimeoutExpired`.
    """
    end = time.monotonic() + _MAX_S
    pipe, output, errors = subprocess.PIPE, bytearray(), bytearray()
    with (
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        try:
            while selector.get_map() and len(output) <= _MAX_BYTES:
                ready = selector.select(max(end - time.monotonic(), 0.0))
                if not ready:
                    raise subprocess.TimeoutExpired(command, _MAX_S)
                for key, _ in ready:
                    part = os.read(key.fd, _MAX_BYTES)
                    key.data.extend(part)
                    if not part:
                        selector.unregister(key.fileobj)
                del errors[:-_MAX_BYTES]
            if len(output) <= _MAX_BYTES:
                process.wait(max(end - time.monotonic(), 0.0))
        finally:
            process.kill()  # no-op if it has exited
    return process.returncode, bytes(output), bytes(errors)
