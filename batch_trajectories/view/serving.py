"""Serve the page until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

import pyarrow as pa
from aiohttp import web
from aiohttp.http import HttpProcessingError

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.errors import ConfigError, RunDirError
from batch_trajectories.basics.event_loop import run_coroutine
from batch_trajectories.view.guard import AccessGuard, is_loopback
from batch_trajectories.view.runs import Places
from batch_trajectories.view.server import MOST_LINE_BYTES, ViewServer
from batch_trajectories.view.state import State

_PATIENCE_S = 2.0
_PASSWORD_CHARS = 12


def serve(places: list[str], *, host: str, port: int, password: str | None, who: str) -> None:
    """Serve the runs of some places, and print the address.

    Raises `RunDirError` if there are no such places or the address cannot be used.
    """
    state = State(Places(places), who)
    guard = AccessGuard(host, password)
    try:
        run_coroutine(_serve(ViewServer(state, guard), guard, host, port))
    finally:
        state.close()


def read_password(host: str, variable: str | None) -> str | None:
    """The password in an environment variable.

    Raises `ConfigError` if it is empty, or if the address needs one and none is named.
    """
    if variable is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host={host}: others could reach the page there; give it a password by "
                "--password_env=NAME, or keep 127.0.0.1 and forward its port (ssh -L)"
            )
        return None
    password = os.environ.get(variable, "")
    if len(password) < _PASSWORD_CHARS:
        raise ConfigError(
            f"--password_env={variable}: this variable must hold at least {_PASSWORD_CHARS} "
            "characters"
        )
    return password


def _is_worth_a_trace(record: logging.LogRecord) -> bool:
    """Whether what aiohttp logs is more than a request that was malformed or cut off.

    Those have their answer, and a port that browsers and scanners reach gets many.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


async def _serve(server: ViewServer, guard: AccessGuard, host: str, port: int) -> None:
    logging.getLogger("aiohttp.server").addFilter(_is_worth_a_trace)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        shutdown_timeout=_PATIENCE_S,
        handler_cancellation=True,
        max_line_size=MOST_LINE_BYTES,
    )
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except (OSError, socket.gaierror, OverflowError) as error:
            raise RunDirError(
                f"cannot listen on {host} port {port}: {error}; give another --port or --host"
            ) from error
        taken = runner.addresses[0][1]
        name = f"[{host}]" if ":" in host else host
        token = "" if guard.has_password else f"?token={guard.token}"
        show(f"http://{name}:{taken}/{token}")
        say("open this address; Ctrl-C ends it")
        # With its first value Arrow imports pandas, if that is installed, for which the first page
        # would wait.
        asyncio.get_running_loop().run_in_executor(None, pa.scalar, True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()
