"""The command `stats`: statistics of what the models of a run did."""

from __future__ import annotations

from pathlib import Path

import click

from cli.exit_codes import errors_as_exit_codes
from cli.shared import run_dir_argument
from runs.process.console import show


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(run: str, output_dir: Path, as_json: bool) -> None:
    """Show statistics of RUN from its records: turns, tokens, tools."""
    import orjson

    from api.stored_run import open_run
    from export.run_statistics import as_text

    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        found = stored.statistics()
        if as_json:
            show(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
            return
        show("\n".join(as_text(found, stored.identity["meaning"].get("distribution") or {})))
