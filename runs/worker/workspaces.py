"""The workspaces and sandboxes of a worker's tasks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from runs.dataset.row import RowTask
from runs.protocol.worker_setup import WorkerSetup
from runs.worker.check import run_check
from runs.worker.workspace_setup import SetupFailed, half_set_up, set_up_workspace
from toolsets.browser.process import Browsers
from toolsets.builtin.command_result import sandbox_of
from toolsets.context import ToolContext
from toolsets.sandbox.docker import docker_problem
from toolsets.sandbox.factory import Limits, Sandbox, make_sandbox
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import Workspace


class Workspaces:
    """Opens the workspaces of one worker's tasks."""

    def __init__(self, setup: WorkerSetup, browsers: Browsers) -> None:
        self._setup = setup
        self._web = setup.config.web_settings()
        self._browsers = browsers
        self._images: dict[str, str | None] = {}

    def open(self, key: bytes, row: RowTask, *, resumed: bool) -> ToolContext:
        """The context of the task with this key; its directory is made when it is needed."""
        workspace = Workspace(self._setup.run_dir / "workspaces" / key.hex())
        return ToolContext(
            workspace,
            self._sandbox_for(workspace, _image_of(row)),
            web=self._web,
            browsers=self._browsers,
            resumed=resumed,
        )

    async def prepare(self, context: ToolContext, row: RowTask, *, place: str) -> bool:
        """Prepare a workspace as its row says; return whether it is from an earlier assignment.

        `place` is where the workspace of that assignment is. Raises `SetupFailed`.
        """
        root = context.workspace.root
        is_new = not context.resumed or place != self._setup.place
        if is_new and os.path.lexists(root):
            # What a conversation left whose journal was lost is not this one's, nor is what this
            # one left here before it went on elsewhere.
            await asyncio.to_thread(remove_tree, root)
        if (image := _image_of(row)) and (problem := await self._image_problem(image)):
            raise SetupFailed(problem)
        if half_set_up(root).exists():
            await asyncio.to_thread(remove_tree, root)
        kept = root.exists()
        if row.setup is not None:
            context.workspace.start_dir = row.setup.start_dir
            if not kept:
                await set_up_workspace(context, row.setup)
        return kept

    async def judge(self, context: ToolContext, row: RowTask) -> dict[str, Any] | None:
        """The result of the row's check; None if it has none. Raises `SetupFailed`."""
        if row.setup is None or row.setup.check is None:
            return None
        # Processes that the model left running could affect the check.
        await sandbox_of(context).stop()
        check = row.setup.check

        def open_as(user: str | None) -> ToolContext:
            timeout_s = check.timeout_s or self._setup.config.command_timeout_s
            sandbox = self._sandbox_for(context.workspace, _image_of(row), timeout_s=timeout_s)
            return replace(context, sandbox=sandbox)

        return await run_check(check, open_as)

    async def _image_problem(self, image: str) -> str | None:
        """Why a row's image cannot be run, checked once per image."""
        if image not in self._images:
            self._images[image] = await asyncio.to_thread(docker_problem, image)
        return self._images[image]

    def _sandbox_for(
        self, workspace: Workspace, image: str | None, *, timeout_s: float | None = None
    ) -> Sandbox | None:
        kind = self._setup.provenance.sandbox
        if kind is None:
            return None
        config = self._setup.config
        limits = Limits(
            timeout_s=timeout_s or config.command_timeout_s,
            memory_mb=config.command_memory_mb,
            processes=config.max_processes,
            workspace_mb=config.workspace_mb,
            network=config.network,
        )
        return make_sandbox(kind, workspace, limits, image=image or config.docker_image)


def _image_of(row: RowTask) -> str | None:
    return None if row.image is None else row.image.reference
