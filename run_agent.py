"""The door for one agent: `AIAgent` from Python, `python run_agent.py "…"` from a shell.

from run_agent import AIAgent

agent = AIAgent(model="openai:gpt-5-mini", enabled_toolsets=["file"], save_trajectories=True)
print(agent.chat("Write a haiku about sandboxes to haiku.txt, then read it back."))
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, get_args

if __name__ == "__main__":
    from batch_trajectories.basics.requirements import check_requirements

    check_requirements("run_agent.py")

import click

from agent.models.providers import Api
from batch_trajectories.api.ai_agent import AIAgent
from batch_trajectories.basics.process import fork_if_init
from batch_trajectories.basics.text import join_commas
from toolsets.sandbox.base import SandboxError

__all__ = ["AIAgent", "cli", "main"]


def _list_option(name: str, help: str) -> Callable[[Any], Any]:
    return click.option(name, multiple=True, callback=join_commas, help=help)


@click.command(
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
@click.argument("prompt")
@click.option("--model", required=True, help="As --model of batch_runner.py.")
@click.option("--base_url", help="Root URL of the endpoint.")
@click.option("--api", type=click.Choice(get_args(Api)), help="Dialect, if not the model's own.")
@click.option(
    "--key_env", "--api_key_env", help="Variable that holds the API key; 'none' for none."
)
@click.option("--system_prompt", help="System prompt of the conversation.")
@click.option("--max_turns", type=click.IntRange(min=1), default=20, show_default=True)
@_list_option("--enabled_toolsets", "Names separated by commas; default: all but browser and web.")
@_list_option("--disabled_toolsets", "Names separated by commas.")
@_list_option("--tools", "Your own tools: MODULE:ATTRIBUTE, with commas.")
@click.option("--sandbox", default="bwrap", show_default=True, help="As for batch_runner.py.")
@click.option("--save_trajectories", is_flag=True, help="Append to trajectories/*.jsonl.")
@click.option("--verbose_logging", is_flag=True, help="Log each turn on standard error.")
def main(prompt: str, **settings: Any) -> None:
    """Answer PROMPT with one agent and print its final answer."""
    try:
        agent = AIAgent(**settings)
    except (ValueError, SandboxError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    result = agent.run_conversation(prompt)
    click.echo(result["final_response"])
    if not result["completed"]:
        click.echo(f"not completed: {result['error'] or result['status']}", err=True)
        sys.exit(1)


def cli() -> None:
    """`main` for a shell."""
    fork_if_init()
    main()


if __name__ == "__main__":
    cli()
