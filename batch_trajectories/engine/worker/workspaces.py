"""The workspaces and sandboxes of a worker's tasks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.config.sandboxes import check_image_digest, image_sandboxes
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.messages import WorkerSetup
from batch_trajectories.engine.worker.workspace_setup import (
    SetupFailed,
    fresh_root,
    home_of_user,
    incomplete_mark,
    keep_or_remove,
    make_ready,
    mark_finished_setup,
    mark_unfinished_setup,
    remove_all,
    set_up_workspace,
)
from batch_trajectories.records.files import storage_error
from batch_trajectories.records.names import RETAINED_WORKSPACES, WORKSPACES
from toolsets.context import ToolContext
from toolsets.sandbox.base import Extras, ImageSpec, Limits, Sandbox, SandboxError
from toolsets.sandbox.commands import require_sandbox
from toolsets.sandbox.factory import make_sandbox, sandbox_problem
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import TEMPORARY, Workspace

if TYPE_CHECKING:
    from batch_trajectories.dataset.row_workspace import Check, RowSetup
    from batch_trajectories.engine.worker.reward_functions import Inside
    from toolsets.browser.process import Browsers
    from toolsets.net.web_settings import WebSettings
    from toolsets.sandbox.base import SandboxSettings
    from toolsets.sandbox.image_files import ImageSandbox


LOST = "the workspace was lost"


class PreparedWorkspace(NamedTuple):
    """A workspace that is set up."""

    context: ToolContext
    survived: bool
    """Whether the workspace is from an earlier assignment."""
    why_new: str = LOST
    """The reason why an earlier workspace is not used, if there was one."""


log = logging.getLogger(__name__)

_FAILED_FOR_S = 60.0
"""Seconds for which an image that could not be fetched is not asked for again."""

_ASK_PYTHON = ("python3", "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))")
_WITHOUT_PYTHON = (1, 126, 127)
"""Exit codes of an older Python, of one that cannot be executed, and of none."""


class Workspaces:
    """Opens the workspaces of one worker's tasks."""

    def __init__(
        self, setup: WorkerSetup, *, web: WebSettings | None, browsers: Browsers | None
    ) -> None:
        """`web` and `browsers` are for the web tools and the browser, where a task has them."""
        self._setup = setup
        self._web = web
        self._browsers = browsers
        self._problems: dict[str, str | None] = {}
        self._digests = dict(setup.images)
        """Digests of images around workspaces, by reference; `RunImages` has those of images
        inside."""
        self._images: RunImages | None = None
        if setup.config.is_inside and setup.provenance.sandbox is not None:
            from batch_trajectories.engine.worker.diffs.diffs import Diffs

            self._images = RunImages(setup)
            self._diffs = Diffs()
        self._has_python: dict[str, bool] = {}
        """Whether images have a `python3`, by digest or else by reference."""
        self._waiting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def open(self, key: bytes, row: RowTask, *, resumed: bool) -> ToolContext:
        """The context of the task with this key; its directory is made when it is needed.

        Where the workspace is inside an image, `prepare` adds files and sandbox.
        """
        workspace = Workspace(self._setup.run_dir / WORKSPACES / key.hex())
        return ToolContext(
            workspace,
            self._make_sandbox(workspace, row) if self._images is None else None,
            web=self._web,
            browsers=self._browsers,
            resumed=resumed,
        )

    async def prepare(
        self, context: ToolContext, row: RowTask, *, workspace_id: str
    ) -> PreparedWorkspace:
        """Prepare a workspace as its row says.

        `workspace_id` is the storage of the workspace of that assignment. Raises `SetupFailed`.
        """
        root = context.workspace.root
        is_new = not context.resumed or workspace_id != self._setup.workspace_id
        if is_new and os.path.lexists(root):
            # What a conversation left whose journal was lost is not this one's, nor is what this
            # one left here before it went on elsewhere.
            await asyncio.to_thread(remove_tree, root)
        if row.setup is not None:
            context.workspace.start_dir = row.setup.start_dir
        if self._images is not None:
            return await self._prepare_image(context, row)
        config = self._setup.config
        if config.uses_images:
            image = row.image.reference if row.image else config.docker_image
            if image is not None and (problem := await self._image_problem(image)):
                raise SetupFailed(problem)
        if incomplete_mark(root).exists():
            await asyncio.to_thread(remove_tree, root)
        survived = root.exists()
        if row.setup is not None and not survived:
            async with mark_unfinished_setup(root):
                await set_up_workspace(context, row.setup)
        return PreparedWorkspace(context, survived)

    async def _prepare_image(self, context: ToolContext, row: RowTask) -> PreparedWorkspace:
        """Prepare a workspace inside an image; see `prepare`."""
        from batch_trajectories.engine.worker.diffs.changes import begin_diff

        assert self._images is not None
        images = self._images
        spec, limits = self._image_spec(row), self._limits(row)
        root = context.workspace.root

        def begin() -> tuple[ImageSandbox, bool, bool]:
            sandbox = images.sandbox_in_thread(root, limits, spec)
            return sandbox, *keep_or_remove(root, sandbox)

        await images.bring(limits, spec)
        sandbox, survived, is_other = await asyncio.to_thread(begin)
        context = self._inside(context, sandbox, root)
        try:
            await make_ready(sandbox)
            if not survived:
                if row.check is not None:
                    await self._find_judge(row, row.check, root)
                if row.setup is not None:
                    await self._set_up_in_image(context, row, row.setup)
                await begin_diff(
                    context,
                    is_needed=row.is_judged_afresh,
                    known=self._diffs.known,
                    then=partial(mark_finished_setup, root, sandbox.image_digest),
                )
        except BaseException:
            await context.close(remove=False)
            raise
        return PreparedWorkspace(context, survived, "the image was replaced" if is_other else LOST)

    def image(self, row: RowTask, check: Check | None = None) -> dict[str, str] | None:
        """The image that a conversation works in, or that its check has, for its record.

        None where there is no image, or none that was used.
        """
        digests = self._digests if self._images is None else self._images.digests
        if not digests:
            return None
        spec = self._image_spec(row) if check is None else self._spec_of_check(row, check)
        reference = spec.reference
        if (digest := digests.get(reference)) is None:
            return None
        return {"reference": reference, "digest": digest}

    async def has_python(self, context: ToolContext, row: RowTask) -> bool:
        """Whether the tool `python` can run: in an image, by the image's `python3` (3.8 or later).

        Each image is asked once.
        """
        sandbox = context.sandbox
        if sandbox is None or not sandbox.has_own_python:
            return True
        image = self.image(row)
        name = row.image.reference if row.image else self._setup.config.docker_image or ""
        key = image["digest"] if image else name
        if key not in self._has_python:
            try:
                code = (await sandbox.exec(_ASK_PYTHON)).exit_code
            except SandboxError:
                return True  # it failed as a whole: the model's first call says how
            if code not in (0, *_WITHOUT_PYTHON):
                return True
            self._has_python[key] = code == 0
            if code:
                log.warning(
                    "The tool python is not offered in %s, which has no python3 (3.8 or later).",
                    name,
                )
        return self._has_python[key]

    async def make_agent_sandbox(
        self,
        context: ToolContext,
        row: RowTask,
        extras: Extras,
        *,
        timeout_s: float,
        output_bytes: int,
    ) -> tuple[Sandbox, str | None]:
        """A sandbox for an agent that is a command, and its HOME where an image decides that.

        No other sandbox of the conversation may run. Raises `SetupFailed`.
        """
        root = context.workspace.root
        limits = msgspec.structs.replace(
            self._limits(row), timeout_s=timeout_s, output_bytes=output_bytes
        )
        if self._images is None:
            settings = self._settings(row)
            kind = self._setup.config.sandbox
            return make_sandbox(kind, Workspace(root), limits, settings, extras=extras), None
        inside = await self._images.sandbox(root, limits, self._image_spec(row), extras)
        await make_ready(inside)
        return inside, inside.user_home or await home_of_user(inside)

    async def reopen(
        self, context: ToolContext, row: RowTask, *, starts_entrypoint: bool = True
    ) -> ToolContext:
        """The context with a new sandbox, where its own was stopped."""
        if self._images is None:
            return context
        root = context.workspace.root
        spec = msgspec.structs.replace(self._image_spec(row), starts_entrypoint=starts_entrypoint)
        sandbox = await self._sandbox_in_image(root, row, spec)
        await make_ready(sandbox)
        return self._inside(context, sandbox, root)

    @property
    def are_in_images(self) -> bool:
        """Whether workspaces are directories of images."""
        return self._images is not None

    def has_network(self, row: RowTask) -> bool:
        """Whether commands of a row may reach the network."""
        if self._images is None:
            return self._setup.config.network
        return self._image_spec(row).network

    async def diff(self, context: ToolContext, row: RowTask) -> dict[str, Any] | None:
        """The changes of the conversation to its image's repository; None without a repository.

        Ends the conversation's sandbox. For a fresh check the changed copy of the image is left in
        place. Raises `SetupFailed` if there is no copy for such a check.
        """
        if self._images is None:
            return None
        from batch_trajectories.engine.worker.diffs.diffs import Openings

        # Processes that the model left running could change files, or leave no room for others.
        await require_sandbox(context).stop()
        afresh = row.is_judged_afresh
        root = context.workspace.root
        made_of = self._ingredients(context, row, with_history=not afresh)
        shared = root.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")

        def fresh(at: Path) -> Callable[[], Awaitable[ToolContext]]:
            return partial(self._fresh, context, row, at, with_history=not afresh)

        opening = Openings(
            fresh=fresh(fresh_root(root)),
            reopened=partial(self.reopen, context, row, starts_entrypoint=False),
            shared=fresh(shared),
            made_of=made_of,
        )
        return await self._diffs.make(context, row.setup, opening, is_afresh=afresh)

    async def close(self) -> None:
        """End what was opened for several conversations."""
        if self._images is not None:
            await self._diffs.close()

    def _ingredients(self, context: ToolContext, row: RowTask, *, with_history: bool) -> str | None:
        """A name for the ingredients of fresh workspaces of a row; None if its commands decide
        them."""
        setup = row.setup
        if setup is not None and (setup.files or setup.commands):
            return None
        base = None if setup is None or with_history else setup.base_commit
        image = cast("ImageSandbox", require_sandbox(context)).image_digest
        return repr((image, self._image_spec(row), base))

    @asynccontextmanager
    async def inside(self, context: ToolContext, row: RowTask) -> AsyncIterator[Inside | None]:
        """The workspace inside its image, to be read after the conversation; None elsewhere."""
        if self._images is None:
            yield None
            return
        from batch_trajectories.engine.worker.reward_functions import Inside

        opened: list[ToolContext] = []

        async def open_again() -> ToolContext:
            if not opened:
                try:
                    opened.append(await self.reopen(context, row, starts_entrypoint=False))
                except SetupFailed as error:
                    raise ToolError(str(error)) from error
            return opened[0]

        try:
            yield Inside(context.workspace.home, open_again)
        finally:
            for found in opened:
                await require_sandbox(found).stop()

    async def judging(
        self, context: ToolContext, row: RowTask, check: Check, root: Path, user: str | None
    ) -> ToolContext:
        """The workspace in `root` in a sandbox for a check, as a user of its image."""
        limits = self._limits(row if check.limits is None else row._replace(limits=check.limits))
        limits = msgspec.structs.replace(limits, timeout_s=check.timeout_s or limits.timeout_s)
        if self._images is None:
            workspace = Workspace(root)
            sandbox = self._make_sandbox(workspace, row, limits)
            return replace(context, workspace=workspace, sandbox=sandbox, held={})
        spec = self._spec_of_check(row, check)
        sandbox = await self._sandbox_in_image(
            root, row, msgspec.structs.replace(spec, user=user or spec.user), limits
        )
        await make_ready(sandbox)
        return self._inside(context, sandbox, root)

    async def _find_judge(self, row: RowTask, check: Check, root: Path) -> None:
        """Raise `SetupFailed` where the image or the user that a check names is not there.

        What a conversation costs would be paid for nothing.
        """
        if check.image is not None or check.user is not None:
            spec = self._spec_of_check(row, check)
            as_user = msgspec.structs.replace(spec, user=check.user or spec.user)
            await self._sandbox_in_image(fresh_root(root), row, as_user)

    async def remove_judged(self, row: RowTask, check: Check, root: Path) -> None:
        """Remove a workspace that was made for a check alone."""
        sandbox = await self._sandbox_in_image(root, row, self._spec_of_check(row, check))
        await asyncio.to_thread(sandbox.discard)
        await asyncio.to_thread(remove_tree, root)

    async def _fresh(
        self, context: ToolContext, row: RowTask, root: Path, *, with_history: bool
    ) -> ToolContext:
        """A fresh workspace: the image, set up as the row says. Raises `SetupFailed`."""
        sandbox = await self._sandbox_in_image(root, row, self._image_spec(row))
        fresh = self._inside(context, sandbox, root)
        try:
            await asyncio.to_thread(remove_all, root, sandbox)
            await make_ready(sandbox)
            if row.setup is not None:
                again = replace(row.setup, hidden=())
                if with_history:
                    again = replace(again, base_commit=None)
                await self._set_up_in_image(fresh, row, again)
        except BaseException:
            await fresh.close(remove=True)
            raise
        return fresh

    async def _set_up_in_image(self, context: ToolContext, row: RowTask, setup: RowSetup) -> None:
        """Set up a workspace inside an image.

        A fresh copy for a check has no more of the history: what the model wrote runs there. An
        image whose history was removed is made and proved once, and all others begin above it.
        """
        sandbox = cast("ImageSandbox", require_sandbox(context))
        can_change = setup.files or setup.commands or self._setup.config.keep_workspaces is not None
        if setup.base_commit is None or can_change or not sandbox.shares_bases:
            await _set_up(context, setup)
            return
        spec = self._image_spec(row)
        begins = (self._setup.start, sandbox.image_digest, spec, replace(setup, check=None))
        name = hashlib.sha256(repr(begins).encode()).hexdigest()
        async with self._waiting[name]:
            while not await asyncio.to_thread(sandbox.begin_from_base, name):
                making = context.workspace.root.with_name(f"{TEMPORARY}{name}.{os.getpid()}")
                await asyncio.to_thread(remove_tree, making)
                maker = await self._sandbox_in_image(making, row, spec)
                try:
                    await _set_up(self._inside(context, maker, making), setup)
                finally:
                    await maker.stop()
                await asyncio.to_thread(maker.save_base, name)

    def _inside(self, context: ToolContext, sandbox: ImageSandbox, root: Path) -> ToolContext:
        from toolsets.sandbox.image_files import ImageFiles

        workspace = Workspace(root)
        workspace.start_dir = context.workspace.start_dir
        return replace(context, workspace=ImageFiles(workspace, sandbox), sandbox=sandbox)

    async def _sandbox_in_image(
        self, root: Path, row: RowTask, spec: ImageSpec, limits: Limits | None = None
    ) -> ImageSandbox:
        """Raises `SetupFailed` where the image cannot be used."""
        assert self._images is not None
        return await self._images.sandbox(root, limits or self._limits(row), spec)

    def _image_spec(self, row: RowTask) -> ImageSpec:
        from toolsets.sandbox.base import ImageSpec

        config = self._setup.config
        # The scan refuses rows without an image where the run names none.
        spec = row.image or ImageSpec(config.docker_image or "", network=config.network)
        return msgspec.structs.replace(spec, workdir=spec.workdir or config.workdir)

    def _spec_of_check(self, row: RowTask, check: Check) -> ImageSpec:
        spec = check.image_spec or self._image_spec(row)
        return msgspec.structs.replace(spec, network=check.network or spec.network)

    async def _image_problem(self, image: str) -> str | None:
        """The reason why an image cannot be used for workspaces; tried once per image."""
        if image not in self._problems:
            async with self._waiting[image]:
                if image not in self._problems:
                    self._problems[image] = await asyncio.to_thread(self._inspect_image, image)
        return self._problems[image]

    def _inspect_image(self, image: str) -> str | None:
        from batch_trajectories.config.sandboxes import check_image_digest, image_digest

        config = self._setup.config
        if problem := sandbox_problem(config.sandbox, config.sandbox_settings(image)):
            return problem
        try:
            digest = image_digest(config, image)
        except ToolError as error:
            return str(error)
        return digest and check_image_digest(self._digests, image, digest)

    def _make_sandbox(
        self, workspace: Workspace, row: RowTask, limits: Limits | None = None
    ) -> Sandbox | None:
        kind = self._setup.provenance.sandbox
        if kind is None:
            return None
        return make_sandbox(kind, workspace, limits or self._limits(row), self._settings(row))

    def _settings(self, row: RowTask) -> SandboxSettings:
        return self._setup.config.sandbox_settings(row.image.reference if row.image else None)

    def _limits(self, row: RowTask) -> Limits:
        config = self._setup.config
        own = row.limits
        memory_mb, disk_mb = (own.memory_mb, own.disk_mb) if own is not None else (None, None)
        return Limits(
            timeout_s=config.command_timeout_s,
            memory_mb=min(config.command_memory_mb, memory_mb or config.command_memory_mb),
            cpus=None if own is None else own.cpus,
            processes=config.max_processes,
            workspace_mb=min(config.workspace_mb, disk_mb or config.workspace_mb),
            network=config.network and self._images is None,
        )


async def _set_up(context: ToolContext, setup: RowSetup) -> None:
    """Set up a workspace, and remove its history. Raises `SetupFailed`."""
    await set_up_workspace(context, setup)
    if setup.base_commit is not None:
        from batch_trajectories.engine.worker.history import remove_history

        await remove_history(context, setup.base_commit)


# Keep the workspace of a finished conversation as it is before its check.

_OVERLAY_DIRECTORIES = ("work",)
"""The kernel's directory beside a layer, which nobody else can read."""


async def keep(context: ToolContext, setup: WorkerSetup) -> dict[str, str]:
    """Pack a workspace; for its record the `name` of the file, or the `error` why there is none.

    Ends the sandbox: what still runs could change files. Of a workspace in an image, what lies
    above the image is kept. Raises `StorageError`.
    """
    from toolsets.workspace.packing import TooLarge, pack  # few runs keep workspaces

    config = setup.config
    assert config.keep_workspaces is not None
    if context.sandbox is not None:
        await context.sandbox.stop()
    root = context.workspace.root
    if config.is_inside and not (root / "upper").exists():
        return {"error": f"sandbox {config.sandbox} keeps no files here"}
    if not config.is_inside:
        Workspace(root).make()  # one that no tool has used
    most = config.keep_workspaces << 20
    store = setup.run_dir / RETAINED_WORKSPACES
    without = _OVERLAY_DIRECTORIES if config.is_inside else ()
    try:
        name = await asyncio.to_thread(pack, root, store, max_bytes=most, without=without)
    except TooLarge:
        return {"error": f"its files have more than {config.keep_workspaces:,} MB"}
    except PermissionError as error:
        return {"error": f"a file cannot be read: {error.strerror}"}
    except OSError as error:
        raise storage_error(store, error) from error
    return {"name": name}


# The images of a run, as one worker uses them.


class RunImages:
    """Makes the sandboxes in images; each image stays the same during the run."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._sandboxes = image_sandboxes(setup.config)
        if setup.has_overlays:
            self._sandboxes.trust_overlays()
        self.digests = dict(setup.images)
        """Digests of the images that conversations of the run used, by reference. They must not
        change."""
        self._brought: set[str] = set()
        """References of images that were here when a conversation began."""
        self._failed: dict[str, tuple[float, str]] = {}
        """The failure of each image that could not be fetched, and the time of the next attempt."""
        self._waiting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def sandbox(
        self, root: Path, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """A sandbox that is to be made. Raises `SetupFailed` where its image cannot be used."""
        await self.bring(limits, spec)
        return await asyncio.to_thread(self.sandbox_in_thread, root, limits, spec, extras)

    async def bring(self, limits: Limits, spec: ImageSpec) -> None:
        """Have an image here. Raises `SetupFailed`."""
        if spec.reference in self._brought:
            return
        # One of the conversations that wait for an image occupies a thread, not each.
        async with self._waiting[spec.reference]:
            if spec.reference not in self._brought:
                await self._fetch(spec.reference)
                root = self._setup.run_dir / WORKSPACES / TEMPORARY
                await asyncio.to_thread(self.sandbox_in_thread, root, limits, spec)
                self._brought.add(spec.reference)

    async def _fetch(self, reference: str) -> None:
        """Fetch an image that is not here. Raises `SetupFailed`."""
        until, reason = self._failed.get(reference, (0.0, ""))
        if until > time.monotonic():  # others that waited for it need not try again at once
            raise SetupFailed(reason)
        try:
            await self._sandboxes.fetch(reference)
        except ToolError as error:
            reason = f"{self._node}{error}"
            self._failed[reference] = time.monotonic() + _FAILED_FOR_S, reason
            raise SetupFailed(reason) from error

    def sandbox_in_thread(
        self, root: Path, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """Make a sandbox in an image that is already here; see `sandbox`."""
        try:
            made = self._sandboxes.make(Workspace(root), limits, spec, extras)
        except ToolError as error:
            raise SetupFailed(f"{self._node}{error}") from error
        if problem := check_image_digest(self.digests, spec.reference, made.image_digest):
            raise SetupFailed(f"{self._node}{problem}")
        return made

    @property
    def _node(self) -> str:
        """Which machine a message is about, where a run has several."""
        return f"on {os.uname().nodename}: " if self._setup.config.executor == "ray" else ""
