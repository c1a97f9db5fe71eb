"""The shape of the command line: `run` is the default, and each config field is an option."""

from __future__ import annotations

from typing import Any

import click


class Commands(click.Group):
    """A group whose default command is `run`, with that command's options in its own help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "--version", *self.commands}
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[run] [OPTIONS]  |  COMMAND [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run = self.commands["run"]
        run.format_options(click.Context(run, parent=ctx), formatter)
        self.format_commands(ctx, formatter)


class RunCommand(click.Command):
    """A command with one option per config field, made from the config itself when needed.

    The fields are read as late as possible, because the other commands and completion do not
    need them.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from batch.config import RunConfig

        known = {param.name for param in self.params}
        for name, field in RunConfig.model_fields.items():
            if name not in known:
                self.params.append(_option(name, field))
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from agent.options import AgentOptions

        of_run: list[tuple[str, str]] = []
        of_conversation: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                own = param.name in AgentOptions.model_fields
                (of_conversation if own else of_run).append(record)
        with formatter.section("Options of the run"):
            formatter.write_dl(of_run)
        with formatter.section(
            "Options of each conversation (a row can set most of them in its column agent_options)"
        ):
            formatter.write_dl(of_conversation)


def _option(name: str, field: Any) -> click.Option:
    """The command line option of one config field; pydantic does the checking."""
    is_flag = field.annotation is bool
    default = field.default
    shown = not field.is_required() and default not in (None, (), False)
    text = field.description + (f"  [default: {'on' if is_flag else default}]" if shown else "")
    declaration = f"--{name}/--no_{name}" if is_flag else f"--{name}"
    return click.Option([declaration], default=None, help=text, metavar=_metavar(name, field))


def _metavar(name: str, field: Any) -> str | None:
    from typing import get_args

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
  python batch_runner.py estimate --pilot=30 --dataset_file=prompts.jsonl --run_name=my_run ...
  python batch_runner.py status my_run

Run the same command again to resume: finished conversations are kept, unfinished ones go on at
their turn.
"""
