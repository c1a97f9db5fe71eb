"""A session: one prompt after the other to the same agent, in the same workspace."""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from agent.loop.loop import close_calls
from agent.loop.opening import with_bound_stated
from agent.loop.rules import ConversationSpec
from agent.loop.steps import Finish
from agent.loop.tools import check_names
from agent.messages import Event, Message
from agent.models.client.pool import ModelPool
from agent.models.client.retrying import Retry
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.scripted import ScriptedTurn
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.setup import Home, Setup, key_for, replies_played, schemas_for
from agent.state.events import note_event
from agent.state.history import completed_history
from agent.state.trajectory import Journal, Trajectory
from agent.state.transcript import Transcript
from agent.stream_events import StreamHandler
from toolsets.browser.process import Browsers
from toolsets.context import ToolContext
from toolsets.mcp.servers import McpServers
from toolsets.net.web_settings import WebSettings
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

T = TypeVar("T")

State = Literal["idle", "running", "done", "awaiting_input", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """All that the sessions of one agent have in common, checked."""

    settings: ModelSettings
    api_key: str
    common: Setup
    options: AgentOptions
    sandbox: str | None
    """None where no tool runs commands."""
    system_prompt: str | None = None
    script: Sequence[ScriptedTurn] = ()
    on_event: StreamHandler | None = None
    on_retry: Callable[[Retry], None] = lambda retry: None
    journal: Journal = lambda event: None
    """Told of every event as it happens."""
    transcript_dir: Path | None = None
    call_timeout_s: float = 300.0
    web: WebSettings | None = None
    browsers: Browsers | None = None
    """The browser that prompts answered side by side share."""
    servers: McpServers | None = None
    """The MCP servers behind the tools; they live as long as the answering of one prompt."""


class AgentSession:
    """Prompts and answers that build on each other. Use as a context manager, or `close` it.

    `messages` is the whole conversation so far, as sent and received.
    """

    def __init__(
        self,
        setup: AgentSetup,
        *,
        history: Sequence[Message] = (),
        session_id: str | None = None,
    ) -> None:
        """`history` is copied. Raises `ValueError` where no prompt could follow it."""
        self.messages: list[Message] = completed_history(history)
        self._setup = setup
        self._id = session_id
        self._root = Path(tempfile.mkdtemp(prefix="agent-"))
        self._state: State = "idle"
        self._is_closed = False
        self._failed_prompts = 0
        self._last_failure: str | None = None
        self._played = 0
        self._known_tools: set[str] | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancel_reason = ""
        self.trajectory = Trajectory(self.messages)
        """The conversation since the last prompt."""
        self.end = Finish("failed", "no prompt was answered yet")
        """How the last prompt ended."""
        self.error: ModelError | None = None
        """Why the endpoint failed the last prompt, if it did."""
        self.transcript: Path | None = None
        """The transcript of the last prompt; None where there is no `transcript_dir`."""
        self._terms = ConversationSpec(setup.options)

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_prompt(self, text: str, *, expected: str | None = None) -> str:
        """Answer one prompt; see `anew_prompt`. Works inside a running event loop too."""
        return run_here(self.anew_prompt(text, expected=expected))

    async def anew_prompt(self, text: str, *, expected: str | None = None) -> str:
        """Answer one prompt, after a tool asked for input the user's reply to it.

        `expected` is compared with the answer (see option `check_expected`). Gives the answer,
        "" without one; `end` says how it ended, `error` what was wrong with the endpoint.
        Raises `ValueError` where `text` is blank.
        """
        if not text.strip():
            msg = "a prompt must not be blank"
            raise ValueError(msg)
        if self._is_closed or self._state == "running":
            msg = f"the session is {'closed' if self._is_closed else 'running'}"
            raise RuntimeError(msg)
        if self._state == "awaiting_input":
            self._terms = replace(
                self._terms, user_replies=(*self._terms.user_replies, text), expected=expected
            )
        else:
            self.trajectory = Trajectory(self._opening(text))
            self._terms = ConversationSpec(self._setup.options, expected=expected)
        self._state = "running"
        self.error = None
        # What stands if this is left by an exception.
        self.end = Finish("failed", "it was left before its ending")
        played = replies_played(self.trajectory, self._setup.common)
        try:
            self.end = await self._converse()
        finally:
            close_calls(self.trajectory, self.end.status, lambda event: None)
            self.messages = self.trajectory.messages
            self._played += replies_played(self.trajectory, self._setup.common) - played
            self._state = _STATES.get(self.end.status, "failed")
            if self._state in ("failed", "interrupted"):
                self._failed_prompts += 1
                self._last_failure = self.end.reason or self.end.status
        return self.get_last_result()

    def get_last_result(self) -> str:
        """The last answer; what a tool asks, where one asks for input; "" where there is none."""
        if self._state == "awaiting_input":
            return self.end.reason or ""
        return self.trajectory.final_text()

    def get_variables(self) -> dict[str, Any]:
        """`last_answer`, `status` (see `State`) and `failed_turns`, the prompts that failed."""
        return {
            "last_answer": self.get_last_result(),
            "status": self._state,
            "failed_turns": self._failed_prompts,
        }

    def finalize_failures(self) -> dict[str, str] | None:
        """Sum failed prompts up as a `cannot_complete`; None where none failed."""
        if not self._failed_prompts:
            return None
        reason = f"{self._failed_prompts} prompts failed; the last one: {self._last_failure}"
        return {"tool": "cannot_complete", "reason": reason}

    def cancel(self, reason: str = "") -> None:
        """Stop the prompt that is being answered, from any thread; the session can go on."""
        running = self._running
        if running is not None:
            loop, task = running
            self._cancel_reason = reason
            loop.call_soon_threadsafe(task.cancel)

    def fork(self) -> AgentSession:
        """A session of its own that begins as this one is now, files included."""
        other = AgentSession(self._setup, history=self.messages)
        other._played = self._played
        if self._state == "awaiting_input":
            other.trajectory = copy.deepcopy(self.trajectory)
            other._terms, other.end, other._state = self._terms, self.end, self._state
        if (self._root / "workspace").exists():
            shutil.copytree(self._root / "workspace", other._root / "workspace", symlinks=True)
        return other

    def set_tools(self, common: Setup) -> None:
        """Replace the tools from the next prompt on; the model is told what changed.

        The approval hook stays. Raises `ValueError` where a name is reserved or there twice.
        """
        options = self._setup.options
        names = [tool.name for tool in common.tools]
        check_names([*names, *(agent.name for agent in options.subagents)])
        common = replace(common, approve=common.approve or self._setup.common.approve)
        self._setup = replace(self._setup, common=common)

    def close(self) -> None:
        """Remove the workspace; no prompt can follow."""
        self._is_closed = True
        shutil.rmtree(self._root, ignore_errors=True)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools on offer, in OpenAI form."""
        return [dict(schema) for schema in schemas_for(self._setup.common, self._setup.options)]

    def _opening(self, text: str) -> list[Message]:
        opening = list(self.messages)
        system = self._setup.system_prompt
        if system and (not opening or opening[0]["role"] != "system"):
            opening.insert(0, Message(role="system", content=system))
        prompt = Message(role="user", content=text)
        if changes := self._changes_of_tools():
            prompt["content"] = f"[Tools have changed; {changes}]\n\n{text}"
            prompt["notes"] = ["tools_changed"]
        return with_bound_stated([*opening, prompt], self._setup.options)

    def _changes_of_tools(self) -> str:
        """What has changed since the prompt before, in words for the model; "" for nothing."""
        now = {schema["function"]["name"] for schema in self.schemas()}
        before = now if self._known_tools is None else self._known_tools
        self._known_tools = now
        changes = (("added", now - before), ("removed", before - now))
        return "; ".join(f"{word}: {', '.join(sorted(names))}" for word, names in changes if names)

    async def _converse(self) -> Finish:
        """Run the conversation on, from opening what it needs to closing it."""
        setup = self._setup
        workspace = Workspace(self._root / "workspace")
        sandbox = make_sandbox(setup.sandbox, workspace, Limits()) if setup.sandbox else None
        resumed = bool(self.trajectory.results)  # each prompt has a shell of its own
        context = ToolContext(
            workspace, sandbox, web=setup.web, browsers=setup.browsers, resumed=resumed
        )
        async with AsyncExitStack() as stack:
            if setup.servers is not None:
                setup.servers.open()
                stack.push_async_callback(setup.servers.close)
            stack.push_async_callback(context.close, remove=False)
            journal = self._open_journal(stack)
            pool = ModelPool(
                key_of=lambda asked: key_for(asked, setup.settings, setup.api_key),
                on_retry=lambda _, retry: setup.on_retry(retry),
            )
            stack.push_async_callback(pool.close)
            home = Home(setup.common, context, pool, setup.call_timeout_s)
            conversation = ConversationRunner(
                trajectory=self.trajectory,
                spec=self._terms,
                model=home.model(setup.script, start=self._played),
                toolbox=home.toolbox(),
                journal=journal,
                host=home,
                subagents=setup.options.subagents,
                approve=setup.common.approve,
                on_event=setup.on_event,
            )
            return await self._cancellable(conversation, journal)

    def _open_journal(self, stack: AsyncExitStack) -> Journal:
        """Where events go: to the caller, and to a transcript if there is to be one."""
        setup = self._setup
        if setup.transcript_dir is None:
            return setup.journal
        transcript = Transcript(setup.transcript_dir, self._id)
        self.transcript = transcript.path
        asked = {"model": setup.settings.name, "messages": self.trajectory.messages}
        transcript.write("request", **asked, tools=self.schemas())

        def journal(event: Event) -> None:
            transcript.write_event(event)
            setup.journal(event)

        def finish() -> None:
            if self.error is not None:
                transcript.write("error", kind=self.error.kind, message=str(self.error))
            usage, cost = self.trajectory.usage(), self.trajectory.cost_usd()
            transcript.write("accounting", usage=usage, cost_usd=cost)
            transcript.close()

        stack.callback(finish)
        return journal

    async def _cancellable(self, conversation: ConversationRunner, journal: Journal) -> Finish:
        task = asyncio.create_task(conversation.run())
        self._running = (asyncio.get_running_loop(), task)
        try:
            return await task
        except ModelError as error:
            self.error = error
            return Finish("failed", f"{error.kind}: {error}")
        except asyncio.CancelledError:
            if not task.cancelled() or (me := asyncio.current_task()) is None or me.cancelling():
                task.cancel()
                raise
            end = Finish("cancelled", self._cancel_reason or None)
            close_calls(self.trajectory, end.status, journal)
            words = f"[The request was cancelled{': ' + end.reason if end.reason else ''}]"
            note = note_event(self.trajectory.turns, "cancelled", words)
            journal(note)
            self.trajectory.apply(note)
            return end
        finally:
            self._running = None


_STATES: dict[str, State] = {
    "completed": "done",
    "awaiting_input": "awaiting_input",
    "cancelled": "interrupted",
}


def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also from inside an event loop (a notebook, say)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_inside = False
    else:
        is_inside = True
    if not is_inside:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
