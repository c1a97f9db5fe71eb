"""The command `publish`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import join_commas, plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import run_dir_argument, trust_option

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun
    from batch_trajectories.publishing.publish import Choices


@click.command()
@run_dir_argument
@click.argument("out", metavar="OUT")
@click.option(
    "--format",
    "formats",
    metavar="NAME,...",
    multiple=True,
    callback=join_commas,
    help="Formats of rows, as for export.",
)
@click.option("--recipe", metavar="FILE", type=LocalPath(), help="Recipe, as for export.")
@click.option("--license", "license_name", metavar="NAME", help="License of the dataset.")
@click.option(
    "--prompts",
    type=click.Choice(["whole", "digests"]),
    default="whole",
    help="Publish whole prompts, or only their digests (also in the rows).  [default: whole]",
)
@click.option(
    "--allow",
    metavar="TEXT",
    multiple=True,
    help="A text that may be published although it looks private (docs/publish.md).",
)
@click.option("--replace", is_flag=True, help="Replace an earlier publication in OUT.")
@click.option("--push_for_real", is_flag=True, help="Send it, if OUT is hf:ORG/NAME.")
@trust_option
def publish(run: str, output_dir: Path, out: str, **flags: Any) -> None:
    """Publish the dataset of RUN, with all that others need to make it again.

    OUT is a new directory, or hf:ORG/NAME. `verify OUT` checks it. See docs/publish.md.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.validation import is_url
    from batch_trajectories.dataset.source import HUB_PREFIX
    from batch_trajectories.engine.narrowing import refuse_narrowing
    from batch_trajectories.export.rows.recipe import Recipe, load_recipe
    from batch_trajectories.publishing.publish import Choices
    from batch_trajectories.publishing.publish import publish as write

    with errors_as_exit_codes():
        is_hub = out.startswith(HUB_PREFIX)
        if is_url(out):
            raise ConfigError(f"{out}: a publication goes to a directory, or to hf:ORG/NAME")
        if flags["push_for_real"] and not is_hub:
            raise ConfigError("--push_for_real: only with hf:ORG/NAME")
        stored = open_run(run, output_dir)
        refuse_narrowing(stored.path, stored.scan, stored.config, stored.identity, accepted=())
        given = {"formats": flags["formats"]} if flags["formats"] else {}
        recipe: Recipe = load_recipe(Path(flags["recipe"]) if flags["recipe"] else None, given)
        if flags["license_name"]:
            licensed = recipe.card.model_copy(update={"license": flags["license_name"]})
            recipe = recipe.model_copy(update={"card": licensed})
        if recipe.card.license == "other":
            say("warning: no license is stated; --license=NAME does it")
        choices = Choices(
            prompts=flags["prompts"],
            replace=flags["replace"],
            allowed=flags["allow"],
            trust_run=flags["trust_run"],
        )
        if is_hub:
            repo = out.removeprefix(HUB_PREFIX)
            _send(stored, recipe, choices, repo, for_real=flags["push_for_real"])
        else:
            _report(out, Path(out), write(stored, recipe, Path(out), choices))


def _report(place: str, directory: Path, manifest: dict[str, Any]) -> None:
    """Print what was published, and warn of what is missing."""
    from batch_trajectories.publishing.verifying import read_publication

    if manifest["pending"]:
        say(f"warning: {plural(manifest['pending'], 'pending task')} not in this publication")
    lines = [
        f"{place}: {plural(part['rows'], 'row')} of {part['format']}"
        for part in manifest["formats"]
    ]
    lines += [
        f"to bring: {need['name']}: {need['what']}" for need in manifest["publication"]["needs"]
    ]
    lines.append(f"sha256 of manifest.json: {read_publication(directory).sha256}")
    show("\n".join(lines))


def _send(stored: StoredRun, recipe: Any, choices: Choices, repo: str, *, for_real: bool) -> None:
    """Make a publication, and send it to the hub or show what would be sent."""
    from batch_trajectories.export.dataset.directory import plan_upload, upload
    from batch_trajectories.publishing.publish import publish_temporarily

    with publish_temporarily(stored, recipe, choices) as (directory, manifest):
        _report(repo, directory, manifest)
        if for_real:
            show(upload(directory, repo, manifest, replaces=choices.replace))
        else:
            show(plan_upload(directory, repo, manifest))
