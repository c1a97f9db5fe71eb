"""Agents that run as commands: presets, and the options of a run that go with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path
from typing import Any

from agent.gateway.command_agent import CommandAgent
from agent.models.model import ModelSettings
from agent.options import LIMITS, AgentOptions, SimulatedUser, parse_json
from batch_trajectories.basics.presets import preset_or_path
from batch_trajectories.basics.validation import resolve_beside
from batch_trajectories.config.endpoints import is_secret
from toolsets.catalog.registry import NONE

DEFAULTS: Mapping[str, Any] = {"max_turns": 200, "max_conversation_s": 3600.0, "repeat_limit": 0}
"""Defaults with agents, for options whose usual defaults suit conversations of this program."""

_UNUSED_BY_AGENTS = (
    "system_prompt",
    "temperature",
    "top_p",
    "extra_body",
    "reasoning_effort",
    "stream_replies",
    "script_file",
    "enabled_toolsets",
    "disabled_toolsets",
    "tools",
    "mcp",
    "distribution",
    "forks",
    "web_allow",
    "docker_image",
    "batch_api",
)
"""Options of a run that have no effect, because an agent writes its own requests and has its own
tools."""


def read_agent(value: Any) -> CommandAgent:
    """The agent that a preset's name, a YAML file, JSON or a mapping describes.

    Raises `ValueError`, also `ValidationError`.
    """
    return CommandAgent.model_validate(_load_agent(value))


def _load_agent(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        given = parse_json(value)
        return resolve_programs(given, Path()) if isinstance(given, dict) else given
    path, _ = preset_or_path(value, "agents")
    # Imported only for a named agent: --help needs no YAML.
    from batch_trajectories.basics.yaml_file import read_yaml

    loaded = read_yaml(path, "agent")
    if isinstance(loaded, dict) and loaded.keys() == {"agent"}:
        loaded = loaded["agent"]  # as in a config file
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: must have `key: value` lines, such as command and speaks")
    return {"name": path.stem, **resolve_programs(loaded, path.parent)}


def resolve_programs(loaded: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Find the `programs` of an agent that was read from a file in `directory`, first beside it.

    A word of the agent's commands that equals one of these paths becomes its absolute path.
    """
    programs = loaded.get("programs")
    if not isinstance(programs, list):
        return dict(loaded)
    found = {name: resolve_beside(name, directory) for name in programs if isinstance(name, str)}
    files = {name: Path(path) for name, path in found.items() if Path(path).exists()}
    absolute_paths = {normpath(name): str(file.absolute()) for name, file in files.items()}
    paths = [found[name] if isinstance(name, str) else name for name in programs]
    resolved: dict[str, Any] = {**loaded, "programs": paths}
    for key in ("command", "continues", "version"):
        if isinstance(words := loaded.get(key), list):
            resolved[key] = [
                absolute_paths.get(normpath(word), word) if isinstance(word, str) and word else word
                for word in words
            ]
    return resolved


def check_user(agent: CommandAgent, user: SimulatedUser) -> None:
    """Raise `ValueError` if the user has tools or writes first, which `agent` does not allow."""
    if user.writes_first:
        raise ValueError(
            f"simulated_user.writes_first: agent {agent.name!r} runs as a command, which begins "
            "with the row's `prompt`; leave writes_first out, or run without --agent"
        )
    if set(user.enabled_toolsets) - {NONE}:
        raise ValueError(
            f"simulated_user.enabled_toolsets: agent {agent.name!r} runs as a command. After a "
            "crash it starts again with the workspace of its first start, which would lack the "
            "effects of the user's calls; leave the toolsets out, or run without --agent"
        )


def check_options(agent: CommandAgent, given: Collection[str]) -> None:
    """Raise `ValueError` if one of the options in `given` has no effect with `agent`."""
    allowed = {*LIMITS, *(["simulated_user"] if agent.continues else ())}
    if "simulated_user" in given and not agent.continues:
        raise ValueError(f"simulated_user: {agent.why_one_message}")
    unused = [name for name in AgentOptions.model_fields if name not in allowed]
    for name in (*unused, *_UNUSED_BY_AGENTS):
        if name in given:
            raise ValueError(
                f"{name}: means nothing with agent {agent.name!r}, which writes its own requests "
                f"and has its own tools; leave {name} out, or set it in the agent's own "
                "configuration (`command`, `env`, `files`)"
            )
    for name, text in agent.env.items():
        if is_secret(text or ""):
            raise ValueError(
                f"agent.env.{name}: seems to hold a secret, which would be in the sandbox and in "
                "files; models are called with the run's own key (--key_env), outside of it"
            )


def find_model(
    agent: CommandAgent,
    settings: ModelSettings,
    aliases: Mapping[str, ModelSettings],
    requested: str,
) -> ModelSettings | None:
    """The model for a name that an agent asks for; None if it is not one of the run's."""
    if requested in (settings.name, settings.reference):
        return settings
    names = [name for name in agent.aliases if fnmatchcase(requested, name)]
    return aliases[max(names, key=len)] if names else None
