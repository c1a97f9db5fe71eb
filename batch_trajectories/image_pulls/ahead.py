"""Fetches the images of a run's tasks ahead of their conversations, in a process of its own.

Nothing waits for this process. A conversation whose image is not there yet fetches it itself, or
waits while this process does. If this process ends, only time is lost.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from array import array
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from batch_trajectories.basics.errors import HostError, RunError
from batch_trajectories.basics.process import die_with_parent, log_to
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.local_workers import (
    limited_environment,
    start_tracker_without_secrets,
    start_without_main,
)
from batch_trajectories.image_pulls.fetching import Fetched, fetch_all
from batch_trajectories.image_pulls.references import list_task_images
from batch_trajectories.records.names import LOG_FILE
from toolsets.images.names import ImageError
from toolsets.images.registry.pulling import Puller
from toolsets.images.registry.settings import RegistrySettings
from toolsets.images.store import ImageStore

_log = logging.getLogger(__name__)

_END_S = 5.0
_NEEDED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    # Who asks registries, and how they are reached.
    "DOCKER_CONFIG",
    "REGISTRY_AUTH_FILE",
    "XDG_RUNTIME_DIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    *(
        variable
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
        for variable in (name, name.upper())
    ),
)
"""Variables that the process gets. Keys of models are not among them."""


class _Setup(NamedTuple):
    parent_pid: int
    images: Path
    registry: RegistrySettings
    docker_image: str | None
    scan: Scan
    numbers: array[int]
    log_file: Path
    log_level: str


class ImagesAhead:
    """The process, from its start until it is closed."""

    def __init__(self, config: RunConfig, scan: Scan, numbers: array[int], run_dir: Path) -> None:
        """`numbers` are those of the tasks that need work, in the order of the queue."""
        assert config.images is not None
        setup = _Setup(
            parent_pid=os.getpid(),
            images=config.images.absolute(),
            registry=config.registry or RegistrySettings(),
            docker_image=config.docker_image,
            scan=scan,
            numbers=numbers,
            log_file=run_dir / LOG_FILE,
            log_level=config.log_level,
        )
        start_tracker_without_secrets()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(setup,), name="images", daemon=True
        )
        with limited_environment(_NEEDED):
            start_without_main(self._process)

    def close(self) -> None:
        """End the process; downloads continue where they are in the next one."""
        with suppress(ValueError):
            self._process.terminate()
            self._process.join(_END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process.close()


def _run(setup: _Setup) -> None:
    die_with_parent(setup.parent_pid)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal; the parent ends this process
    log_to(setup.log_file, setup.log_level)
    try:
        asyncio.run(_fetch(setup))
    except (HostError, ImageError, RunError) as error:
        _log.warning("images are no longer fetched ahead: %s", error)
    except Exception:  # a bug here must only cost time
        _log.exception("images are no longer fetched ahead")


async def _fetch(setup: _Setup) -> None:
    store = ImageStore(setup.images)
    counts = Counter[str]()

    def report(fetched: Fetched) -> None:
        if fetched.error is not None:
            counts["failed"] += 1
            _log.info("not fetched ahead: %s", fetched.error)
        else:
            counts["here" if fetched.was_here else "fetched"] += 1

    references = list_task_images(setup.scan, setup.numbers, setup.docker_image)
    async with Puller(setup.images, setup.registry, is_ahead=True) as puller:
        await fetch_all(puller, store, references, report)
    _log.info(
        "images: %d fetched ahead (%d bytes), %d here already, %d failed",
        counts["fetched"],
        puller.blobs.fetched_bytes,
        counts["here"],
        counts["failed"],
    )
