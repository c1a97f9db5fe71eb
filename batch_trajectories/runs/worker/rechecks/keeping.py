"""Keep the workspace of a finished conversation as it is before its check."""

from __future__ import annotations

import asyncio

from batch_trajectories.runs.protocol.messages import WorkerSetup
from batch_trajectories.runs.store.files import KEPT_WORKSPACES, storage_error
from toolsets.context import ToolContext
from toolsets.workspace.packing import TooLarge, pack
from toolsets.workspace.workspace import Workspace

_OF_OVERLAYS = ("work",)
"""The kernel's directory beside a layer, which nobody else can read."""


async def keep(context: ToolContext, setup: WorkerSetup) -> dict[str, str]:
    """Pack a workspace; for its record the `name` of the file, or the `error` why there is none.

    Ends the sandbox: what still runs could change files. Of a workspace in an image, what lies
    above the image is kept. Raises `StorageError`.
    """
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
    store = setup.run_dir / KEPT_WORKSPACES
    without = _OF_OVERLAYS if config.is_inside else ()
    try:
        name = await asyncio.to_thread(pack, root, store, max_bytes=most, without=without)
    except TooLarge:
        return {"error": f"its files have more than {config.keep_workspaces:,} MB"}
    except PermissionError as error:
        return {"error": f"a file cannot be read: {error.strerror}"}
    except OSError as error:
        raise storage_error(store, error) from error
    return {"name": name}
