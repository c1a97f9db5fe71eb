"""What commands share: finding, starting, exporting and showing a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.live import check_live, live_view
from runs.process.console import show

if TYPE_CHECKING:
    from runs.config.run_config import RunConfig
    from runs.dataset.scan import Scan
    from runs.planning.plan import Plan
    from runs.run import Outcome
    from runs.run_dir import RunDir
    from runs.totals.accounts import Accounts


_RUNS_SHOWN = 10


def starting_options(function: Any) -> Any:
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
                help="Start over; an existing run directory is moved aside.",
            ),
            click.option(
                "--accept_config_change",
                multiple=True,
                metavar="KEY,...",
                help="Resume although these keys, which affect the data, have changed. "
                "max_samples, num_samples and dataset_file: even if finished rows leave the "
                "training file.",
            ),
        ]
    ):
        function = option(function)
    return function


live_option = click.option(
    "--live",
    is_flag=True,
    help="Show the run full-screen while it works (extra `live`).",
)

output_dir_option = click.option(
    "--output_dir",
    type=click.Path(path_type=Path),
    default=Path("trajectories"),
    help="Where to find RUN if it is a name, not a directory.  [default: trajectories]",
)


def run_dir_argument(function: Any) -> Any:
    """The parameters by which a command names a run; see `path_of`."""
    return run_argument("run")(output_dir_option(function))


def run_argument(name: str) -> Callable[[Any], Any]:
    """A parameter that names a run; a shell offers those in the default output directory."""
    return click.argument(name, metavar="RUN", shell_complete=_runs)


def _runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    output_dir = ctx.params.get("output_dir") or Path("trajectories")
    return [name for name in _runs_in(output_dir) if name.startswith(incomplete)]


def _runs_in(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("*/run.json"))


def path_of(run: str, output_dir: Path) -> Path:
    """The directory of a run given by name or path.

    Raises `RunDirError` where there is none, and names those that there are.
    """
    from runs.errors import RunDirError

    found = next((path for path in (Path(run), output_dir / run) if path.exists()), None)
    if found is None:
        runs = _runs_in(output_dir)
        known = f"; runs there: {', '.join(runs[:_RUNS_SHOWN])}" if runs else ""
        more = ", ..." if len(runs) > _RUNS_SHOWN else ""
        msg = f"{output_dir / run}: no such run{known}{more}; --output_dir says where runs are"
        raise RunDirError(msg)
    return Path(run) if (Path(run) / "run.json").exists() else output_dir / run


def make_plan_of(config_file: Path | None, flags: dict[str, Any]) -> Plan:
    from runs.config.loading import load_config
    from runs.planning.plan import make_plan

    given = {name: value for name, value in flags.items() if value is not None}
    return make_plan(load_config(config_file, given))


def start(
    plan: Plan,
    *,
    fresh: bool,
    accept_config_change: tuple[str, ...],
    live: bool,
    only: Collection[bytes] | None = None,
) -> tuple[Outcome, Accounts]:
    """Run the tasks of a plan (`only` those with these keys); show and return the outcome.

    `live` is for the view on the whole screen.
    """
    from runs.planning.plan import refuse_bad_rows, warn
    from runs.run import run_batch

    if live:
        check_live()
    warn(plan)
    refuse_bad_rows(plan)
    with opened(plan, fresh, accept_config_change) as run_dir:
        with live_view(run_dir.path) if live else nullcontext() as tell:
            outcome = run_batch(plan, run_dir, only=only, tell=tell)
        accounts = export_and_account(
            run_dir.path, plan.scan, plan.config, last_start=outcome.to_json()
        )
    show_run(run_dir.path, accounts)
    return outcome, accounts


def opened(plan: Plan, fresh: bool, accept_config_change: tuple[str, ...]) -> closing[RunDir]:
    """The run directory of a plan, locked until the end of a `with` block."""
    from runs.run_dir import open_run

    return closing(
        open_run(
            plan.config,
            plan.scan,
            api=plan.api,
            fresh=fresh,
            accept_changes=accepted(accept_config_change),
        )
    )


def accepted(accept_config_change: Sequence[str]) -> list[str]:
    """The keys that the option names, which can be given more than once."""
    return [key for key in ",".join(accept_config_change).split(",") if key]


def open_for_reading(run: str, output_dir: Path) -> tuple[Path, Scan, RunConfig]:
    """Find a run by name or directory and scan its dataset as its last start did."""
    from runs.maintenance.upkeep import find_run, scan_of

    path, identity, config = find_run(str(path_of(run, output_dir)), Path())
    return path, scan_of(path, identity, config), config


def export_and_account(
    path: Path, scan: Scan, config: RunConfig, *, last_start: dict[str, Any] | None = None
) -> Accounts:
    """Write the training files, then the summary, both from what is on disk.

    `last_start` is how the start went that has just ended; the summary keeps what it says of the
    last one where none has.
    """
    import orjson

    from export.conversation.style import style_of_run
    from export.training_files import export_run
    from runs.batch_api.totals import sum_up
    from runs.store.files import replace_file
    from runs.totals.accounts import account

    export_run(
        path,
        scan,
        num_samples=config.num_samples,
        style=style_of_run(config.to_json()),
        require_reasoning=config.require_reasoning,
        require_passed=config.require_passed,
    )
    accounts = account(path, scan, config)
    summary = path / "summary.json"
    if last_start is None:
        # A summary that is missing or damaged has nothing to keep.
        with suppress(FileNotFoundError, orjson.JSONDecodeError, AttributeError):
            last_start = orjson.loads(summary.read_bytes()).get("last_start")
    toolsets = _toolsets(path)
    content = {**accounts.to_json(), "toolsets": toolsets, "last_start": last_start}
    if (batches := sum_up(path)) is not None:
        content["batches"] = batches.to_json()
    replace_file(summary, orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    return accounts


def _toolsets(path: Path) -> list[dict[str, Any]]:
    """In how many of the records each toolset was offered, beside what a distribution asks for."""
    import orjson

    from runs.run_dir import read_run_json

    offered = orjson.loads((path / "statistics.json").read_bytes())["toolsets"]
    asked = read_run_json(path)["meaning"].get("distribution") or {}
    never = [
        {"toolset": name, "rows": 0, "percent": 0.0}
        for name in sorted(asked.keys() - {one["toolset"] for one in offered})
    ]
    return [{**one, "asked_percent": asked.get(one["toolset"])} for one in (*offered, *never)]


def show_run(path: Path, accounts: Accounts) -> None:
    import orjson

    from runs.batch_api.totals import sum_up
    from runs.totals.accounts import as_table

    manifest = orjson.loads((path / "exports" / "manifest.json").read_bytes())
    lines = [as_table(accounts)]
    if (batches := sum_up(path)) is not None:
        lines.append(batches.describe())
    for file in manifest["files"]:
        if file["rows"] or file is manifest["files"][0]:
            place = os.path.normpath(path / file["path"])
            lines.append(f"{file['rows']:>9,} in {place}  ({file['holds']})")
    if manifest["exported"] and _has_empty_thoughts_only(path):
        lines.append(
            "No reply holds reasoning, so every gpt turn opens with an empty <think> block; "
            "--empty_think=omit leaves these blocks out."
        )
    show("\n".join(lines))


def _has_empty_thoughts_only(path: Path) -> bool:
    """Whether nothing in the training file was reasoned about, and every turn of it says so."""
    import orjson

    from export.conversation.style import style_of_run
    from runs.run_dir import read_run_json

    reasoning = orjson.loads((path / "statistics.json").read_bytes())["reasoning"]
    style = style_of_run(read_run_json(path)["config"])
    return style.empty_think == "keep" and not (
        reasoning["with_reasoning"] or reasoning.get("hidden")
    )
