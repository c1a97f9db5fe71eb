"""One machine of the service: its life, the workspace's files on it, and the link to its server.

A request that fails is repeated, and what it asks for is such that doing it twice does no harm: the
exchanges of files have numbers, and so has each piece of the link's data (see `relay`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batch_trajectories_e2b import relay, tree
from batch_trajectories_e2b.api import Api, Gone, Machine, Refused, Unreachable, Waits
from batch_trajectories_e2b.service import Service

log = logging.getLogger(__name__)

_PATIENCE_S = 45.0
"""Seconds for which a machine that does not answer may come back."""
_RENEWALS = 3
"""How often a machine's life is renewed within its lifetime."""
_ANY_SIZE = 1 << 62
_TREE_SOURCE = inspect.getsource(tree)
_RELAY_SOURCE = inspect.getsource(relay)
_MAX_ERROR_BYTES = 4096

Result = TypeVar("Result")


class Lost(Exception):
    """The machine does not answer or does not exist any more."""


class Broken(Exception):
    """The machine answers, but what runs on it has damaged what the exchange of files needs."""


class Box(NamedTuple):
    """What a sandbox asks of its machine."""

    template: str
    root: str
    """The workspace here."""
    home: str
    """The workspace there."""
    state: str
    """A directory of ours there, on the same file system."""
    max_bytes: int
    """The most bytes that files may bring from there."""
    network: bool
    metadata: Mapping[str, str]


class Output(NamedTuple):
    """What a program on the machine printed, and how it ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class RemoteMachine:
    """One machine, until it is killed."""

    def __init__(self, api: Api, service: Service, box: Box) -> None:
        self._api, self._service, self._box = api, service, box
        self._machine: Machine | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._known: tree.Tree = {}
        """The workspace as both sides have it, as it is described here."""
        self._number = 0
        """The latest exchange that both sides have finished."""
        self._files = asyncio.Lock()
        self._link: _Link | None = None
        self.lost: str | None = None
        """Why the machine cannot be used any more; None while it can."""

    async def make(self, patience_s: float) -> None:
        """Make the machine. Raises `Refused` and `Unreachable`."""
        box = self._box
        self._machine = await self._api.make_machine(
            box.template, box.metadata, network=box.network, patience_s=patience_s
        )
        self._renewing = asyncio.create_task(self._renew(self._machine))

    async def kill(self) -> None:
        """End the machine with everything on it; may be repeated."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._link is not None:
            self._link.cancel()
        machine, self._machine = self._machine, None
        if machine is not None:
            await self._api.kill_machine(machine.id)

    async def push(self) -> None:
        """Bring changes of the workspace here to the machine. Raises `Lost` and `Broken`."""
        async with self._files:
            root = self._box.root
            now = await asyncio.to_thread(tree.scan, root)
            changed, gone = tree.differences(self._known, now)
            if not changed and not gone and self._number:
                return
            number = self._number + 1
            with tempfile.NamedTemporaryFile(prefix="e2b-") as file:
                await asyncio.to_thread(tree.pack, root, now, changed, gone, file.file)
                file.flush()
                there = f"{self._box.state}/in-{number}.tar"
                await self._again(lambda machine: self._api.upload(machine, there, Path(file.name)))
            await self._exchange("push", _ANY_SIZE)
            self._known, self._number = now, number

    async def pull(self) -> None:
        """Bring changes of the workspace on the machine here. Raises `Lost` and `Broken`."""
        async with self._files:
            answer = await self._exchange("pull", self._box.max_bytes)
            number, size = answer["number"], answer["bytes"]
            if number == self._number:
                return
            if not isinstance(size, int) or number != self._number + 1:
                raise Broken("the machine's answer about its files is not what was asked")
            with tempfile.NamedTemporaryFile(prefix="e2b-") as file:
                there, here = f"{self._box.state}/out-{number}.tar", Path(file.name)
                await self._again(
                    lambda machine: self._api.download(machine, there, here, size + 1)
                )
                await asyncio.to_thread(self._apply, here)
            self._number = number

    def _apply(self, archive: Path) -> None:
        """Change the workspace here as an archive of the machine says; see `pull`."""
        root = self._box.root
        try:
            with archive.open("rb") as file:
                # An archive adds to each file a header and padding, far less than its content.
                most = 2 * self._box.max_bytes + (64 << 20)
                control, paths = tree.unpack(root, file, str(Path(root).parent), most)
        except tree.TreeError as error:
            raise Broken(str(error)) from error
        gone = set(map(str, control["gone"]))
        if (everything := control.get("all")) is not None:
            # The machine has lost what both sides had: what it lacks is gone.
            gone = set(self._known) - set(map(str, everything))
            tree.remove(root, sorted(gone))
        for path in gone:
            self._known.pop(path, None)
        for path in paths:
            if (described := tree.describe(f"{root}/{path}")) is not None:
                self._known[path] = described

    async def _exchange(self, act: str, max_bytes: int) -> dict[str, Any]:
        """Run our program for files on the machine; return its answer. Raises `Broken`."""
        box = self._box
        argv = ["python3", "-I", "-S", "-c", _TREE_SOURCE, act, box.state, box.home]
        argv += [str(self._number), str(max_bytes)]
        done = await self.run(argv)
        try:
            answer = json.loads(done.stdout)
            refused = answer.get("refused")
        except (ValueError, AttributeError):
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = last[0][:300] if last else f"exit code {done.exit_code}"
            raise Broken(f"the files cannot be exchanged with the machine: {why}") from None
        if refused is not None:
            raise Broken(str(refused)[:300])
        return dict(answer)

    async def run(self, argv: Sequence[str]) -> Output:
        """Run a program on the machine that may run twice. Raises `Lost`."""

        async def once(machine: Machine) -> Output:
            stdout, stderr, code = bytearray(), bytearray(), 1
            body = {"process": _process(argv, {}), "stdin": False}
            async with self._api.stream(machine, "Start", body) as events:
                async for event in events:
                    data = event.get("data", {})
                    stdout += base64.b64decode(data.get("stdout", ""))
                    stderr = (stderr + base64.b64decode(data.get("stderr", "")))[-_MAX_ERROR_BYTES:]
                    if (end := event.get("end")) is not None:
                        code = _exit_code(end)
            return Output(code, bytes(stdout), bytes(stderr))

        try:
            return await self._again(once)
        except Refused as error:
            # Of a machine without a shell or such a user, as of its template.
            raise Broken(str(error)) from error

    async def _again(self, ask: Callable[[Machine], Awaitable[Result]]) -> Result:
        """Ask the machine until it answers; raises `Lost` if it never does, and `Refused`."""
        waits = Waits(_PATIENCE_S)
        while True:
            machine = self._usable()
            try:
                return await ask(machine)
            except (Unreachable, Gone) as error:
                failure: Exception = error
            await self._check_there(machine, failure)
            if not await waits.wait(getattr(failure, "after_s", None)):
                self.lost = f"machine {machine.id} does not answer: {failure}"

    def _usable(self) -> Machine:
        if self.lost is not None:
            raise Lost(self.lost)
        if self._machine is None:
            raise Lost("the machine was ended")
        return self._machine

    async def _check_there(self, machine: Machine, failure: Exception) -> None:
        """Find out from the service whether the machine is gone. Raises `Lost`."""
        try:
            is_there = await self._api.is_there(machine.id)
        except (Unreachable, Refused) as error:
            log.warning("%s; %s", failure, error)
            return
        if not is_there:
            self.lost = f"machine {machine.id} is gone"
            raise Lost(self.lost) from failure

    async def _renew(self, machine: Machine) -> None:
        """Keep the machine alive while it is used."""
        while self.lost is None:
            await asyncio.sleep(self._service.lifetime_s / _RENEWALS)
            try:
                await self._api.keep_machine(machine.id)
            except Gone:
                self.lost = f"machine {machine.id} is gone"
                if self._link is not None:
                    self._link.cancel()
            except (Refused, Unreachable) as error:
                log.warning("%s", error)

    def link(
        self, here: socket.socket, errors: int, argv: Sequence[str], env: Mapping[str, str]
    ) -> asyncio.Task[int]:
        """Connect a socket with the standard input and output of a command on the machine.

        The result is the command's exit code. What it prints as an error goes to `errors`.
        """
        self._link = _Link(self, here, errors, argv, env)
        return self._link.task

    def note_cut_off(self) -> None:
        """The sandbox gave up the link's command: because of the network, if that broke lately."""
        if self._link is not None and self._link.broke_within(_PATIENCE_S):
            self.lost = self.lost or "the connection with the machine breaks again and again"

    @property
    def is_linked(self) -> bool:
        """Whether the command of the link still runs."""
        return self._link is not None and not self._link.task.done()


class _Link:
    """The connection of one socket here with one command there."""

    def __init__(
        self,
        machine: RemoteMachine,
        here: socket.socket,
        errors: int,
        argv: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        self._remote, self._here, self._errors = machine, here, errors
        self._argv = ["python3", "-I", "-S", "-c", _RELAY_SOURCE, *argv]
        self._env = env
        self._pid: int | None = None
        self._frames = relay.Frames()
        self._mark: bytes | None = None
        """What the stream will hold before anything else that counts."""
        self._received = 0
        self._exit_code: int | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=8)
        self._unsent_ack = False
        self._broke_at = float("-inf")
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Pass nothing on any more; the command may still run."""
        self.task.cancel()

    def broke_within(self, seconds: float) -> bool:
        """Whether the stream has broken off that lately."""
        return time.monotonic() - self._broke_at < seconds

    async def _run(self) -> int:
        helpers: list[asyncio.Task[None]] = []
        reader, writer = await asyncio.open_connection(sock=self._here)
        try:
            waits = Waits(_PATIENCE_S)
            while True:
                machine = self._remote._usable()
                try:
                    if self._pid is None:
                        body = {"process": _process(self._argv, self._env), "stdin": True}
                        method = "Start"
                    else:
                        body, method = {"process": {"pid": self._pid}}, "Connect"
                    async with self._remote._api.stream(machine, method, body) as events:
                        async for event in events:
                            if "start" not in event:
                                waits = Waits(_PATIENCE_S)
                            if (start := event.get("start")) is not None:
                                if self._pid is not None:
                                    await self._ask_again()
                                else:
                                    self._pid = int(start["pid"])
                                    helpers = [
                                        asyncio.create_task(self._read(reader)),
                                        asyncio.create_task(self._send()),
                                    ]
                            elif (end := event.get("end")) is not None:
                                return self._ended(_exit_code(end))
                            elif data := event.get("data"):
                                self._print_error(base64.b64decode(data.get("stderr", "")))
                                await self._receive(
                                    base64.b64decode(data.get("stdout", "")), writer
                                )
                    failure: Exception = Unreachable("the stream ended without an end")
                except (Unreachable, Gone) as error:
                    failure = error
                except Refused as error:
                    if error.status == 404 and self._exit_code is not None:
                        return self._exit_code
                    self._remote.lost = f"machine {machine.id}: {error}"
                    continue
                log.info("%s: the stream is opened again", failure)
                self._broke_at = time.monotonic()
                await self._remote._check_there(machine, failure)
                if not await waits.wait():
                    self._remote.lost = f"machine {machine.id} does not answer: {failure}"
        finally:
            for helper in helpers:
                helper.cancel()
            # Not the socket: the event loop would watch a number that another file may get.
            writer.close()
            os.close(self._errors)

    def _ended(self, exit_code: int) -> int:
        return exit_code if self._exit_code is None else self._exit_code

    async def _receive(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        """Pass on what the relay printed, each piece of data once."""
        if self._mark is not None:
            rest = self._frames.skip_to(self._mark, piece)
            if rest is None:
                return
            self._mark, piece = None, rest
        for words, data in self._frames.feed(piece):
            if words[0] == "d":
                if int(words[1]) == self._received + 1:
                    self._received += 1
                    self._unsent_ack = True
                    writer.write(data)
                    # A worker that has ended: nobody waits for the rest.
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
            elif words[0] == "x":
                self._exit_code = int(words[1])
                await self._input(b"a %d\n" % self._received)

    async def _ask_again(self) -> None:
        token = secrets.token_hex(8)
        self._mark = relay.mark(token)
        self._frames = relay.Frames()
        await self._input(b"r %d %s\n" % (self._received, token.encode()))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Number what comes from the socket here."""
        number = 0
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(relay.CHUNK_BYTES):
                number += 1
                await self._outbox.put(relay.data_frame(number, piece))
        await self._outbox.put(b"e\n")

    async def _send(self) -> None:
        while True:
            frame = await self._outbox.get()
            if self._unsent_ack:
                self._unsent_ack = False
                frame = b"a %d\n" % self._received + frame
            await self._input(frame)

    async def _input(self, frames: bytes) -> None:
        """Write to the relay's input; what was written before is ignored there."""
        body = {
            "process": {"pid": self._pid},
            "input": {"stdin": base64.b64encode(frames).decode()},
        }
        # If it fails for good, the stream fails as well, and says why.
        with contextlib.suppress(Lost, Refused):
            await self._remote._again(
                lambda machine: self._remote._api.call(machine, "SendInput", body)
            )

    def _print_error(self, data: bytes) -> None:
        # Not more than the pipe takes: nobody reads it after the start.
        with contextlib.suppress(OSError):
            os.write(self._errors, data)


def _process(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    return {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(env), "cwd": "/"}


def _exit_code(end: Mapping[str, Any]) -> int:
    """Return the exit code of an end event; JSON leaves out a code that is 0."""
    code = int(end.get("exitCode", 0))
    return code if code >= 0 else 1
