"""Starts a confined Chromium, shared by the conversations of an event loop, and stops it.

Chromium ends with this process, even if that crashes; see `browser_launcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics.errors import (
    HostError,
    ToolError,
    install_command,
    machine_failure,
    machine_failure_in,
)
from batch_trajectories.basics.per_loop import PerLoop
from toolsets.net.guard import Guard
from toolsets.sandbox.bwrap import bwrap_problem, python_options, system_options
from toolsets.sandbox.programs import python_bin

# The browser's only way to the network: a SOCKS proxy that checks each address it connects to.
#
# With a SOCKS proxy, Chromium does not resolve names: it sends the name with every connection,
# for pages, redirects, images and web sockets alike.

REFUSED = "refused, because its host is not at a public address"
_NO_ADDRESS = "its host has no known address"
_UNREACHABLE = "cannot connect to its host"

_CONNECT_S = 20.0
_CHUNK_BYTES = 64 * 1024
_MAX_CONNECTIONS = 512
_MAX_FAILURES = 1000
_IPV4, _NAME, _IPV6 = 1, 3, 4  # RFC 1928
_CODES = {REFUSED: 2, _NO_ADDRESS: 4, _UNREACHABLE: 5}


class _ConnectError(Exception):
    """No connection was made; the message says why."""


class Proxy:
    """Connects one browser to addresses that a guard permits. Use it in one event loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._failures: dict[tuple[str, int], str] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from `listener`; the proxy closes it."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_CHUNK_BYTES)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def failure(self, host: str, port: int) -> str | None:
        """Return why the last connection to a host and port failed; None if it succeeded."""
        return self._failures.get((host, port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve_one(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Either side may close at any time; the page sees a failed connection.
        with contextlib.suppress(OSError, EOFError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECT_S):
                host, port = await _read_target(reader, writer)
                try:
                    server = await self._connect(host, port)
                except _ConnectError as failed:
                    self._store_failure(host, port, str(failed))
                    writer.write(_reply(_CODES[str(failed)]))
                    await writer.drain()
                    return
            self._failures.pop((host, port), None)
            writer.write(_reply(0))
            with contextlib.closing(server[1]):
                await _join((reader, writer), server)

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _ConnectError(_NO_ADDRESS) from None
        permitted = [info for info in addresses if self._guard.permits(host, port, str(info[4][0]))]
        if not permitted:
            raise _ConnectError(REFUSED)
        for family, kind, protocol, _, address in permitted:
            server = socket.socket(family, kind, protocol)
            try:
                server.setblocking(False)
                await loop.sock_connect(server, address)
                return await asyncio.open_connection(sock=server, limit=_CHUNK_BYTES)
            except OSError:
                server.close()
            except BaseException:
                server.close()
                raise
        raise _ConnectError(_UNREACHABLE)

    def _store_failure(self, host: str, port: int, why: str) -> None:
        self._failures[host, port] = why
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]


async def _read_target(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, int]:
    """Return the host and port that a client asks for; raises `EOFError` if it is not SOCKS 5."""
    version, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    if version != 5:
        raise EOFError
    writer.write(b"\x05\x00")
    version, command, _, kind = await reader.readexactly(4)
    if version != 5 or command != 1:
        raise EOFError
    if kind == _NAME:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode("ascii", "replace")
    elif kind in (_IPV4, _IPV6):
        packed = await reader.readexactly(4 if kind == _IPV4 else 16)
        host = socket.inet_ntop(socket.AF_INET if kind == _IPV4 else socket.AF_INET6, packed)
    else:
        raise EOFError
    (port,) = struct.unpack("!H", await reader.readexactly(2))
    return host.lower(), port


def _reply(code: int) -> bytes:
    return bytes((5, code, 0, _IPV4)) + bytes(6)


async def _join(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass bytes both ways until one side ends."""
    directions = {
        asyncio.create_task(_pass(client[0], server[1])),
        asyncio.create_task(_pass(server[0], client[1])),
    }
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


_log = logging.getLogger(__name__)

VARIABLE = "BROWSER_EXECUTABLE"
"""The environment variable with the path of the browser; without it, PATH is searched."""

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_S = 60.0
_STOP_S = 10.0
_MEMORY_MB = 2048
_TMP_MB = 512
_LAUNCHER = Path(__file__).with_name("browser_launcher.py")
_NODE_VARIABLE = "PLAYWRIGHT_NODEJS_PATH"
_FLAGS = (
    f"--js-flags=--max-old-space-size={_MEMORY_MB // 2}",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
    "--disable-gpu",
    "--renderer-process-limit=8",
)
_ETC = ("alternatives", "chromium", "chromium.d", "fonts", "ld.so.cache", "localtime", "opt")
_UNSHARE = (
    "--unshare-all",
    "--unshare-user",
    "--die-with-parent",
    "--new-session",
    # Chromium's own sandbox does not work for root.
    "--uid",
    "1000",
    "--gid",
    "1000",
    "--hostname",
    "browser",
)


def browser_problem() -> str | None:
    """Return why the browser cannot work here, and what to install; None if it works."""
    if find_spec("playwright") is None:
        return f"it needs a further package: {install_command('browser')}"
    named = os.environ.get(VARIABLE)
    if _executable() is not None:
        return None
    if named:
        return f"{VARIABLE} is {named!r}, which is not a program; name Chromium or Google Chrome"
    return (
        "it needs Chromium or Google Chrome: install it (on Debian: apt-get install chromium), or "
        f"name the program in {VARIABLE}"
    )


class Browsers(PerLoop["_Shared"]):
    """The browsers of a process: one per event loop, started when a conversation first needs it."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        """`allow` lists addresses that are permitted besides public ones; see `Guard`."""
        super().__init__(_Shared, _stop)
        self._guard = Guard(allow)

    async def chromium(self) -> Chromium:
        """Return the running browser; start it if there is none. Raises `ToolError`."""
        shared = self.shared()
        if shared.start is None or (shared.start.done() and not _is_alive(shared.start)):
            shared.start = asyncio.create_task(_start(self._guard, after=_Shared(shared.start)))
        # Shielded: a call that is cut off must not leave a half-started browser.
        return await asyncio.shield(shared.start)


@dataclass(slots=True)
class _Shared:
    start: asyncio.Task[Chromium] | None = None


class Chromium(NamedTuple):
    """A running browser."""

    browser: Any
    """The browser, as Playwright's object."""
    proxy: Proxy
    resources: AsyncExitStack


class _Mode(NamedTuple):
    """A way to confine Chromium."""

    name: str
    bwrap: str | None
    """The path of bubblewrap; None if Chromium runs outside of it."""
    own_sandbox: bool
    """Whether Chromium uses its own sandbox, too."""


def _executable() -> str | None:
    named = os.environ.get(VARIABLE)
    paths = (shutil.which(name) for name in ((named,) if named else _PROGRAMS))
    return next((path for path in paths if path is not None), None)


def _is_alive(start: asyncio.Task[Chromium]) -> bool:
    return (
        not start.cancelled()
        and start.exception() is None
        and bool(start.result().browser.is_connected())
    )


async def _stop(shared: _Shared) -> None:
    if shared.start is None:
        return
    try:
        chromium = await shared.start
    except (ToolError, HostError):
        return  # It never ran; the call that started it got this error.
    try:
        await chromium.resources.aclose()
    except Exception as error:
        _log.warning("The browser did not stop in order: %s", _first_line(error))


async def _start(guard: Guard, *, after: _Shared) -> Chromium:
    await _stop(after)
    executable = await asyncio.to_thread(_executable)
    if executable is None:
        raise ToolError("the browser is gone from this machine")
    for mode in await asyncio.to_thread(_modes):
        try:
            async with asyncio.timeout(_START_S):
                return await _launch(Path(executable), mode, guard)
        except Exception as error:
            why = _first_line(error) or type(error).__name__
            if (message := machine_failure(error) or machine_failure_in(why)) is not None:
                raise HostError(f"the browser does not start: {message}") from error
            _log.warning(
                "The browser %s does not start %s, and another way is tried: %s",
                executable,
                mode.name,
                why,
            )
    raise ToolError("the browser could not be started")


def _modes() -> list[_Mode]:
    """Return the ways to start Chromium, the safest first; the next is tried if one fails."""
    modes = []
    if bwrap_problem() is None:
        modes.append(_Mode("in bwrap", bwrap=shutil.which("bwrap"), own_sandbox=True))
    if os.geteuid() == 0:
        modes.append(_Mode("as root, without a sandbox", bwrap=None, own_sandbox=False))
    else:
        modes.append(_Mode("outside bwrap", bwrap=None, own_sandbox=True))
    return modes


async def _launch(executable: Path, mode: _Mode, guard: Guard) -> Chromium:
    from playwright.async_api import async_playwright

    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        proxy = Proxy(guard)
        # The directory is needed only for the start.
        with (
            tempfile.TemporaryDirectory(prefix="browser-") as directory,
            socket.socket(socket.AF_UNIX) as door,
        ):
            home = Path(directory)
            path = home / "s"
            door.bind(str(path))
            door.listen(1)
            door.setblocking(False)
            with _driver_without_secrets(home):
                manager = async_playwright()
                playwright = await manager.start()
            stack.push_async_callback(_close_in_time, playwright.stop)
            script = _script(home / "chromium", _command(executable, mode, path))
            launching = asyncio.create_task(
                playwright.chromium.launch(
                    executable_path=script,
                    args=list(_FLAGS),
                    chromium_sandbox=mode.own_sandbox,
                    env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
                    timeout=_START_S * 1000,
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                )
            )
            stack.push_async_callback(_cancel, launching)
            accepting = asyncio.create_task(loop.sock_accept(door))
            stack.push_async_callback(_cancel, accepting)
            await asyncio.wait({launching, accepting}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                await launching  # raises the reason
            connection, _ = await accepting
            # Closing it kills every process of the browser, whatever else happens.
            stack.callback(connection.close)
            connection.settimeout(_START_S)
            listener = await asyncio.to_thread(_receive_listener, connection)
            await proxy.serve(listener)
            stack.push_async_callback(proxy.close)
            browser = await launching
            stack.push_async_callback(_close_in_time, browser.close)
        return Chromium(browser, proxy, stack.pop_all())


def _receive_listener(connection: socket.socket) -> socket.socket:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


async def _close_in_time(close: Callable[[], Awaitable[None]]) -> None:
    """Close in order, within a time limit; afterwards callbacks kill the processes anyway."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await close()


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


_WITH_OWN_TEMPORARY = """
trap : HUP INT TERM
own=$(mktemp -d) || exit
TMPDIR=$own "$@"
status=$?
rm -rf "$own"
exit $status
"""
"""A shell script that runs a command and then removes its temporary files. The driver leaves some
if it ends early."""


@contextlib.contextmanager
def _driver_without_secrets(home: Path) -> Iterator[None]:
    """Let Playwright start its driver, a Node.js process, without our environment."""
    import playwright

    named = os.environ.get(_NODE_VARIABLE)
    node = named or str(Path(playwright.__file__).parent / "driver" / "node")
    variables = {"HOME": str(home), "PATH": os.environ.get("PATH", os.defpath)}
    if "TMPDIR" in os.environ:
        variables["TMPDIR"] = os.environ["TMPDIR"]
    settings = [f"{name}={value}" for name, value in variables.items()]
    command = ["env", "-i", *settings, "sh", "-c", _WITH_OWN_TEMPORARY, "sh", node]
    os.environ[_NODE_VARIABLE] = _script(home / "node", command)
    try:
        yield
    finally:
        if named is None:
            del os.environ[_NODE_VARIABLE]
        else:
            os.environ[_NODE_VARIABLE] = named


def _script(path: Path, command: list[str]) -> str:
    """Write a program that runs `command` with its own arguments appended."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return str(path)


def _command(executable: Path, mode: _Mode, door: Path) -> list[str]:
    if mode.bwrap is None:
        python = [sys.executable, "-I", "-S", str(_LAUNCHER)]
        return [*python, str(door), str(_MEMORY_MB), "", str(executable)]
    real = executable.resolve()
    options = [*_UNSHARE, *system_options(), *python_options()]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for sized in ("/tmp", "/dev/shm"):
        options += ["--size", str(_TMP_MB << 20), "--tmpfs", sized]
    for name in _ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not real.is_relative_to("/usr"):
        options += ["--ro-bind", str(real.parent), str(real.parent)]
    options += ["--ro-bind", str(_LAUNCHER), "/run/launcher.py", "--bind", str(door), "/run/door"]
    options += ["--clearenv", "--setenv", "PATH", f"{python_bin()}:/usr/local/bin:/usr/bin:/bin"]
    options += ["--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8", "--chdir", "/tmp"]
    python = [str(python_bin() / "python3"), "-I", "-S", "/run/launcher.py"]
    chromium = ["/run/door", str(_MEMORY_MB), "/tmp/profile", str(real)]
    return [mode.bwrap, *options, "--", *python, *chromium]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
