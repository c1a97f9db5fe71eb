"""Run one task, from its assignment to the message about its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from agent.loop.loop import close_calls
from agent.loop.rules import Finish
from agent.messages.message import SIMULATED_USER, Event, RestartedEvent, is_cost_only
from agent.models.conversation_id import task_conversation_id
from agent.models.errors import ModelError
from agent.models.model import Model
from agent.models.resolve import SCRIPTED
from agent.models.scripted import ScriptedTurn, parse_script
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup, replies_played
from agent.state.trajectory import Trajectory, WaitUntilPersisted
from batch_trajectories.basics.errors import (
    AgentFailed,
    HostError,
    SandboxLost,
    Stopped,
    machine_failure,
)
from batch_trajectories.basics.text import plural, single_line
from batch_trajectories.config.models import Setups, setup_of_task
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.messages import (
    Assignment,
    TaskEnded,
    TaskFailed,
    TaskFinished,
    TaskReleased,
    WorkerSetup,
    no_counters,
)
from batch_trajectories.engine.parser_signs import parser_signs
from batch_trajectories.engine.record import (
    add_scores,
    as_stored,
    describe_missing_tokens,
    describe_missing_usage,
    make_record,
    used_images,
)
from batch_trajectories.engine.worker.calls import Calls, StoppableModel, StopSignal
from batch_trajectories.engine.worker.workspace_setup import SetupFailed, is_set_aside, put_back
from batch_trajectories.engine.worker.workspaces import PreparedWorkspace, Workspaces
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.index import index_fields
from batch_trajectories.records.journal import Journal
from batch_trajectories.records.tasks import Task
from toolsets.context import ToolContext

if TYPE_CHECKING:
    from agent.gateway.command_agent import CommandAgent
    from batch_trajectories.engine.worker.reward_functions import RewardFunctions

log = logging.getLogger(__name__)

TASK_ID: ContextVar[str] = ContextVar("TASK_ID")
"""The task that the current coroutine works for, so that logs of its calls can name it."""


@dataclass(slots=True)
class Work:
    """A task in progress, and its results so far."""

    task: Task
    assignment: Assignment
    row: RowTask
    trajectory: Trajectory
    context: ToolContext
    setup: Setup
    """Model and tools of the conversation."""
    end: Finish = field(default=Finish("failed"))
    diff: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    """Findings of a step of `check_tasks`."""
    workspace: dict[str, Any] | None = None
    """Place where the workspace is kept; see `engine.worker.workspaces`."""


class AgentTask(msgspec.Struct, frozen=True):
    """One conversation of an agent that is a command."""

    key: bytes
    agent: CommandAgent
    setup: Setup
    row: RowTask
    context: ToolContext
    trajectory: Trajectory
    journal: Callable[[Event], None]
    wait_until_persisted: Callable[[], Awaitable[None]] | None
    """Waits until the journal is on disk; None if an event is on disk as soon as it is recorded."""
    conversation: str = ""
    """See `agent.models.conversation_id`."""

    def record(self, event: Event) -> None:
        """Journal an event and apply it."""
        self.journal(event)
        self.trajectory.apply(event)


class AgentPrograms(Protocol):
    """Runs the agents of one worker that are commands."""

    async def with_version(self, agent: CommandAgent) -> CommandAgent:
        """Return an agent with its version. Raises `AgentFailed`."""
        ...

    async def run(self, task: AgentTask) -> tuple[Finish, CommandAgent]:
        """Run the agent to its end; return that, and the agent with its version.

        Raises `AgentFailed`, `ModelError` where the endpoint failed, `Stopped`, and `HostError`.
        """
        ...

    def stop(self) -> None:
        """End all commands."""
        ...


class TaskRunner:
    """Runs the tasks of one worker."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        setups: Setups,
        spaces: Workspaces,
        journal: Journal,
        calls: Calls,
        stops: StopSignal,
    ) -> None:
        self._setup = setup
        self._config = setup.config
        self._rules = setup.config.row_rules(setup.api)
        self._setups = setups
        self._spaces = spaces
        self._journal = journal
        self._calls = calls
        self._stops = stops
        self._agents: AgentPrograms | None = None
        if setup.config.agent is not None:
            self._agents = find_feature("agent")(setup.config, spaces, calls, stops)
        self._rewards = _reward_functions(setup.config) if setup.config.reward else None
        self._trajectories: dict[bytes, Trajectory] = {}
        self._not_durable: dict[bytes, ToolContext] = {}
        self.cancelled: set[bytes] = set()
        """Tasks that a person has stopped."""
        self.counters = no_counters()
        """Work since the last heartbeat, which resets them."""

    async def run(self, task: Task, assignment: Assignment) -> TaskEnded:
        """Run one task; return the message about its end, whatever happens."""
        TASK_ID.set(task.id)
        try:
            return await self._run_attempt(task, assignment)
        except Stopped:
            return TaskReleased(task.key)
        except (StorageError, HostError) as error:
            self._stops.halt(str(error))
            return TaskReleased(task.key)
        except (Exception, asyncio.CancelledError) as error:
            try:
                return self._report_error(task, assignment, error)
            except Exception as defect:
                if (message := machine_failure(defect)) is not None:
                    self._stops.halt(f"{task.id}: {message}")
                    return TaskReleased(task.key)
                # Its record cannot be made, but the parent must know of the attempt.
                log.exception(
                    "Task %s failed, and no record of it can be made (a bug in this program).",
                    task.id,
                )
                return _report_failure(
                    task, _failure(task, assignment, "internal", traceback.format_exc())
                )
        finally:
            self._trajectories.pop(task.key, None)
            self.cancelled.discard(task.key)

    async def close(self) -> None:
        """End the processes of reward functions."""
        if self._rewards is not None:
            await self._rewards.close()

    def stop_agents(self) -> None:
        """End agents that are commands; other conversations stop before their next call."""
        if self._agents is not None:
            self._agents.stop()

    def release(self, key: bytes) -> ToolContext | None:
        """The task's record is durable; return its context if its workspace must be removed."""
        self._journal.finish(key)
        context = self._not_durable.pop(key, None)
        return context if context is not None and context.workspace.root.exists() else None

    def _report_error(self, task: Task, assignment: Assignment, error: BaseException) -> TaskEnded:
        """The message about a task that ended with an unexpected error."""
        if (message := machine_failure(error)) is not None:
            log.error(
                "Task %s: the machine failed, so the run stops and the task runs again later.",
                task.id,
                exc_info=error,
            )
            self._stops.halt(f"{task.id}: {message}")
        if self._stops.is_stopping:
            return TaskReleased(task.key)
        kind, trace = "stopped", "a person stopped this conversation"
        if task.key not in self.cancelled:
            log.error(
                "Task %s: this attempt failed by a bug in this program.", task.id, exc_info=error
            )
            kind, trace = "internal", "".join(traceback.format_exception(error))
        failure = _failure(task, assignment, kind, trace)
        if assignment.attempt < self._config.max_attempts:
            return _report_failure(task, failure)
        row = self._rules.read(task.columns)
        # The record includes all replies so far: they were paid for.
        trajectory = self._trajectories.get(task.key) or row.trajectory(assignment.events)
        close_calls(trajectory, "failed", lambda event: None)
        context = self._spaces.open(task.key, row, resumed=False)
        record = self._record(
            Work(
                task=task,
                assignment=assignment,
                row=row,
                trajectory=trajectory,
                context=context,
                setup=setup_of_task(self._setups, self._config, task),
            ),
            failure,
        )
        return _report_finished(task, record, failure)

    async def _run_attempt(self, task: Task, assignment: Assignment) -> TaskEnded:
        """Run one task; return the message about its end, with its record if there is one.

        Raises errors that `run` handles.
        """
        row = self._rules.read(task.columns)
        # An agent that runs as a command begins again with the workspace of its first start.
        resumed = _has_begun(assignment) and row.agent is None
        trajectory = row.trajectory(assignment.events)
        self._trajectories[task.key] = trajectory
        context = self._spaces.open(task.key, row, resumed=resumed)
        work = Work(
            task=task,
            assignment=assignment,
            row=row,
            trajectory=trajectory,
            context=context,
            setup=setup_of_task(self._setups, self._config, task),
        )
        failure = None
        try:
            await self.do(work)
        except ModelError as error:
            if await self._calls.must_stop_run(error):
                self._stops.halt(self._calls.describe(error))
                raise Stopped from error
            self._calls.report()  # the parent knows what was answered before what has failed
            failure = Failure(
                id=task.id,
                input_digest=task.input_digest,
                attempt=assignment.attempt,
                error_class=error.kind,
                message=str(error),
            )
        except (SetupFailed, AgentFailed, SandboxLost) as error:
            work.end = Finish("failed")
            failure = _failure(task, assignment, error.error_class, str(error))
        finally:
            await work.context.close(remove=False)
        turns = trajectory.turns if (calls := trajectory.agent_calls) is None else len(calls.live)
        log.info(
            "Task %s ended as %s after %s%s",
            task.id,
            work.end.status,
            plural(turns, "turn"),
            self._what_follows(failure, assignment),
        )
        if failure and assignment.attempt < self._config.max_attempts:
            return _report_failure(task, failure)
        self._not_durable[task.key] = work.context
        record = self._record(work, failure)
        if self._rewards is not None and work.end.status != "failed":
            async with self._spaces.inside(work.context, work.row) as inside:
                root = inside or work.context.workspace.root
                scores = await self._rewards.scores(record, root)
            for score in scores:
                if score["error"] is not None:
                    log.warning(
                        "Task %s gets no reward from --reward=%s: %s",
                        task.id,
                        score["source"],
                        score["error"],
                    )
            record = add_scores(record, scores)
        return _report_finished(task, record, failure)

    def _what_follows(self, failure: Failure | None, assignment: Assignment) -> str:
        """The end of the sentence about a task: why it failed, and whether it runs again."""
        if failure is None:
            return "."
        attempts = self._config.max_attempts
        if assignment.attempt < attempts:
            follows = f"attempt {assignment.attempt} of {attempts}, the next start tries it again"
        else:
            follows = "it has no attempts left"
        return f" ({follows}): {failure.error_class}: {single_line(failure.message)}"

    async def do(self, work: Work) -> None:
        """Prepare the workspace, hold the conversation, run the check, and store the outcome on
        `work`."""
        prepared = await self._prepare_workspace(work)
        if work.row.agent is not None and self._agents is not None:
            work.row = work.row._replace(agent=await self._agents.with_version(work.row.agent))
            work.end, agent = await self._run_agent(work)
            work.row = work.row._replace(agent=agent)
            work.context = await self._spaces.reopen(work.context, work.row)
        else:
            work.end = await self._converse(work, prepared)
        if work.row.check is not None and work.row.check.collect:
            from batch_trajectories.engine.worker.judging import collect

            await collect(work.context, work.row.check, work.task.id)
        if self._config.keep_workspaces is not None:
            from batch_trajectories.engine.worker.workspaces import keep

            work.workspace = await keep(work.context, self._setup)
        await self._judge(work)

    async def _prepare_workspace(self, work: Work) -> PreparedWorkspace:
        workspace_id, root = work.assignment.workspace_id, work.context.workspace.root
        if is_set_aside(root):
            await asyncio.to_thread(put_back, root)
        prepared = await self._spaces.prepare(work.context, work.row, workspace_id=workspace_id)
        work.context = prepared.context
        return prepared

    async def _judge(self, work: Work) -> None:
        """Make the diff, and judge the workspace.

        Raises `SetupFailed` if no sandbox could be opened for the check; not in the last attempt.
        """
        work.diff = await self._spaces.diff(work.context, work.row)
        if work.row.check is None:
            return
        from batch_trajectories.engine.worker.judging import judge, make_unjudged

        turns = self._count_turns(work)
        try:
            work.check = await judge(self._spaces, work.context, work.row, turns, work.diff)
        except SetupFailed as error:
            if work.assignment.attempt < self._config.max_attempts:
                raise
            work.check = make_unjudged(str(error))
        if work.check is not None and (why := work.check.get("error")) is not None:
            log.warning("Task %s gets no reward from its check: %s", work.task.id, why)

    def _count_turns(self, work: Work) -> int | None:
        """The turns of this run's model; None if an agent's calls decide later what they are."""
        if work.row.agent is not None:
            return None
        return work.trajectory.turns - (work.row.fork.turn if work.row.fork is not None else 0)

    def _record(self, work: Work, failure: Failure | None) -> dict[str, Any]:
        return make_record(
            work.task,
            work.trajectory,
            end=work.end,
            spec=work.row.spec,
            setup=work.setup,
            failure=failure,
            check=work.check,
            diff=work.diff,
            audit=work.audit,
            workspace=work.workspace,
            attempt=work.assignment.attempt,
            provenance=self._setup.provenance,
            agent=work.row.agent,
            image=self._spaces.image(work.row),
        )

    async def _converse(self, work: Work, prepared: PreparedWorkspace) -> Finish:
        task, assignment, row, trajectory = work.task, work.assignment, work.row, work.trajectory
        rebuild = None
        if work.setup.uses("python") and not await self._spaces.has_python(prepared.context, row):
            work.setup = work.setup.leave_out_toolset("python")
        setup = work.setup
        if _has_begun(assignment):
            from batch_trajectories.engine.worker.rebuild import Rebuilder  # only resumes need it

            rebuilder = Rebuilder(
                spaces=self._spaces,
                worker=self._setup,
                key=task.key,
                row=row,
                assignment=assignment,
                setup=setup,
                check_stop=self._check_stop,
            )
            prepared, rebuild = await rebuilder.restore_workspace(prepared, trajectory)
        work.context, survived, why_new = prepared

        wait_until_persisted = self._make_persistence_wait(task)
        by_batch = self._calls.batch_wrapper(task.key, assignment)

        def make_stoppable(model: Model) -> StoppableModel:
            return StoppableModel(self._stops, by_batch(model), wait_until_persisted)

        pool, timeout_s = self._calls.pool, self._config.tool_timeout_s
        home = AgentServices(
            setup,
            work.context,
            pool,
            timeout_s,
            wrap_model=make_stoppable,
            wait_until_persisted=wait_until_persisted,
        )
        journal = self._make_journal(task, assignment)
        if row.fork is not None and trajectory.forked is None:
            from batch_trajectories.engine.worker.replay import replay, replayable

            names = replayable(setup, frozenset(self._config.mcp or ()))
            replayed = await replay(
                row.fork.events, home.toolbox(), trajectory, names, check_stop=self._check_stop
            )
            forked = row.fork.event(branch=task.sample, replay=replayed)
            journal(forked)
            trajectory.apply(forked)
        is_taken_up = _has_begun(assignment)
        if is_taken_up and not survived and self._config.is_inside and row.fork is None:
            # Its calls worked on an image; later turns would not fit a fresh one.
            restarted = RestartedEvent(
                kind="restarted", turn=trajectory.turns, reason=why_new, at=time.time()
            )
            journal(restarted)
            trajectory.apply(restarted)
            is_taken_up = False
        conversation = ConversationRunner(
            trajectory=trajectory,
            spec=row.spec,
            model=home.model(self._find_script(task), start=replies_played(trajectory, setup)),
            toolbox=home.toolbox(),
            journal=journal,
            services=home,
            subagents=row.spec.options.subagents,
            workspace_survived=survived,
            records_starts=wait_until_persisted is None,
            has_start_events=assignment.knows_begun,
            rebuild=rebuild,
            conversation=self._conversation_id(task),
        )
        return await conversation.run(taken_up=is_taken_up)

    async def _run_agent(self, work: Work) -> tuple[Finish, CommandAgent]:
        """Run an agent that is a command; return its end, and the agent with its version."""
        assert self._agents is not None
        assert work.row.agent is not None
        if work.context.sandbox is not None:
            await work.context.sandbox.stop()  # what set up the workspace
        return await self._agents.run(
            AgentTask(
                key=work.task.key,
                agent=work.row.agent,
                setup=work.setup,
                row=work.row,
                context=work.context,
                trajectory=work.trajectory,
                journal=self._make_journal(work.task, work.assignment),
                wait_until_persisted=self._make_persistence_wait(work.task),
                conversation=self._conversation_id(work.task),
            )
        )

    def _conversation_id(self, task: Task) -> str:
        return task_conversation_id(self._setup.run_key, task.key)

    def _make_persistence_wait(self, task: Task) -> WaitUntilPersisted:
        """The function that waits until a task's events are on disk; None if they are at once."""
        kept_by = self._journal.wait_persisted
        return None if kept_by is None else partial(kept_by, task.key)

    def _make_journal(self, task: Task, assignment: Assignment) -> Callable[[Event], None]:
        """Appends events of a task to the journal; from any thread, where that keeps them."""
        positions = itertools.count(len(assignment.events))
        in_order = threading.Lock()  # a kill must leave no gap

        def journal(event: Event) -> None:
            with in_order:
                self._journal.append(
                    task.id,
                    task.input_digest,
                    event,
                    assignment=assignment.number,
                    position=next(positions),
                )
            self._count(event)

        return journal

    def _check_stop(self) -> None:
        if self._stops.is_stopping:
            raise Stopped

    def _count(self, event: Event, *, is_users: bool = False) -> None:
        """Count a reply; `is_users`: a simulated user wrote it, whose prompts are not kept."""
        if event["kind"] == "sub":
            self._count(event["event"], is_users=event["name"] == SIMULATED_USER)
        elif event["kind"] == "exchange":
            self._count(event["reply"])
            if message := describe_missing_usage(event["reply"]):
                self._stops.say(message)
        elif event["kind"] == "reply":
            usage = event["usage"]
            self.counters["turns"] += 1
            if usage is not None:
                self.counters["input_tokens"] += usage["input_tokens"] or 0
                self.counters["output_tokens"] += usage["output_tokens"] or 0
            if event["cost_usd"] is None:
                self.counters["cost_unknown"] = True
            else:
                self.counters["cost_usd"] += event["cost_usd"]
            if (
                self._config.token_ids
                and not is_users
                and (message := describe_missing_tokens(event))
            ):
                self._stops.say(message)

    def _find_script(self, task: Task) -> Sequence[ScriptedTurn]:
        """The script of model "scripted"; other models ignore a column of this name."""
        if self._setup.api != SCRIPTED:
            return ()
        own = task.columns.get("script")
        return self._setup.script or () if own is None else parse_script(own)


def _failure(task: Task, assignment: Assignment, kind: str, message: str) -> Failure:
    return Failure(
        id=task.id,
        input_digest=task.input_digest,
        attempt=assignment.attempt,
        error_class=kind,
        message=message,
    )


def _report_failure(task: Task, failure: Failure) -> TaskFailed:
    return TaskFailed(key=task.key, model=task.model, failure=failure)


def _report_finished(task: Task, record: dict[str, Any], failure: Failure | None) -> TaskFinished:
    stored = as_stored(record)
    return TaskFinished(
        key=task.key,
        fields=index_fields(stored),
        failure=failure,
        images=[] if failure else used_images(record),
        signs=parser_signs(record),
        payload=stored.line,
    )


def _reward_functions(config: RunConfig) -> RewardFunctions:
    from batch_trajectories.engine.worker.reward_functions import (
        RewardFunctions,  # most runs have none
    )

    return RewardFunctions(config.reward, timeout_s=config.reward_timeout_s)


def _has_begun(assignment: Assignment) -> bool:
    """Whether the task continues a conversation: it has events other than discarded replies."""
    return not all(map(is_cost_only, assignment.events))
