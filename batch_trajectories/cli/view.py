"""The command `view`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batch_trajectories.cli.exit_codes import errors_as_exit_codes

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: a free one]")
@click.option("--host", default="127.0.0.1", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--password_env",
    metavar="NAME",
    help="Environment variable that holds a password. Any other HOST needs one.",
)
@click.option("--who", metavar="NAME", help="The reviewer.  [default: your user name]")
def view(
    places: tuple[str, ...], port: int, host: str, password_env: str | None, who: str | None
) -> None:
    """Serve a live page of all runs in PLACEs, to look at them, label and steer them.

    A PLACE is a directory of runs (default: trajectories), a run, or the URL of a mirrored run.
    """
    from batch_trajectories.engine.control import user_name
    from batch_trajectories.view.serving import read_password, serve

    ended = "view has ended; the runs are as they were"
    with errors_as_exit_codes(on_interrupt=ended):
        password = read_password(host, password_env)
        serve(
            list(places) or ["trajectories"],
            host=host,
            port=port,
            password=password,
            who=who or user_name(),
        )
