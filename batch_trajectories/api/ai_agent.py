"""The class `AIAgent`: one agent with tools, its conversations and sessions."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from agent.loop.tools import Approve
from agent.messages.message import Event, Message
from agent.models.model import ModelSettings, StreamHandler
from agent.models.providers import Api
from agent.models.resolve import read_key, resolve_model
from agent.models.scripted import parse_script
from agent.options import AgentOptions
from agent.session import AgentSession, AgentSetup, run_here
from agent.setup import set_up
from batch_trajectories.basics.option_names import describe_unknown
from batch_trajectories.basics.validation import UNKNOWN_KEY, local_path, mistakes_in
from batch_trajectories.config.endpoints import check_url
from batch_trajectories.export.conversation.ending import rewrite_ending
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.validity import Reason, Rejected, check_finished
from batch_trajectories.export.formats.hermes import to_conversations
from batch_trajectories.records.files import AppendFile, StorageError
from batch_trajectories.records.record_types import stored_messages
from toolsets.browser.process import Browsers
from toolsets.catalog.custom import load_custom_toolsets, make_toolsets
from toolsets.catalog.registry import Toolset, catalog
from toolsets.mcp.mcp_settings import McpError, McpServer, ServerName
from toolsets.mcp.servers import McpServers, list_servers
from toolsets.net.web_settings import WebSettings
from toolsets.sandbox.base import Sandbox, SandboxError
from toolsets.sandbox.factory import find_sandbox_class, sandbox_problem

log = logging.getLogger("run_agent")

COMPLETED_FILE = "trajectory_samples.jsonl"
FAILED_FILE = "failed_trajectories.jsonl"


class AIAgent:
    """An agent with tools.

    Each conversation gets a fresh workspace, which is removed when it ends.
    """

    def __init__(
        self,
        model: str = "",
        api_key: str | None = None,
        base_url: str | None = None,
        max_turns: int = 20,
        enabled_toolsets: Sequence[str] | str | None = None,
        disabled_toolsets: Sequence[str] | str | None = None,
        verbose_logging: bool = False,
        *,
        save_trajectories: bool = False,
        api: Api | None = None,
        key_env: str | None = None,
        model_options: Mapping[str, Any] | None = None,
        sandbox: str = "bwrap",
        system_prompt: str | None = None,
        script: Sequence[dict[str, Any]] | None = None,
        output_dir: Path | str = "trajectories",
        transcript_dir: Path | str | None = None,
        tools: Sequence[Any] | str | None = None,
        mcp: Mapping[str, Any] | None = None,
        stream_handler: StreamHandler | None = None,
        approve_calls: Approve | None = None,
        web: WebSettings | None = None,
        **options: Any,
    ) -> None:
        """Check the settings. Makes no model call and writes nothing.

        The model:

        - `model`, `base_url`: as in batch_runner.py. A name without a prefix is the name of a
          model at `base_url`.
        - `api`: the dialect of the endpoint; None: that of the model's provider.
        - `api_key`: None takes the key from the environment. `key_env` names its variable; "none"
          means that no key is needed.
        - `model_options`: other fields of `ModelSettings`, such as temperature.
        - `script`: the turns of the model "scripted".

        The tools:

        - `enabled_toolsets`, `disabled_toolsets`: names, as a list or with commas. None means all
          but "browser" and "web".
        - `tools`: your own. Functions and `Tool`s are in a toolset called "own"; `Toolset`s keep
          their name. A text is MODULE:ATTRIBUTE.
        - `mcp`: MCP servers by name, as in a config file. All are started here to list their tools.
        - `sandbox`: where commands run. "local" runs them with your own rights.
        - `web`: the settings of toolset "web". None: search with ddgs, public addresses only, no
          cache of pages.
        - `approve_calls`: called before each tool call.

        The conversation:

        - `system_prompt`: its system message.
        - `max_turns`: the most model replies.
        - `options`: the fields of `AgentOptions`.

        What is kept and reported:

        - `save_trajectories`: append each conversation to a file in `output_dir`, as ShareGPT.
        - `transcript_dir`: a JSONL file per conversation, written while it goes on.
        - `stream_handler`: gets each `StreamEvent`.
        - `verbose_logging`: log each turn on standard error.

        Raises `ValueError` (unknown model, toolset or option, missing key) and `SandboxError`.
        """
        settings = _resolve_settings(
            model,
            api_key=api_key,
            base_url=base_url,
            api=api,
            key_env=options.pop("api_key_env", key_env),
            model_options=model_options or {},
        )
        checked = _check_options({"max_turns": max_turns, **options})
        servers = McpServers(_list_server_tools(mcp or {}))
        common = set_up(
            checked,
            settings,
            enabled_toolsets=_names(enabled_toolsets),
            disabled_toolsets=_names(disabled_toolsets) or (),
            api_key=api_key,
            known=catalog((*_own_toolsets(tools), *servers.toolsets())),
        )
        if approve_calls is not None:
            common = replace(common, approve=approve_calls)
        # An unknown name is refused also if no tool runs commands.
        kind = find_sandbox_class(sandbox)
        runs_commands = bool(common.sandboxed_toolsets())
        if runs_commands:
            _prepare_sandbox(sandbox, kind)
        if common.uses("web") and (problem := (web or WebSettings()).problem()):
            raise ValueError(problem)
        self._setup = AgentSetup(
            settings=settings,
            api_key=api_key or read_key(settings),
            common=common,
            options=checked,
            sandbox=sandbox if runs_commands else None,
            system_prompt=system_prompt,
            script=parse_script(script) if script is not None else (),
            on_event=stream_handler,
            on_retry=log.warning,
            transcript_dir=Path(transcript_dir) if transcript_dir is not None else None,
            web=web,
            browsers=Browsers((web or WebSettings()).allow),
            servers=servers,
        )
        self._model_name = model
        self._save_trajectories = save_trajectories
        self._output_dir = Path(local_path(output_dir))
        if verbose_logging:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
            log.setLevel(logging.DEBUG)

    def chat(self, user_message: str, task_id: str | None = None) -> str:
        """Answer one message; "" if there is no final answer."""
        return str(self.run_conversation(user_message, task_id=task_id)["final_response"])

    def run_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Message] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """Answer one message; return the answer and the whole conversation.

        Returns `final_response`, `messages` (the whole conversation as sent and received),
        `status`, `stop_reason` (text, or else `status`), `completed`, `partial` (ended early after
        at least one reply), `failed`, `interrupted`, `error` (None or text), `api_calls`,
        `last_reasoning`, `usage`, `cost_usd`, `model`, `task_id`, `transcript` (its path; None
        without `transcript_dir`). If the endpoint fails, the result has `failed`; no exception is
        raised. `conversation_history` is copied; `system_message` replaces its system message.
        """
        return run_here(
            self.arun_conversation(user_message, system_message, conversation_history, task_id)
        )

    async def arun_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Message] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """Answer one message, as `run_conversation` does, for callers that have an event loop."""
        task_id = task_id or uuid.uuid4().hex
        history = list(conversation_history or ())
        setup = replace(self._setup, journal=lambda event: _log_event(task_id, event))
        system = system_message or setup.system_prompt
        if system and history and history[0].get("role") == "system":
            del history[0]
        setup = replace(setup, system_prompt=system)
        if not user_message.strip():
            raise ValueError("user_message must not be blank")
        with AgentSession(setup, history=history, session_id=task_id) as session:
            try:
                await session.anew_prompt(user_message)
            finally:
                if self._save_trajectories:
                    self._save(session)
        trajectory, status = session.trajectory, session.end.status
        if session.error is not None:
            log.warning("%s: %s", task_id, session.end.reason)
        return {
            "final_response": trajectory.final_text(),
            "messages": trajectory.messages,
            "status": status,
            "stop_reason": session.end.reason or status,
            "completed": status == "completed",
            "partial": status not in ("completed", "failed") and trajectory.turns > 0,
            "failed": status == "failed",
            "interrupted": status == "cancelled",
            "error": session.end.reason,
            "api_calls": trajectory.api_calls(),
            "last_reasoning": trajectory.last_reasoning(),
            "usage": trajectory.usage(),
            "cost_usd": trajectory.cost_usd(),
            "model": self._model_name,
            "task_id": task_id,
            "transcript": None if session.transcript is None else str(session.transcript),
        }

    def start_session(self, history: Sequence[Message] = ()) -> AgentSession:
        """Start a session, for several prompts in one workspace. Close it when done."""
        return AgentSession(self._setup, history=history)

    def _save(self, session: AgentSession) -> None:
        """Append the conversation to its file; invalid rows go to the failures file."""
        messages, status = session.messages, session.end.status
        row: dict[str, Any] = {
            "conversations": [],
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": self._model_name,
            "completed": status == "completed",
            "status": status,
        }
        try:
            ending = rewrite_ending(
                stored_messages(messages), session.schemas(), answered=row["completed"]
            )
            if ending.invented:
                raise Rejected(Reason.UNKNOWN_TOOL, ending.invented[0])
            reasoning_tokens = [
                None if (usage := reply["usage"]) is None else usage["reasoning_tokens"]
                for reply in session.trajectory.replies
            ]
            row["conversations"] = to_conversations(ending.messages, ending.tools, reasoning_tokens)
            if row["completed"]:
                check_finished(ending.messages)
        except Rejected as rejected:
            row |= {"completed": False, "rejected": str(rejected), "messages": messages}
        try:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            name = COMPLETED_FILE if row["completed"] else FAILED_FILE
            with closing(AppendFile(self._output_dir / name)) as file:
                file.append(dumps_row(row))
                file.sync()
        except (OSError, StorageError):
            # The answer was paid for, so the caller still gets it.
            log.exception("the conversation was not saved in %s", self._output_dir)


def _log_event(task_id: str, event: Event) -> None:
    """Log an event. A single conversation is not resumed and needs no other journal."""
    if event["kind"] == "reply":
        message = event["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        log.info("%s assistant %s", task_id, _one_line(str(calls or message["content"])))
    elif event["kind"] == "result":
        message = event["message"]
        log.info("%s %s %s", task_id, message["name"], _one_line(message["content"]))


def _one_line(text: str) -> str:
    """Shorten a text for the log to one line of at most 120 characters."""
    text = " ".join(text[:240].split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _resolve_settings(
    model: str,
    *,
    api_key: str | None,
    base_url: str | None,
    api: Api | None,
    key_env: str | None,
    model_options: Mapping[str, Any],
) -> ModelSettings:
    """Find the endpoint and dialect of a model. Raises `ValueError` for wrong settings."""
    try:
        if base_url is not None:
            check_url(base_url)
    except ValueError as error:
        raise ValueError(f"base_url: {error}") from error
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: it has invalid characters, such as a line end")
    checked = _check_model_options(model_options)
    settings = resolve_model(model, base_url=base_url, api=api, key_env=key_env, **checked)
    if api_key is not None and settings.connection.client is not None:
        raise ValueError(f"api_key: the client of {model!r} has its own credentials; see key_env")
    return settings


def _prepare_sandbox(name: str, kind: type[Sandbox]) -> None:
    """Make a sandbox ready. Raises `SandboxError` if it cannot run here."""
    if kind.needs_image:
        raise SandboxError(f"sandbox {name}: it needs an image, which only runs name")
    if problem := sandbox_problem(name):
        raise SandboxError(problem)
    kind.prepare()


def _check_options(options: Mapping[str, Any]) -> AgentOptions:
    try:
        return AgentOptions.model_validate(options)
    except ValidationError as error:
        first = mistakes_in(error)[0]
        if first.kind == UNKNOWN_KEY:
            allowed = AgentOptions.model_fields
            reason = describe_unknown(first.key, allowed, f"options are {', '.join(allowed)}")
            raise ValueError(f"{first.key}: {reason}") from error
        raise ValueError(first.describe()) from error


def _check_model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check fields of `ModelSettings` that have no argument; raises `ValueError`."""
    others = ("name", "api", "base_url", "key_env", "reference", "needs_bound")
    types = {name: of for name, of in get_type_hints(ModelSettings).items() if name not in others}
    for name, value in options.items():
        if name not in types:
            raise ValueError(
                f"model_options: {name!r} is not one of the options: {', '.join(types)}"
            )
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = mistakes_in(error)[0].reason
            raise ValueError(f"model_options: {name}: {reason} (got {value!r})") from error
    return dict(options)


def _own_toolsets(tools: Sequence[Any] | str | None) -> tuple[Toolset, ...]:
    """The toolsets of the user's tools, which are given as MODULE:ATTRIBUTE or as objects."""
    given = tools if isinstance(tools, list | tuple) else _names(tools) or ()
    places = tuple(tool for tool in given if isinstance(tool, str))
    objects = (("own", tool) for tool in given if not isinstance(tool, str))
    return load_custom_toolsets(places) + make_toolsets(objects)


def _list_server_tools(mcp: Mapping[str, Any]) -> dict[str, McpServer]:
    """Start MCP servers to list their tools. Raises `ValueError`."""
    try:
        servers = TypeAdapter(dict[ServerName, McpServer]).validate_python(mcp)
    except ValidationError as error:
        raise ValueError(f"mcp: {mistakes_in(error)[0].describe()}") from error
    listed = {}
    for name, server in run_here(list_servers(servers)).items():
        if isinstance(server, McpError):
            raise server
        listed[name] = server
    return listed


def _names(value: Sequence[str] | str | None) -> Sequence[str] | None:
    """Read a list of names, which can be a text with commas, as on the command line."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
