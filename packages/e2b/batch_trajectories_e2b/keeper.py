"""A process beside each worker: it makes the worker's machines, keeps them alive and ends them.

Requests come over a Unix socket, each on a connection of its own: a line of JSON, answered by a
line of JSON. When the worker has ended, however it ended, the keeper ends all of its machines. What
it could not end, because it was killed itself, the next keeper on this computer ends, and else the
service, as soon as the machine's lifetime is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_trajectories_e2b.api import Api, Refused, Unreachable
from batch_trajectories_e2b.machine import Box, Broken, Lost, RemoteMachine
from batch_trajectories_e2b.service import Service

_MAX_FRAME_BYTES = 8 << 20
_LINK_FDS = 2
_LATE_S = 3.0
"""Seconds after which a machine that was being made when all ended is looked for again."""


def computer() -> str:
    """Return a name of this computer, or container, since its start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    space = str(Path("/proc/self/ns/pid").readlink())
    # Letters and digits: servers differ in how they decode others in a filter.
    return hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:16]


def process_start(pid: int | str) -> str | None:
    """Return when a process started, in ticks of the clock; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = status.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


class Keeper:
    """The machines of one worker."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._api = Api(service)
        self._machines: dict[str, RemoteMachine] = {}
        self._is_ending = False
        self.name = {
            "keeper": secrets.token_hex(8),
            "computer": computer(),
            "process": f"{os.getpid()}-{process_start('self')}",
        }

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a request asks; return the answer."""
        try:
            if request["do"] == "open":
                return await self._open(request)
            machine = self._machines.get(request["box"])
            if request["do"] == "close":
                await self._close(request["box"])
                return {}
            if machine is None:
                return {"error": "lost", "message": "the machine was ended"}
            if request["do"] == "push":
                await machine.push()
            elif request["do"] == "pull":
                await machine.pull()
            return {"is_linked": machine.is_linked, "lost": machine.lost}
        except Lost as error:
            return {"error": "lost", "message": str(error)}
        except Broken as error:
            return {"error": "broken", "message": str(error)}
        except Refused as error:
            return {"error": "refused", "message": str(error), "status": error.status}
        except Unreachable as error:
            return {"error": "unreachable", "message": str(error)}
        except OSError as error:
            # Of the workspace or of temporary files here.
            return {"error": "host", "message": str(error)}
        except Exception as error:  # else the worker would only see that no answer comes
            traceback.print_exc()
            return {"error": "host", "message": f"a bug: {type(error).__name__}: {error}"}

    async def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        terms = dict(request["terms"])
        metadata = {**self.name, **terms.pop("metadata"), "box": request["box"]}
        machine = RemoteMachine(self._api, self._service, Box(**terms, metadata=metadata))
        self._machines[request["box"]] = machine
        try:
            await machine.make(request["patience_s"])
        except BaseException:
            self._machines.pop(request["box"], None)
            raise
        if request["box"] not in self._machines or self._is_ending:
            await machine.kill()
        return {}

    async def _close(self, box: str) -> None:
        machine = self._machines.pop(box, None)
        if machine is not None:
            await machine.kill()

    async def link(
        self, request: Mapping[str, Any], stub: socket.socket, descriptors: list[int]
    ) -> None:
        """Connect the streams of a stub with a command on a machine, until one of them ends."""
        loop = asyncio.get_running_loop()
        here = socket.socket(fileno=descriptors[0])
        here.setblocking(False)
        os.set_blocking(descriptors[1], False)
        machine = self._machines.get(request["box"])
        if machine is None:
            here.close()
            os.close(descriptors[1])
            return
        command = machine.link(here, descriptors[1], request["argv"], request["env"])
        # The stub says nothing more: it is readable when it was killed.
        ended = asyncio.ensure_future(loop.sock_recv(stub, 1))
        try:
            await asyncio.wait([command, ended], return_when=asyncio.FIRST_COMPLETED)
            code = 1
            if not command.done():
                machine.note_cut_off()
            if command.done() and not command.cancelled() and command.exception() is None:
                code = command.result()
            with contextlib.suppress(OSError):
                await loop.sock_sendall(stub, bytes([code & 0xFF]))
        finally:
            ended.cancel()
            command.cancel()
            await asyncio.gather(ended, command, return_exceptions=True)

    async def end_orphans(self) -> None:
        """End machines of this computer whose keepers have been killed."""
        of_computer = {"computer": self.name["computer"]}
        for found in await self._api.list_machines(of_computer):
            pid, _, started = found.get("metadata", {}).get("process", "").partition("-")
            if not pid.isdecimal() or process_start(pid) != started:
                await self._api.kill_machine(found["sandboxID"])

    async def end(self) -> None:
        """End all machines, also those that were being made."""
        self._is_ending = True
        known = list(self._machines)
        await asyncio.gather(*map(self._close, known), return_exceptions=True)
        for late_s in (0.0, _LATE_S) if known else ():
            await asyncio.sleep(late_s)
            for left in await self._api.list_machines({"keeper": self.name["keeper"]}):
                await self._api.kill_machine(left["sandboxID"])
        await self._api.close()


async def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a request, and the descriptors that came with it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, _LINK_FDS)
    while data and not data.endswith(b"\n") and len(data) < _MAX_FRAME_BYTES:
        if not (piece := await loop.sock_recv(connection, 1 << 16)):
            break
        data += piece
    return json.loads(data), descriptors


async def _serve(keeper: Keeper, connection: socket.socket) -> None:
    """Answer the request of one connection."""
    connection.setblocking(False)
    with connection:
        try:
            request, descriptors = await _receive(connection)
            if request["do"] == "link":
                await keeper.link(request, connection, descriptors)
            else:
                answer = json.dumps(await keeper.answer(request)).encode()
                await asyncio.get_running_loop().sock_sendall(connection, answer + b"\n")
        except (ConnectionError, ValueError):
            pass  # the worker has given up this request, or has ended


async def _until_worker_ends(worker: int) -> None:
    """Wait for the end of the worker, or of the pipe that it holds."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(worker)
        # It may have ended before, and its number may be another process's.
        if os.getppid() != worker:
            return
        loop.add_reader(handle, ended.set)
        await ended.wait()


async def keep(path: str, worker: int) -> None:
    """Serve on the socket `path` until the worker ends."""
    service = Service(**json.loads(sys.stdin.readline()))
    keeper = Keeper(service)
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    listener.setblocking(False)
    serving: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(_serve(keeper, connection))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def end_orphans() -> None:
        with contextlib.suppress(Refused, Unreachable):  # the first machine will say so
            await keeper.end_orphans()

    orphans = asyncio.create_task(end_orphans())
    accepting = asyncio.create_task(accept())
    print("ready", flush=True)
    await _until_worker_ends(worker)
    accepting.cancel()
    listener.close()
    with contextlib.suppress(OSError):
        Path(path).unlink()
        Path(path).parent.rmdir()
    try:
        await keeper.end()
    finally:
        for task in (*serving, orphans):
            task.cancel()


def main() -> None:
    """Run as `python -m batch_trajectories_e2b.keeper SOCKET PID`."""
    asyncio.run(keep(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
