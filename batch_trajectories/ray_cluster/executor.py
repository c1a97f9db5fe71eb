"""Workers as Ray actors, on any node of a cluster.

Ray only starts actors with resources and reports their deaths; it does nothing per task. Actors
connect back and are handled like local workers. Ray restarts and retries nothing, because the
supervisor decides which task is to blame for a death.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import Inbox, WorkerHandle
from batch_trajectories.engine.local_workers import limited_environment
from batch_trajectories.engine.messages import Say, WorkerSetup
from batch_trajectories.engine.run_dir import RunDir, read_run_json
from batch_trajectories.ray_cluster.actor import RayWorkerActor, authenticate, code_digest, listen
from batch_trajectories.ray_cluster.worker_handle import ClusterStart, RayWorker
from batch_trajectories.records.files import open_no_follow
from batch_trajectories.records.names import LOCK_FILE, LOG_FILE

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RAY_NEEDS = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "RAY_TMPDIR",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN_PATH",
)
_RAY_RESOURCES = ("num_cpus", "num_gpus", "memory")
"""The resources that are options of their own in Ray."""

_LOCAL = "local"
"""The address with which Ray starts a cluster on this machine."""
_HELLO_BYTES = 1 << 16
_WATCH_EVERY_S = 1.0
_REACH_S = 10.0
_SAY_WAITING_S = 15.0
_OBJECT_STORE_BYTES = 80 << 20
"""About the minimum that Ray allows; this program stores nothing there."""


class RayExecutor:
    """Joins a cluster, or starts one on this machine, and starts workers in it."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        """Raises `ConfigError` if the cluster cannot be joined."""
        address = config.ray_address or os.environ.get("RAY_ADDRESS")
        with _restore_signal_handlers():
            environment = _start_cluster(config) if address is None else _join(address)
        is_remote = address is not None and config.ray_storage != "shared"
        host = "127.0.0.1" if address is None else ray.util.get_node_ip_address()
        self._resources = _resources(config)
        self._listener = listen(host)
        self._run = ClusterStart(
            key=os.urandom(32),
            address=self._listener.address,
            code=code_digest(),
            inflight=run_dir.inflight,
            is_remote=is_remote,
            token=_run_token(run_dir.path),
            lock=(run_dir.path / LOCK_FILE).read_bytes(),
            environment=environment,
            log_fd=open_no_follow(run_dir.path / LOG_FILE, os.O_WRONLY | os.O_APPEND),
        )
        self._workers: dict[int, RayWorker] = {}
        self._closing = threading.Event()
        self._has_said = False
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._accept, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, setup: WorkerSetup, inbox: Inbox) -> WorkerHandle:
        """See `Executor`."""
        host, port = self._run.address
        actor: ActorHandle[Any] = ray.remote(RayWorkerActor).options(**self._resources).remote()
        ended = actor.run.remote(host, port, self._run.key, setup.number)
        worker = RayWorker(
            setup.number,
            f"worker-{setup.number}",
            inbox,
            setup=setup,
            run=self._run,
            actor=actor,
            ended=ended,
        )
        self._workers[setup.number] = worker
        return worker

    def close(self) -> None:
        """See `Executor`."""
        self._closing.set()
        self._listener.close()
        self._threads[1].join()
        with _restore_signal_handlers():
            ray.shutdown()
        os.close(self._run.log_fd)

    def _accept(self) -> None:
        """Accept connections; each peer authenticates in its own thread and delays no other."""
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        if not authenticate(connection, self._run.key):
            return
        try:
            hello = orjson.loads(connection.recv_bytes(_HELLO_BYTES))
        except (EOFError, OSError):
            return
        self._workers[hello["number"]].attach(connection, hello)

    def _watch(self) -> None:
        """Ask Ray which actors have ended, also those that never connected."""
        began = time.monotonic()
        while not self._closing.wait(_WATCH_EVERY_S):
            alive = [worker for worker in list(self._workers.values()) if not worker.is_gone]
            try:
                self._check(alive)
            except ray.exceptions.RayError as error:
                log.warning(
                    "Ray does not say which workers are alive, and is asked again: %s", error
                )
            if time.monotonic() - began > _SAY_WAITING_S:
                self._say_if_waiting(alive)

    def _check(self, alive: list[RayWorker]) -> None:
        if not alive:
            return
        by_reference = {worker.ended: worker for worker in alive}
        # Always with a timeout: Ray may wait forever for a result on a lost node.
        ended, _ = ray.wait(list(by_reference), num_returns=len(alive), timeout=0)
        for reference in ended:
            by_reference[reference].end(_end_reason(reference))

    def _say_if_waiting(self, alive: list[RayWorker]) -> None:
        waiting = [worker for worker in alive if worker.is_waiting]
        if waiting and not self._has_said:
            self._has_said = True
            named = self._resources.keys() & set(_RAY_RESOURCES)
            needed = {name: self._resources[name] for name in sorted(named)}
            needed |= self._resources["resources"]
            described = ", ".join(f"{name}={value}" for name, value in needed.items())
            message = (
                f"{len(waiting)} of {len(alive)} workers wait for a place in the Ray cluster; "
                f"each needs {described} (see --worker_resources, --num_workers and `ray status`)"
            )
            waiting[0].inbox.put((waiting[0], Say(message)))


def _resources(config: RunConfig) -> dict[str, Any]:
    """Return the options with which an actor starts."""
    custom = dict(config.worker_resources)
    named: dict[str, Any] = {name: custom.pop(name) for name in _RAY_RESOURCES if name in custom}
    return {
        "num_cpus": 1,
        **named,
        "resources": custom,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
    }


def _start_cluster(config: RunConfig) -> Mapping[str, str]:
    """Start a cluster on this machine; return the environment that its workers lack."""
    # Every process of this user can read the environment of the cluster, so it must have no keys.
    cpus = math.ceil(config.num_workers * config.worker_resources.get("num_cpus", 1))
    with limited_environment(_RAY_NEEDS) as environment, _block_signals():
        _init_ray(
            _LOCAL,
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    return environment


def _join(address: str) -> Mapping[str, str]:
    if "://" in address:
        raise ConfigError(
            f"ray_address: {address}: Ray Client is not supported; run this on a node of the "
            "cluster (for example with `ray job submit`), with --ray_address=auto"
        )
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            # Ray itself would try for many minutes.
            socket.create_connection((host, int(port)), timeout=_REACH_S).close()
        except OSError as error:
            raise _cannot_join(address, error) from error
    _init_ray(address)
    return {}


def _init_ray(address: str, **options: Any) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise _cannot_join(address, error) from error


def _cannot_join(address: str, error: Exception) -> ConfigError:
    if address == _LOCAL:
        return ConfigError(
            f"executor: ray: cannot start a Ray cluster on this machine: {error}. Ray saves a "
            "token in ~/.ray; where it cannot, name a file with a token in RAY_AUTH_TOKEN_PATH"
        )
    return ConfigError(
        f"ray_address: {address}: cannot join this Ray cluster: {error}. `ray status` on this "
        "machine must show it (`ray start --head` starts one); a cluster with a token needs the "
        "same token here, in ~/.ray/auth_token"
    )


@contextlib.contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore our signal handlers: Ray's handler of SIGTERM would end the process at once."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Protect processes that are started inside from Ctrl-C and hang-up of the terminal."""
    # Not SIGTERM, which ends Ray's own processes when the others have gone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_token(run_dir: Path) -> str:
    identity = f"{socket.gethostname()}\0{run_dir.resolve()}\0{read_run_json(run_dir)['created']}"
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def _end_reason(reference: Any) -> str | None:
    """Return why an actor has ended; None if the parent made it exit."""
    try:
        ray.get(reference, timeout=1)
    except Exception as error:
        # Any class: it may be the exception of the actor.
        reason = " ".join(str(error).split())
        if "ModuleNotFoundError" in reason or "ImportError" in reason:
            return (
                f"a node cannot import this program ({reason[-300:]}): install the same version "
                "with its extra `ray` on every node"
            )
        return reason[:600]
    return None
