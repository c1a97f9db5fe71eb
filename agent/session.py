"""A session: several prompts to one agent, in one workspace.

Nothing of a session survives a crash of the process but the lines of its `Transcript`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from agent.loop.loop import close_calls
from agent.loop.rules import ConversationSpec, Finish, add_turn_limit
from agent.loop.tools import check_names
from agent.messages.message import Event, Message
from agent.models.client.pool import ModelPool
from agent.models.client.retrying import Retry
from agent.models.conversation_id import new_id
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, StreamHandler
from agent.models.scripted import ScriptedTurn
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup, find_key, list_schemas, replies_played
from agent.state.events import note_event
from agent.state.history import complete_history
from agent.state.trajectory import Journal, Trajectory
from batch_trajectories.basics import exact_json
from toolsets.browser.process import Browsers
from toolsets.context import ToolContext
from toolsets.mcp.servers import McpServers
from toolsets.net.web_settings import WebSettings
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

T = TypeVar("T")

State = Literal["idle", "running", "done", "awaiting_input", "interrupted", "failed"]


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all sessions of one agent share, checked."""

    settings: ModelSettings
    api_key: str
    common: Setup
    options: AgentOptions
    sandbox: str | None
    """The sandbox of commands; None if no tool runs any."""
    system_prompt: str | None = None
    script: Sequence[ScriptedTurn] = ()
    on_event: StreamHandler | None = None
    on_retry: Callable[[Retry], None] = lambda retry: None
    journal: Journal = lambda event: None
    """Called with every event."""
    transcript_dir: Path | None = None
    call_timeout_s: float = 300.0
    web: WebSettings | None = None
    browsers: Browsers | None = None
    """The browsers that concurrent prompts share."""
    servers: McpServers | None = None
    """The MCP servers behind the tools; stopped after each prompt."""


class AgentSession:
    """Prompts and answers in one conversation. Use it as a context manager, or `close` it.

    `messages` is the whole conversation so far, as sent and received.
    """

    def __init__(
        self,
        setup: AgentSetup,
        *,
        history: Sequence[Message] = (),
        session_id: str | None = None,
    ) -> None:
        """`history` is copied. Raises `ValueError` if no prompt can follow it."""
        user = setup.options.simulated_user
        if user is not None and user.writes_first:
            raise ValueError(
                "simulated_user.writes_first: a session begins with your prompt; leave it out"
            )
        self.messages: list[Message] = complete_history(history)
        self._setup = setup
        self._id = session_id
        self._conversation = new_id()
        self._root = Path(tempfile.mkdtemp(prefix="agent-"))
        self._state: State = "idle"
        self._is_closed = False
        self._failed_prompts = 0
        self._last_failure: str | None = None
        self._played = 0
        self._known_tools: set[str] | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        """The conversation of the running prompt, once it has begun."""
        self._cancel_reason: str | None = None
        """The reason for cancelling the running prompt; None if it is not cancelled."""
        self._cancelling = threading.Lock()
        self.trajectory = Trajectory(self.messages)
        """The conversation since the last prompt."""
        self.end = Finish("failed", "no prompt was answered yet")
        """The ending of the last prompt."""
        self.error: ModelError | None = None
        """The failure of the endpoint that ended the last prompt, if any."""
        self.transcript: Path | None = None
        """The transcript of the last prompt; None without a `transcript_dir`."""
        self._spec = ConversationSpec(setup.options)

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_prompt(self, text: str, *, expected: str | None = None) -> str:
        """Answer one prompt; see `anew_prompt`. Works inside a running event loop too."""
        self._begin(text, expected)  # before the event loop starts: `cancel` may come meanwhile
        try:
            return run_here(self._answer())
        finally:
            if self._state == "running":  # no event loop was started
                self._finish()

    async def anew_prompt(self, text: str, *, expected: str | None = None) -> str:
        """Answer one prompt. If a tool has asked for input, `text` is the user's reply to it.

        `expected` is compared with the answer (see option `check_expected`). Returns the answer,
        or ""; `end` says how the conversation ended, `error` why the endpoint failed. Raises
        `ValueError` if `text` is blank.
        """
        self._begin(text, expected)
        return await self._answer()

    def _begin(self, text: str, expected: str | None) -> None:
        if not text.strip():
            raise ValueError("a prompt must not be blank")
        if self._is_closed or self._state == "running":
            raise RuntimeError(f"the session is {'closed' if self._is_closed else 'running'}")
        if self._state == "awaiting_input":
            self._spec = replace(
                self._spec, user_replies=(*self._spec.user_replies, text), expected=expected
            )
        else:
            self.trajectory = Trajectory(self._opening(text))
            self._spec = ConversationSpec(self._setup.options, expected=expected)
        self._cancel_reason = None
        self._state = "running"
        self.error = None
        # This ending remains if an exception is raised.
        self.end = Finish("failed", "interrupted by an exception")

    async def _answer(self) -> str:
        played = replies_played(self.trajectory, self._setup.common)
        try:
            self.end = await self._converse()
        finally:
            close_calls(self.trajectory, self.end.status, lambda event: None)
            self.messages = self.trajectory.messages
            self._played += replies_played(self.trajectory, self._setup.common) - played
            self._finish()
        return self.get_last_result()

    def _finish(self) -> None:
        self._state = _STATES.get(self.end.status, "failed")
        if self._state in ("failed", "interrupted"):
            self._failed_prompts += 1
            self._last_failure = self.end.reason or self.end.status

    def get_last_result(self) -> str:
        """The last answer; a tool's question, if it asks for input; "" if there is neither."""
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
        """The failed prompts as one `cannot_complete`; None if none failed."""
        if not self._failed_prompts:
            return None
        reason = f"{self._failed_prompts} prompts failed; the last one: {self._last_failure}"
        return {"tool": "cannot_complete", "reason": reason}

    def cancel(self, reason: str = "") -> None:
        """Stop the running prompt, from any thread; the session can continue.

        A prompt runs from the call of `new_prompt` on, or from the first step of `anew_prompt`.
        """
        with self._cancelling:  # meanwhile the conversation neither begins nor ends
            if self._state != "running":
                return
            self._cancel_reason = reason
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    def fork(self) -> AgentSession:
        """An independent session that starts as a copy of this one, files included."""
        other = AgentSession(self._setup, history=self.messages)
        other._played = self._played
        other._known_tools = self._known_tools
        other._failed_prompts = self._failed_prompts
        other._last_failure = self._last_failure
        if self._state == "awaiting_input":
            other.trajectory = copy.deepcopy(self.trajectory)
            other._spec, other.end, other._state = self._spec, self.end, self._state
        if (self._root / "workspace").exists():
            shutil.copytree(self._root / "workspace", other._root / "workspace", symlinks=True)
        return other

    def set_tools(self, common: Setup) -> None:
        """Replace the tools from the next prompt on; a note in that prompt says what changed.

        The approval hook stays. Raises `ValueError` for a reserved or repeated name.
        """
        options = self._setup.options
        names = [tool.name for tool in common.tools]
        check_names([*names, *(agent.name for agent in options.subagents)])
        common = replace(common, approve=common.approve or self._setup.common.approve)
        self._setup = replace(self._setup, common=common)

    def close(self) -> None:
        """Remove the workspace and end the session."""
        self._is_closed = True
        shutil.rmtree(self._root, ignore_errors=True)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools on offer, in OpenAI form."""
        return [dict(schema) for schema in list_schemas(self._setup.common, self._setup.options)]

    def _opening(self, text: str) -> list[Message]:
        opening = list(self.messages)
        system = self._setup.system_prompt
        if system and (not opening or opening[0]["role"] != "system"):
            opening.insert(0, Message(role="system", content=system))
        prompt = Message(role="user", content=text)
        if changes := self._tool_changes():
            prompt["content"] = f"[Tools have changed; {changes}]\n\n{text}"
            prompt["notes"] = ["tools_changed"]
        return add_turn_limit([*opening, prompt], self._setup.options)

    def _tool_changes(self) -> str:
        """The changes of tools since the last prompt, as a text for the model; "" for none."""
        now = {schema["function"]["name"] for schema in self.schemas()}
        before = now if self._known_tools is None else self._known_tools
        self._known_tools = now
        changes = (("added", now - before), ("removed", before - now))
        return "; ".join(f"{word}: {', '.join(sorted(names))}" for word, names in changes if names)

    async def _converse(self) -> Finish:
        """Run the conversation, with its sandbox, servers and models open."""
        setup = self._setup
        workspace = Workspace(self._root / "workspace")
        sandbox = make_sandbox(setup.sandbox, workspace, Limits()) if setup.sandbox else None
        resumed = bool(self.trajectory.results)  # each prompt has a new shell
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
                key_of=lambda model: find_key(model, setup.settings, setup.api_key),
                on_retry=lambda _, retry: setup.on_retry(retry),
            )
            stack.push_async_callback(pool.close)
            home = AgentServices(setup.common, context, pool, setup.call_timeout_s)
            conversation = ConversationRunner(
                trajectory=self.trajectory,
                spec=self._spec,
                model=home.model(setup.script, start=self._played),
                toolbox=home.toolbox(),
                journal=journal,
                services=home,
                subagents=setup.options.subagents,
                on_event=setup.on_event,
                conversation=self._conversation,
            )
            return await self._run_cancellable(conversation, journal)

    def _open_journal(self, stack: AsyncExitStack) -> Journal:
        """Open the journal: it passes events to the caller, and to a transcript if one is on."""
        setup = self._setup
        if setup.transcript_dir is None:
            return setup.journal
        transcript = Transcript(setup.transcript_dir, self._id)
        self.transcript = transcript.path
        transcript.write(
            "request",
            model=setup.settings.name,
            messages=self.trajectory.messages,
            tools=self.schemas(),
        )

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

    async def _run_cancellable(self, conversation: ConversationRunner, journal: Journal) -> Finish:
        task = asyncio.create_task(conversation.run())
        with self._cancelling:
            self._running = (asyncio.get_running_loop(), task)
            if self._cancel_reason is not None:
                task.cancel()
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
            text = f"[The request was cancelled{': ' + end.reason if end.reason else ''}]"
            note = note_event(self.trajectory.turns, "cancelled", text)
            journal(note)
            self.trajectory.apply(note)
            return end
        finally:
            with self._cancelling:
                self._running = None


_STATES: dict[str, State] = {
    "completed": "done",
    "awaiting_input": "awaiting_input",
    "cancelled": "interrupted",
}


def run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even inside a running event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


_TYPES = {"reply": "response", "result": "tool_result"}
"""The `type` of a transcript's line by the kind of its event, where the two differ."""


class Transcript:
    """An open transcript; its lines survive a crash of the process.

    A JSONL file. Lines by `type`: `request` (model, messages, tools), then every event of the
    conversation (`response`, `tool_result`, `note`, `opening`, `resumed`, `sub`), `error` if the
    endpoint failed, and `accounting` at the end. It contains no API keys.
    """

    def __init__(self, directory: Path, run_id: str | None) -> None:
        """Create `directory` and open `<run_id>.jsonl` in it; without an id, a name by time."""
        directory.mkdir(parents=True, exist_ok=True)
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = run_id or f"{now}-{uuid.uuid4().hex[:8]}"
        self.path = directory / f"{_safe_file_name(name)}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(self._fd, 0o600)

    def write(self, type: str, **fields: Any) -> None:
        """Append one line."""
        os.write(self._fd, exact_json.dumps({"type": type, **fields}) + b"\n")

    def write_event(self, event: Event) -> None:
        """Append one event of the conversation."""
        fields = {k: v for k, v in event.items() if k != "kind"}
        self.write(_TYPES.get(event["kind"], event["kind"]), **fields)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _safe_file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "run"
