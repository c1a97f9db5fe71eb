"""Run an agent that is a command: in the sandbox of its conversation, with a gateway of its own.

Each start begins with the workspace and the HOME of the first one. Calls that an earlier start has
paid for are answered from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agent.gateway.answers import names_only
from agent.gateway.command_agent import CommandAgent, fill
from agent.gateway.relay import CallLimits, RefusedModel, Relay, Route
from agent.gateway.server import Gateway
from agent.loop.rules import Finish, ending_of_refusal
from agent.messages.message import AgentExitEvent, AgentRestartedEvent, ReplyEvent
from agent.models.errors import ModelError
from agent.models.model import Model
from agent.runner import ConversationRunner
from agent.setup import Home, Setup
from agent.state.trajectory import Journal, Kept, Trajectory
from agent.wires.lines import Line, lines_of
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import AgentFailed, Stopped
from batch_trajectories.basics.text import clip
from batch_trajectories.config.agents import model_asked
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.worker.agent_program import (
    HOME,
    SOCKET_DIR,
    VERSION_TIMEOUT_S,
    NotInstalled,
    extras_of,
    path_of,
    printed_version,
    program_of,
    version_of,
)
from batch_trajectories.engine.worker.calls import Calls, StoppableModel, Stops
from batch_trajectories.engine.worker.task_runner import AgentTask
from batch_trajectories.engine.worker.workspaces import Workspaces
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, Sandbox, SandboxError
from toolsets.sandbox.factory import sandbox_kind
from toolsets.sandbox.programs import forwarding
from toolsets.workspace.removal import remove_tree

# Why an agent has failed: its requests that were refused, and files that it does not see.


def advice(agent: CommandAgent, config: RunConfig, *, refused: str | None, has_called: bool) -> str:
    """What follows the reason of a failure; "" if nothing is known.

    `refused` is why the gateway refused its last request, `has_called` whether a call was answered.
    """
    said = [] if refused is None else [f"the gateway refused a request of it: {refused}"]
    if not has_called:
        said += [
            f"its sandbox does not show {path}: name the whole path in `command`, and in `programs`"
            for path in _not_shown(agent, config)
        ]
    return "".join(f"; {one}" for one in said)


def _not_shown(agent: CommandAgent, config: RunConfig) -> list[Path]:
    """Files of this machine that its command names and its sandbox has not."""
    if config.uses_images or not sandbox_kind(config.sandbox).is_isolated:
        return []
    shown = [*map(Path, program_of(agent, config).binds), Path("/usr")]
    named = [Path(word).absolute() for word in agent.command[1:] if _is_name(word)]
    return [
        path
        for path in named
        if path.is_file() and not any(path.is_relative_to(place) for place in shown)
    ]


def _is_name(word: str) -> bool:
    """Whether a word of a command can name a file: the system refuses longer names."""
    return "\n" not in word and len(word) < 255 and not word.startswith("-")


_PORT = 8800
_SOCKET = "socket"
_LAST_WORDS_S = 10.0
"""For a command to end by itself once it gets no more replies."""
_NO_LIMIT_S = 7 * 24 * 3600.0
_OUTPUT_BYTES = 32 * 1024
_SHOWN = 300
"""Characters of an agent's output in the reason of a failure."""
_SIGNALLED = 128
"""Exit codes above it are those of signals."""
_KILLED = _SIGNALLED + signal.SIGKILL

_ENDED = ExecResult(None, "", "", timed_out=False, truncated=False, duration_s=0.0)
"""The result of a command that was ended because it could get no more replies."""


class _Ran(NamedTuple):
    """How the last command of a start ended."""

    result: ExecResult
    agent: CommandAgent
    """With the version that it has."""
    before: frozenset[int]
    """The calls of the commands before it."""
    end: Finish | None
    """Why there was no further message, where that ends the conversation."""


class AgentRunner:
    """Runs the agents of one worker."""

    def __init__(self, config: RunConfig, spaces: Workspaces, calls: Calls, stops: Stops) -> None:
        self._config = config
        self._spaces = spaces
        self._calls = calls
        self._stops = stops
        self._commands: set[asyncio.Task[ExecResult]] = set()
        self._versions: dict[tuple[str, ...], str] = {}

    def stop(self) -> None:
        """End all commands. Nothing is lost: calls that are paid for are journaled."""
        for command in self._commands:
            command.cancel()

    async def run(self, task: AgentTask) -> tuple[Finish, CommandAgent]:
        """Run the agent to its end; return that, and the agent with its version.

        Raises `AgentFailed`, `ModelError` where the endpoint failed, `Stopped`, and `HostError`.
        """
        if self._stops.is_stopping:
            raise Stopped
        if task.trajectory.agent_calls is not None:
            task.record(AgentRestartedEvent(kind="agent_restarted", at=time.time()))
        gateway = self._gateway(task)
        try:
            ran = await self._run_commands(task, gateway)
        except (SandboxError, NotInstalled) as error:
            raise AgentFailed(f"agent {task.agent.name!r}: {error}") from error
        try:
            return ran.end or _ending(task, gateway.relay, ran.result, ran.before), ran.agent
        except AgentFailed as error:
            more = advice(
                task.agent,
                self._config,
                refused=gateway.relay.refused,
                has_called=_last_reply(task) is not None,
            )
            raise AgentFailed(f"{error}{more}") from error

    def _gateway(self, task: AgentTask) -> Gateway:
        options = task.row.spec.options
        setup = task.setup

        def route(dialect: str, name: str) -> Route:
            settings = model_asked(task.agent, setup.settings, setup.aliases, name)
            if settings is None:
                raise RefusedModel(
                    f"the agent asks for model {name!r}, which this run does not have; add it to "
                    "`aliases` of the agent, or have it ask for `{model}`"
                )
            return Route(
                model=self._calls.pool.get(settings),
                name=None if name == settings.name else settings.name,
            )

        relay = Relay(
            route=route,
            trajectory=task.trajectory,
            journal=task.journal,
            kept=task.kept,
            limits=replace(CallLimits.of(options), repeats=options.repeat_limit),
            volatile=task.agent.what_varies,
            is_stopping=lambda: self._stops.is_stopping,
            conversation=task.conversation,
        )
        aliases = (name for name in task.agent.aliases if not any(mark in name for mark in "*?["))
        models = names_only([setup.settings.name, *aliases])
        return Gateway(relay, wires=task.agent.speaks, models=models)

    async def _run_commands(self, task: AgentTask, gateway: Gateway) -> _Ran:
        """Run the agent for the task, and again for each further message of the user."""
        config, workspace, agent = self._config, task.context.workspace, task.agent
        installed = program_of(agent, config)
        async with _home_beside(workspace.root) as beside:
            kind, in_image = sandbox_kind(config.sandbox), config.uses_images
            shares_loopback = not kind.has_own_loopback and self._spaces.has_network(task.row)
            socket = beside / _SOCKET if kind.is_isolated and not shares_loopback else None
            url, key = f"http://127.0.0.1:{_PORT}", "placeholder"
            if socket is not None:
                # By a short name: the path of a socket may have 107 bytes.
                with _open_directory(beside) as fd:
                    await gateway.serve_unix(Path(f"/proc/self/fd/{fd}/{_SOCKET}"))
                # A container's user may be another one; nobody else gets into the run directory.
                socket.chmod(0o666)
                beside.chmod(0o711)
            else:
                port, key = await gateway.serve_tcp()
                url = f"http://127.0.0.1:{port}"
            own_home = None if config.is_inside else HOME
            extras = extras_of(installed, socket, in_image=in_image, home=own_home)
            left_s = task.row.spec.options.max_conversation_s or _NO_LIMIT_S
            sandbox = None
            try:
                sandbox, home = await self._spaces.for_agent(
                    task.context,
                    task.row,
                    extras,
                    timeout_s=left_s,
                    output_bytes=_OUTPUT_BYTES,
                )
                if in_image and agent.version_command:
                    asking = self._begin(
                        sandbox, agent.version_command, timeout_s=VERSION_TIMEOUT_S
                    )
                    agent = agent.with_found(printed_version(agent, await self._result(asking)))
                home = home or (HOME if kind.is_isolated else str(beside))
                values = {
                    "prompt": task.row.opening[-1]["content"],
                    "gateway": url,
                    "key": key,
                    "model": task.setup.settings.name,
                    "workspace": str(Path(sandbox.home) / workspace.start_dir),
                    "home": home,
                }
                own = {"HOME": home}
                if not in_image:
                    own |= {"PATH": path_of(installed), "LANG": "C.UTF-8"}
                    own |= {"TERM": "dumb", "USER": "user"}
                further = self._further_messages(task)
                said, answers = [values["prompt"]], list[str]()
                before: frozenset[int] = frozenset()
                while True:
                    words = agent.continues if answers else agent.command
                    program = installed.path if words[0] == agent.command[0] else words[0]
                    terms: dict[str, Any] = {
                        "argv": [program, *(fill(text, values) for text in words[1:])],
                        "env": own | agent.environment(values),
                        "inherits": in_image,
                        "cwd": values["workspace"],
                        "stdin": fill(agent.stdin, values),
                        "files": {}
                        if answers
                        else {f"{home}/{path}": fill(t, values) for path, t in agent.files.items()},
                        "socket": None if socket is None else f"{SOCKET_DIR}/{_SOCKET}",
                        "port": _PORT,
                        "acp": agent.acp_terms(values),
                    }
                    argv, stdin = forwarding(terms, in_image=in_image)
                    command = self._begin(sandbox, argv, stdin=stdin, timeout_s=max(left_s, 0.001))
                    result = await self._ended(task, gateway, command)
                    left_s -= result.duration_s
                    ran = _Ran(result, agent, before, None)
                    if further is None or not _has_answered(task, gateway.relay, ran):
                        return ran
                    answers.append(_last_text(task))
                    message = await further(said, answers)
                    if message is None or isinstance(message, Finish):
                        return ran._replace(end=message)
                    said.append(message)
                    values["prompt"] = message
                    assert task.trajectory.agent_calls is not None
                    before = frozenset(task.trajectory.agent_calls.live)
            finally:
                stops = () if sandbox is None else (sandbox.stop,)
                await close_all(*stops, gateway.close)

    def _further_messages(self, task: AgentTask) -> FurtherMessage | None:
        spec = task.row.spec
        if not spec.user_turns and spec.options.simulated_user is None:
            return None

        return further_messages(
            task.row,
            task.trajectory,
            setup=task.setup,
            context=task.context,
            journal=task.journal,
            kept=task.kept,
            config=self._config,
            calls=self._calls,
            stops=self._stops,
            conversation=task.conversation,
        )

    def _begin(
        self, sandbox: Sandbox, argv: Sequence[str], **given: Any
    ) -> asyncio.Task[ExecResult]:
        """Begin a command, which `stop` ends. Raises `Stopped`."""
        if self._stops.is_stopping:
            raise Stopped
        command = asyncio.create_task(sandbox.exec(argv, **given))
        self._commands.add(command)
        command.add_done_callback(self._commands.discard)
        return command

    async def _result(self, command: asyncio.Task[ExecResult]) -> ExecResult:
        """The result of a command; `_ENDED` if something other than `stop` ended it.

        Raises `Stopped`.
        """
        try:
            return await command
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            if self._stops.is_stopping:
                raise Stopped from None
            return _ENDED

    async def _ended(
        self, task: AgentTask, gateway: Gateway, command: asyncio.Task[ExecResult]
    ) -> ExecResult:
        """Wait until a command has ended, or end it once it can get no more replies."""
        over = asyncio.create_task(_end_after(gateway.relay.ended, command))
        try:
            result = await self._result(command)
        finally:
            over.cancel()
        if result is not _ENDED:
            task.record(_exit_event(result))
        return result

    async def with_version(self, agent: CommandAgent) -> CommandAgent:
        """An agent with its version; that of a row's own program is asked for once.

        That in an image is found when it runs. Raises `AgentFailed`.
        """
        command = agent.version_command
        if agent.found is not None or not command or self._config.uses_images:
            return agent
        if command not in self._versions:
            try:
                version = await asyncio.to_thread(version_of, agent, self._config)
            except (SandboxError, NotInstalled) as error:
                raise AgentFailed(f"agent {agent.name!r}: {error}") from error
            self._versions[command] = version
        return agent.with_found(self._versions[command])


def _main_line(task: AgentTask) -> Line | None:
    calls = task.trajectory.agent_calls
    return None if calls is None else lines_of(calls, task.row.opening[-1]["content"]).main


def _last_reply(task: AgentTask, before: Collection[int] = ()) -> ReplyEvent | None:
    """The last reply of the main conversation; None if the agent has made no call since."""
    main, calls = _main_line(task), task.trajectory.agent_calls
    if main is None or calls is None or main.numbers[-1] in before:
        return None
    return calls.exchanges[main.numbers[-1]]["reply"]


def _is_cut_off(task: AgentTask, relay: Relay, result: ExecResult) -> bool:
    """Whether an agent was not done, as its end says, though its last reply is a text: that may be
    the summary of a compaction, or a title where it offered no tools."""
    main, code = _main_line(task), result.exit_code or 0
    has_failed, offered_none = relay.last_refusal is not None, main is not None and not main.tools
    if code == _KILLED or (has_failed and code != 0):
        return True
    return offered_none and (code > _SIGNALLED or has_failed)


@asynccontextmanager
async def _home_beside(root: Path) -> AsyncIterator[Path]:
    """A directory beside a workspace for the time of one start."""
    path = root.with_name(f"{root.name}.agent")
    if os.path.lexists(path):
        await asyncio.to_thread(remove_tree, path)  # of a worker that was killed
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        await asyncio.to_thread(remove_tree, path)


@contextlib.contextmanager
def _open_directory(path: Path) -> Any:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def _end_after(ended: asyncio.Event, command: asyncio.Task[ExecResult]) -> None:
    """End a command that continues although it gets no more replies."""
    await ended.wait()
    await asyncio.wait([command], timeout=_LAST_WORDS_S)
    command.cancel()


def _exit_event(result: ExecResult) -> AgentExitEvent:
    return AgentExitEvent(
        kind="agent_exit",
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        duration_s=round(result.duration_s, 3),
        timed_out=result.timed_out,
    )


def _has_answered(task: AgentTask, relay: Relay, ran: _Ran) -> bool:
    """Whether a command ended with an answer, so that the user may write again."""
    try:
        return _ending(task, relay, ran.result, ran.before).status == "completed"
    except (AgentFailed, ModelError):
        return False


def _last_text(task: AgentTask) -> str:
    reply = _last_reply(task)
    return "" if reply is None else reply["message"]["content"]


def _ending(
    task: AgentTask, relay: Relay, result: ExecResult, before: Collection[int] = ()
) -> Finish:
    """How the conversation ended, as the relay saw it. Raises `AgentFailed`.

    `before` are calls of earlier commands of this start: the main conversation must go on.
    """
    if relay.ending is not None:
        return relay.ending
    if result.timed_out:
        return Finish("time_limit", f"{result.duration_s:.1f} s are over the limit")
    last = _last_reply(task, before)
    # A command that was ended was not done, even after a final reply.
    if last is not None and not result.was_filling and not _is_cut_off(task, relay, result):
        match last["finish_reason"]:
            case "length" | "refusal" | "context_exceeded" as cut:
                return Finish(cut)
        made = last["message"].get("tool_calls", ())
        pattern = task.agent.final_call
        if not made and last["finish_reason"] == "stop":
            return Finish("completed")
        if pattern and any(re.search(pattern, call["function"]["arguments"]) for call in made):
            return Finish("completed")
    if relay.last_error is not None:
        error = relay.last_error
        if (end := ending_of_refusal(error.kind, str(error))) is not None:
            return end
        raise error
    how = "was ended" if result.exit_code is None else f"ended with exit code {result.exit_code}"
    when = "before a final answer" if last is not None else "before its first model call"
    if last is None and before:
        when = "without going on with its conversation (`continues`)"
    if result.was_filling:
        how = "was ended because its workspace is over --workspace_mb:"
        when = f"it holds {result.full_mb} MB"
    output = clip((result.stderr or result.stdout).strip(), max_chars=_SHOWN)
    raise AgentFailed(f"agent {task.agent.name!r} {how} {when}: {output or 'no output'}")


# The further messages of the user of an agent that runs as a command.

FurtherMessage = Callable[[Sequence[str], Sequence[str]], Awaitable[str | Finish | None]]
"""See `ConversationRunner.further_message`."""


def further_messages(
    row: RowTask,
    trajectory: Trajectory,
    *,
    setup: Setup,
    context: ToolContext,
    journal: Journal,
    kept: Kept,
    config: RunConfig,
    calls: Calls,
    stops: Stops,
    conversation: str,
) -> FurtherMessage:
    """What gives the messages of a row, or of its simulated user."""

    def gated(model: Model) -> StoppableModel:
        return StoppableModel(stops, model, kept)

    home = Home(setup, context, calls.pool, config.tool_timeout_s, gate=gated, kept=kept)
    return ConversationRunner(
        trajectory=trajectory,
        spec=row.spec,
        model=home.model((), start=0),
        toolbox=home.toolbox(()),
        journal=journal,
        host=home,
        conversation=conversation,
    ).further_message
