"""Commands that list what is available: agents, distributions, tools, endpoints, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import say, show, show_json
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.shared import output_dir_option, run_argument


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
@click.option("--mcp", metavar="JSON", help="As for `run`. The servers are started.")
@click.option("--sandbox", help="As for `run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with complete schemas.")
def tools(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """List all toolsets with their tools and whether they work here."""
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.cli.listings import tool_list, tools_as_text
    from batch_trajectories.config.loading import load_config

    with errors_as_exit_codes():
        # Required by a config, but not used here.
        unused = {"dataset_file": "-", "run_name": "tools"}
        try:
            listed = tool_list(load_config(config_file, {**unused, **flags}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    show_json(listed) if as_json else show(tools_as_text(listed))


@click.command()
@click.option("--config", "config_file", type=LocalPath(path_type=Path), help="As for `run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all that is known.")
def endpoints(config_file: Path | None, as_json: bool) -> None:
    """List all endpoints that a model can name and whether their keys are set."""
    from batch_trajectories.cli.listings import endpoint_list, endpoints_as_text
    from batch_trajectories.config.loading import load_config

    with errors_as_exit_codes():
        # A config is checked as a whole, and these two have no default.
        unused = {"dataset_file": "-", "run_name": "endpoints"}
        listed = endpoint_list(load_config(config_file, unused).endpoints)
    show_json(listed) if as_json else show(endpoints_as_text(listed))


@click.command()
@run_argument("run", required=False)
@output_dir_option
@click.option("--json", "as_json", is_flag=True, help="With RUN: print failures as JSON.")
def errors(run: str | None, output_dir: Path, as_json: bool) -> None:
    """List what failed or ended early in RUN, and what to do about it.

    Without a RUN, list how each error of endpoints is handled, and by which words it is known.
    """
    if run is None:
        if as_json:
            raise click.UsageError("--json needs a RUN")
        from batch_trajectories.cli.listings import endings_as_text, errors_as_text

        show(f"{errors_as_text()}\n\n{endings_as_text()}")
        return
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.report.remedies import early_endings, run_errors
    from batch_trajectories.report.remedies import errors_as_text as run_errors_as_text

    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        failed = run_errors(stored)
        endings = [] if as_json else early_endings(stored)
    show_json(failed) if as_json else show(run_errors_as_text(failed, endings))


_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@click.group(invoke_without_command=True)
@click.pass_context
def agents(ctx: click.Context) -> None:
    """List the presets of --agent with their versions here. `agents check` tries one."""
    if ctx.invoked_subcommand is not None:
        return
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.presets import presets
    from batch_trajectories.config.run_config import RunConfig
    from batch_trajectories.engine.worker.agent_program import check_agent_program

    with errors_as_exit_codes():
        unused = {"dataset_file": "-", "run_name": "agents", "model": "x"}
        names = presets("agents")
        width = max(map(len, names))
        missing = 0
        for name in names:
            try:
                checked = check_agent_program(RunConfig.model_validate({**unused, "agent": name}))
            except ConfigError as error:
                show(f"{name:<{width}}  not available: {error}")
                missing += 1
            else:
                assert checked.agent is not None
                show(f"{name:<{width}}  {checked.agent.found_version}")
        if missing:
            say("how to install them: docs/reference/presets.md")


@agents.command()
@click.argument("agent", metavar="AGENT")
@click.option("--sandbox", default="bwrap", help="As for `run`.  [default: bwrap]")
@click.option(
    "--final_command",
    metavar="TEXT",
    help="Command that `final_call` matches, for agents that end with a command.",
)
@click.option(
    "--timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    metavar="SECONDS",
    help="Time limit of the whole check.  [default: 300]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(agent: str, as_json: bool, **options: Any) -> None:
    """Try AGENT (a preset or a file) with a built-in model, and kill it once.

    The check says what would go wrong in a run: a URL that the agent does not read, calls that
    differ after a crash, an ending without an answer. Nothing is paid. The exit code is 6 if there
    is a problem.
    """
    import sys
    from dataclasses import asdict

    from pydantic import ValidationError

    from batch_trajectories.agents.checking import check_agent
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.validation import mistakes_in
    from batch_trajectories.config.agents import read_agent

    with errors_as_exit_codes():
        try:
            tried = read_agent(agent)
        except ValidationError as error:
            raise ConfigError(f"{agent}: {mistakes_in(error)[0].describe()}") from error
        except ValueError as error:
            raise ConfigError(str(error)) from error
        findings = check_agent(tried, **options)
    if as_json:
        show_json([asdict(one) for one in findings])
    else:
        show("\n".join(f"{_MARKS[one.level]}  {one.text}" for one in findings))
    if any(one.level == "problem" for one in findings):
        sys.exit(PROBLEMS)
