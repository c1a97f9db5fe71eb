"""The command `fork`: start a run of branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.cli.command_line import LocalPath, RunCommand
from batch_trajectories.cli.exit_codes import end, errors_as_exit_codes
from batch_trajectories.cli.shared import (
    Starting,
    start,
    starting_options,
    trust_option,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun
    from batch_trajectories.records.record_types import Record

_FILTERS = ("status", "min_reward", "max_reward", "passed")


@click.command(cls=RunCommand)
@click.argument("parent", metavar="RUN")
@click.option(
    "--at_turn",
    metavar="N",
    type=click.IntRange(min=1),
    required=True,
    help="The last turn that parent and branch share.",
)
@click.option(
    "--n",
    "branches",
    metavar="N",
    type=click.IntRange(min=1),
    required=True,
    help="Branches per conversation.",
)
@click.option(
    "--status", metavar="NAME,...", help="Only conversations that ended so.  [default: any]"
)
@click.option(
    "--min_reward",
    metavar="NUMBER",
    type=float,
    help="Only conversations with this reward or more.",
)
@click.option(
    "--max_reward",
    metavar="NUMBER",
    type=float,
    help="Only conversations with this reward or less.",
)
@click.option(
    "--passed/--not_passed", default=None, help="Only conversations that passed, or that did not."
)
@click.option(
    "--recipe", type=LocalPath(path_type=Path), help="Recipe whose filters choose conversations."
)
@click.option(
    "--ids", type=LocalPath(path_type=Path), help="File with ids of conversations, one per line."
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    help="Maximum number of conversations to branch from.",
)
@trust_option
@starting_options
def fork(
    parent: str,
    at_turn: int,
    branches: int,
    recipe: Path | None,
    ids: Path | None,
    limit: int | None,
    trust_run: bool,
    starting: Starting,
    **flags: Any,
) -> None:
    """Continue conversations of RUN from a turn, several times each, as a new run.

    Options that you leave out are those of RUN. The same command resumes.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.config.models import called_models
    from batch_trajectories.engine.origin import describe_trust
    from batch_trajectories.engine.plan import make_plan
    from batch_trajectories.engine.run_dir import refuse_held
    from batch_trajectories.maintenance.fork import FIXED_KEYS, forked_config, write_forks

    given = {name: value for name, value in flags.items() if value is not None}
    filters = {name: given.pop(name) for name in _FILTERS if name in given}
    with errors_as_exit_codes():
        stored = open_run(parent, given.get("output_dir", "trajectories"))
        identity = stored.identity
        refuse_held(stored.path)
        trusts = stored.is_own or trust_run
        config = forked_config(
            identity,
            starting.config_file,
            given,
            branches=branches,
            fresh=starting.fresh,
            received=None if trusts else stored.path,
        )
        if not stored.is_own and trust_run:
            say(describe_trust(stored.path, identity["config"], given={*given, *FIXED_KEYS}))
        refuse_held(config.run_dir)  # before writing a dataset beside it
        left_out = Counter[str]()
        forked = write_forks(
            config.dataset_file,
            chosen_records(
                stored, recipe=recipe, ids=ids, limit=limit, left_out=left_out, **filters
            ),
            run=identity["run_name"],
            turn=at_turn,
            rules=stored.config.row_rules(identity["api"]),
            fresh=starting.fresh,
            left_out=left_out,
        )
        config = config.model_copy(update={"dataset_file": forked.path})
        show(forked.describe())
        plan = make_plan(config)
        if not stored.is_own:
            for settings in called_models(plan.setups):
                say(f"{stored.path}: its conversations are sent to {settings.destination}")
        ended = start(plan, starting)
    end(ended)


def chosen_records(
    stored: StoredRun,
    *,
    recipe: Path | None = None,
    ids: Path | None = None,
    limit: int | None = None,
    left_out: Counter[str] | None = None,
    **filters: Any,
) -> Iterator[dict[str, Any]]:
    """The records to branch from, in the order written.

    `filters` are fields of `Filters` that override those of the recipe; `left_out` counts those
    that they leave out. Raises `ConfigError`.
    """
    from itertools import islice

    from pydantic import ValidationError

    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.validation import mistakes_in
    from batch_trajectories.export.filters.filters import RecordFilters
    from batch_trajectories.export.rows.filter_options import Filters
    from batch_trajectories.export.rows.recipe import load_recipe
    from batch_trajectories.records.reader import stored_records

    read = load_recipe(recipe, {})
    base = read.filters if recipe else Filters(status=("any",))
    try:
        checked = Filters.model_validate({**base.model_dump(), **filters})
    except ValidationError as error:
        first = mistakes_in(error)[0]
        raise ConfigError(f"--{first.keys[0]}: {first.with_value()}") from error
    keep = RecordFilters(checked, threshold=read.preference.threshold, reward_name=read.reward_name)
    wanted = _read_ids(ids)

    def is_chosen(record: Record) -> bool:
        if wanted is not None and record.id not in wanted:
            return False
        rejection = keep.rejection(record)
        if rejection is not None and left_out is not None:
            filter_name, detail = rejection
            is_plain = filter_name == "require_passed"
            left_out[detail if is_plain else f"by the filter {filter_name}"] += 1
        return rejection is None

    chosen = filter(is_chosen, stored_records(stored.path, doing="fork"))
    return (record.as_dict() for record in islice(chosen, limit))


def _read_ids(ids: Path | None) -> set[str] | None:
    from batch_trajectories.basics.errors import ConfigError

    if ids is None:
        return None
    try:
        return {line.strip() for line in ids.read_text(encoding="utf-8").splitlines()} - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ids: {ids}: cannot read it: {error}") from error
