"""Why an agent has failed: its requests that were refused, and files that it does not see."""

from __future__ import annotations

from pathlib import Path

from agent.gateway.command_agent import CommandAgent
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.worker.agents.agent_program import program_of
from toolsets.sandbox.factory import sandbox_kind


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
