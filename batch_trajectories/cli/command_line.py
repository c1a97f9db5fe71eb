"""Click classes of the command line: `run` is the default, and each config field is an option."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from batch_trajectories.basics.text import join_commas

_SHOWS_ALL = f"{__name__}.shows_all"
"""The key in a context's `meta` that makes the help show all options."""

_COMMAND_OPTIONS = ("audit", "checked_run")
"""Fields of a config that only `check_tasks` and `check` set."""

COMMAND_GROUPS: dict[str, dict[str, str]] = {
    "Commands to run": {
        "run": "run.run",
        "record": "record.record",
        "look": "look.look",
        "build_images": "build_images.build_images",
        "images": "images.images",
        "check_tasks": "check.check_tasks",
        "estimate": "run.estimate",
        "fork": "fork.fork",
        "import": "importing.import_",
        "merge": "verify.merge",
    },
    "Commands to inspect": {
        "status": "status.status",
        "stats": "report.stats",
        "report": "report.report",
        "view": "view.view",
        "show": "show.show_one",
        "compare": "show.compare",
        "label": "label.label",
    },
    "Commands to steer a run": {
        "pause": "steer.pause",
        "resume": "steer.resume",
        "stop": "steer.stop",
        "limits": "steer.limits",
        "cancel": "steer.cancel",
        "retry": "steer.retry",
    },
    "Commands to export and check": {
        "export": "export.export",
        "publish": "publish.publish",
        "check": "check.check",
        "score": "score.score",
        "verify": "verify.verify",
    },
    "Commands to list what is available": {
        "agents": "lists.agents",
        "tools": "lists.tools",
        "distributions": "lists.distributions",
        "endpoints": "lists.endpoints",
        "errors": "lists.errors",
    },
}
"""The groups of commands in the help; of each command its module and function in this folder."""

COMMANDS = {name: place for group in COMMAND_GROUPS.values() for name, place in group.items()}

FORMER_COMMANDS = {"import_hermes": "importing.import_hermes"}
"""Commands that are understood under their former names, which no help lists."""


def _help_all_option() -> click.Option:
    """`--help_all`: the help with all options of a run instead of the common ones."""

    def show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_SHOWS_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return click.Option(
        ["--help_all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show_all,
        help="Show all options, in groups, and exit.",
    )


class LocalPath(click.Path):
    """A path of this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; URLs are refused."""
        from batch_trajectories.basics.validation import local_path

        try:
            return super().convert(local_path(value), param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PlacePath(click.Path):
    """A path of this machine, or the URL of a bucket."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path; a URL is a `UrlPath`."""
        from batch_trajectories.basics.validation import path_or_url

        try:
            return path_or_url(Path(str(super().convert(value, param, ctx))))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Commands(click.Group):
    """A group whose default command is `run`, with that command's options in its own help."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.params.append(_help_all_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.import_command(cmd_name) if cmd_name in COMMANDS | FORMER_COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        normalize = ctx.token_normalize_func or str
        known = COMMANDS | FORMER_COMMANDS
        if not ctx.resilient_parsing and normalize(args[0]) not in known:
            from batch_trajectories.basics.validation import did_you_mean

            meant = did_you_mean(args[0], COMMANDS) or "options of a run begin with `--`"
            ctx.fail(f"there is no command {args[0]!r}; {meant}")
        return super().resolve_command(ctx, args)

    def import_command(self, name: str) -> click.Command:
        """Import a command; a start uses one, and the others import much that it does not need."""
        module, _, function = (COMMANDS | FORMER_COMMANDS)[name].partition(".")
        command: click.Command = getattr(import_module(f"{__package__}.{module}"), function)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {option for param in self.get_params(ctx) for option in param.opts}
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # completion of the first word
        if not args or (args[0].startswith("-") and _normalize_option(ctx, args[0]) not in own):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[run] [OPTIONS]  |  COMMAND [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in COMMAND_GROUPS.items():
            with formatter.section(title):
                rows = ((name, self.import_command(name).get_short_help_str(100)) for name in names)
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in rows])
        run = self.import_command("run")
        run.format_options(click.Context(run, parent=ctx), formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands, and the options of the default one."""
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            run = self.import_command("run")
            items += run.shell_complete(click.Context(run, parent=ctx), incomplete)
        return items


def _normalize_option(ctx: click.Context, option: str) -> str:
    """An option as declared, with underscores for dashes."""
    normalize = ctx.token_normalize_func
    return option if normalize is None else "--" + normalize(option.removeprefix("--"))


class RunCommand(click.Command):
    """A command with one option per config field.

    Creates the options when they are needed, which saves time in other commands and completion.
    `--help` shows the common ones, `--help_all` all of them in groups.
    """

    def __init__(self, *args: Any, only: Collection[str] = (), **attributes: Any) -> None:
        """Leave out all other options if `only` names some."""
        super().__init__(*args, **attributes)
        self._only = only
        if not only:
            self.params.append(_help_all_option())

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from agent.options import is_marked
        from batch_trajectories.basics.option_names import FORMER
        from batch_trajectories.config.run_config import RunConfig

        known = {param.name for param in self.params}
        if self._only:
            fields = RunConfig.model_fields
            self.params += [_option(one, fields[one]) for one in self._only if one not in known]
            return super().get_params(ctx)
        for name, field in RunConfig.model_fields.items():
            if name not in known and name not in _COMMAND_OPTIONS:
                self.params.append(
                    _make_hidden_flag(name, _refuse_rare)
                    if is_marked(field, "rare")
                    else _option(name, field)
                )
        self.params += [_make_hidden_flag(name) for name in FORMER if name not in known]
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._only:
            super().format_options(ctx, formatter)
        elif ctx.meta.get(_SHOWS_ALL):
            self._format_all_options(ctx, formatter)
        else:
            self._format_common_options(ctx, formatter)

    def _format_common_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options, then the common options of a run."""
        from batch_trajectories.cli.option_groups import COMMON_OPTIONS, RARE_OPTIONS
        from batch_trajectories.config.run_config import RunConfig

        params = {
            param.name or "": param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and "--help" not in param.opts and not param.hidden
        }
        of_runs = {*RunConfig.model_fields, *COMMON_OPTIONS, *RARE_OPTIONS}
        sections = {
            "Options of this command": [name for name in params if name not in of_runs],
            "Common options": [name for name in COMMON_OPTIONS if name in params],
        }
        for title, names in sections.items():
            records = (params[name].get_help_record(ctx) for name in names)
            if listed := [record for record in records if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(listed)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"See all {len(params)} options, in groups, with --help_all.")

    def _format_all_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from agent.options import AgentOptions
        from batch_trajectories.cli.option_groups import OF_CONVERSATIONS, OF_STARTS, OPTION_GROUPS

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


def _make_hidden_flag(name: str, callback: Callable[..., Any] | None = None) -> click.Option:
    """A flag, with or without a value, that the help does not show."""
    return click.Option(
        [f"--{name}"], hidden=True, is_flag=False, flag_value="true", callback=callback
    )


def _refuse_rare(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        raise click.UsageError(
            f"--{param.name} cannot be given as a flag. Set {param.name} in a config file "
            "(--config) or in a row's agent_options"
        )


def _option(name: str, field: Any) -> click.Option:
    """The command line option of a config field; pydantic checks its value."""
    is_flag = field.annotation is bool
    text = field.description + _describe_default(field)
    declaration = f"--{name}/--no_{name}" if is_flag else f"--{name}"
    is_list = _is_list(field)
    choices = _choices(field)
    metavar = _metavar(name, field, choices, is_list=is_list)
    return click.Option(
        [declaration],
        default=None,
        help=text,
        metavar=metavar,
        multiple=is_list,
        callback=join_commas if is_list else None,
        shell_complete=_make_completer(metavar, choices),
    )


def _describe_default(field: Any) -> str:
    """The default for the help; "" if it needs no mention."""
    default = field.default
    if field.is_required() or default in (None, "", (), False, {}):
        return ""
    if default is True:
        default = "on"
    elif isinstance(default, dict):
        default = ",".join(f"{key}={value:g}" for key, value in default.items())
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"  [default: {default}]"


def _is_list(field: Any) -> bool:
    """Whether the value of a flag is a list separated by commas."""
    from agent.options import split_commas
    from batch_trajectories.config.option_types import parse_columns, parse_resources

    rules = [*field.metadata]
    for inner in get_args(field.annotation):
        rules += getattr(inner, "__metadata__", ())
    lists = (split_commas, parse_columns, parse_resources)
    return any(getattr(rule, "func", None) in lists for rule in rules)


def _make_completer(
    metavar: str | None, choices: list[str]
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
    """Shell completion for the value of an option."""
    if metavar == "PATH":
        return lambda ctx, param, incomplete: [CompletionItem(incomplete, type="file")]
    if not choices:
        return None
    return lambda ctx, param, incomplete: [
        CompletionItem(choice) for choice in choices if choice.startswith(incomplete)
    ]


def _choices(field: Any) -> list[str]:
    """The possible values of an option, or of each part of a list."""
    choices = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    for inner in get_args(field.annotation):
        choices += [arg for arg in get_args(inner) if isinstance(arg, str)]
    return choices


def _metavar(name: str, field: Any, choices: list[str], *, is_list: bool) -> str | None:
    from agent.options import parse_json

    if field.annotation is bool:
        return None
    kinds = str(field.annotation)
    if name == "columns":
        return "COLUMN=SOURCE_COLUMN,..."
    if is_list:
        return "NAME=NUMBER,..." if "float" in kinds else "NAME,..."
    if choices:
        return "|".join(choices)
    if any(getattr(rule, "func", None) is parse_json for rule in field.metadata):
        return "JSON"
    if "Path" in kinds:
        return "PATH"
    if "float" in kinds:
        return "SECONDS" if name.endswith("_s") else "NUMBER"
    return "N" if "int" in kinds else "TEXT"


EXAMPLES = """\b
Examples:
  python batch_runner.py --config=demo --run_name=demo
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=openai:gpt-5-mini --batch_size=20 --num_workers=4
  python batch_runner.py --dataset_file=prompts.jsonl --run_name=my_run \\
      --model=my-model --base_url=http://127.0.0.1:8000/v1
  python batch_runner.py --config=vllm --dataset_file=prompts.jsonl --run_name=my_run
  python batch_runner.py estimate --pilot=30 --config=my.yaml --run_name=my_run
  python batch_runner.py status my_run --watch
  python batch_runner.py report my_run
  python batch_runner.py export my_run --format=openai,llamafactory

Run the same command again to resume: finished conversations are kept, unfinished ones continue at
their last turn.
"""
