"""The command `score`: rewards or a teacher's log-probabilities for the records of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import run_dir_argument, trust_option
from batch_trajectories.records.names import SCORES_FILE, TEACHER_FILE

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun
    from batch_trajectories.config.run_config import RunConfig
    from batch_trajectories.scoring.score_file import Wanted


@click.command()
@run_dir_argument
@click.option(
    "--reward",
    metavar="MODULE:FUNCTION,...",
    help="Functions that give rewards (docs/rewards.md).",
)
@click.option(
    "--reward_timeout_s",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Time limit of a function.  [default: 60]",
)
@click.option(
    "--judge", metavar="MODEL", help="Model that gives rewards, named as in --model of a run."
)
@click.option(
    "--judge_prompt",
    metavar="FILE",
    type=LocalPath(path_type=Path),
    help="Prompt of the judge (docs/rewards.md).  [default: is the answer right? 1 or 0]",
)
@click.option(
    "--recipe",
    metavar="FILE",
    type=LocalPath(path_type=Path),
    help="Score only conversations that this recipe of `export` can keep.",
)
@click.option(
    "--teacher",
    metavar="MODEL",
    help="Model (vllm:NAME or sglang:NAME) that gives log-probabilities of the recorded token ids "
    "(docs/training.md).",
)
@click.option(
    "--top_logprobs",
    metavar="K",
    type=click.IntRange(min=1, max=1000),
    help="With --teacher: also get the K most likely tokens at each place.",
)
@click.option(
    "--tokenizer",
    metavar="DIR",
    type=LocalPath(path_type=Path),
    help="With --teacher: the tokenizer of the run's model.",
)
@click.option(
    "--teacher_tokenizer",
    metavar="DIR",
    type=LocalPath(path_type=Path),
    help="With --teacher: tokenizer of the teacher. It must be the same as that of the model.",
)
@click.option(
    "--same_tokenizer",
    is_flag=True,
    help="With --teacher: do not compare the tokenizers, because you know that they are the same.",
)
@click.option(
    "--subagents", is_flag=True, help="With --teacher: also score conversations of subagents."
)
@click.option(
    "--discarded",
    is_flag=True,
    help="With --teacher: also score replies that were set aside and asked for again.",
)
@click.option(
    "--max_teacher_cost_usd",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    help="Budget in dollars of all calls of teachers for RUN.",
)
@click.option(
    "--max_teacher_requests",
    metavar="N",
    type=click.IntRange(min=1),
    help="Maximum requests of this command to the teacher, retries included.",
)
@click.option(
    "--base_url", metavar="URL", help="Root URL of the endpoint of the judge or the teacher."
)
@click.option(
    "--key_env",
    "--api_key_env",
    metavar="NAME",
    help="Environment variable that holds the API key of the judge or the teacher.",
)
@click.option(
    "--temperature", metavar="NUMBER", type=float, help="Sampling temperature of the judge."
)
@click.option("--max_tokens", metavar="N", type=int, help="Maximum tokens of a reply of the judge.")
@click.option("--prices", metavar="JSON", help="Prices, as for `run`.  [default: those of RUN]")
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
    help="Budget in dollars of all calls of judges for RUN.",
)
@trust_option
def score(
    run: str,
    output_dir: Path,
    reward: str | None,
    reward_timeout_s: float,
    judge: str | None,
    recipe: Path | None,
    teacher: str | None,
    max_in_flight: int,
    trust_run: bool,
    **options: Any,
) -> None:
    """Give the conversations of RUN rewards, or the log-probabilities of a teacher.

    Rewards come from functions or a judge model and are written to scores.jsonl, log-probabilities
    to teacher.jsonl. Records stay as they are. The same command resumes, and scores what is new.
    """
    functions = [name for name in map(str.strip, (reward or "").split(",")) if name]
    given = {
        name: value for name, value in options.items() if not (value is None or value is False)
    }
    if sum((bool(functions), judge is not None, teacher is not None)) != 1:
        raise click.UsageError(
            "give --reward MODULE:FUNCTION, or --judge MODEL, or --teacher MODEL"
        )
    _refuse_meaningless(given, judge=judge, teacher=teacher, trust_run=trust_run)
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.export.statistics.counts import reason_lines

    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        wanted = None
        if recipe is not None:
            from batch_trajectories.export.dataset.build import make_scoring_filter
            from batch_trajectories.export.rows.recipe import load_recipe

            wanted = make_scoring_filter(load_recipe(recipe, {}))
        if teacher is not None:
            code = _score_by_teacher(
                stored,
                teacher,
                given,
                max_in_flight=max_in_flight,
                wanted=wanted,
                trust_run=trust_run,
            )
            sys.exit(code)
        if judge is not None:
            from batch_trajectories.scoring.by_judge import load_prompt, score_by_judge

            prompt = load_prompt(given.pop("judge_prompt", None))
            config = _endpoint_config(stored, "judge", judge, given, trust_run=trust_run)
            scores, failed = score_by_judge(
                stored.path, config, prompt, max_in_flight=max_in_flight, wanted=wanted
            )
        else:
            from batch_trajectories.scoring.by_functions import score_by_functions

            scores, failed = score_by_functions(
                stored.path, functions, timeout_s=reward_timeout_s, wanted=wanted
            )
    result = f"{plural(scores, 'score')}, {sum(failed.values()):,} of them failed"
    show("\n".join([f"{stored.path / SCORES_FILE}: {result}", *reason_lines(failed)]))
    sys.exit(1 if failed else 0)


_ENDPOINT_OPTIONS = frozenset(("base_url", "key_env", "prices", "call_attempts"))
"""The options that a judge and a teacher have in common."""
_JUDGE_OPTIONS = frozenset(("judge_prompt", "temperature", "max_tokens", "max_judge_cost_usd"))


def _refuse_meaningless(
    given: Mapping[str, Any], *, judge: str | None, teacher: str | None, trust_run: bool
) -> None:
    """Raise `click.UsageError` for an option that means nothing with the others."""
    for name in [*given, *(("trust_run",) if trust_run else ())]:
        if name in _ENDPOINT_OPTIONS or name == "trust_run":
            if judge is None and teacher is None:
                raise click.UsageError(f"--{name} means nothing without --judge or --teacher")
        elif name in _JUDGE_OPTIONS:
            if judge is None:
                raise click.UsageError(f"--{name} means nothing without --judge")
        elif teacher is None:
            raise click.UsageError(f"--{name} means nothing without --teacher")


def _score_by_teacher(
    stored: StoredRun,
    teacher: str,
    given: dict[str, Any],
    *,
    max_in_flight: int,
    wanted: Wanted | None,
    trust_run: bool,
) -> int:
    """Score by a teacher and show the result; return the exit code."""
    from batch_trajectories.export.statistics.counts import reason_lines
    from batch_trajectories.teacher.score import TeacherOptions, score_by_teacher

    options = TeacherOptions(
        top=given.pop("top_logprobs", 0),
        tokenizer=given.pop("tokenizer", None),
        teacher_tokenizer=given.pop("teacher_tokenizer", None),
        same_tokenizer=given.pop("same_tokenizer", False),
        subagents=given.pop("subagents", False),
        discarded=given.pop("discarded", False),
        max_in_flight=max_in_flight,
        max_requests=given.pop("max_teacher_requests", None),
    )
    config = _endpoint_config(stored, "teacher", teacher, given, trust_run=trust_run)
    done = score_by_teacher(stored.path, config, options, wanted=wanted)
    lines = [
        f"{stored.path / TEACHER_FILE}: {plural(done.segments, 'segment')} with "
        f"{plural(done.tokens, 'sampled token')}; {done.scored_before:,} had figures before, "
        f"{sum(done.failed.values()):,} failed",
        *reason_lines(done.failed),
    ]
    if done.left_out:
        lines += ["left out:", *reason_lines(done.left_out)]
    if done.mean_logprob is not None:
        lines.append(f"mean log-probability of these tokens: {done.mean_logprob:.3f}")
    show("\n".join(lines))
    if done.is_hardly_chance:
        say(
            "warning: the teacher finds these tokens hardly likelier than random ones; its "
            "tokenizer may be another one"
        )
    return 1 if done.failed else 0


def _endpoint_config(
    stored: StoredRun,
    role: Literal["judge", "teacher"],
    name: str,
    given: dict[str, Any],
    *,
    trust_run: bool,
) -> RunConfig:
    """The config of calls to a judge or teacher, with the endpoints and prices of this user's run.

    Raises `ConfigError`.
    """
    from batch_trajectories.config.loading import load_config

    run_config = stored.identity["config"]
    budget_usd = given.pop(f"max_{role}_cost_usd", None)
    uses_run = trust_run or stored.is_own
    run_values = (
        {name: run_config.get(name) or {} for name in ("endpoints", "prices")} if uses_run else {}
    )
    endpoint_values = _select_endpoint(
        stored, role, name, has_url="base_url" in given, uses_run=uses_run
    )
    values = {
        **run_values,
        **endpoint_values,
        **given,
        "dataset_file": run_config["dataset_file"],
        "run_name": run_config["run_name"],
    }
    config = load_config(None, values)
    return config.model_copy(update={"max_run_cost_usd": budget_usd})


def _select_endpoint(
    stored: StoredRun, role: str, name: str, *, has_url: bool, uses_run: bool
) -> dict[str, Any]:
    """The name of the judge or teacher, with the options of its endpoint that come from the run.

    Raises `ConfigError` if these options would come from a received run.
    """
    from agent.models.providers import PROVIDERS, RESERVED_PREFIXES, find_provider
    from agent.models.resolve import normalize_prefix
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.config.models import sibling_options
    from batch_trajectories.engine.origin import FLAG, describe_received

    base_url, endpoints = stored.config.base_url, stored.config.endpoints
    prefix = normalize_prefix(name, endpoints).partition(":")[0]
    if has_url or (not uses_run and prefix in PROVIDERS):
        return {"model": name}
    run_endpoint = sibling_options(stored.config, name)
    provider = None if base_url is None else find_provider(base_url)
    if (
        prefix in RESERVED_PREFIXES
        and base_url is not None
        and (provider is None or provider.base_url != PROVIDERS[prefix].base_url)
    ):
        return {"model": name}  # the provider's own host, whatever URL the run has
    if uses_run:
        return run_endpoint
    names_more = any(value for name, value in run_endpoint.items() if name != "model")
    if prefix in endpoints or names_more:
        raise ConfigError(
            f"--{role}: {describe_received(stored.path)}, so the address in its run.json is not "
            f"used for {name!r}. Name it as PROVIDER:NAME, give --base_url, or add {FLAG}"
        )
    return {"model": name}
