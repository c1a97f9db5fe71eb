"""A worker in a process of Ray's, on any node.

Ray gives it its place, its resources and its life; what it says and hears goes over a TCP
connection of ours to the parent, in the same bytes as through the pipe of a local worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import orjson

from runs.errors import RunError
from runs.executors.ray.code_digest import code_digest
from runs.executors.ray.tcp import connect
from runs.process.startup import hide_environment
from runs.protocol.messages import pack
from runs.protocol.worker_setup import WorkerSetup
from runs.worker.worker import run_worker
from toolsets.errors import machine_failure

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the parent tells a worker that has connected and runs the same code.

    It is pickled. Only the parent's side of an authenticated connection is ever unpickled; what
    workers send is JSON and bytes.
    """

    setup: WorkerSetup
    run_token: str
    """Names the run among all that ever use a node."""
    lock: bytes
    """What the run directory's lock file holds, to know the directory by."""
    environment: Mapping[str, str]
    """The parent's, where the cluster is its own and on its machine; else nothing."""
    cwd: Path
    told_at: float
    """The parent's monotonic clock as it sent this."""


class RayWorkerActor:
    """The class of the actors."""

    def run(self, host: str, port: int, key: bytes, number: int) -> None:
        """Work until the parent says exit or is gone."""
        # They may be blocked, so that a Ctrl-C for all does not end the cluster before the work.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        hide_environment()
        connection = connect((host, port), key)
        asked_at = time.monotonic()
        hello = {"number": number, "host": socket.gethostname(), "code": code_digest()}
        connection.send_bytes(orjson.dumps(hello))
        try:
            welcome: Welcome = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # this code is not the parent's, which says so to the user
        name = f"worker-{number} on {hello['host']}"
        multiprocessing.current_process().name = name  # as it is logged
        offset_s = welcome.told_at - (asked_at + time.monotonic()) / 2
        os.environ.update(welcome.environment)
        with contextlib.suppress(OSError):
            os.chdir(welcome.cwd)
        _work(connection, welcome, replace(welcome.setup, clock_offset_s=offset_s))
        connection.close()


def _work(connection: Connection, welcome: Welcome, setup: WorkerSetup) -> None:
    try:
        if not setup.is_remote:
            _check_shares(setup.run_dir, welcome.lock)
            run_worker(connection, setup)
            return
        scratch = _scratch(setup, welcome.run_token)
        config = setup.config.model_copy(update={"output_dir": scratch})
        place = _name_of(scratch)
        setup = replace(setup, run_dir=config.run_dir, config=config, place=place)
        (setup.run_dir / "workspaces").mkdir(parents=True, exist_ok=True, mode=0o700)
        if run_worker(connection, setup):
            shutil.rmtree(scratch, ignore_errors=True)
    except Exception as error:
        words = machine_failure(error)
        if words is None and not isinstance(error, RunError | ImportError | OSError | ValueError):
            raise
        # What is missing on this node will be missing for the next worker here too.
        message = f"{multiprocessing.current_process().name}: {words or error}"
        connection.send_bytes(pack("halt", message=message))


def _check_shares(run_dir: Path, lock: bytes) -> None:
    try:
        found = (run_dir / "lock").read_bytes()
    except OSError:
        found = b""
    if found != lock:
        msg = (
            f"the run directory {run_dir} is not here: mount its storage at the same path on "
            "every node, or leave --ray_storage=shared out"
        )
        raise ValueError(msg)


def _scratch(setup: WorkerSetup, run_token: str) -> Path:
    """Where this node keeps what workers keep of a run; the same for all of them."""
    parent = setup.config.ray_scratch_dir or Path(tempfile.gettempdir())
    ours = parent / f"batch-trajectories-{os.getuid()}"
    ours.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = ours.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077 or ours.is_symlink():
        msg = f"{ours}: not a directory of this user's alone; choose another --ray_scratch_dir"
        raise ValueError(msg)
    scratch = ours / run_token
    scratch.mkdir(mode=0o700, exist_ok=True)
    return scratch


def _name_of(scratch: Path) -> str:
    """A name that no other storage has: hosts and paths repeat, among containers above all."""
    mark, mine = scratch / "place", scratch / f".{uuid.uuid4().hex}"
    mine.write_text(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):
        os.link(mine, mark)  # whole or not at all, and only by the first
    mine.unlink()
    return mark.read_text()
