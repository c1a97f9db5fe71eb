"""The command `export`, and its options for datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import join_commas, plural
from batch_trajectories.basics.validation import UrlPath
from batch_trajectories.cli.command_line import LocalPath, PlacePath
from batch_trajectories.records.names import EXPORTS, MANIFEST_FILE

if TYPE_CHECKING:
    from batch_trajectories.export.dataset.runs import Source
    from batch_trajectories.export.rows.recipe import Recipe
import sys

from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import (
    complete_runs,
    output_dir_option,
    show_run,
)

_OPTIONS = (
    ("format", "NAME,...", "Formats of rows: `export --help` and docs/export.md list them."),
    ("recipe", "FILE", "YAML file with formats, filters and splits. Flags win over it."),
    (
        "mix",
        "FILE",
        "Recipe that mixes several RUNs, with the weight or count of each under `runs`.",
    ),
    ("output", "PLACE", "Directory or URL of the dataset.  [default: RUN/exports/dataset]"),
    (
        "reasoning",
        "inline|field|last|none|since_user",
        "Where reasoning goes. since_user is for --segments.",
    ),
    ("reasoning_key", "NAME", "openai: reasoning_content (default), reasoning or thinking."),
    ("parallel_calls", "keep|split", "Parallel calls in one turn, or one per turn."),
    ("system", "saved|omit", "Keep or omit the system prompt that the model saw."),
    (
        "empty_think",
        "keep|omit|text",
        "The empty <think> block of turns without reasoning. text: also write it into messages.",
    ),
    ("call_text", "keep|reasoning", "openai: keep text beside calls, or move it to the reasoning."),
    (
        "arguments",
        "objects|text",
        "Write the arguments of calls in messages as objects, or as JSON text.",
    ),
    ("max_tool_chars", "N", "Cut the middle out of longer tool results."),
    ("tools", "text|list", "In rows with messages, write tools as JSON text or as a list."),
    (
        "include",
        "not_passed,...",
        "Also export conversations that did not pass or ended early, with their bad turns masked.",
    ),
    ("accept_rows", "REASON,...", "Keep rows with these flaws (docs/export.md)."),
    ("reward_name", "NAME", "Reward that filters, dpo and kto use (docs/rewards.md)."),
    (
        "splits",
        "NAME=SHARE,...",
        "Shares of the splits, which are made by prompt: train=0.9,test=0.1.",
    ),
    (
        "split_by",
        "COLUMN,...",
        "Rows with the same value of these columns, such as repo, are in the same split.",
    ),
    ("teacher", "MODEL", "rl: add columns with the figures of this model from `score --teacher`."),
    ("teacher_top", "K", "With --teacher: also add its K most likely tokens at each place."),
    ("shard_mb", "NUMBER", "Megabytes per file. Default: one file per split."),
    (
        "render",
        "FILE",
        "Print rows through a chat template (Jinja or tokenizer_config.json).",
    ),
    (
        "parity",
        "TEMPLATE,...",
        "Prove rows of openai with chat templates. Give names, hf:ORG/MODEL, tokenizer "
        "directories, Jinja files, or all.",
    ),
    ("push_to_hub", "REPO", "Show what a push to this dataset repository would send."),
)


_TYPES: Mapping[str, Any] = {"FILE": LocalPath(), "PLACE": PlacePath(path_type=Path)}


class ExportCommand(click.Command):
    """`export`, whose help ends with the formats."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each format with its description."""
        from batch_trajectories.export.rows.format_names import format_summaries

        with formatter.section("Formats"):
            formatter.write_dl([*format_summaries().items()])


def dataset_options(function: Any) -> Any:
    """Add the options for datasets to a command."""
    flags = (
        click.option(
            "--replace",
            is_flag=True,
            help="Remove formats of earlier exports that this export does not write.",
        ),
        click.option("--check", is_flag=True, help="Compare the dataset with the records."),
        click.option(
            "--trust_run",
            is_flag=True,
            help="With --check: run functions and read files that a recipe of someone else names.",
        ),
        click.option(
            "--render_rows",
            metavar="N",
            type=click.IntRange(min=0),
            help="Number of rows that --render prints.  [default: 3]",
        ),
        click.option(
            "--max_length",
            metavar="N",
            type=click.IntRange(min=1),
            help="With --parity: name rows with more than N tokens.",
        ),
        click.option(
            "--require_passed",
            is_flag=True,
            help="Leave out conversations that did not pass. Alone: from the training file.",
        ),
        click.option(
            "--per_turn",
            is_flag=True,
            help="Write one row per turn of the model, for templates that remove old reasoning.",
        ),
        click.option(
            "--segments",
            is_flag=True,
            help="Write one row per view that the model had. A turn carries loss in one of them.",
        ),
        click.option(
            "--subagents", is_flag=True, help="rl: also write rows for conversations of subagents."
        ),
        click.option(
            "--discarded",
            is_flag=True,
            help="rl: also write rows for replies that were set aside and asked for again.",
        ),
        click.option(
            "--push_for_real",
            is_flag=True,
            help="Send what --push_to_hub shows. Needs HF_TOKEN or a login.",
        ),
    )
    options = [
        click.option(
            f"--{name}",
            metavar=form,
            type=_TYPES.get(form, str),
            help=text,
            multiple=form.endswith(",..."),
            callback=join_commas if form.endswith(",...") else None,
        )
        for name, form, text in _OPTIONS
    ]
    for option in reversed([*options, *flags]):
        function = option(function)
    return function


def make_dataset(sources: Sequence[Source], *, flags: Mapping[str, Any]) -> int:
    """Do what the options say; return the exit code. Raises `RunError`."""
    source, place = _one(sources, flags["output"])
    if isinstance(place, UrlPath):
        from batch_trajectories.export.dataset.directory import open_dataset

        with open_dataset(str(place), writes=not flags["check"]) as directory:
            return _make(source, directory, place, flags)
    return _make(source, place, place, flags)


def _make(source: Source, directory: Path, place: Path, flags: Mapping[str, Any]) -> int:
    """Export into a directory, which the user knows as `place`."""
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.export.dataset.directory import export_dataset
    from batch_trajectories.export.rows.recipe import Recipe, load_recipe
    from batch_trajectories.export.templates.rendering import load_template

    sources = [source, *source.others]
    named = {k: flags.get(k) for k in Recipe.model_fields} | {"formats": flags["format"]}
    given = {key: value for key, value in named.items() if value not in (None, False)}
    filters = {"require_passed": True} if flags["require_passed"] else {}
    if flags["check"]:
        if given or filters or flags["recipe"] or flags["mix"] or flags["replace"]:
            raise ConfigError(
                "--check uses the recipe of the dataset; leave out other options for datasets"
            )
        if flags["render"] or flags["push_to_hub"] or flags["parity"]:
            raise ConfigError(
                "--check only reads a dataset; leave out --render, --parity and --push_to_hub"
            )
        return _check(source, directory, place, trusted=flags["trust_run"])
    if flags["trust_run"]:
        raise ConfigError("--trust_run means nothing without --check")
    if flags["push_for_real"] and not flags["push_to_hub"]:
        raise ConfigError("--push_for_real needs --push_to_hub REPO")
    if flags["render_rows"] is not None and not flags["render"]:
        raise ConfigError("--render_rows needs --render FILE")
    if flags["mix"] and flags["recipe"]:
        raise ConfigError(
            "--mix already names a recipe. Put the content of --recipe into the file of --mix"
        )
    file = flags["mix"] or flags["recipe"]
    recipe = load_recipe(Path(file) if file else None, given, filters)
    if unknown := [name for name in recipe.runs if name not in {one.name for one in sources}]:
        known = ", ".join(sorted(one.name for one in sources))
        raise ConfigError(
            f"{file}: runs: {unknown[0]!r} is none of the RUNs of this command ({known}); name it "
            "there, or take it out of the file"
        )
    render = load_template(Path(flags["render"])) if flags["render"] else None
    if render is not None and "openai" not in recipe.formats:
        raise ConfigError("--render shows rows of the format openai; add it to --format")
    prove = _prover(flags, recipe)
    manifest = prove(export_dataset(source, recipe, directory, replace=flags["replace"]), directory)
    if manifest["pending"]:
        say(f"warning: {plural(manifest['pending'], 'pending task')} not in this export")
    has_stopped = any(one.config and one.config.until_passed is not None for one in sources)
    if has_stopped and {"rl", "rl_parquet"}.intersection(recipe.formats):
        say(
            "warning: samples of this run stopped at --until_passed, so groups differ in size and "
            "are not whole; GRPO needs a fixed --num_samples"
        )
    _warn_of_shared_filters(recipe, manifest)
    show(_table(place, manifest))
    if render is not None:
        _show_rows(render, directory, manifest, flags["render_rows"])
    if flags["push_to_hub"]:
        _push(directory, flags["push_to_hub"], manifest, for_real=flags["push_for_real"])
    return _end_without_rows(manifest)


_ADVICE = {
    "no_token_ids": "token ids come from a run with --token_ids",
    "no_reward": "rewards come from `score RUN`, or from a run with --check_expected, --reward or "
    "a check in each row",
}
"""How to get what a format needs, by the reason for which it left rows out."""


def _warn_of_shared_filters(recipe: Recipe, manifest: Mapping[str, Any]) -> None:
    """Say that formats of all conversations lack some, as other formats leave these out."""
    whole = [one.name for one in recipe.row_formats if one.takes_all]
    others = [one.name for one in recipe.row_formats if not one.takes_all]
    lost = sum(manifest["rejected_by_reason"].get(one, 0) for one in ("status", "exact_duplicates"))
    if whole and others and lost:
        say(
            f"warning: {', '.join(whole)} lacks {plural(lost, 'conversation')} that ended early or "
            f"equal others, because {', '.join(others)} leaves them out: its groups and rates are "
            f"not whole. Export {', '.join(whole)} alone"
        )


def _end_without_rows(manifest: Mapping[str, Any]) -> int:
    """Name the formats without a row; returns the exit code: 1 if there are any, else 0."""
    from batch_trajectories.export.dataset.losses import describe_losses

    empty = [part for part in manifest["formats"] if not part["rows"]]
    for part in empty:
        advice = [
            f"; {advised}"
            for reason, advised in _ADVICE.items()
            if reason in part["rejected_by_reason"]
        ]
        losses = describe_losses(manifest, part)
        say(f"error: no row of {part['format']}: {losses}{''.join(advice)}")
    return 1 if empty else 0


def _one(sources: Sequence[Source], output: Path | None) -> tuple[Source, Path]:
    """The source of all runs, and the directory of the dataset. Raises `ConfigError`."""
    from dataclasses import replace

    from batch_trajectories.basics.errors import ConfigError

    first, *others = sources
    names = [one.name for one in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"two RUNs are named {twice[0]!r}; name each run once, or rename a run's directory"
        )
    if others and not output:
        raise ConfigError(
            "a dataset of several RUNs needs a directory of its own. Add --output PLACE"
        )
    where = output if output else first.run_dir / EXPORTS / "dataset"
    return replace(first, others=tuple(others)), where


def _prover(flags: Mapping[str, Any], recipe: Any) -> Callable[[dict[str, Any], Path], Any]:
    """Make the function that checks a dataset for `--parity`. Raises `ConfigError`."""
    from batch_trajectories.basics.errors import ConfigError

    if not flags["parity"]:
        if flags["max_length"] is not None:
            raise ConfigError("--max_length needs --parity with the directory of a tokenizer")
        return lambda manifest, _: manifest
    from batch_trajectories.export.templates.parity import (
        check_parity_options,
        describe_judgements,
        judge_templates,
    )
    from batch_trajectories.export.templates.template_names import (
        NOT_COVERED,
        describe_missing,
        find_templates,
    )

    templates = find_templates(flags["parity"])
    check_parity_options(recipe, templates, flags["max_length"])

    def prove(manifest: dict[str, Any], directory: Path) -> Any:
        from batch_trajectories.export.dataset.directory import add_parity

        judged = judge_templates(directory, manifest, templates, max_length=flags["max_length"])
        missing = [*describe_missing(flags["parity"]), NOT_COVERED]
        show("\n".join([*describe_judgements(judged), *missing]))
        return add_parity(directory, manifest, recipe, judged)

    return prove


def _check(source: Any, directory: Path, place: Path, *, trusted: bool) -> int:
    from batch_trajectories.export.dataset.checking import find_problems

    is_valid = True
    for finding in find_problems(source, directory, trusted=trusted):
        say(finding)
        is_valid = False
    if is_valid:
        show(f"{place}: all files match the manifest and the records")
    return 0 if is_valid else 1


def _table(directory: Path, manifest: Mapping[str, Any]) -> str:
    from batch_trajectories.export.dataset.losses import kind_of_loss, task_counts
    from batch_trajectories.export.training_files import FAILED

    by_reason = manifest["rejected_by_reason"]
    counts = {**task_counts(manifest), "selected": manifest["selected"]}
    sums = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    lines = [f"{directory}: {plural(manifest['tasks'], 'task')} = {sums or 'none'}"]
    lines += [
        f"  {kind_of_loss(reason):<11}{count:>9,}  {reason}"
        for reason, count in by_reason.items()
        if reason != FAILED
    ]
    lines += [
        f"{run['selected']:>9,} of {plural(run['tasks'], 'task')} of {run['name']}"
        for run in manifest.get("runs", ())
    ]
    for part in manifest["formats"]:
        rows = "row" if part["rows"] == 1 else "rows"
        lines.append(f"{part['rows']:>9,} {rows} of {part['format']}")
        lines += [
            f"  not used   {count:>9,}  {reason}"
            for reason, count in part["rejected_by_reason"].items()
        ]
        if count := part.get("rows_with_null_arguments"):
            lines.append(
                f"{count:>9,} of these rows have arguments that are null, which Axolotl drops from "
                "JSON lines: give it Parquet (--format openai,parquet)"
            )
        if splits := part.get("splits_with_late_keys"):
            lines.append(
                f"{'':>9} datasets refuses the JSON lines of {', '.join(splits)}: the first 10 MB "
                "have no reasoning, calls or results, later rows have; load the dataset by its "
                "card, or hf or parquet (--format "
                f"{part['format']},hf)"
            )
        lines += _describe_masked_turns(part)
        if part["format"] in ("rl", "rl_parquet"):
            lines += _describe_token_rows(part, discarded=manifest["recipe"]["discarded"])
        lines += [
            f"{file['rows']:>9,} in {directory / file['path']} ({plural(file['bytes'], 'byte')})"
            for file in part["files"]
        ]
    lines += _argument_advice(manifest)
    return "\n".join(lines)


def _argument_advice(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Advice on keeping rows whose arguments are no JSON object."""
    from batch_trajectories.export.conversation.tolerance import NON_OBJECT_ARGUMENTS

    counts = (part["rejected_by_reason"] for part in (manifest, *manifest["formats"]))
    if reasons := sorted(
        NON_OBJECT_ARGUMENTS & {reason for by_reason in counts for reason in by_reason}
    ):
        accept = f"--accept_rows={','.join(reasons)}"
        yield (
            f"rows whose arguments are no JSON object are kept as written by {accept}: in hermes, "
            "and with --arguments text in openai, dpo and kto"
        )


def _describe_masked_turns(part: Mapping[str, Any]) -> Iterator[str]:
    """The number of turns without loss by the recipe's `mask`, by reason; a turn can have two."""
    if masked := part.get("masked"):
        yield f"{masked['turns']:>9,} of {plural(masked['of'], 'turn')} carry no loss"
        yield from (f"{count:>9,}   {reason}" for reason, count in masked["by_reason"].items())
    if count := part.get("not_passed"):
        yield f"{count:>9,} of the conversations did not pass, or ended early"


def _describe_token_rows(part: Mapping[str, Any], *, discarded: bool) -> Iterator[str]:
    """Lines about the rows of the format rl."""
    if part["rows"]:
        yield (
            f"{part['split']:>9,} of these rows begin where a prompt did not begin with what was "
            f"sampled; {plural(part['turns_without_ids'], 'turn')} of these conversations without "
            "token ids"
        )
    for place in part["split_texts"]:
        sampled, shown = (json.dumps(place[key])[:60] for key in ("sampled", "shown"))
        yield f"{place['rows']:>9,}   sampled {sampled}, then shown {shown}"
    if count := part["discarded_replies"]:
        what = (
            "have a row each, without a reward"
            if discarded
            else "are left out: --discarded gives each a row"
        )
        yield f"{count:>9,} replies were set aside and asked for again; they {what}"
    if missing := part.get("rows_without_teacher"):
        yield f"{missing:>9,} rows without figures of the teacher: `score --teacher` gets them"
    if left_out := part.get("subagents_left_out"):
        yield (
            f"{left_out:>9,} conversations of subagents left out: no token ids, or another model's"
        )


def _show_rows(
    render: Any, directory: Path, manifest: Mapping[str, Any], limit: int | None
) -> None:
    from collections import Counter

    from batch_trajectories.export.templates.rendering import read_rows

    kinds: Counter[str] = Counter()
    total = 0
    for total, row in enumerate(read_rows(directory, manifest), start=1):
        text, trained, dropped = render(row)
        kinds.update({_kind(place) for place in dropped})
        if total <= (3 if limit is None else limit):
            show(f"=== {row['id']}\n{text}")
            spans = ", ".join(f"{begin}-{end}" for begin, end in trained)
            count = sum(end - begin for begin, end in trained)
            no_loss = [n for n, m in enumerate(row["messages"], 1) if m.get("weight") == 0]
            show(
                f"carry loss: {count:,} of {len(text):,} characters, at {spans}"
                if trained
                else "carry loss: unknown (the template has no generation block)"
            )
            if no_loss:
                places = ", ".join(map(str, no_loss))
                show(f"no loss where a trainer reads `weight`: messages {places}")
            show("\n".join(f"dropped: {place}" for place in dropped) or "dropped: nothing")
    show(f"=== dropped by the template in {plural(total, 'row')}:")
    show("\n".join(f"{count:>9,}  {kind}" for kind, count in kinds.most_common()) or "  nothing")


def _kind(place: str) -> str:
    """A place without its numbers, for counting over rows."""
    option = place.split(", argument ")[0]
    kind = "".join(letter for letter in option if not letter.isdigit()).replace(" ,", ",")
    return " ".join(kind.split()) + (", argument" if ", argument " in place else "")


def _push(directory: Path, repo: str, manifest: Mapping[str, Any], *, for_real: bool) -> None:
    from batch_trajectories.export.dataset.directory import plan_upload, upload

    show(upload(directory, repo, manifest) if for_real else plan_upload(directory, repo, manifest))


@click.command(cls=ExportCommand)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@output_dir_option
@dataset_options
def export(runs: tuple[str, ...], output_dir: Path, **flags: Any) -> None:
    """Write the training files of RUN again from its records, or build a dataset.

    Without options, or with --require_passed alone, this writes the training files. With any other
    option, or several RUNs, it builds a dataset (docs/export.md). Formats that an earlier export
    wrote stay, unless you give --replace.
    """
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine.narrowing import refuse_narrowing
    from batch_trajectories.export.dataset.runs import Source

    with errors_as_exit_codes():
        changes = {name for name, value in flags.items() if value not in (None, False)}
        is_training_file = len(runs) == 1 and changes <= {"require_passed"}
        opened = [
            open_run(run, output_dir, writes=bool(changes) and is_training_file) for run in runs
        ]
        for stored in opened:
            refuse_narrowing(stored.path, stored.scan, stored.config, stored.identity, accepted=())
        if not is_training_file:
            sources = [
                Source(one.path, one.scan, one.config.num_samples, one.config) for one in opened
            ]
            sys.exit(make_dataset(sources, flags=flags))
        path = opened[0].path
        if flags["require_passed"]:
            _leave_out_not_passed(path)
        stored = open_run(path)
        totals = write_results(path, stored.scan, stored.config)
    if totals.pending:
        say(f"warning: {plural(totals.pending, 'pending task')} not in the training file")
    show_run(path, totals)
    manifest = json.loads((path / EXPORTS / MANIFEST_FILE).read_bytes())
    if not manifest["exported"]:
        from batch_trajectories.export.dataset.losses import describe_losses

        say(f"error: the training file has no row: {describe_losses(manifest)}")
        sys.exit(1)


def _leave_out_not_passed(path: Path) -> None:
    """Set `require_passed` in the config of a run. Raises `RunLocked` while a process works on it.

    The option stays, so that the end of a later start, `verify` and the report agree with the file.
    """
    from batch_trajectories.engine.run_dir import (
        hold_lock,
        read_run_json,
        was_started_here,
        write_run_json,
    )

    with hold_lock(path):
        run = read_run_json(path)
        if not run["config"].get("require_passed"):
            is_own = was_started_here(path)
            run["config"]["require_passed"] = True
            write_run_json(path, run, is_own=is_own)
            say(
                "the training file has conversations that passed alone, from now on; "
                f"`--run_name={path.name} --no-require_passed` takes this back"
            )
