"""The images of a run, as one worker uses them."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.runs.config.sandboxes import image_sandboxes, replaced_during_run
from batch_trajectories.runs.protocol.messages import WorkerSetup
from batch_trajectories.runs.worker.workspace_setup import SetupFailed
from toolsets.sandbox.base import Extras, ImageSpec, Limits
from toolsets.sandbox.image_files import ImageSandbox
from toolsets.workspace.workspace import TEMPORARY, Workspace


class RunImages:
    """Makes the sandboxes in them; each image stays the one that it was."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._sandboxes = image_sandboxes(setup.config)
        self.digests = dict(setup.images)
        """Of images that conversations of the run used, by reference: they must not change."""
        self._brought: set[str] = set()
        """References of images that were here when a conversation began."""
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
                root = self._setup.run_dir / "workspaces" / TEMPORARY
                await asyncio.to_thread(self.sandbox_in_thread, root, limits, spec)
                self._brought.add(spec.reference)

    def sandbox_in_thread(
        self, root: Path, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """As `sandbox`, of an image that was brought."""
        config = self._setup.config
        # Which machine a message is about, where a run has several.
        node = f"on {os.uname().nodename}: " if config.executor == "ray" else ""
        try:
            made = self._sandboxes.make(Workspace(root), limits, spec, extras)
        except ToolError as error:
            raise SetupFailed(f"{node}{error}") from error
        if problem := replaced_during_run(self.digests, spec.reference, made.image_digest):
            raise SetupFailed(f"{node}{problem}")
        return made
