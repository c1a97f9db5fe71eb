"""A worker in a Ray actor, on any node.

Ray starts it on a node with the required resources. It exchanges the same messages with the parent
as a local worker, over a TCP connection instead of a pipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path

import orjson
from msgspec.structs import replace

from batch_trajectories.basics.errors import RunError, machine_failure
from batch_trajectories.basics.process import hide_environment
from batch_trajectories.config.sandboxes import find_sandbox_problem, remove_leftover_containers
from batch_trajectories.engine.messages import HaltRun, WorkerSetup, encode
from batch_trajectories.engine.worker.worker import run_worker
from batch_trajectories.records.files import list_directory
from batch_trajectories.records.names import LOCK_FILE, WORKSPACES

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The parent's first message to a worker that has connected and runs the same code.

    It is pickled. Workers unpickle only this message, over an authenticated connection; the
    parent unpickles nothing, as workers send JSON and bytes.
    """

    setup: WorkerSetup
    run_token: str
    """A name of the run that is unique among all runs on a node."""
    lock: bytes
    """The content of the run directory's lock file, by which a worker recognizes the directory."""
    environment: Mapping[str, str]
    """The parent's environment if it started the cluster on its machine; else empty."""
    cwd: Path
    sent_at: float
    """The parent's monotonic clock when it sent this message."""


class RayWorkerActor:
    """The class of the Ray actors."""

    def run(self, host: str, port: int, key: bytes, number: int) -> None:
        """Work until the parent sends exit or the connection ends."""
        # The parent may have blocked these signals so that Ctrl-C does not end the cluster first.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        hide_environment()
        connection = connect((host, port), key)
        asked_at = time.monotonic()
        hello = {"number": number, "host": socket.gethostname(), "code": code_digest()}
        connection.send_bytes(orjson.dumps(hello))
        try:
            welcome: Welcome = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # this code differs from the parent's, which reports it to the user
        name = f"worker-{number} on {hello['host']}"
        multiprocessing.current_process().name = name  # for the log
        offset_s = welcome.sent_at - (asked_at + time.monotonic()) / 2
        os.environ.update(welcome.environment)
        with contextlib.suppress(OSError):
            os.chdir(welcome.cwd)
        _work_here(connection, welcome, replace(welcome.setup, clock_offset_s=offset_s))
        connection.close()


def _work_here(connection: Connection, welcome: Welcome, setup: WorkerSetup) -> None:
    try:
        if not setup.is_remote:
            _check_run_dir(setup.run_dir, welcome.lock)
            _check_sandbox(setup)
            if run_worker(connection, setup):
                remove_leftover_containers(setup.config)
            return
        scratch = _make_scratch(setup, welcome.run_token)
        config = setup.config.model_copy(update={"output_dir": scratch})
        workspace_id = _storage_name(scratch)
        setup = replace(setup, run_dir=config.run_dir, config=config, workspace_id=workspace_id)
        workspaces = setup.run_dir / WORKSPACES
        workspaces.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_sandbox(setup)
        if run_worker(connection, setup):
            # The workspaces left here belong to conversations that continued on other nodes.
            for workspace in list_directory(workspaces):
                shutil.rmtree(workspace, ignore_errors=True)
            remove_leftover_containers(config)
            shutil.rmtree(scratch, ignore_errors=True)
    except Exception as error:
        failure = machine_failure(error)
        if failure is None and not isinstance(error, RunError | ImportError | OSError | ValueError):
            raise
        # The next worker on this node would fail in the same way.
        message = f"{multiprocessing.current_process().name}: {failure or error}"
        connection.send_bytes(encode(HaltRun(message)))


def _check_sandbox(setup: WorkerSetup) -> None:
    """Refuse to work on a node on which commands or agents cannot run, before any call."""
    if setup.provenance.sandbox is not None and (problem := find_sandbox_problem(setup.config)):
        raise ValueError(problem)
    if setup.config.agent is not None:
        from batch_trajectories.engine.worker.agent_program import check_agent_of_node

        check_agent_of_node(setup.config)


def _check_run_dir(run_dir: Path, lock: bytes) -> None:
    try:
        content = (run_dir / LOCK_FILE).read_bytes()
    except OSError:
        content = b""
    if content != lock:
        raise ValueError(
            f"the run directory {run_dir} is not here: mount its storage at the same path on "
            "every node, or leave --ray_storage=shared out"
        )


def _make_scratch(setup: WorkerSetup, run_token: str) -> Path:
    """Create the directory for the run's files on this node, shared by its workers."""
    private = Path(tempfile.gettempdir()) / f"batch-trajectories-{os.getuid()}"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = private.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077 or private.is_symlink():
        raise ValueError(
            f"{private}: not a private directory of this user; remove it, or set another TMPDIR"
        )
    scratch = private / run_token
    scratch.mkdir(mode=0o700, exist_ok=True)
    return scratch


def _storage_name(scratch: Path) -> str:
    """Return a name of this storage, unique even if containers have equal hosts and paths."""
    name_file = scratch / "place"
    candidate = scratch / f".{uuid.uuid4().hex}"
    candidate.write_text(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):
        os.link(candidate, name_file)  # atomic, and only the first worker succeeds
    candidate.unlink()
    return name_file.read_text()


_PACKAGES = ("agent", "batch_trajectories", "toolsets")
"""The packages that a worker imports."""


def code_digest() -> str:
    """Return 16 hex digits over the source of the modules that workers import."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


_HANDSHAKE_S = 20
_KEEPALIVE_IDLE_S = 10
_PROBE_EVERY_S = 5
_PROBES = 4
"""A lost machine is noticed after `_KEEPALIVE_IDLE_S + _PROBES * _PROBE_EVERY_S` (30) seconds."""


def listen(host: str) -> Listener:
    """Listen on a free port of `host`."""
    return Listener((host, 0), backlog=1024)


def authenticate(connection: Connection, key: bytes) -> bool:
    """Authenticate a peer by `key`, and this process to the peer; return False if that fails."""
    with _duplicate_socket(connection) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_S, 0))
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            _set_options(raw)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return False
    return True


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a listener. Raises `OSError` or `AuthenticationError`.

    Both sides prove that they know the run's key, which is random for each start. Later messages
    are neither authenticated nor encrypted, like all traffic of a Ray cluster.
    """
    connection: Connection = Client(address, authkey=key)
    with _duplicate_socket(connection) as raw:
        _set_options(raw)
    return connection


def shut_down(connection: Connection) -> None:
    """Shut down a connection that other threads use: they read an end of file."""
    with contextlib.suppress(OSError), _duplicate_socket(connection) as raw:
        raw.shutdown(socket.SHUT_RDWR)


def _set_options(raw: socket.socket) -> None:
    # Else the second part of a message waits for the acknowledgment of the first.
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", (_KEEPALIVE_IDLE_S + _PROBE_EVERY_S * _PROBES) * 1000),
    ):
        if option := getattr(socket, name, None):  # only Linux has all of them
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


def _duplicate_socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
