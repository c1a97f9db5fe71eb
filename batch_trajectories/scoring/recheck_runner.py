"""Rebuilds the workspace of a conversation and runs the check; no model is called.

The column `judged` of a row says where the record is, and from what its workspace is made. Nothing
is journaled: work that was interrupted begins again in a new workspace.
"""

from __future__ import annotations

import asyncio
import base64
import tarfile
from dataclasses import replace
from typing import Any

from agent.loop.rules import Finish
from batch_trajectories.audit.solving import NotApplied, apply_patch
from batch_trajectories.engine.worker.task_runner import TaskRunner, Work
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from batch_trajectories.records.files import storage_error
from batch_trajectories.records.names import RETAINED_WORKSPACES
from batch_trajectories.records.reader import open_records, read_record
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.records import UnreadableRecord
from toolsets.workspace.packing import unpack
from toolsets.workspace.removal import remove_tree


class RecheckRunner(TaskRunner):
    """Judges the conversations of a finished run again."""

    async def do(self, work: Work) -> None:
        """Judge one conversation. Raises `SetupFailed` if its workspace cannot be rebuilt."""
        work.end = Finish("completed")
        record = self._read_judged_record(work.task.columns["judged"])
        if work.task.columns["judged"]["from"] == "workspace":
            await self._unpack_workspace(work, record)
        else:
            await self._prepare_workspace(work)
            assert record.diff is not None
            try:
                if patch := patch_in(record.diff):
                    await apply_patch(work.context, patch)
            except NotApplied as error:
                raise SetupFailed(f"its diff does not fit the image and set-up: {error}") from error
        await self._judge(work)
        work.diff = None  # that of the record

    def _count_turns(self, work: Work) -> int | None:
        turns: int | None = work.task.columns["judged"]["turns"]
        return turns

    def _read_judged_record(self, judged: dict[str, Any]) -> Record:
        assert self._config.checked_run is not None
        key = bytes.fromhex(judged["task"])
        with open_records(self._config.checked_run) as records:
            try:
                return read_record(records, judged["offset"], judged["length"], key)
            except UnreadableRecord as error:
                raise SetupFailed(str(error)) from error

    async def _unpack_workspace(self, work: Work, record: Record) -> None:
        assert self._config.checked_run is not None
        assert record.workspace is not None
        root, name = work.context.workspace.root, record.workspace["name"]
        store = self._config.checked_run / RETAINED_WORKSPACES
        await asyncio.to_thread(remove_tree, root)
        try:
            await asyncio.to_thread(unpack, store, name, root)
        except (FileNotFoundError, tarfile.TarError) as error:
            raise SetupFailed(f"its kept workspace cannot be read: {error}") from error
        except OSError as error:
            raise storage_error(root, error) from error
        work.context = replace(work.context, resumed=True)
        prepared = await self._spaces.prepare(
            work.context, work.row, workspace_id=self._setup.workspace_id
        )
        work.context = prepared.context
        if not prepared.survived:
            raise SetupFailed(f"its kept workspace does not fit: {prepared.why_new}")


def patch_in(diff: dict[str, Any]) -> bytes:
    """The exact bytes of a diff in a record; see `engine.worker.diffs`."""
    if (encoded := diff.get("base64")) is not None:
        return base64.b64decode(encoded)
    return str(diff["patch"]).encode()
