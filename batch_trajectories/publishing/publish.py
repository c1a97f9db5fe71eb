"""Writes a publication: a dataset, and all that somebody else needs to make it again.

    <format>/<split>.jsonl    the rows, as `export` writes them
    README.md                 the card of the dataset, with how it was made
    run.yaml                  the config of the run without anything of this machine
    recipe.yaml               the recipe of the rows
    prompts.jsonl             the prompts; or prompts.digests.jsonl, their digests
    script.yaml               with --model=scripted and --script_file; distribution.yaml likewise
    reproduce.sh              starts the same job, and compares the rows
    manifest.json             that of the dataset, with all files and the key `publication`

Everything is made in a hidden directory beside the destination, which gets its name at the end. A
killed `publish` leaves no directory under that name, and the next one removes what it left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import ConfigError, EnvironmentStop, help_for_write
from batch_trajectories.basics.text import first_few, plural
from batch_trajectories.config.fingerprint import data_options, digest_options
from batch_trajectories.config.loading import load_config
from batch_trajectories.dataset.scan import scan
from batch_trajectories.dataset.source import HUB_PREFIX
from batch_trajectories.engine.origin import FLAG, describe_received
from batch_trajectories.export.dataset.card import card
from batch_trajectories.export.dataset.directory import export_dataset, listed_files
from batch_trajectories.export.dataset.recipe_origin import RECIPE_MAC
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import Written
from batch_trajectories.publishing.private_facts import PrivateFacts
from batch_trajectories.publishing.published_config import (
    CONFIG_FILE,
    PROMPTS_FILE,
    RECIPE_FILE,
    Need,
    publish_config,
    publish_recipe,
    to_yaml,
)
from batch_trajectories.publishing.reproduce_script import SCRIPT_NAME, reproduce_script
from batch_trajectories.publishing.verifying import count_lines, read_publication
from batch_trajectories.publishing.withheld import (
    DIGESTS_FILE,
    check_formats,
    withhold_prompts,
    write_digests,
)
from batch_trajectories.records.files import (
    lock_directory,
    make_directory,
    replace_file,
    replace_json,
    sync_directory,
)
from batch_trajectories.records.names import (
    IMPORTED,
    LABELS_FILE,
    MANIFEST_FILE,
    SCORES_FILE,
    SESSIONS,
)

PUBLICATION_FORMAT = 1
"""The version of the key `publication` of a manifest."""

_BLOCK = 1 << 20

_MAX_LISTED = 10
"""The most findings that a refusal lists."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of one `publish`."""

    prompts: str = "whole"
    """`whole`, or `digests`: the texts of prompts are in no file."""
    replace: bool = False
    """Whether an earlier publication in this place is replaced."""
    allowed: tuple[str, ...] = ()
    """Texts that may be published although they look private."""
    trust_run: bool = False
    """Whether files that the run.json of a received run names are read."""


def publish(stored: StoredRun, recipe: Recipe, out: Path, choices: Choices) -> dict[str, Any]:
    """Write the publication of a run into the directory `out`; returns its manifest.

    Raises `ConfigError` if there is something in this place or something private would be
    published, `RunLocked` while another process publishes there, and `StorageError`.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - a link in the place of `out` must stay one
    try:
        with _stage_directory(out, replaces=choices.replace) as directory:
            return _make(stored, recipe, directory, choices)
    except OSError as error:
        raise EnvironmentStop(
            f"{out}: cannot write the publication: {error.strerror or error}; "
            f"{help_for_write(error)}, then run the same command again"
        ) from error


@contextmanager
def publish_temporarily(
    stored: StoredRun, recipe: Recipe, choices: Choices
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make a publication in a temporary directory; yields the directory and its manifest."""
    with TemporaryDirectory(prefix="batch-trajectories-") as name:
        directory = Path(name) / "publication"
        yield directory, publish(stored, recipe, directory, choices)


def _refuse_place(out: Path, *, replaces: bool) -> None:
    """Raise `ConfigError` unless `out` is free, empty, or a publication to be replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"{out}: not a directory; name another place")
    if not out.exists() or not any(out.iterdir()):
        return
    try:
        read_publication(out)
    except ConfigError as error:
        raise ConfigError(f"{out}: holds other files ({error}); name another place") from error
    if not replaces:
        raise ConfigError(
            f"{out}: there is a publication already; add --replace, or name another place"
        )


@contextmanager
def _stage_directory(out: Path, *, replaces: bool) -> Iterator[Path]:
    """Yield a directory that gets the name `out` if nothing fails; else it is removed."""
    staging = out.with_name(f".{out.name}.publishing")
    aside = out.with_name(f".{out.name}.replaced")
    work = staging / out.name
    make_directory(staging, parents=True)
    with lock_directory(staging, f"{out}: another process publishes there; wait for it"):
        try:
            if aside.is_dir() and not out.exists():
                aside.rename(out)  # a kill came between the two renames below
            _refuse_place(out, replaces=replaces)
            for left in (aside, work):
                shutil.rmtree(left, ignore_errors=True)
            work.mkdir(mode=0o700)
            yield work
            _sync_all(work)
            if replaces and out.exists():
                out.rename(aside)
            try:
                work.rename(out)
            except OSError:
                if aside.is_dir():
                    aside.rename(out)
                raise
            sync_directory(out.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def _sync_all(directory: Path) -> None:
    """Make a directory survive a power loss."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with Path(folder, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def _make(stored: StoredRun, recipe: Recipe, directory: Path, choices: Choices) -> dict[str, Any]:
    config = stored.config
    if config.audit or config.checked_run is not None:
        raise ConfigError(
            f"{stored.path}: a run of `check` or `check_tasks` has no training rows; "
            "publish the run whose conversations it judged"
        )
    is_whole = choices.prompts == "whole"
    published = publish_config(config, name=stored.path.name, with_prompts=is_whole)
    if published.files and not (stored.is_own or choices.trust_run):
        raise ConfigError(
            f"{describe_received(stored.path)}, so the files that its run.json names are not read; "
            f"add {FLAG} to publish {', '.join(map(str, published.files.values()))}"
        )
    if not is_whole:
        check_formats(recipe)
    if recipe.filters.secrets == "off":
        filters = recipe.filters.model_copy(update={"secrets": "patterns"})
        recipe = recipe.model_copy(update={"filters": filters})
    source = Source(stored.path, stored.scan, config.num_samples, config)
    manifest = export_dataset(source, recipe, directory)
    (directory / manifest["rejects"]["path"]).unlink()  # it quotes what is not published
    stored_recipe, recipe_needs = publish_recipe(recipe)
    manifest["recipe"] = stored_recipe
    manifest.pop(RECIPE_MAC, None)
    if (audit := manifest["run"].get("audit")) is not None:
        manifest["run"]["audit"] = {**audit, "audit": PurePath(audit["audit"]).name}
    if is_whole:
        _copy_prompts(stored, directory / PROMPTS_FILE)
    else:
        texts = write_digests(stored.scan, directory / DIGESTS_FILE)
        withhold_prompts(directory, manifest, texts)
    for name, file in published.files.items():
        replace_file(directory / name, file.read_bytes())
    replace_file(directory / RECIPE_FILE, to_yaml(stored_recipe))
    needs = [*published.needs, *recipe_needs, *_later_needs(stored.path, recipe)]
    can_run = not any((stored.path / name).exists() for name in (IMPORTED, SESSIONS))
    if can_run:
        replace_file(directory / CONFIG_FILE, to_yaml(published.options))
        replace_file(directory / SCRIPT_NAME, reproduce_script(choices.prompts))
        needs += _digest_need(directory, stored.identity["digest"], needs)
    else:
        needs = [Need("run", "its conversations were imported or recorded; no start makes them")]
    manifest["publication"] = _facts(stored, recipe, needs, choices)
    text = card(manifest, recipe) + "\n" + "\n".join(_card_section(manifest)) + "\n"
    replace_file(directory / "README.md", text.encode())
    own = [file["path"] for file in manifest["other_files"] if file["path"] != "README.md"]
    manifest["other_files"] = [
        _describe(directory, path).to_json() for path in [*own, *_top_files(directory)]
    ]
    replace_json(directory / MANIFEST_FILE, manifest)
    _refuse_private(stored, manifest, directory, choices.allowed)
    return manifest


def _copy_prompts(stored: StoredRun, target: Path) -> None:
    """Copy the rows that the run has read. Raises `ConfigError` if the dataset has changed."""
    made = stored.scan
    left = made.size
    with made.path.open("rb") as file, target.open("wb") as copy:
        while block := file.read(min(left, _BLOCK)):
            copy.write(block)
            left -= len(block)
    if scan(target, may_be_empty=True, **made.options).sha256 != made.sha256:
        raise ConfigError(
            f"{made.path}: the dataset has changed since the run; put the earlier file back, or "
            "start the run again with this one before you publish it"
        )


def _later_needs(run_dir: Path, recipe: Recipe) -> Iterator[Need]:
    """Needs of what was done with the run after its end."""
    if recipe.teacher is not None:
        yield Need("score --teacher", f"log-probabilities of {recipe.teacher}")
    if (run_dir / SCORES_FILE).exists():
        yield Need("score", "rewards that were given after the run, or labels of reviewers")
    elif (run_dir / LABELS_FILE).exists():
        yield Need("label", "labels of reviewers")


def _digest_need(directory: Path, digest: str, needs: Collection[Need]) -> Iterator[Need]:
    """A need if the published config is another one for this version of the program.

    Options that the stranger has to give count, too, so nothing is compared where there are any.
    """
    if needs:
        return
    try:
        config = load_config(directory / CONFIG_FILE, {})
        now = digest_options(data_options(config))
    except ConfigError as error:
        raise ConfigError(f"the config of this run cannot be published: {error}") from error
    if now != digest:
        yield Need(
            "version", "an earlier version made the run; `config_digest` of the rows will differ"
        )


def _facts(
    stored: StoredRun, recipe: Recipe, needs: Collection[Need], choices: Choices
) -> dict[str, Any]:
    """The value of `publication` in the manifest."""
    config, identity = stored.config, stored.identity
    totals = stored.totals()
    prices = {name: stored.price_of(name) for name in config.model_weights()}
    return {
        "format": PUBLICATION_FORMAT,
        "license": recipe.card.license,
        "seeds": {"run": config.seed, "split": recipe.split_seed, "choice": recipe.seed},
        "versions": identity["versions"],
        "prices": {name: price and price._asdict() for name, price in prices.items()},
        "spent_usd": totals.spent_usd,
        "tokens": {"input": totals.input_tokens, "output": totals.output_tokens},
        "images": identity.get("images", {}),
        "prompts": {"published": choices.prompts, **_describe_source(identity["dataset"])},
        "needs": [need._asdict() for need in needs],
    }


def _describe_source(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the source of the prompts: a dataset of the hub, or the names of files."""
    source = dataset.get("source") or {}
    name = str(source.get("source") or dataset["path"])
    is_hub = name.startswith(HUB_PREFIX)
    return {
        "source": name if is_hub else PurePath(name).name,
        "revision": source.get("revision") if is_hub else None,
        "columns": source.get("columns") or {},
        "kind": source["kind"] if is_preset_name(source.get("kind")) else None,
    }


def is_preset_name(kind: object) -> bool:
    """Whether `--rows` names a preset, not a file of this machine."""
    return isinstance(kind, str) and "/" not in kind and not kind.endswith((".yaml", ".yml"))


def _card_section(manifest: Mapping[str, Any]) -> Iterator[str]:
    facts = manifest["publication"]
    version = facts["versions"].get("batch-trajectories", "unknown")
    yield "## Make it again"
    yield ""
    yield (
        f"Made by batch-trajectories {version}. `batch-runner verify DIRECTORY` tells whether "
        "these files are those that were published. `sh reproduce.sh` starts the same job with "
        "your own key and compares the rows; the rows of a model that samples differ."
    )
    yield ""
    yield f"- seeds: {', '.join(f'{name} {seed}' for name, seed in facts['seeds'].items())}"
    tokens = facts["tokens"]
    yield f"- tokens: {tokens['input']:,} in and {tokens['output']:,} out"
    spent = facts["spent_usd"]
    yield f"- spent: {'unknown' if spent is None else f'${spent:.4f}'}"
    for name, price in facts["prices"].items():
        if price is not None:
            dollars = f"${price['input']:g} in, ${price['output']:g} out"
            yield f"- price of `{name}` per million tokens: {dollars}"
    source = facts["prompts"]
    revision = f", revision {source['revision']}" if source["revision"] else ""
    what = "in `prompts.jsonl`" if source["published"] == "whole" else "only digests are published"
    yield f"- prompts: `{source['source']}`{revision}; {what}"
    for need in facts["needs"]:
        yield f"- to bring: `{need['name']}`: {need['what']}"


def _top_files(directory: Path) -> list[str]:
    """The files of a publication that lie beside its card, without the manifest."""
    return sorted(p.name for p in directory.iterdir() if p.is_file() and p.name != MANIFEST_FILE)


def _describe(directory: Path, path: str) -> Written:
    file = directory / path
    with file.open("rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    rows = count_lines(file) if path in (PROMPTS_FILE, DIGESTS_FILE) else 0
    return Written(path=path, rows=rows, size=file.stat().st_size, sha256=digest)


def _refuse_private(
    stored: StoredRun, manifest: Mapping[str, Any], directory: Path, allowed: Collection[str]
) -> None:
    """Raise `ConfigError` if a file of the publication holds something private."""
    config = stored.config
    facts = PrivateFacts(
        config, [stored.path, config.output_dir, stored.scan.path], allowed=allowed
    )
    files = [file["path"] for file in listed_files(manifest) if (directory / file["path"]).exists()]
    found = [*facts.find_in(directory, [*files, MANIFEST_FILE])]
    if not found:
        return
    places = [f"{one.path}, line {one.line}: {one.kind}" for one in found]
    raise ConfigError(
        f"{plural(len(found), 'place')} of the publication would tell something private, so "
        f"nothing was published: {first_few(places, _MAX_LISTED, separator='; ')}. Leave "
        "conversations out by a filter of the recipe (`label RUN ID`, then filters: {label: "
        "not_rejected}), withhold prompts by --prompts=digests, or name a text that may be "
        "published by --allow"
    )
