"""The command `record`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.cli.command_line import RunCommand
from batch_trajectories.cli.exit_codes import end, errors_as_exit_codes
from batch_trajectories.cli.shared import Starting, show_run, starting_options

_NOT_GIVEN = {
    **dict.fromkeys(
        ("dataset_file", "model", "models", "agent"), "sessions bring prompts and models"
    ),
    "reward": "use `score` afterwards",
}


@click.command(cls=RunCommand)
@starting_options
@click.option(
    "--upstream",
    required=True,
    metavar="PREFIX",
    help="Endpoint that answers the calls: the PREFIX of --model=PREFIX:NAME, such as anthropic.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    default=8080,
    help="Port to listen on. 0: a free one.  [default: 8080]",
)
@click.option(
    "--silence_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=600.0,
    help="End a session after this time without a call.  [default: 600]",
)
def record(
    starting: Starting,
    upstream: str,
    host: str,
    port: int,
    silence_s: float,
    **flags: Any,
) -> None:
    """Record the model calls of a program or harness of yours that runs elsewhere.

    Give the program http://HOST:PORT as the base URL of its API, and an API key of your choice for
    each session. Or give it http://HOST:PORT/sessions/NAME. Each session becomes a record.
    """
    from batch_trajectories.config.loading import load_config
    from batch_trajectories.recording.recording import Listening, record, sessions_path
    from batch_trajectories.recording.upstream import ANY

    with errors_as_exit_codes():
        if wrong := [name for name in _NOT_GIVEN if flags.get(name) is not None]:
            raise ConfigError(f"{wrong[0]}: means nothing for `record`: {_NOT_GIVEN[wrong[0]]}")
        flags |= {"dataset_file": Path("sessions.jsonl"), "model": f"{upstream}:{ANY}"}
        config = load_config(starting.config_file, flags)
        config = config.model_copy(update={"dataset_file": sessions_path(config.run_dir)})
        ended = record(
            config,
            upstream,
            Listening(host, port, silence_s),
            fresh=starting.fresh,
            accept_config_change=starting.accept_config_change,
            say=say,
        )
    show_run(ended.path, ended.totals)
    end(ended)
