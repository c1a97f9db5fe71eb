"""The command `score`: rewards for a run, given after it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import run_dir_argument, trust_option
from batch_trajectories.records.names import SCORES_FILE

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun
    from batch_trajectories.config.run_config import RunConfig


@click.command()
@run_dir_argument
@click.option(
    "--reward",
    metavar="MODULE:FUNCTION,...",
    help="Functions that give rewards; see docs/rewards.md.",
)
@click.option(
    "--reward_timeout_s",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Time limit of a function.  [default: 60]",
)
@click.option(
    "--judge", metavar="MODEL", help="A model that gives rewards, named as in --model of a run."
)
@click.option(
    "--judge_prompt",
    metavar="FILE",
    type=LocalPath(path_type=Path),
    help="Its prompt; see docs/rewards.md.  [default: is the answer right? 1 or 0]",
)
@click.option(
    "--recipe",
    metavar="FILE",
    type=LocalPath(path_type=Path),
    help="Score only what this recipe of `export` can keep.",
)
@click.option("--base_url", metavar="URL", help="Root URL of the judge's endpoint.")
@click.option(
    "--key_env", "--api_key_env", metavar="NAME", help="Environment variable with its API key."
)
@click.option("--temperature", metavar="NUMBER", type=float, help="Its sampling temperature.")
@click.option("--max_tokens", metavar="N", type=int, help="Token limit of its replies.")
@click.option("--prices", metavar="JSON", help="Prices as in a run.  [default: those of RUN]")
@click.option(
    "--max_in_flight",
    metavar="N",
    type=click.IntRange(min=1),
    default=16,
    help="Maximum calls in flight.  [default: 16]",
)
@click.option("--call_attempts", metavar="N", type=int, help="Attempts per call.  [default: 8]")
@click.option(
    "--max_judge_cost_usd",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    help="Dollar budget of all judge calls for RUN.",
)
@trust_option
def score(
    run: str,
    output_dir: Path,
    reward: str | None,
    reward_timeout_s: float,
    judge: str | None,
    recipe: Path | None,
    max_in_flight: int,
    trust_run: bool,
    **judged: Any,
) -> None:
    """Give the conversations of RUN rewards by functions or a judge model, in scores.jsonl.

    Records stay as they are. The same command resumes, and scores what is new.
    """
    places = [place for place in map(str.strip, (reward or "").split(",")) if place]
    given = {name: value for name, value in judged.items() if value is not None}
    if bool(places) == (judge is not None):
        raise click.UsageError("give --reward MODULE:FUNCTION, or --judge MODEL")
    if (given or trust_run) and judge is None:
        name = next(iter([*given, "trust_run"]))
        raise click.UsageError(f"--{name} means nothing without --judge")
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.export.statistics.counts import reason_lines

    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        wanted = None
        if recipe is not None:
            from batch_trajectories.export.dataset.build import make_scoring_filter
            from batch_trajectories.export.rows.recipe import load_recipe

            wanted = make_scoring_filter(load_recipe(recipe, {}))
        if judge is not None:
            from batch_trajectories.scoring.by_judge import load_prompt, score_by_judge

            prompt = load_prompt(given.pop("judge_prompt", None))
            config = _judge_config(stored, judge, given, trust_run=trust_run)
            scores, failed = score_by_judge(
                stored.path, config, prompt, max_in_flight=max_in_flight, wanted=wanted
            )
        else:
            from batch_trajectories.scoring.by_functions import score_by_functions

            scores, failed = score_by_functions(
                stored.path, places, timeout_s=reward_timeout_s, wanted=wanted
            )
    of_them = f"{plural(scores, 'score')}, {sum(failed.values()):,} of them failed"
    show("\n".join([f"{stored.path / SCORES_FILE}: {of_them}", *reason_lines(failed)]))
    sys.exit(1 if failed else 0)


def _judge_config(
    stored: StoredRun, judge: str, given: dict[str, Any], *, trust_run: bool
) -> RunConfig:
    """How the judge is called: as given, with the endpoints and prices of a run of this user's.

    Raises `ConfigError`.
    """
    from batch_trajectories.config.loading import load_config

    of_run = stored.identity["config"]
    budget_usd = given.pop("max_judge_cost_usd", None)
    uses_run = trust_run or stored.is_own
    taken = {name: of_run.get(name) or {} for name in ("endpoints", "prices")} if uses_run else {}
    values = {
        **taken,
        **_at_endpoint(stored, judge, has_url="base_url" in given, uses_run=uses_run),
        **given,
        "dataset_file": of_run["dataset_file"],
        "run_name": of_run["run_name"],
    }
    config = load_config(None, values)
    return config.model_copy(update={"max_run_cost_usd": budget_usd})


def _at_endpoint(stored: StoredRun, judge: str, *, has_url: bool, uses_run: bool) -> dict[str, Any]:
    """The judge's name, with the options of its endpoint that come from the run.

    Raises `ConfigError` where these would be those of a received run.
    """
    from agent.models.providers import PROVIDERS, RESERVED_PREFIXES, provider_at
    from agent.models.resolve import normalize_prefix
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.config.models import sibling_options
    from batch_trajectories.engine.origin import FLAG, received

    base_url, endpoints = stored.config.base_url, stored.config.endpoints
    prefix = normalize_prefix(judge, endpoints).partition(":")[0]
    if has_url or (not uses_run and prefix in PROVIDERS):
        return {"model": judge}
    of_run = sibling_options(stored.config, judge)
    there = None if base_url is None else provider_at(base_url)
    if (
        prefix in RESERVED_PREFIXES
        and base_url is not None
        and (there is None or there.base_url != PROVIDERS[prefix].base_url)
    ):
        return {"model": judge}  # the provider's own host, whatever URL the run has
    if uses_run:
        return of_run
    names_more = any(value for name, value in of_run.items() if name != "model")
    if prefix in endpoints or names_more:
        raise ConfigError(
            f"--judge: {received(stored.path)}, so {judge!r} is not asked where its run.json "
            f"says: name it as PROVIDER:NAME, give --base_url, or add {FLAG}"
        )
    return {"model": judge}
