"""The door for one agent: `AIAgent` from Python, `python run_agent.py "…"` from a shell.

from run_agent import AIAgent

agent = AIAgent(model="openai:gpt-5-mini", enabled_toolsets=["file"], save_trajectories=True)
print(agent.chat("Write a haiku about sandboxes to haiku.txt, then read it back."))
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import click

from agent.loop import run_agent
from agent.messages import Event, Message
from agent.models.errors import ModelError
from agent.models.model import Model
from agent.models.names import (
    SCRIPTED,
    Api,
    MissingKey,
    UnknownModel,
    open_model,
    read_key,
    resolve_model,
)
from agent.models.scripted import ScriptedModel, parse_script
from agent.trajectory import Status, Trajectory
from batch.files import AppendFile
from export.hermes import dumps_row, to_conversations
from export.row_rules import Rejected
from toolsets.registry import UnknownToolset, resolve_toolsets, tools_of
from toolsets.sandbox import Limits, SandboxError, make_sandbox, sandbox_problem
from toolsets.space import TaskSpace
from toolsets.toolbox import Toolbox
from toolsets.workspace import Workspace

log = logging.getLogger("run_agent")

COMPLETED_FILE = "trajectory_samples.jsonl"
FAILED_FILE = "failed_trajectories.jsonl"


class AIAgent:
    """An agent with tools that answers one conversation after the other.

    Each conversation gets a fresh workspace, which is removed when it ends.
    """

    def __init__(
        self,
        model: str = "anthropic/claude-sonnet-4",
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
        sandbox: str = "bwrap",
        system_prompt: str | None = None,
        script: Sequence[dict[str, Any]] | None = None,
        output_dir: Path | str = "trajectories",
    ) -> None:
        """Check the settings; nothing is asked or written yet.

        `model` and `base_url` are read as by batch_runner.py: a bare name goes to OpenRouter
        unless `base_url` says otherwise. `api_key` None takes the key from the environment.
        `key_env` names its variable, "none" says that none is needed.
        `max_turns` bounds the model replies. Toolsets None means all. `sandbox` "local" runs
        commands with your own rights. `script` holds the turns that model "scripted" plays.
        With `save_trajectories`, each conversation is appended to `output_dir`, as ShareGPT.

        Raises `ValueError` (unknown model or toolset, missing key) and `SandboxError`.
        """
        if max_turns < 1:
            msg = f"max_turns is {max_turns}; it must be at least 1"
            raise ValueError(msg)
        self._settings = resolve_model(model, base_url=base_url, api=api, key_env=key_env)
        self._api_key = api_key or read_key(self._settings)
        self._model_name = model
        self._max_turns = max_turns
        toolsets = resolve_toolsets(_names(enabled_toolsets), _names(disabled_toolsets) or ())
        self._tools = tools_of(toolsets)
        self._sandbox = sandbox if any(toolset.needs_sandbox for toolset in toolsets) else None
        if self._sandbox and (problem := sandbox_problem(self._sandbox)):
            raise SandboxError(problem)
        self._system_prompt = system_prompt
        self._script = parse_script(script) if script is not None else None
        self._save_trajectories = save_trajectories
        self._output_dir = Path(output_dir)
        if verbose_logging:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
            log.setLevel(logging.DEBUG)

    def chat(self, user_message: str, task_id: str | None = None) -> str:
        """Answer one message; "" where no final answer came."""
        return str(self.run_conversation(user_message, task_id=task_id)["final_response"])

    def run_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Message] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """Answer one message and tell all about it.

        Returns `final_response`, `messages` (the whole conversation as sent and received),
        `status`, `completed`, `partial` (ended early after at least one reply), `failed`,
        `error` (None or text), `api_calls`, `usage`, `cost_usd`, `task_id`. An endpoint that
        fails is a result with `failed`, not an exception. `conversation_history` is copied.
        """
        conversation = self.arun_conversation(
            user_message, system_message, conversation_history, task_id
        )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(conversation)
        # Called from inside an event loop (a notebook, say): the conversation gets its own.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, conversation).result()

    async def arun_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Message] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """`run_conversation` for callers that have an event loop."""
        task_id = task_id or uuid.uuid4().hex
        trajectory = Trajectory(
            self._opening(user_message, system_message, conversation_history or ())
        )
        status: Status = "failed"
        error = None
        model = self._open_model(conversation_history or ())
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as root:
            workspace = Workspace(Path(root) / "workspace")
            limits = Limits()
            sandbox = make_sandbox(self._sandbox, workspace, limits) if self._sandbox else None
            toolbox = Toolbox(self._tools, TaskSpace(workspace, sandbox))
            try:
                status = await run_agent(
                    trajectory,
                    model=model,
                    toolbox=toolbox,
                    max_turns=self._max_turns,
                    journal=lambda event: _log_event(task_id, event),
                )
            except ModelError as failure:
                error = f"{failure.kind}: {failure}"
                log.warning("%s: %s", task_id, error)
            finally:
                await toolbox.close(remove_workspace=True)
                await model.close()
                if self._save_trajectories:
                    self._save(trajectory, toolbox, status)
        return {
            "final_response": trajectory.final_text(),
            "messages": trajectory.messages,
            "status": status,
            "completed": status == "completed",
            "partial": status not in ("completed", "failed") and trajectory.turns > 0,
            "failed": status == "failed",
            "error": error,
            "api_calls": trajectory.turns,
            "usage": trajectory.usage(),
            "cost_usd": trajectory.cost_usd(),
            "task_id": task_id,
        }

    def _open_model(self, history: Sequence[Message]) -> Model:
        if self._settings.api != SCRIPTED:
            return open_model(self._settings, api_key=self._api_key, on_retry=log.warning)
        replies = sum(message["role"] == "assistant" for message in history)
        return ScriptedModel(self._script or (), prompt_replies=replies)

    def _opening(
        self, user_message: str, system_message: str | None, history: Sequence[Message]
    ) -> list[Message]:
        system = system_message or self._system_prompt
        opening = [Message(role="system", content=system)] if system else []
        opening += [message.copy() for message in history if message["role"] != "system"]
        opening.append(Message(role="user", content=user_message))
        return opening

    def _save(self, trajectory: Trajectory, toolbox: Toolbox, status: Status) -> None:
        """Append the conversation to its file; one that breaks a row rule goes to the failed."""
        row: dict[str, Any] = {
            "conversations": [],
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": self._model_name,
            "completed": status == "completed",
            "status": status,
        }
        try:
            row["conversations"] = to_conversations(trajectory.messages, toolbox.schemas)
        except Rejected as rejected:
            row |= {
                "completed": False,
                "rejected": str(rejected),
                "messages": trajectory.messages,
            }
        self._output_dir.mkdir(parents=True, exist_ok=True)
        file = AppendFile(self._output_dir / (COMPLETED_FILE if row["completed"] else FAILED_FILE))
        file.append(dumps_row(row))
        file.sync()
        file.close()


def _log_event(task_id: str, event: Event) -> None:
    """A single conversation is not resumed, so its journal is only the log."""
    match event["kind"]:
        case "reply":
            message = event["message"]
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            log.info("%s turn %d: %s", task_id, event["turn"], calls or message["content"][:200])
        case "result":
            message = event["message"]
            log.info("%s %s: %s", task_id, message["name"], message["content"][:200])


def _names(value: Sequence[str] | str | None) -> Sequence[str] | None:
    """Names as a list; also written as one text with commas, as on the command line."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


@click.command(
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
@click.argument("prompt")
@click.option("--model", default="anthropic/claude-sonnet-4", show_default=True)
@click.option("--base_url", help="Root URL of the endpoint.")
@click.option("--api", type=click.Choice(get_args(Api)), help="Dialect, if not the model's own.")
@click.option("--key_env", help="Variable that holds the API key; 'none' for none.")
@click.option("--system_prompt", help="System prompt of the conversation.")
@click.option("--max_turns", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--enabled_toolsets", help="Names separated by commas; default: all.")
@click.option("--disabled_toolsets", help="Names separated by commas.")
@click.option("--sandbox", type=click.Choice(["bwrap", "local"]), default="bwrap")
@click.option("--save_trajectories", is_flag=True, help="Append to trajectories/*.jsonl.")
@click.option("--verbose_logging", is_flag=True, help="Log each turn on standard error.")
def main(
    prompt: str,
    model: str,
    base_url: str | None,
    api: Api | None,
    key_env: str | None,
    system_prompt: str | None,
    max_turns: int,
    enabled_toolsets: str | None,
    disabled_toolsets: str | None,
    sandbox: str,
    save_trajectories: bool,
    verbose_logging: bool,
) -> None:
    """Answer PROMPT with one agent and print its final answer."""
    try:
        agent = AIAgent(
            model,
            base_url=base_url,
            max_turns=max_turns,
            api=api,
            key_env=key_env,
            system_prompt=system_prompt,
            enabled_toolsets=enabled_toolsets,
            disabled_toolsets=disabled_toolsets,
            sandbox=sandbox,
            save_trajectories=save_trajectories,
            verbose_logging=verbose_logging,
        )
    except (UnknownModel, MissingKey, UnknownToolset, SandboxError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    result = agent.run_conversation(prompt)
    click.echo(result["final_response"])
    if not result["completed"]:
        click.echo(f"not completed: {result['error'] or result['status']}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
