"""Writes docs/options.md from the code: `python -m tests.option_docs > docs/options.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import click

from agent.options import AgentOptions
from batch_runner import main
from cli.option_groups import COMMAND_GROUPS, OF_CONVERSATIONS, OF_STARTS, OPTION_GROUPS

HEAD = """\
# All options

Written from the code by `python -m tests.option_docs`; a test fails while the two differ.

An option such as `--max_turns` of a run is also a key `max_turns` of a config file (`--config`);
flags win over the file. `--plan / --no_plan` is `plan: true` or `plan: false`. JSON is for flags:
in a file write YAML. Lists have commas between their parts, or the option is given several times.
Those under "This start" and of the other commands are no keys.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_run(), *_commands()]) + "\n"


def _run() -> Iterator[str]:
    run = main.commands["run"]
    params = {param.name: param for param in run.get_params(click.Context(run))}
    conversation = list(AgentOptions.model_fields)
    grouped = {name for names in OPTION_GROUPS.values() for name in names} | set(conversation)
    starts = [name for name in params if name not in grouped]
    groups = {OF_STARTS: starts, **OPTION_GROUPS, OF_CONVERSATIONS: conversation}
    for title, names in groups.items():
        yield from (f"## {title}", "", *_table(params[name] for name in names), "")


def _commands() -> Iterator[str]:
    known = {param.name for param in main.commands["run"].params}
    yield from ("## The other commands", "")
    for names in COMMAND_GROUPS.values():
        for name in names:
            if name == "run":
                continue
            command = main.commands[name]
            context = click.Context(command, info_name=name)
            own = [
                param for param in command.get_params(context) if isinstance(param, click.Option)
            ]
            takes_all = known <= {param.name for param in own} | {"dry_run", "live", "resume"}
            if takes_all:
                own = [param for param in own if param.name not in known]
            pieces = [piece for piece in command.collect_usage_pieces(context) if piece[0] != "["]
            yield from (f"### `{' '.join([name, *pieces])}`", "")
            yield from (" ".join((command.help or "").split()), "")
            if any("--help" not in param.opts for param in own):
                yield from (*_table(own), "")


def _table(params: Iterable[click.Parameter | None]) -> Iterator[str]:
    yield from ("| option | meaning |", "|---|---|")
    for param in params:
        assert isinstance(param, click.Option)
        if "--help" in param.opts:
            continue
        record = param.get_help_record(click.Context(click.Command("x")))
        assert record is not None
        yield "| `{}` | {} |".format(*(text.replace("|", "\\|") for text in record))


if __name__ == "__main__":
    sys.stdout.write(page())
