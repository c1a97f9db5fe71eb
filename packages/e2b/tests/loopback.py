"""A service with E2B's API on this computer: its machines are bubblewrap sandboxes.

Each machine has its own files, processes and network, and in it a server of its own (`envd.py`).
Requests for a machine come to the same address as those for the service, with the machine's id in
a header, as with E2B_SANDBOX_URL. Faults are injected here, between a client and what it asks.

    python loopback.py [PORT]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import aiohttp
from aiohttp import web

KEY = "e2b_" + "5ec2e7" * 7
FIELDS = {
    *("templateID", "timeout", "autoPause", "autoPauseMemory", "autoResume", "secure"),
    *("allow_internet_access", "network", "metadata", "envVars", "mcp", "iam", "volumeMounts"),
}
_FIRST_UID = 30000
_HOP = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Fault:
    """What happens to requests whose "METHOD PATH" matches, `times` times."""

    matches: str
    status: int | None = None
    """Answer with it; None: cut the connection."""
    after: bool = False
    """Do what was asked before, so that only the answer is lost."""
    bytes_before: int | None = None
    """Cut the connection after so many bytes of the answer."""
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    seen: int = 0


@dataclass
class Made:
    """A machine of the service."""

    id: str
    token: str
    directory: Path
    process: subprocess.Popen[bytes]
    body: dict[str, Any]
    started: float
    ends: float

    @property
    def socket(self) -> str:
        return str(self.directory / "run" / "envd")

    @property
    def home(self) -> Path:
        """The home of the machine's user, as seen from here."""
        return self.directory / "home"

    def listed(self) -> dict[str, Any]:
        """What the API says of it."""
        return {
            "templateID": self.body["templateID"],
            "sandboxID": self.id,
            "clientID": "loopback",
            "startedAt": _time(self.started),
            "endAt": _time(self.ends),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "metadata": self.body.get("metadata", {}),
            "state": "running",
            "envdVersion": "0.5.2",
        }


class Loopback:
    """The service, which runs in a thread of its own until it is closed."""

    def __init__(self, port: int = 0) -> None:
        self.machines: dict[str, Made] = {}
        self.requests: list[str] = []
        """All requests, as "METHOD PATH"."""
        self.made: list[dict[str, Any]] = []
        """The bodies of all requests for machines that were granted."""
        self.renewals: list[str] = []
        self.killed: list[str] = []
        self.faults: list[Fault] = []
        self.on_request: Callable[[str], Fault | None] | None = None
        self.max_machines: int | None = None
        self.knows_v2 = True
        self.templates = {"base", "other"}
        self._port = port
        self._uids = iter(range(_FIRST_UID, 65000))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients find the service."""
        return {"E2B_API_KEY": KEY, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def close(self) -> None:
        """End the service and all machines."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def break_off(self, id: str) -> None:
        """End a machine as if its host had failed."""
        self._loop.call_soon_threadsafe(self._end, id)
        give_up = time.monotonic() + 30
        while id in self.machines and time.monotonic() < give_up:
            time.sleep(0.01)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30, middlewares=[self._with_faults])
        app.router.add_post("/sandboxes", self._make)
        app.router.add_post("/v2/sandboxes", self._make)  # as newer clients ask
        app.router.add_get("/v2/sandboxes", self._list)
        app.router.add_get("/sandboxes/{id}", self._show)
        app.router.add_delete("/sandboxes/{id}", self._kill)
        app.router.add_post("/sandboxes/{id}/timeout", self._renew)
        app.router.add_post("/sandboxes/{id}/connect", self._connect)
        app.router.add_post("/v2/sandboxes/{id}/connect", self._connect)
        app.router.add_route("*", "/{path:.*}", self._proxy)
        # A handler of a stream ends when its client leaves, as a proxy of the service does.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self._port = runner.addresses[0][1]
        ending = asyncio.create_task(self._end_old())
        self._ready.set()
        await self._stop.wait()
        ending.cancel()
        for id in list(self.machines):
            self._end(id)
        await runner.cleanup()

    async def _end_old(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for one in list(self.machines.values()):
                if time.time() > one.ends:
                    self._end(one.id)

    def _end(self, id: str) -> None:
        made = self.machines.pop(id)
        made.process.kill()
        made.process.wait()
        shutil.rmtree(made.directory, ignore_errors=True)

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = f"{request.method} {request.path}"
        self.requests.append(name)
        fault = self.on_request(name) if self.on_request is not None else None
        for one in self.faults:
            if fault is None and one.seen < one.times and re.search(one.matches, name):
                one.seen += 1
                fault = one
        if fault is None:
            return await handler(request)
        if fault.bytes_before is not None:
            request["bytes_before"] = fault.bytes_before
            return await handler(request)
        if fault.after:
            await handler(request)
        if fault.status is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        message = {"code": fault.status, "message": f"an injected fault; you sent {KEY}"}
        return web.json_response(message, status=fault.status, headers=fault.headers)

    def _is_trusted(self, request: web.Request) -> bool:
        return request.headers.get("X-API-Key") == KEY

    async def _make(self, request: web.Request) -> web.Response:
        if not self._is_trusted(request):
            return _error(401, "Invalid API key")
        is_new = request.path.startswith("/v2/")
        if is_new and not self.knows_v2:
            return _error(404, "page not found")
        body = await request.json()
        if unknown := set(body) - (FIELDS - {"secure"} if is_new else FIELDS):
            return _error(400, f"unknown fields {unknown}")
        if body["templateID"] not in self.templates:
            return _error(404, f"template '{body['templateID']}' not found")
        if self.max_machines is not None and len(self.machines) >= self.max_machines:
            return _error(429, "you have reached the maximum number of concurrent sandboxes")
        made = await asyncio.to_thread(self._start, body)
        self.machines[made.id] = made
        self.made.append(body)
        answer = {
            "templateID": body["templateID"],
            "sandboxID": made.id,
            "clientID": "loopback",
            "envdVersion": "0.5.2",
            "envdAccessToken": made.token,
            "domain": None,
        }
        return web.json_response(answer, status=201)

    def _start(self, body: dict[str, Any]) -> Made:
        id, token = "i" + secrets.token_hex(10), secrets.token_hex(16)
        directory = Path(tempfile.mkdtemp(prefix="loopback-", dir="/tmp"))
        argv = [*_bwrap(directory, network=body.get("allow_internet_access", True)), token]
        owner: dict[str, Any] = {}
        if os.getuid() == 0:
            # A user without rights, as on a machine: limits on processes do not hold for root.
            uid = next(self._uids)
            owner = {"user": uid, "group": uid, "extra_groups": []}
            for path in (directory, *directory.rglob("*")):
                os.chown(path, uid, uid)
        process = subprocess.Popen(argv, env={}, stdin=subprocess.DEVNULL, **owner)
        give_up = time.monotonic() + 30
        while not (directory / "run" / "envd").exists():
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError("a machine of the loopback service did not start")
            time.sleep(0.01)
        now = time.time()
        return Made(id, token, directory, process, body, now, now + body.get("timeout", 15))

    async def _list(self, request: web.Request) -> web.Response:
        if not self._is_trusted(request):
            return _error(401, "Invalid API key")
        wanted = _metadata(request.query.get("metadata", ""))
        limit = int(request.query.get("limit", "100"))
        if not 1 <= limit <= 100:
            return _error(400, "limit must be from 1 to 100")
        found = [
            one.listed()
            for one in self.machines.values()
            if wanted.items() <= one.body.get("metadata", {}).items()
        ]
        first = int(request.query.get("nextToken", "0"))
        headers = {}
        if len(found) > first + limit:
            headers["X-Next-Token"] = str(first + limit)
        return web.json_response(found[first : first + limit], headers=headers)

    async def _show(self, request: web.Request) -> web.Response:
        found = self.machines.get(request.match_info["id"])
        if found is None:
            return _error(404, "sandbox not found")
        return web.json_response(found.listed() | {"domain": None})

    async def _kill(self, request: web.Request) -> web.Response:
        if not self._is_trusted(request):
            return _error(401, "Invalid API key")
        id = request.match_info["id"]
        if id not in self.machines:
            return _error(404, "sandbox not found")
        self.killed.append(id)
        self._end(id)
        return web.Response(status=204)

    async def _renew(self, request: web.Request) -> web.Response:
        found = self.machines.get(request.match_info["id"])
        if found is None:
            return _error(404, "sandbox not found")
        self.renewals.append(found.id)
        found.ends = time.time() + (await request.json())["timeout"]
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.Response:
        found = self.machines.get(request.match_info["id"])
        if found is None:
            return _error(404, "sandbox not found")
        answer = {**found.listed(), "envdAccessToken": found.token, "domain": None}
        return web.json_response(answer)

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on to the machine that its header names."""
        id = request.headers.get("E2b-Sandbox-Id", "")
        found = self.machines.get(id)
        if found is None:
            text = {"sandboxId": id, "message": "The sandbox was not found", "code": 502}
            return web.json_response(text, status=502)
        assert request.headers["E2b-Sandbox-Port"] == "49983"
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        left = request.get("bytes_before")
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(found.socket), auto_decompress=False
                ) as session,
                session.request(
                    request.method,
                    f"http://machine{request.path_qs}",
                    headers=headers,
                    data=await request.read(),
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as answer,
            ):
                kept = {name: v for name, v in answer.headers.items() if name.lower() not in _HOP}
                passed = web.StreamResponse(status=answer.status, headers=kept)
                if answer.content_length is not None:
                    passed.content_length = answer.content_length
                await passed.prepare(request)
                async for piece in answer.content.iter_any():
                    if left is not None and len(piece) >= left:
                        await passed.write(piece[:left])
                        assert request.transport is not None
                        request.transport.abort()
                        return passed
                    left = None if left is None else left - len(piece)
                    await passed.write(piece)
                await passed.write_eof()
                return passed
        except (aiohttp.ClientError, OSError) as error:
            if id in self.machines:
                print(f"loopback: {request.method} {request.path}: {error!r}", file=sys.stderr)
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)


def _bwrap(directory: Path, *, network: bool) -> list[str]:
    """Return the command line of a machine; it ends with the token."""
    (directory / "home").mkdir()
    (directory / "run").mkdir()
    (directory / "passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    shutil.copy(Path(__file__).with_name("envd.py"), directory / "envd.py")
    directory.chmod(0o755)
    # Other users may not reach a Python in somebody's home.
    prefix = Path("/usr" if Path("/usr/bin/python3").exists() else sys.base_prefix)
    argv = ["/usr/bin/env", "bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    argv += ["--share-net"] if network else []
    argv += ["--uid", "1000", "--gid", "1000", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if (path := Path("/", name)).is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    if not prefix.is_relative_to("/usr"):
        argv += ["--ro-bind", str(prefix), str(prefix)]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/root"]
    argv += ["--ro-bind", str(directory / "passwd"), "/etc/passwd"]
    argv += ["--bind", str(directory / "home"), "/home/user"]
    argv += ["--bind", str(directory / "run"), "/run/envd"]
    argv += ["--ro-bind", str(directory / "envd.py"), "/opt/envd.py"]
    argv += ["--setenv", "PATH", f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    return [*argv, "--chdir", "/", "python3", "/opt/envd.py", "/run/envd/envd"]


def _metadata(query: str) -> dict[str, str]:
    """Read a filter as the service does: decoded as a whole, and each part of it again."""
    pairs = [pair.split("=") for pair in unquote_plus(query).split("&") if pair]
    return {unquote_plus(name): unquote_plus(value) for name, value in pairs}


def _error(code: int, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=code)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


if __name__ == "__main__":
    service = Loopback(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for name, value in service.environment.items():
        print(f"export {name}={value}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    service.close()
