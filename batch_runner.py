"""The door for runs: `python batch_runner.py --dataset_file=… --run_name=…` and its sisters.

Exit codes: 0 complete · 1 complete, some tasks failed · 2 bad usage, config or dataset · 3 stopped
by the run's budget, resumable · 4 stopped by the environment (credentials, credit, endpoint, disk),
resumable · 5 the run is locked by another process · 70 a defect of this program · 130/143
interrupted, resumable.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from batch.command_line import Commands, RunCommand
from batch.console import open_missing_streams, say, show
from report.commands import add_commands

if TYPE_CHECKING:
    from batch.accounts import Accounts
    from batch.config import RunConfig
    from batch.prompts import Scan
    from batch.run import Outcome, Plan

SIGNALLED = 128
"""Added to the number of the signal that stopped a run, as shells do."""

DEFECT = 70
"""A defect of this program (EX_SOFTWARE of sysexits.h)."""

_EXAMPLES = """\b
Examples:
  python batch_runner.py --config=configs/demo/run.yaml --run_name=demo
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=openai:gpt-5-mini --batch_size=20 --num_workers=4
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=my-model --base_url=http://127.0.0.1:8000/v1
  python batch_runner.py estimate --pilot=30 --dataset_file=prompts.jsonl --run_name=my_run ...
  python batch_runner.py status my_run

Run the same command again to resume: finished conversations are kept, unfinished ones go on at
their turn.
"""


def _underscored(name: str) -> str:
    """Dashes and underscores in option and command names mean the same."""
    return name.replace("-", "_")


@click.group(
    cls=Commands,
    epilog=_EXAMPLES,
    context_settings={"token_normalize_func": _underscored, "max_content_width": 100},
)
@click.version_option(package_name="batch-trajectories", prog_name="batch_runner")
def main() -> None:
    """Run one tool-using agent per prompt and keep every trajectory as training data.

    Reads JSONL prompts, survives being killed, and writes ShareGPT trajectories to
    trajectories/RUN_NAME.jsonl and everything else to trajectories/RUN_NAME/.
    """


def _starting(function: Any) -> Any:
    """The options of the commands that start a run."""
    for option in reversed(
        [
            click.option(
                "--config",
                "config_file",
                type=click.Path(path_type=Path),
                help="YAML file with any of these options; flags win over it.",
            ),
            click.option(
                "--fresh",
                is_flag=True,
                help="Begin anew; an existing run directory is moved aside.",
            ),
            click.option(
                "--accept_config_change",
                default="",
                metavar="KEY,...",
                help="Resume although these keys, which decide what the data is, have changed.",
            ),
        ]
    ):
        function = option(function)
    return function


@main.command(cls=RunCommand, epilog=_EXAMPLES)
@_starting
@click.option("--dry_run", is_flag=True, help="Check everything, say what would run, and stop.")
@click.option(
    "--resume", is_flag=True, help="Accepted for habit's sake: the same command always resumes."
)
def run(
    config_file: Path | None,
    fresh: bool,
    accept_config_change: str,
    dry_run: bool,
    resume: bool,
    **flags: Any,
) -> None:
    """Run all prompts of a dataset, or resume doing so (the default command)."""
    from batch.run import describe, show_bad_rows, warn

    with _errors_as_exit_codes():
        plan = _plan(config_file, flags)
        if dry_run:
            warn(plan)
            show_bad_rows(plan.scan)
            show(describe(plan))
            return
        started = _start(plan, fresh=fresh, accept_config_change=accept_config_change)
    _exit(*started)


@main.command(cls=RunCommand)
@_starting
@click.option(
    "--pilot",
    type=click.IntRange(min=2),
    default=30,
    help="Tasks to run, drawn at random.  [default: 30]",
)
def estimate(
    config_file: Path | None, fresh: bool, accept_config_change: str, pilot: int, **flags: Any
) -> None:
    """Run a random sample of a run's tasks, then forecast what the whole run will take.

    Takes the options of the run. The sample is part of the run: the same options without
    `estimate` go on with the rest.
    """
    import orjson

    from batch.files import replace_file
    from batch.forecast import as_table, forecast, sample_tasks
    from batch.models import bounds_of

    with _errors_as_exit_codes():
        plan = _plan(config_file, flags)
        config = plan.config
        sample = sample_tasks(
            plan.scan, num_samples=config.num_samples, count=pilot, seed=config.seed
        )
        outcome, accounts = _start(
            plan, fresh=fresh, accept_config_change=accept_config_change, only=sample
        )
        bounds = bounds_of(config, plan.setups)
        found = forecast(
            config.run_dir,
            accounts,
            sample,
            conversations=config.conversations,
            bounds=bounds,
            seed=config.seed,
        )
        if found is not None:
            content = orjson.dumps(found.to_json(), option=orjson.OPT_INDENT_2) + b"\n"
            replace_file(config.run_dir / "estimate.json", content)
    if found is None:
        _fail("no task of the sample has ended, so nothing can be forecast", 1)
    show(as_table(found))
    _exit(outcome, accounts)


def _plan(config_file: Path | None, flags: dict[str, Any]) -> Plan:
    from batch.config_file import load_config
    from batch.run import make_plan

    given = {name: value for name, value in flags.items() if value is not None}
    return make_plan(load_config(config_file, given))


def _start(
    plan: Plan, *, fresh: bool, accept_config_change: str, only: Collection[bytes] | None = None
) -> tuple[Outcome, Accounts]:
    """Work on the tasks of a plan (`only` those with these keys); show and give what came of it."""
    from batch.run import refuse_bad_rows, run_batch, warn
    from batch.run_dir import open_run

    warn(plan)
    refuse_bad_rows(plan)
    run_dir = open_run(
        plan.config,
        plan.scan,
        api=plan.api,
        fresh=fresh,
        accept_changes=[key for key in accept_config_change.split(",") if key],
    )
    try:
        outcome = run_batch(plan, run_dir, only=only)
        accounts = _export_and_account(
            run_dir.path, plan.scan, plan.config, last_start=outcome.to_json()
        )
    finally:
        run_dir.close()
    _show(run_dir.path, accounts)
    return outcome, accounts


def _exit(outcome: Outcome, accounts: Accounts) -> NoReturn:
    if outcome.is_out_of_budget:
        _fail(
            f"stopped: {outcome.stopped_by}\nNothing that was finished is lost; raise it and run "
            "the same command again to go on.",
            3,
        )
    if outcome.stopped_by is not None:
        _fail(
            f"stopped: {outcome.stopped_by}\nNothing that was finished is lost; mend it and run "
            "the same command again.",
            4,
        )
    if outcome.signal is not None and (accounts.pending or accounts.to_retry):
        _fail("interrupted; run the same command again to go on", SIGNALLED + outcome.signal)
    sys.exit(1 if accounts.failed else 0)


@contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    """Every way out has its message and its exit code; only a defect shows a traceback."""
    from batch.errors import EnvironmentStop, RunError

    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    except RunError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error}; nothing that was finished is lost", EnvironmentStop.exit_code)
    except KeyboardInterrupt:
        first = received[0] if received else int(signal.SIGINT)
        _fail("interrupted; run the same command again to go on", SIGNALLED + first)
    except Exception:
        trace = traceback.format_exc()
        _fail(f"{trace}a defect of the program; nothing that was finished is lost", DEFECT)


def _run_dir_argument(function: Any) -> Any:
    function = click.option(
        "--output_dir",
        type=click.Path(path_type=Path),
        default=Path("trajectories"),
        help="Where run directories are, if RUN is only a name.  [default: trajectories]",
    )(function)
    return click.argument("run", metavar="RUN")(function)


@main.command()
@_run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=5.0,
    metavar="[SECONDS]",
    help="Show it again every 5 or SECONDS seconds, while the run goes on.",
)
def status(run: str, output_dir: Path, as_json: bool, watch: float | None) -> None:
    """Show the accounts of RUN (a name or a directory) and what it is about, also while it runs."""
    from report.run_status import show_status

    with _errors_as_exit_codes():
        show_status(*_open_for_reading(run, output_dir), as_json=as_json, every_s=watch)


@main.command()
@_run_dir_argument
def export(run: str, output_dir: Path) -> None:
    """Write the training files of RUN (a name or a directory) again from its records."""
    with _errors_as_exit_codes():
        path, scan, config = _open_for_reading(run, output_dir)
        accounts = _export_and_account(path, scan, config)
    if accounts.pending:
        click.echo(f"{accounts.pending} tasks are pending and not in the files", err=True)
    _show(path, accounts)


@main.command()
def distributions() -> None:
    """Show the distributions of toolsets that have a name."""
    from toolsets.distributions import DISTRIBUTIONS

    for name, distribution in DISTRIBUTIONS.items():
        shares = ", ".join(f"{toolset} {percent:g}%" for toolset, percent in distribution.items())
        show(f"{name:<14} {shares}")


@main.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="As for run.")
@click.option("--tools", help="As for run.")
@click.option("--mcp", metavar="JSON", help="As for run; the servers are started and asked.")
@click.option("--sandbox", help="As for run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the whole schemas.")
def tools(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Show every toolset with its tools, and whether it works here."""
    import orjson

    from batch.config_file import load_config
    from batch.errors import ConfigError
    from batch.tool_list import as_text, tool_list

    with _errors_as_exit_codes():
        given = {name: value for name, value in flags.items() if value is not None}
        # A config is checked as a whole, and these two have no default.
        unused = {"dataset_file": "-", "run_name": "tools"}
        try:
            found = tool_list(load_config(config_file, {**unused, **given}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    show(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() if as_json else as_text(found))


@main.command()
def errors() -> None:
    """Show what each failure of an endpoint leads to."""
    from agent.models.errors import RULES, SAYS_MORE_OF_THE_ENDPOINT

    consequences = {
        "retry": "tried again, with growing pauses; then the attempt has failed",
        "end": "the conversation ends there, and counts as done",
        "fail_task": "the attempt has failed; the next start makes another",
        "stop_run": "the run stops (exit 4); nothing is lost",
    }
    never = "; from an endpoint that has never answered it stops the run (exit 4)"
    width = max(map(len, RULES))
    show(
        "\n".join(
            f"{kind:<{width}}  {rule.meaning}\n{'':<{width}}  -> {consequences[rule.action]}"
            + (never if kind in SAYS_MORE_OF_THE_ENDPOINT else "")
            for kind, rule in RULES.items()
        )
    )


def _find_run(run: str, output_dir: Path) -> Path:
    return Path(run) if (Path(run) / "run.json").exists() else output_dir / run


def _open_for_reading(run: str, output_dir: Path) -> tuple[Path, Scan, RunConfig]:
    """Find a run by name or directory and scan its dataset as its last start did."""
    from pydantic import ValidationError

    from batch.config import RunConfig
    from batch.errors import RunDirError
    from batch.prompts import scan
    from batch.run_dir import read_run_json

    path = _find_run(run, output_dir)
    identity = read_run_json(path)
    try:
        config = RunConfig.model_validate(identity["config"])
    except ValidationError as error:
        msg = f"{path}/run.json: its config is not one of this version: {error.errors()[0]['msg']}"
        raise RunDirError(msg) from error
    found = scan(
        Path(identity["dataset"]["path"]),
        max_samples=config.max_samples,
        rules=config.row_rules(identity["api"]),
    )
    return path, found, config


def _export_and_account(
    path: Path, scan: Scan, config: RunConfig, *, last_start: dict[str, Any] | None = None
) -> Accounts:
    """Write the training files, then the summary, both from what is on disk.

    `last_start` is how the start went that has just ended; the summary keeps what it says of the
    last one where none has.
    """
    import orjson

    from batch.accounts import account
    from batch.files import replace_file
    from export.training_files import export_run

    export_run(
        path, scan, num_samples=config.num_samples, require_reasoning=config.require_reasoning
    )
    accounts = account(path, scan, config)
    summary = path / "summary.json"
    if last_start is None and summary.exists():
        last_start = orjson.loads(summary.read_bytes()).get("last_start")
    content = {**accounts.to_json(), "last_start": last_start}
    replace_file(summary, orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    return accounts


def _show(path: Path, accounts: Accounts) -> None:
    import orjson

    from batch.accounts import as_table

    manifest = orjson.loads((path / "exports" / "manifest.json").read_bytes())
    lines = [as_table(accounts)]
    for file in manifest["files"]:
        if file["rows"] or file is manifest["files"][0]:
            place = os.path.normpath(path / file["path"])
            lines.append(f"{file['rows']:>9,} in {place}  ({file['holds']})")
    show("\n".join(lines))


add_commands(
    main,
    run_dir_argument=_run_dir_argument,
    find_run=_find_run,
    errors_as_exit_codes=_errors_as_exit_codes,
)


def _fail(message: str, exit_code: int) -> NoReturn:
    say(f"error: {message}")
    sys.exit(exit_code)


def cli() -> NoReturn:
    """`main` for a shell: like click's own, but an interrupt has the exit code of its signal."""
    open_missing_streams()
    try:
        code = main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", SIGNALLED + signal.SIGINT)
    sys.exit(code)


if __name__ == "__main__":
    cli()
