"""A worker: one process, one event loop, many conversations in flight.

It journals every reply and tool result itself and sends each finished record to the parent, who
alone writes records. A task's journal and workspace are kept until the parent says that its
record is durable. A worker never outlives its parent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from agent.conversation import Conversation
from agent.loop import close_calls
from agent.messages import Event
from agent.models.errors import RULES, SAYS_MORE_OF_THE_ENDPOINT, ModelError
from agent.models.model import Completion, Model, ModelSettings, Request
from agent.models.names import SCRIPTED
from agent.models.scripted import ScriptedTurn, parse_script
from agent.moves import End
from agent.rules import Terms
from agent.setup import Home, replies_played
from agent.trajectory import Trajectory
from batch.calls import Calls
from batch.catalog import catalog_of
from batch.config import RunConfig
from batch.draw import setup_of_task
from batch.failures import Failure
from batch.files import StorageError
from batch.journal import JournalWriter
from batch.limiter import Bounds
from batch.models import set_up_models
from batch.process import allow_many_files, collect_garbage_rarely, die_with_parent, log_to
from batch.prompts import Task
from batch.purse import Amount
from batch.record import Provenance, dump_record, make_record
from batch.records import index_fields
from batch.row_workspace import SetupFailed, half_set_up, run_check, set_up_workspace
from batch.stopped import Stopped
from batch.wire import Deal, no_counters, pack, unpack
from toolsets.browser_process import Browsers
from toolsets.command import sandbox_of
from toolsets.docker import docker_problem
from toolsets.errors import HOST_ERRNOS, HostError
from toolsets.mcp_servers import McpServers
from toolsets.process import use_pidfd_watcher
from toolsets.removal import remove_tree
from toolsets.sandbox import Limits, Sandbox, make_sandbox, sandbox_problem
from toolsets.space import TaskSpace
from toolsets.workspace import Workspace

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker process is started with. Crosses the process border; holds no secrets."""

    number: int
    parent_pid: int
    run_dir: Path
    config: RunConfig
    api: str
    """The dialect of the run's models, which says what a row's script is."""
    provenance: Provenance
    script: list[ScriptedTurn] | None
    bounds: Mapping[str, Bounds]
    """On the calls of the run to each endpoint."""
    budget: Amount | None
    proven: frozenset[str]
    """The base URLs that have answered already."""


def worker_main(connection: Connection, setup: WorkerSetup) -> None:
    """Entry point of a worker process."""
    die_with_parent(setup.parent_pid)
    # The parent decides what a Ctrl-C, a scheduler's SIGTERM or a closed terminal means. Not
    # SIG_IGN: commands would inherit that, and `kill` would do nothing in them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_to_the_parent)
    allow_many_files()
    collect_garbage_rarely()
    try:
        log_to(setup.run_dir / "run.log", setup.config.log_level)
        use_pidfd_watcher()
        if setup.provenance.sandbox == "bwrap":
            sandbox_problem("bwrap")  # probes once, before there is a loop to block
        asyncio.run(Worker(connection, setup).serve())
    except (StorageError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in HOST_ERRNOS:
            raise
        connection.send_bytes(pack("halt", message=str(error)))
        sys.exit(1)


def _leave_to_the_parent(number: int, frame: FrameType | None) -> None:
    """A signal that the whole process group got."""


class Worker:
    """Runs the tasks that it is dealt, as many at a time as it is dealt."""

    def __init__(self, connection: Connection, setup: WorkerSetup) -> None:
        self._connection = connection
        self._setup = setup
        self._config = setup.config
        self._rules = self._config.row_rules(setup.api)
        self._servers = McpServers(self._config.mcp or {})
        self._setups = set_up_models(self._config, catalog_of(self._config, self._servers))
        self._web = self._config.web_settings()
        self._images: dict[str, str | None] = {}
        self._browsers = Browsers(self._web.allow)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._trajectories: dict[bytes, Trajectory] = {}
        self._not_durable: dict[bytes, TaskSpace] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._told = False
        self._exit = asyncio.Event()
        self._counters = no_counters()

    async def serve(self) -> None:
        """Take deals until the parent says exit."""
        loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        sender = threading.Thread(target=self._send_forever, name="sender", daemon=True)
        sender.start()
        self._journal = JournalWriter(
            self._setup.run_dir / "inflight",
            self._setup.number,
            on_storage_error=lambda error: self._halt(str(error)),
        )
        self._calls = Calls(
            self._setup.bounds,
            self._setup.budget,
            number=self._setup.number,
            workers=self._config.num_workers,
            proven=self._setup.proven,
            send=self._send,
            on_retry=self._on_retry,
        )
        self._servers.open()
        self._browsers.open()
        loop.add_reader(self._connection.fileno(), self._receive)
        self._send("ready")
        while not self._exit.is_set():
            self._send("alive", counters=self._counters, proven=sorted(self._calls.proven))
            self._counters = no_counters()
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._exit.wait()
            except TimeoutError:
                continue
        loop.remove_reader(self._connection.fileno())
        await asyncio.gather(*self._removals)
        await self._calls.close()
        await self._browsers.close()
        await self._servers.close()
        self._journal.close()
        self._outbox.put(None)
        sender.join()

    def _receive(self) -> None:
        try:
            header, _ = unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone: whoever resumes the run owns its files now
        match header["type"]:
            case "tasks":
                for deal in header["deals"]:
                    self._start(deal)
            case "durable":
                for key in header["keys"]:
                    self._release(bytes.fromhex(key))
            case "limits":
                self._calls.on_limits(**header["limits"])
            case "loan":
                self._calls.on_loan(header["amount"])
            case "recall":
                self._calls.on_recall()
            case "stop":
                self._stopping = True
                self._calls.stop()
                asyncio.get_running_loop().call_later(header["grace_s"], self._abandon)
            case "exit":
                self._exit.set()

    def _start(self, deal: Deal) -> None:
        task = Task(**deal["task"])
        self._running[task.key] = asyncio.create_task(self._run(task, deal))

    async def _run(self, task: Task, deal: Deal) -> None:
        """Run one task and tell the parent how it went: whatever happens, it must hear of it."""
        try:
            message = await self._carry_out(task, deal)
        except Stopped:
            message = pack("released", key=task.key.hex())
        except (StorageError, HostError) as error:
            self._halt(str(error))
            message = pack("released", key=task.key.hex())
        except (Exception, asyncio.CancelledError) as error:
            try:
                message = self._sort_out(task, deal, error)
            except Exception:
                # Not even a record of it can be made; its attempt must be told all the same.
                log.exception("%s: no record of its failure can be made", task.id)
                trace = traceback.format_exc()
                failure = Failure(task.id, task.input_digest, deal["attempt"], "internal", trace)
                message = pack("failed", key=task.key.hex(), failure=failure._asdict())
        self._running.pop(task.key, None)
        self._trajectories.pop(task.key, None)
        self._outbox.put(message)

    def _sort_out(self, task: Task, deal: Deal, error: BaseException) -> bytes:
        """The message about a task that ended in a way which nothing foresaw."""
        if isinstance(error, OSError) and error.errno in HOST_ERRNOS:
            self._halt(str(error))
        if self._stopping:
            return pack("released", key=task.key.hex())
        log.error("%s: a defect of this program", task.id, exc_info=error)
        trace = "".join(traceback.format_exception(error))
        failure = Failure(task.id, task.input_digest, deal["attempt"], "internal", trace)
        if deal["attempt"] < self._config.max_attempts:
            return pack("failed", key=task.key.hex(), failure=failure._asdict())
        row = self._rules.read(task.columns)
        # What it had received by then was paid for and belongs into its record.
        trajectory = self._trajectories.get(task.key) or Trajectory(row.opening, deal["events"])
        close_calls(trajectory, "failed", lambda event: None)
        return self._finished(task, deal, trajectory, row.terms, End("failed"), failure)

    async def _carry_out(self, task: Task, deal: Deal) -> bytes:
        """Run one task; give the message that says how it ended, with its record if there is one.

        Raises what `_run` has to sort out.
        """
        workspace = Workspace(self._setup.run_dir / "workspaces" / task.key.hex())
        row = self._rules.read(task.columns)
        sandbox = self._sandbox_for(workspace, row.image)
        space = TaskSpace(
            workspace,
            sandbox,
            web=self._web,
            browsers=self._browsers,
            resumed=bool(deal["events"]),
        )
        trajectory = Trajectory(row.opening, deal["events"])
        self._trajectories[task.key] = trajectory
        end = End("failed")
        failure = check = None
        try:
            if not deal["events"]:
                # What a conversation left whose journal was lost is not this one's.
                await asyncio.to_thread(remove_tree, workspace.root)
            if row.image is not None and (problem := await self._image_problem(row.image)):
                raise SetupFailed(problem)
            if half_set_up(workspace.root).exists():
                await asyncio.to_thread(remove_tree, workspace.root)
            kept = workspace.root.exists()
            if row.setup is not None:
                workspace.start_dir = row.setup.start_dir
                if not kept:
                    await set_up_workspace(space, row.setup)
            end = await self._converse(task, deal, trajectory, row.terms, space, kept=kept)
            if row.setup is not None and row.setup.check is not None:
                # What the model left running could change what the check relies on.
                await sandbox_of(space).stop()
                space = replace(space, sandbox=self._sandbox_for(workspace, row.image))
                check = await run_check(space, row.setup.check)
        except ModelError as error:
            if self._is_the_endpoints(error):
                self._halt(self._in_words(error))
                raise Stopped from error
            failure = Failure(task.id, task.input_digest, deal["attempt"], error.kind, str(error))
        except SetupFailed as error:
            end = End("failed")
            failure = Failure(
                task.id, task.input_digest, deal["attempt"], "setup_failed", str(error)
            )
        finally:
            await space.close(remove=False)
        log.info("%s: %s after %d turns", task.id, end.status, trajectory.turns)
        if failure and deal["attempt"] < self._config.max_attempts:
            return pack("failed", key=task.key.hex(), failure=failure._asdict())
        self._not_durable[task.key] = space
        return self._finished(task, deal, trajectory, row.terms, end, failure, check)

    def _finished(
        self,
        task: Task,
        deal: Deal,
        trajectory: Trajectory,
        terms: Terms,
        end: End,
        failure: Failure | None,
        check: dict[str, Any] | None = None,
    ) -> bytes:
        record = make_record(
            task,
            trajectory,
            end=end,
            terms=terms,
            setup=setup_of_task(self._setups, self._config, task),
            failure=failure,
            check=check,
            attempt=deal["attempt"],
            provenance=self._setup.provenance,
        )
        return pack(
            "finished",
            dump_record(record),
            key=task.key.hex(),
            fields=index_fields(record),
            failure=failure and failure._asdict(),
        )

    def _in_words(self, error: ModelError) -> str:
        """Why an endpoint stops the run, with what to look at."""
        words = f"{error.endpoint}: {RULES[error.kind].meaning}: {error}"
        if error.kind in ("auth", "forbidden"):
            words += (
                f". The key is that of the environment variable {error.key_env} (see --key_env)."
            )
        return words

    def _is_the_endpoints(self, error: ModelError) -> bool:
        """Whether a failure stops the run rather than the task alone."""
        if error.action == "stop_run":
            return True
        return error.endpoint not in self._calls.proven and error.kind in SAYS_MORE_OF_THE_ENDPOINT

    async def _converse(
        self,
        task: Task,
        deal: Deal,
        trajectory: Trajectory,
        terms: Terms,
        space: TaskSpace,
        *,
        kept: bool,
    ) -> End:
        setup = setup_of_task(self._setups, self._config, task)
        home = Home(
            setup,
            space,
            self._calls.pool,
            self._config.tool_timeout_s,
            gate=lambda model: _Gate(self, model),
        )
        positions = itertools.count(len(deal["events"]))

        def journal(event: Event) -> None:
            self._journal.append(
                task.id,
                task.input_digest,
                event,
                deal=deal["deal"],
                position=next(positions),
            )
            self._count(event)

        conversation = Conversation(
            trajectory=trajectory,
            terms=terms,
            model=home.model(self._script_of(task), start=replies_played(trajectory, setup)),
            toolbox=home.toolbox(),
            journal=journal,
            host=home,
            subagents=terms.options.subagents,
            approve=setup.approve,
            kept=kept,
        )
        return await conversation.run(taken_up=bool(deal["events"]))

    def _count(self, event: Event) -> None:
        if event["kind"] == "sub":
            self._count(event["event"])
        elif event["kind"] == "reply":
            usage = event["usage"]
            self._counters["turns"] += 1
            if usage is not None:
                self._counters["input_tokens"] += usage["input_tokens"] or 0
                self._counters["output_tokens"] += usage["output_tokens"] or 0
            if event["cost_usd"] is None:
                self._counters["cost_unknown"] = True
            else:
                self._counters["cost_usd"] += event["cost_usd"]

    def _script_of(self, task: Task) -> Sequence[ScriptedTurn]:
        """What model "scripted" plays; to others a column of that name means nothing."""
        if self._setup.api != SCRIPTED:
            return ()
        own = task.columns.get("script")
        return self._setup.script or () if own is None else parse_script(own)

    async def _image_problem(self, image: str) -> str | None:
        """Why a row's image cannot be run; asked once per image."""
        if image not in self._images:
            self._images[image] = await asyncio.to_thread(docker_problem, image)
        return self._images[image]

    def _sandbox_for(self, workspace: Workspace, image: str | None) -> Sandbox | None:
        kind = self._setup.provenance.sandbox
        if kind is None:
            return None
        config = self._config
        limits = Limits(
            timeout_s=config.command_timeout_s,
            memory_mb=config.command_memory_mb,
            processes=config.max_processes,
            workspace_mb=config.workspace_mb,
            network=config.network,
        )
        return make_sandbox(kind, workspace, limits, image=image or config.docker_image)

    def _release(self, key: bytes) -> None:
        """The task's record is durable: nothing else of it is needed."""
        self._journal.finish(key)
        space = self._not_durable.pop(key, None)
        if space is not None and space.workspace.root.exists():
            removal = asyncio.create_task(space.close(remove=True))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    def _abandon(self) -> None:
        """Grace is over: what runs now is repeated by the next start."""
        for task in self._running.values():
            task.cancel()

    def _on_retry(self, asked: ModelSettings, words: str) -> None:
        """Log every retry; tell the user of the first while the endpoint has never answered."""
        log.info("%s: %s", asked.base_url, words)
        if asked.base_url not in self._calls.proven and not self._told:
            self._told = True
            self._send("note", message=f"{asked.base_url}: {words}")

    def _halt(self, message: str) -> None:
        """Ask the parent to stop the run; conversations rest until it is taken up again."""
        self._stopping = True
        self._calls.stop()
        self._send("halt", message=message)

    def _send(self, type: str, payload: bytes = b"", **fields: Any) -> None:
        self._outbox.put(pack(type, payload, **fields))

    def _send_forever(self) -> None:
        """A pipe that is full must not hold the event loop, so a thread does the writing."""
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                os._exit(1)


class _Gate:
    """Lets no new model call through once the worker is stopping."""

    def __init__(self, worker: Worker, model: Model) -> None:
        self._worker = worker
        self._model = model

    async def complete(self, request: Request) -> Completion:
        if self._worker._stopping:
            raise Stopped
        return await self._model.complete(request)

    async def close(self) -> None:
        """See `Model.close`."""
        await self._model.close()
