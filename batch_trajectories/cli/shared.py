"""Options and functions that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from batch_trajectories.basics.console import show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.records.names import EXPORTS, MANIFEST_FILE, STATISTICS_FILE

if TYPE_CHECKING:
    from batch_trajectories.api.start import RunEnd
    from batch_trajectories.config.run_config import RunConfig
    from batch_trajectories.engine.plan import Plan
    from batch_trajectories.engine.run_totals import RunTotals
    from batch_trajectories.export.conversation.style import Style


def _split(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of an option that can be repeated, or have several values with commas."""
    return tuple(part for part in ",".join(value).split(",") if part)


class Starting(NamedTuple):
    """The values of the options of commands that start a run."""

    config_file: Path | None
    fresh: bool
    accept_config_change: tuple[str, ...]


def starting_options(function: Any) -> Any:
    """The options of the commands that start a run, which get them as `starting`."""

    @wraps(function)
    def command(**given: Any) -> Any:
        names = given.keys() & set(Starting._fields)
        return function(starting=Starting(**{name: given.pop(name) for name in names}), **given)

    for option in reversed(
        [
            click.option(
                "--config",
                "config_file",
                type=LocalPath(path_type=Path),
                help="YAML file of options, or a preset such as openai. Flags win over it.",
            ),
            click.option(
                "--fresh",
                is_flag=True,
                help="Move an existing run of this name aside, and start from the beginning.",
            ),
            click.option(
                "--accept_config_change",
                multiple=True,
                callback=_split,
                metavar="KEY,...",
                help="Resume although these options have changed, which affect the data.",
            ),
        ]
    ):
        command = option(command)
    return command


trust_option = click.option(
    "--trust_run",
    is_flag=True,
    help="Use the code, keys and addresses that run.json names, although RUN was not started here.",
)

output_dir_option = click.option(
    "--output_dir",
    type=LocalPath(path_type=Path),
    default=Path("trajectories"),
    help="Directory of RUN, if RUN is a name.  [default: trajectories]",
)


def run_dir_argument(function: Any) -> Any:
    """The parameters that name a run; see `open_run`."""
    return run_argument("run")(output_dir_option(function))


def run_argument(name: str, *, required: bool = True) -> Callable[[Any], Any]:
    """A parameter that names a run; completion offers those in the output directory."""
    metavar = "RUN" if required else "[RUN]"
    return click.argument(name, metavar=metavar, required=required, shell_complete=complete_runs)


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The runs in the output directory whose names begin so."""
    from batch_trajectories.engine.run_dir import list_run_names

    output_dir = ctx.params.get("output_dir") or Path("trajectories")
    return [name for name in list_run_names(output_dir) if name.startswith(incomplete)]


def plan_start(
    starting: Starting,
    flags: dict[str, Any],
    *,
    will_start: bool = True,
    adapt: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> Plan:
    """The plan of a config file and flags; `will_start` says that `start` comes next.

    `adapt` makes the config of the plan of the one that was given.
    """
    from batch_trajectories.basics.process import no_garbage_collection

    with no_garbage_collection():
        from batch_trajectories.config.loading import load_config
        from batch_trajectories.engine.plan import make_plan

        config = adapt(load_config(starting.config_file, flags))
        if will_start:
            import batch_trajectories.api.start  # noqa: F401 - what is imported by now, workers need not import
            from batch_trajectories.engine.executor_choice import fork_ahead

            fork_ahead(config)
    return make_plan(config, writes=will_start, fresh=starting.fresh)


def start(plan: Plan, starting: Starting, *, only: Collection[bytes] | None = None) -> RunEnd:
    """Run the tasks of a plan (`only` those with these keys); print the totals."""
    from batch_trajectories.api.start import start

    ended = start(
        plan,
        fresh=starting.fresh,
        accept_config_change=starting.accept_config_change,
        only=only,
    )
    show_run(ended.path, ended.totals)
    return ended


def show_run(path: Path, totals: RunTotals) -> None:
    """Print the totals and the training files of a run."""
    import orjson

    from batch_trajectories.engine.run_dir import read_run_json
    from batch_trajectories.engine.run_totals import as_table
    from batch_trajectories.export.statistics.counts import reason_lines
    from batch_trajectories.export.training_files import FAILED, run_style
    from batch_trajectories.records.files import has_batches

    manifest = orjson.loads((path / EXPORTS / MANIFEST_FILE).read_bytes())
    statistics = orjson.loads((path / STATISTICS_FILE).read_bytes())
    lines = [as_table(totals)]
    if failed := statistics.get("failed_scores"):
        lines.append(
            f"{plural(failed, 'score')} of reward functions failed; "
            f"`score {path.name} --reward ...` calls the functions again"
        )
        lines += reason_lines(statistics["failed_score_reasons"])
    if has_batches(path):
        from batch_trajectories.batch_api.batch_log import compute_batch_totals

        if (batches := compute_batch_totals(path)) is not None:
            lines.append(batches.describe())
    for file in manifest["files"]:
        if file["rows"] or file is manifest["files"][0]:
            place = os.path.normpath(path / file["path"])
            holds = file["holds"]
            if place.endswith("partial.jsonl") and totals.statuses.get("wrong_answer"):
                holds += ", or with a wrong answer"
            lines.append(f"{file['rows']:>9,} in {place}  ({holds})")
    lines += [
        f"  rejected   {count:>9,}  {reason}"
        for reason, count in manifest["rejected_by_reason"].items()
        if reason != FAILED  # the totals count them
    ]
    style = run_style(read_run_json(path)["config"])
    if totals.completed_not_passed and not style.require_passed:
        them = "it" if totals.completed_not_passed == 1 else "them"
        lines.append(
            f"{plural(totals.completed_not_passed, 'completed conversation')} did not pass; "
            f"--require_passed leaves {them} out of the training file"
        )
    if manifest["exported"] and _has_empty_thoughts_only(style, statistics["reasoning"]):
        lines.append(
            "No reply has reasoning, so every gpt turn begins with an empty <think> block; "
            "--empty_think=omit leaves these blocks out."
        )
    show("\n".join(lines))


def _has_empty_thoughts_only(style: Style, reasoning: Mapping[str, int]) -> bool:
    """Whether all turns of the training file have an empty <think> block."""
    return style.empty_think == "keep" and not (
        reasoning["with_reasoning"] or reasoning.get("hidden")
    )
