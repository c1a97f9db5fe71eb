"""Runs an agent that is a command, in the sandbox of its conversation and with its own gateway.

After a crash the agent starts again with the workspace and the HOME of its first start. Calls that
an earlier start has paid for are answered from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from agent.gateway.answers import list_names
from agent.gateway.command_agent import CommandAgent, fill_placeholders
from agent.gateway.relay import CallLimits, RefusedModel, Relay, Route
from agent.gateway.server import Gateway
from agent.loop.rules import Finish, refusal_ending
from agent.messages.message import AgentExitEvent, AgentRestartedEvent, ReplyEvent
from agent.models.errors import ModelError, blame_reply_limit
from agent.models.model import Model
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup
from agent.state.trajectory import Journal, Trajectory, WaitUntilPersisted
from agent.wires.agent_conversations import AgentConversation, find_conversations
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import AgentFailed, Stopped
from batch_trajectories.basics.text import clip
from batch_trajectories.config.agents import find_model
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.worker.agent_program import (
    HOME,
    SOCKET_DIR,
    VERSION_TIMEOUT_S,
    Installed,
    NotInstalled,
    find_agent_program,
    printed_version,
    read_agent_version,
    sandbox_extras,
    search_path,
)
from batch_trajectories.engine.worker.calls import Calls, StoppableModel, StopSignal
from batch_trajectories.engine.worker.task_runner import AgentTask
from batch_trajectories.engine.worker.workspaces import Workspaces
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, Sandbox, SandboxError
from toolsets.sandbox.factory import find_sandbox_class
from toolsets.sandbox.programs import make_forward_command
from toolsets.workspace.removal import remove_tree

# Reasons for which an agent failed: refused requests, and files that its sandbox lacks.


def failure_hints(
    agent: CommandAgent, config: RunConfig, *, refused: str | None, has_called: bool
) -> str:
    """Return the known causes of a failure, to begin its reason; "" if nothing is known.

    `refused` is the reason for which the gateway refused the last request, None if it refused none.
    `has_called` tells whether a call was answered.
    """
    hints = [] if refused is None else [f"the gateway refused a request of it: {refused}"]
    if not has_called:
        hints += [
            f"its sandbox does not show {path}: name the whole path in `command`, and in `programs`"
            for path in _hidden_files(agent, config)
        ]
        hints += [
            f"it starts in a workspace of its own: name the whole path {path} in `command`"
            for path in _relative_programs(agent)
        ]
    return "".join(f"{hint}; " for hint in hints)


def _hidden_files(agent: CommandAgent, config: RunConfig) -> list[Path]:
    """Find the files of this machine that the agent's command names and its sandbox lacks."""
    if config.uses_images or not find_sandbox_class(config.sandbox).is_isolated:
        return []
    visible = [*map(Path, find_agent_program(agent, config).binds), Path("/usr")]
    named = [Path(word).absolute() for word in agent.command[1:] if _is_name(word)]
    return [
        path
        for path in named
        if path.is_file() and not any(path.is_relative_to(place) for place in visible)
    ]


def _relative_programs(agent: CommandAgent) -> list[Path]:
    """Find the programs that the agent's command names by a relative path."""
    names = {Path(word).name for word in agent.command[1:] if _is_name(word) and word[:1] != "/"}
    return [path.absolute() for path in agent.programs if path.name in names]


def _is_name(word: str) -> bool:
    """Whether a word of a command can name a file."""
    # The system refuses names of 255 characters and more.
    return "\n" not in word and len(word) < 255 and not word.startswith("-")


_PORT = 8800
_SOCKET = "socket"
_EXIT_GRACE_S = 10.0
"""Time for a command to end by itself once it gets no more replies."""
_NO_LIMIT_S = 7 * 24 * 3600.0
_OUTPUT_BYTES = 32 * 1024
_EXCERPT_CHARS = 300
"""Characters of an agent's output in the reason of a failure."""
_SIGNALLED = 128
"""Higher exit codes are this number plus that of a signal."""
_KILLED = _SIGNALLED + signal.SIGKILL

_ENDED = ExecResult(None, "", "", timed_out=False, truncated=False, duration_s=0.0)
"""The result of a command that was ended because it could get no more replies."""


class _Ran(NamedTuple):
    """The end of the last command of a start."""

    result: ExecResult
    agent: CommandAgent
    """The agent, with its version."""
    before: frozenset[int]
    """The numbers of the calls that earlier commands of this start made."""
    end: Finish | None
    """The ending of the conversation if the user's messages ended it; else None."""


class _Access(NamedTuple):
    """The gateway as an agent reaches it."""

    url: str
    key: str
    socket: Path | None
    """The socket that the sandbox forwards to; None if the agent connects by TCP."""


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of an agent in its sandbox."""

    agent: CommandAgent
    sandbox: Sandbox
    access: _Access
    program: str
    """The path of the agent's own program."""
    home: str
    workspace: str
    model: str
    variables: Mapping[str, str]
    """Environment variables that the agent does not set itself."""
    in_image: bool

    def terms(self, prompt: str, *, is_first: bool) -> dict[str, Any]:
        """The arguments of `inside.forward`, to run the command for a message of the user."""
        agent = self.agent
        values = {
            "prompt": prompt,
            "gateway": self.access.url,
            "key": self.access.key,
            "model": self.model,
            "workspace": self.workspace,
            "home": self.home,
        }
        name, *arguments = agent.command if is_first else agent.continues
        program = self.program if name == agent.command[0] else name
        files = agent.files.items() if is_first else ()
        return {
            "argv": [program, *(fill_placeholders(text, values) for text in arguments)],
            "env": {"HOME": self.home, **self.variables, **agent.environment(values)},
            "inherits": self.in_image,
            "cwd": self.workspace,
            "stdin": fill_placeholders(agent.stdin, values),
            "files": {
                f"{self.home}/{path}": fill_placeholders(text, values) for path, text in files
            },
            "socket": None if self.access.socket is None else f"{SOCKET_DIR}/{_SOCKET}",
            "port": _PORT,
            "acp": agent.acp_terms(values),
        }


def _system_variables(installed: Installed) -> dict[str, str]:
    """The variables that an image would set."""
    return {"PATH": search_path(installed), "LANG": "C.UTF-8", "TERM": "dumb", "USER": "user"}


class AgentRunner:
    """Runs the agents of one worker."""

    def __init__(
        self, config: RunConfig, spaces: Workspaces, calls: Calls, stops: StopSignal
    ) -> None:
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
        """Run the agent to its end; return the ending, and the agent with its version.

        Raises `AgentFailed`, `ModelError` if the endpoint failed, `Stopped`, and `HostError`.
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
            causes = failure_hints(
                task.agent,
                self._config,
                refused=gateway.relay.refused,
                has_called=_last_reply(task) is not None,
            )
            raise AgentFailed(f"{causes}{error}") from error

    def _gateway(self, task: AgentTask) -> Gateway:
        options = task.row.spec.options
        setup = task.setup

        def route(dialect: str, name: str) -> Route:
            settings = find_model(task.agent, setup.settings, setup.aliases, name)
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
            wait_until_persisted=task.wait_until_persisted,
            limits=replace(CallLimits.from_options(options), repeats=options.repeat_limit),
            volatile=task.agent.volatile_values,
            is_stopping=lambda: self._stops.is_stopping,
            conversation=task.conversation,
        )
        aliases = (name for name in task.agent.aliases if not any(mark in name for mark in "*?["))
        models = list_names([setup.settings.name, *aliases])
        return Gateway(relay, wires=task.agent.speaks, models=models)

    async def _run_commands(self, task: AgentTask, gateway: Gateway) -> _Ran:
        """Run the agent for the task, and again for each further message of the user."""
        config, agent = self._config, task.agent
        installed = find_agent_program(agent, config)
        async with _make_home(task.context.workspace.root) as beside:
            access = await self._serve(task, gateway, beside)
            extras = sandbox_extras(
                installed,
                access.socket,
                in_image=config.uses_images,
                home=None if config.is_inside else HOME,
            )
            limit_s = task.row.spec.options.max_conversation_s or _NO_LIMIT_S
            sandbox = None
            try:
                sandbox, home = await self._spaces.make_agent_sandbox(
                    task.context, task.row, extras, timeout_s=limit_s, output_bytes=_OUTPUT_BYTES
                )
                if config.uses_images and agent.version_command:
                    agent = await self._ask_version(agent, sandbox)
                if not home:
                    home = HOME if find_sandbox_class(config.sandbox).is_isolated else str(beside)
                start = _Start(
                    agent=agent,
                    sandbox=sandbox,
                    access=access,
                    program=installed.path,
                    home=home,
                    workspace=str(Path(sandbox.home) / task.context.workspace.start_dir),
                    model=task.setup.settings.name,
                    variables={} if config.uses_images else _system_variables(installed),
                    in_image=config.uses_images,
                )
                return await self._hold_conversation(task, gateway, start, limit_s)
            finally:
                stops = () if sandbox is None else (sandbox.stop,)
                await close_all(*stops, gateway.close)

    async def _serve(self, task: AgentTask, gateway: Gateway, beside: Path) -> _Access:
        """Have the gateway listen where the sandbox can reach it; `beside` may get the socket."""
        kind = find_sandbox_class(self._config.sandbox)
        shares_loopback = not kind.has_own_loopback and self._spaces.has_network(task.row)
        if not kind.is_isolated or shares_loopback:
            port, key = await gateway.serve_tcp()
            return _Access(f"http://127.0.0.1:{port}", key, None)
        # By a short name: the path of a socket may have 107 bytes.
        with _open_directory(beside) as fd:
            await gateway.serve_unix(Path(f"/proc/self/fd/{fd}/{_SOCKET}"))
        socket = beside / _SOCKET
        # A container's user may be another one; nobody else gets into the run directory.
        socket.chmod(0o666)
        beside.chmod(0o711)
        return _Access(f"http://127.0.0.1:{_PORT}", "placeholder", socket)

    async def _ask_version(self, agent: CommandAgent, sandbox: Sandbox) -> CommandAgent:
        """Return the agent with the version that its program in the sandbox prints."""
        command = self._begin(sandbox, agent.version_command, timeout_s=VERSION_TIMEOUT_S)
        return agent.with_version(printed_version(agent, await self._result(command)))

    async def _hold_conversation(
        self, task: AgentTask, gateway: Gateway, start: _Start, left_s: float
    ) -> _Ran:
        """Run a command per message of the user, for at most `left_s` seconds in all."""
        next_message = self._further_messages(task)
        messages, answers = [task.row.opening[-1]["content"]], list[str]()
        before: frozenset[int] = frozenset()
        while True:
            terms = start.terms(messages[-1], is_first=not answers)
            argv, stdin = make_forward_command(terms, in_image=start.in_image)
            command = self._begin(start.sandbox, argv, stdin=stdin, timeout_s=max(left_s, 0.001))
            result = await self._wait_for_end(task, gateway, command)
            left_s -= result.duration_s
            ran = _Ran(result, start.agent, before, None)
            if next_message is None or not _has_answered(task, gateway.relay, ran):
                return ran
            answers.append(_last_text(task))
            message = await next_message(messages, answers)
            if message is None or isinstance(message, Finish):
                return ran._replace(end=message)
            messages.append(message)
            assert task.trajectory.agent_calls is not None
            before = frozenset(task.trajectory.agent_calls.live)

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
            wait_until_persisted=task.wait_until_persisted,
            config=self._config,
            calls=self._calls,
            stops=self._stops,
            conversation=task.conversation,
        )

    def _begin(
        self, sandbox: Sandbox, argv: Sequence[str], **given: Any
    ) -> asyncio.Task[ExecResult]:
        """Begin a command that `stop` can end. Raises `Stopped`."""
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

    async def _wait_for_end(
        self, task: AgentTask, gateway: Gateway, command: asyncio.Task[ExecResult]
    ) -> ExecResult:
        """Wait until a command has ended, or end it once it can get no more replies."""
        over = asyncio.create_task(_end_command(gateway.relay.ended, command))
        try:
            result = await self._result(command)
        finally:
            over.cancel()
        if result is not _ENDED:
            task.record(_exit_event(result))
        return result

    async def with_version(self, agent: CommandAgent) -> CommandAgent:
        """Return the agent with its version. The program is asked once per worker.

        An agent in an image is returned unchanged: its version is found when it runs. Raises
        `AgentFailed`.
        """
        command = agent.version_command
        if agent.found_version is not None or not command or self._config.uses_images:
            return agent
        if command not in self._versions:
            try:
                version = await asyncio.to_thread(read_agent_version, agent, self._config)
            except (SandboxError, NotInstalled) as error:
                raise AgentFailed(f"agent {agent.name!r}: {error}") from error
            self._versions[command] = version
        return agent.with_version(self._versions[command])


def _main_conversation(task: AgentTask) -> AgentConversation | None:
    calls = task.trajectory.agent_calls
    return (
        None if calls is None else find_conversations(calls, task.row.opening[-1]["content"]).main
    )


def _last_reply(task: AgentTask, before: Collection[int] = ()) -> ReplyEvent | None:
    """The last reply of the main conversation; None if the agent has made no call since."""
    main, calls = _main_conversation(task), task.trajectory.agent_calls
    if main is None or calls is None or main.call_numbers[-1] in before:
        return None
    return calls.exchanges[main.call_numbers[-1]]["reply"]


def _is_cut_off(task: AgentTask, relay: Relay, result: ExecResult) -> bool:
    """Whether the agent was killed or failed although its last reply is plain text.

    Such a text may be a compaction's summary, or a title if the agent offered no tools.
    """
    main, code = _main_conversation(task), result.exit_code or 0
    has_failed, offered_none = relay.last_refusal is not None, main is not None and not main.tools
    if code == _KILLED or (has_failed and code != 0):
        return True
    return offered_none and (code > _SIGNALLED or has_failed)


@asynccontextmanager
async def _make_home(root: Path) -> AsyncIterator[Path]:
    """Make a directory beside a workspace for the time of one start."""
    path = root.with_name(f"{root.name}.agent")
    if os.path.lexists(path):
        await asyncio.to_thread(remove_tree, path)  # left by a worker that was killed
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


async def _end_command(ended: asyncio.Event, command: asyncio.Task[ExecResult]) -> None:
    """End a command that continues although it gets no more replies."""
    await ended.wait()
    await asyncio.wait([command], timeout=_EXIT_GRACE_S)
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
    """Return the ending of the conversation, from its calls and the command's end.

    `before` has the calls of earlier commands of this start; the main conversation must have later
    ones. Raises `AgentFailed`, and `ModelError` if the last call failed.
    """
    if relay.ending is not None:
        return relay.ending
    if result.timed_out:
        return Finish("time_limit", f"{result.duration_s:.1f} s are over the limit")
    last = _last_reply(task, before)
    # A command that had to be ended was not done, even after a final reply.
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
        if last is None and not before:
            blame_reply_limit(error)
        if (end := refusal_ending(error.kind, str(error))) is not None:
            return end
        raise error
    how = "was ended" if result.exit_code is None else f"ended with exit code {result.exit_code}"
    when = "before a final answer" if last is not None else "before its first model call"
    if last is None and before:
        when = "without going on with its conversation (`continues`)"
    if result.was_filling:
        how = "was ended because its workspace is over --workspace_mb:"
        when = f"it holds {result.full_mb} MB"
    output = clip((result.stderr or result.stdout).strip(), max_chars=_EXCERPT_CHARS)
    raise AgentFailed(f"agent {task.agent.name!r} {how} {when}: {output or 'no output'}")


# The further messages of the user of an agent that runs as a command.

FurtherMessage = Callable[[Sequence[str], Sequence[str]], Awaitable[str | Finish | None]]
"""See `ConversationRunner.next_user_message`."""


def further_messages(
    row: RowTask,
    trajectory: Trajectory,
    *,
    setup: Setup,
    context: ToolContext,
    journal: Journal,
    wait_until_persisted: WaitUntilPersisted,
    config: RunConfig,
    calls: Calls,
    stops: StopSignal,
    conversation: str,
) -> FurtherMessage:
    """Make the function that returns the next message of the row or of its simulated user."""

    def gated(model: Model) -> StoppableModel:
        return StoppableModel(stops, model, wait_until_persisted)

    home = AgentServices(
        setup,
        context,
        calls.pool,
        config.tool_timeout_s,
        wrap_model=gated,
        wait_until_persisted=wait_until_persisted,
    )
    return ConversationRunner(
        trajectory=trajectory,
        spec=row.spec,
        model=home.model((), start=0),
        toolbox=home.toolbox(()),
        journal=journal,
        services=home,
        conversation=conversation,
    ).next_user_message
