"""The sandbox `e2b`: a task's commands run on a machine of the service.

The workspace stays here. Before each call what changed in it goes to the machine, after each call,
and now and then during a long one, what changed there comes back. So files, checks and journals
work as with a sandbox on this computer, and a machine that is lost takes no file along.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Self, TypeVar

from batch_trajectories.basics.errors import HostError, SandboxLost
from batch_trajectories_e2b.keeper_client import STUB, KeeperClient
from batch_trajectories_e2b.service import DEFAULT_TEMPLATE, Service, SettingsError
from toolsets.sandbox.base import (
    ExecResult,
    Extras,
    Limits,
    SandboxError,
    SandboxSettings,
    SessionKind,
)
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.served import ServedSandbox
from toolsets.workspace.workspace import Workspace

_OPEN_PATIENCE_S = 120.0
"""Seconds for which a machine is asked for, as while all that the key may have are in use."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 2.0, 60.0
"""Seconds between two looks at the machine's files during a call; each is twice the one before."""
_SPARE_BYTES = 1 << 30
"""Bytes that a workspace may hold above its limit when a call has ended."""

Result = TypeVar("Result")


class E2BSandbox(ServedSandbox):
    """Runs a task's commands on one machine of E2B.

    The template decides memory, CPUs and disk. `Limits` hold for each process, and for time, output
    and size of the workspace. The machine is ended with its sandbox, and with this process.
    """

    name = "e2b"
    summary = "a machine of E2B, or of a server with its API, per conversation"
    limits_itself = True
    has_own_loopback = True

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """See `Sandbox`."""
        del settings
        try:
            return _problem(Service.from_environment())
        except SettingsError as error:
            return f"sandbox e2b: {error}"

    @classmethod
    def create(
        cls,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        extras: Extras | None = None,
    ) -> Self:
        """See `Sandbox`. Does not ask the service: that would block."""
        try:
            service = Service.from_environment()
        except SettingsError as error:
            raise SandboxError(f"sandbox e2b: {error}") from error
        return cls(workspace, limits, extras, service, settings.image or DEFAULT_TEMPLATE)

    def __init__(
        self,
        workspace: Workspace,
        limits: Limits,
        extras: Extras | None,
        service: Service,
        template: str,
    ) -> None:
        super().__init__(workspace, limits, extras)
        self._service = service
        self._keeper = _keeper(service)
        self._template = template
        self._turn = asyncio.Lock()
        self._box: str | None = None
        """The name of the machine's box in the keeper; None: there is no machine."""
        self._has_run = False

    @property
    def home(self) -> str:
        """The path of the workspace on the machine."""
        return f"{self._user_home}/workspace"

    @property
    def max_processes(self) -> int | None:
        """The limit that the server sets: no control group here can hold a machine elsewhere."""
        return self._limits.processes

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """See `Sandbox`. Raises `SandboxLost` if the machine fails."""
        run = super().exec
        return await self._with_files(lambda: run(argv, timeout_s=timeout_s, stdin=stdin))

    async def run(
        self,
        session: SessionKind,
        code: str,
        *,
        timeout_s: float | None = None,
        output_file: str | None = None,
    ) -> ExecResult:
        """See `Sandbox`. Raises `SandboxLost` if the machine fails."""
        run = super().run
        return await self._with_files(
            lambda: run(session, code, timeout_s=timeout_s, output_file=output_file)
        )

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`: a stub, whose streams the keeper connects with the machine."""
        env = {
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "MPLBACKEND": "Agg",
        }
        request = {"do": "link", "box": self._box, "argv": list(argv), "env": env}
        stub = [sys.executable, "-I", "-S", "-c", STUB, self._keeper.path, json.dumps(request)]
        return Launch(argv=stub, env={}, cwd="/")

    async def stop(self) -> None:
        """See `Sandbox`. Files that changed since the last call come back before."""
        try:
            await super().stop()
        finally:
            if self._box is not None:
                try:
                    with contextlib.suppress(SandboxLost, SandboxError):
                        await self._keeper.ask("pull", self._box)
                finally:
                    await self._end_machine()

    @property
    def _user_home(self) -> str:
        user = self._service.user
        return "/root" if user == "root" else f"/home/{user}"

    async def _with_files(self, call: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
        """Make a call on the machine, with the workspace's files before and after it."""
        async with self._turn:
            await self._begin()
            looking = asyncio.create_task(self._look_now_and_then())
            try:
                result = await call()
            except (SandboxError, HostError) as error:
                await self._finish(looking, error)
                raise
            except BaseException:
                with contextlib.suppress(SandboxLost, SandboxError):
                    await self._finish(looking, None)
                raise
            await self._finish(looking, None)
            return result

    async def _begin(self) -> None:
        """Have a machine with the workspace as it is here."""
        self._workspace.make()
        try:
            if self._box is None:
                self._box = secrets.token_hex(8)
                self._has_run = False
                terms = {
                    "template": self._template,
                    "root": str(self._workspace.root),
                    "home": self.home,
                    "state": f"{self._user_home}/.batch-trajectories",
                    "max_bytes": 2 * (self._limits.workspace_mb << 20) + _SPARE_BYTES,
                    "network": self._limits.network,
                    "metadata": {"workspace": self._workspace.root.name},
                }
                await self._keeper.ask("open", self._box, terms=terms, patience_s=_OPEN_PATIENCE_S)
            await self._keeper.ask("push", self._box)
        except BaseException as error:
            await self._end_machine()
            await self.end_server("was ended with its machine")
            if isinstance(error, SandboxError) and not self._has_run:
                # Nothing has run there that could have damaged it: the template is not suited.
                raise HostError(f"{error} (template {self._template!r})") from error
            raise
        self._has_run = True

    async def _look_now_and_then(self) -> None:
        """Bring files here during a long call, so that a lost machine takes few along."""
        wait_s = _FIRST_LOOK_S
        while self._box is not None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)
            try:
                await self._keeper.ask("pull", self._box)
            except (HostError, SandboxError):
                return  # the end of the call will say so

    async def _finish(
        self, looking: asyncio.Task[None], failed: SandboxError | HostError | None
    ) -> None:
        """Bring the files here after a call, also if it is cut off.

        Raises `SandboxLost` if the machine is lost, also as the reason of `failed`. Ends the
        machine if the server on it has ended, with all that still runs there.
        """
        finishing = asyncio.ensure_future(self._pull(looking))
        try:
            is_linked = await _to_its_end(finishing)
        except BaseException as error:
            await _to_its_end(asyncio.ensure_future(self._end_machine()))
            if isinstance(error, SandboxLost) and failed is not None:
                raise error from failed
            raise
        if not is_linked:
            await _to_its_end(asyncio.ensure_future(self._end_machine()))

    async def _pull(self, looking: asyncio.Task[None]) -> bool:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        assert self._box is not None
        state = await self._keeper.ask("pull", self._box)
        if state["lost"] is not None:
            raise SandboxLost(f"sandbox e2b: {state['lost']}")
        return bool(state["is_linked"])

    async def _end_machine(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(HostError):  # the service ends it when its time is over
                await self._keeper.ask("close", box)


async def _to_its_end(task: asyncio.Future[Result]) -> Result:
    """Wait for a task that a cancellation must not cut off; then pass the cancellation on."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        with contextlib.suppress(Exception):
            task.result()
        raise cancelled
    return task.result()


@cache
def _keeper(service: Service) -> KeeperClient:
    client = KeeperClient(service)
    atexit.register(client.close)
    return client


@cache
def _problem(service: Service) -> str | None:
    """Ask the service for a list of machines; return why that fails, None if it works."""
    from concurrent.futures import ThreadPoolExecutor

    from batch_trajectories_e2b.api import Api, Gone, Refused, Unreachable

    async def ask() -> str | None:
        api = Api(service)
        try:
            await api.list_machines({}, limit=1)
        except Refused as error:
            advice = "set E2B_API_KEY to a key that may make machines"
            return f"sandbox e2b: {error}; {advice}"
        except (Unreachable, Gone) as error:
            advice = "check E2B_API_URL or E2B_DOMAIN, and the network"
            return f"sandbox e2b: {error}; {advice}"
        finally:
            await api.close()
        return None

    # In a thread: the caller may have an event loop of its own.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, ask()).result()
