"""Commands that list what is available: distributions, tools, endpoints, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes


@click.command()
def distributions() -> None:
    """List the named distributions of toolsets."""
    from toolsets.catalog.distributions import DISTRIBUTIONS

    for name, distribution in DISTRIBUTIONS.items():
        shares = ", ".join(f"{toolset} {percent:g}%" for toolset, percent in distribution.items())
        show(f"{name:<14} {shares}")


@click.command()
@click.option("--config", "config_file", type=LocalPath(path_type=Path), help="As for `run`.")
@click.option("--tools", help="As for `run`.")
@click.option("--mcp", metavar="JSON", help="As for `run`; the servers are started.")
@click.option("--sandbox", help="As for `run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with complete schemas.")
def tools(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """List all toolsets with their tools and whether they work here."""
    import orjson

    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.cli.listings import tool_list, tools_as_text
    from batch_trajectories.runs.config.loading import load_config

    with errors_as_exit_codes():
        # Required by a config, but not used here.
        unused = {"dataset_file": "-", "run_name": "tools"}
        try:
            listed = tool_list(load_config(config_file, {**unused, **flags}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    show(
        orjson.dumps(listed, option=orjson.OPT_INDENT_2).decode()
        if as_json
        else tools_as_text(listed)
    )


@click.command()
@click.option("--config", "config_file", type=LocalPath(path_type=Path), help="As for `run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all that is known.")
def endpoints(config_file: Path | None, as_json: bool) -> None:
    """List all endpoints that a model can name and whether their keys are set."""
    import orjson

    from batch_trajectories.cli.listings import endpoint_list, endpoints_as_text
    from batch_trajectories.runs.config.loading import load_config

    with errors_as_exit_codes():
        # A config is checked as a whole, and these two have no default.
        unused = {"dataset_file": "-", "run_name": "endpoints"}
        listed = endpoint_list(load_config(config_file, unused).endpoints)
    show(
        orjson.dumps(listed, option=orjson.OPT_INDENT_2).decode()
        if as_json
        else endpoints_as_text(listed)
    )


@click.command()
def errors() -> None:
    """List how each endpoint error is handled."""
    from agent.models.errors import RULES, SAYS_MORE_OF_THE_ENDPOINT

    consequences = {
        "retry": "retried with growing pauses; then the attempt fails",
        "end": "the conversation ends and counts as done",
        "fail_task": "the attempt fails; the next start makes another",
        "stop_run": "the run stops (exit 4); finished work is safe",
    }
    never = "; if the endpoint has never answered, the run stops (exit 4)"
    width = max(map(len, RULES))
    show(
        "\n".join(
            f"{kind:<{width}}  {rule.meaning}\n{'':<{width}}  -> {consequences[rule.action]}"
            + (never if kind in SAYS_MORE_OF_THE_ENDPOINT else "")
            for kind, rule in RULES.items()
        )
    )
