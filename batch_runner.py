"""Runs: `python batch_runner.py --dataset_file=… --run_name=…` and the other commands.

From Python: `from batch_runner import RunConfig, run, open_run`; see docs/api.md.

Exit codes: 0 complete · 1 complete, some tasks failed · 2 bad usage, config or dataset · 3 stopped
by the run's budget, resumable · 4 stopped by the environment (credentials, credit, endpoint, disk),
resumable · 5 another process works on the run · 6 `verify` or `stats --fail_on` found problems ·
70 a bug in this program · 129/130/143 interrupted, resumable.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if __name__ == "__main__":
    from batch_trajectories.basics.requirements import check_requirements

    check_requirements("batch_runner.py")

import click

import batch_trajectories
from batch_trajectories.basics.console import open_missing_streams
from batch_trajectories.basics.errors import SIGNALLED
from batch_trajectories.basics.process import (
    collect_garbage_rarely,
    ensure_utf8,
    fork_if_init,
)
from batch_trajectories.cli.command_line import EXAMPLES, Commands
from batch_trajectories.cli.exit_codes import fail

if TYPE_CHECKING:
    from batch_trajectories import RunConfig, RunEnd, StoredRun, open_run, run

__all__ = ["RunConfig", "RunEnd", "StoredRun", "cli", "main", "open_run", "run"]


def __getattr__(name: str) -> Any:
    """Load public names when a script imports them: most commands do not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(batch_trajectories, name)


def _use_underscores(name: str) -> str:
    """Treat dashes as underscores in names of options and commands."""
    return name.replace("-", "_")


@click.group(
    cls=Commands,
    epilog=EXAMPLES,
    context_settings={"token_normalize_func": _use_underscores, "max_content_width": 100},
)
@click.version_option(package_name="batch-trajectories", prog_name="batch_runner")
def main() -> None:
    """Run one tool-using agent per prompt, and keep every conversation as training data.

    Reads prompts, and writes ShareGPT rows to trajectories/RUN_NAME.jsonl. Everything else is in
    trajectories/RUN_NAME/. A run that was killed continues with the same command.
    """


def cli() -> NoReturn:
    """`main` for a shell: as in click, but an interrupt exits with the code of its signal."""
    # What we start inherits ignored signals, and bwrap waits for this one until it is killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ensure_utf8()
    fork_if_init()
    # pydantic would read the metadata of every installed package to find plugins for itself.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    open_missing_streams()
    collect_garbage_rarely()
    try:
        code = main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", SIGNALLED + signal.SIGINT)
    sys.exit(code)


if __name__ == "__main__":
    cli()
