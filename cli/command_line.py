"""The shape of the command line: `run` is the default, and each config field is an option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from cli.option_groups import COMMAND_GROUPS, OF_CONVERSATIONS, OF_STARTS, OPTION_GROUPS
from toolsets.text import join_commas


class Commands(click.Group):
    """A group whose default command is `run`, with that command's options in its own help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "--version", *self.commands}
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # a shell asks what may come first
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[run] [OPTIONS]  |  COMMAND [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (f"{name:<{width}}", self.commands[name].get_short_help_str(100))
                        for name in names
                    ]
                )
        run = self.commands["run"]
        run.format_options(click.Context(run, parent=ctx), formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands, and the options of the default one."""
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            run = self.commands["run"]
            items += run.shell_complete(click.Context(run, parent=ctx), incomplete)
        return items


class RunCommand(click.Command):
    """A command with one option per config field, made from the config itself when needed.

    The fields are read as late as possible, because the other commands and completion do not
    need them.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from runs.config.run_config import RunConfig

        known = {param.name for param in self.params}
        for name, field in RunConfig.model_fields.items():
            if name not in known:
                self.params.append(_option(name, field))
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from agent.options import AgentOptions

        own = dict.fromkeys(AgentOptions.model_fields, OF_CONVERSATIONS)
        group_of = {name: title for title, names in OPTION_GROUPS.items() for name in names} | own
        records: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (OF_STARTS, *OPTION_GROUPS, OF_CONVERSATIONS)
        }
        params = {param.name or "": param for param in self.get_params(ctx)}
        listed = [name for names in OPTION_GROUPS.values() for name in names]
        for name in (*listed, *(name for name in params if name not in listed)):
            record = params[name].get_help_record(ctx)
            if record is not None:
                records[group_of.get(name, OF_STARTS)].append(record)
        for title, listed_records in records.items():
            with formatter.section(title):
                formatter.write_dl(listed_records)


def _option(name: str, field: Any) -> click.Option:
    """The command line option of one config field; pydantic does the checking."""
    is_flag = field.annotation is bool
    default = field.default
    shown = not field.is_required() and default not in (None, (), False)
    text = field.description + (f"  [default: {'on' if is_flag else default}]" if shown else "")
    declaration = f"--{name}/--no_{name}" if is_flag else f"--{name}"
    metavar = _metavar(name, field)
    is_list = _is_list(field)
    callback = join_commas if is_list else None
    return click.Option(
        [declaration],
        default=None,
        help=text,
        metavar=metavar,
        multiple=is_list,
        callback=callback,
        shell_complete=_completed(metavar),
    )


def _is_list(field: Any) -> bool:
    """Whether the text of a flag is a list separated by commas."""
    from agent.options import split_commas
    from runs.config.option_types import parse_resources

    rules = [*field.metadata]
    for inner in get_args(field.annotation):
        rules += getattr(inner, "__metadata__", ())
    return any(getattr(rule, "func", None) in (split_commas, parse_resources) for rule in rules)


def _completed(
    metavar: str | None,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
    """What a shell offers for the value of an option."""
    if metavar == "PATH":
        return lambda ctx, param, incomplete: [CompletionItem(incomplete, type="file")]
    if metavar is None or "|" not in metavar:
        return None
    choices = metavar.split("|")
    return lambda ctx, param, incomplete: [
        CompletionItem(choice) for choice in choices if choice.startswith(incomplete)
    ]


def _metavar(name: str, field: Any) -> str | None:
    from agent.options import parse_json

    if field.annotation is bool:
        return None
    choices = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    for inner in get_args(field.annotation):
        choices += [arg for arg in get_args(inner) if isinstance(arg, str)]
    if choices:
        return "|".join(choices)
    kinds = str(field.annotation)
    if any(getattr(rule, "func", None) is parse_json for rule in field.metadata):
        return "JSON"
    if "Path" in kinds:
        return "PATH"
    if "float" in kinds:
        return "SECONDS" if name.endswith("_s") else "NUMBER"
    return "N" if "int" in kinds else "TEXT"


EXAMPLES = """\b
Examples:
  python batch_runner.py --config=configs/demo/run.yaml --run_name=demo
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=openai:gpt-5-mini --batch_size=20 --num_workers=4
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=my-model --base_url=http://127.0.0.1:8000/v1
  python batch_runner.py --config=configs/vllm.yaml --dataset_file=prompts.jsonl --run_name=my_run
  python batch_runner.py estimate --pilot=30 --config=my.yaml --run_name=my_run
  python batch_runner.py status my_run --watch
  python batch_runner.py report my_run
  python batch_runner.py export my_run --format=openai,llamafactory

Run the same command again to resume: finished conversations are kept, unfinished ones go on at
their turn.
"""
