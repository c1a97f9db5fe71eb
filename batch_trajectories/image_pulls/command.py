"""The work of the command `images`: bring all images of a dataset, with progress and totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.basics.event_loop import run_coroutine
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.kept_dataset import ColumnRenamer, rows_of_source
from batch_trajectories.dataset.lines import columns_in
from batch_trajectories.dataset.row_conversation import ERROR_COLUMN
from batch_trajectories.dataset.rows_file import load_rows_file
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.dataset.source import parse_source
from batch_trajectories.image_pulls.building import (
    ImageBuild,
    build_all,
    check_engine,
    list_builds,
)
from batch_trajectories.image_pulls.fetching import Fetched, fetch_all
from batch_trajectories.image_pulls.references import list_row_images, list_task_images
from toolsets.images.registry.pulling import BlobEntry, Puller
from toolsets.images.registry.settings import RegistrySettings
from toolsets.images.store import ImageStore


@dataclass(slots=True)
class PullTotals:
    """The totals of the command."""

    fetched: int = 0
    built: int = 0
    were_here: int = 0
    unbuilt: int = 0
    """Number of images whose build failed."""
    errors: list[str] = field(default_factory=list)
    """The reasons why images could not be fetched; each names its image."""
    blobs: set[BlobEntry] = field(default_factory=set)
    """The different layers and configurations of the images that were fetched."""
    received_bytes: int = 0

    @property
    def total(self) -> int:
        """Number of different images."""
        return self.fetched + self.built + self.were_here + self.unbuilt + len(self.errors)

    def describe(self, source: str) -> str:
        """A line for the user."""
        layers = sum(blob.size for blob in self.blobs)
        built = f"{self.built:,} built, " if self.built or self.unbuilt else ""
        return (
            f"{source}: {plural(self.total, 'image')}: {self.fetched:,} fetched, {built}"
            f"{self.were_here:,} here already, {len(self.errors) + self.unbuilt:,} failed; "
            f"{self.received_bytes / 1e6:,.1f} MB received for {layers / 1e6:,.1f} MB of "
            "different layers"
        )


def bring_images(
    config: RunConfig, references: Iterator[str], builds: Mapping[str, ImageBuild]
) -> PullTotals:
    """Fetch and build the images that the directory of images lacks.

    Those of `references` that `builds` has are built. Raises `ConfigError`, `ImageError` if the
    directory cannot be used, `EnvironmentStop` if an image must be built and no engine works, and
    `HostError`.
    """
    assert config.images is not None
    store = ImageStore(config.images, is_filled=True)
    if (problem := store.problem()) is not None:
        raise DatasetError(problem)
    lacking = {}
    if builds:
        names = list(references)
        lacking = {name: builds[name] for name in names if name in builds and not store.has(name)}
        references = (name for name in names if name not in lacking)
        # Before anything is fetched: who has no engine hears it at once.
        check_engine(lacking, config.container_engine)
    totals = run_coroutine(_fetch(store, config, references))
    totals.unbuilt = build_all(lacking, config.container_engine, store.directory)
    totals.built = len(lacking) - totals.unbuilt
    return totals


async def _fetch(store: ImageStore, config: RunConfig, references: Iterator[str]) -> PullTotals:
    outcome = PullTotals()
    with LongWork("images", unit="images") as work:

        def report(fetched: Fetched) -> None:
            work.advance()
            if fetched.error is not None:
                outcome.errors.append(fetched.error)
            elif fetched.was_here:
                outcome.were_here += 1
            else:
                outcome.fetched += 1
                if (manifest := fetched.manifest) is not None:
                    outcome.blobs |= {manifest.config, *manifest.layers}

        async with Puller(store.directory, config.registry or RegistrySettings()) as puller:
            await fetch_all(puller, store, references, report)
            outcome.received_bytes = puller.blobs.fetched_bytes
    return outcome


def list_run_images(scan: Scan, config: RunConfig) -> Iterator[str]:
    """Yield the images of a run's rows, each once."""
    return list_task_images(scan, range(scan.tasks), config.docker_image)


def list_dataset_builds(config: RunConfig) -> dict[str, ImageBuild]:
    """List the images that must be built for a dataset, by name; only Harbor tasks have such.

    Raises `DatasetError` if a file of a task cannot be read.
    """
    # Runs that were moved or received keep their rows, and can lack the dataset that they name.
    if not Path(config.dataset_file).is_dir():
        return {}
    source = parse_source(config.dataset_file)
    try:
        return list_builds(source.tasks)
    except OSError as error:
        raise DatasetError(f"{error.filename}: cannot read it: {error.strerror}") from error


def list_dataset_images(config: RunConfig) -> Iterator[str]:
    """Yield the images of the rows of a dataset, each once.

    Raises `DatasetError` for a row that cannot be read, and if no row names an image.
    """
    source = parse_source(config.dataset_file)
    kind = config.rows or ("harbor" if source.tasks else None)
    renaming = ColumnRenamer(config.columns, None if kind is None else load_rows_file(kind))
    seen: set[str] = set()
    rows = usable = 0
    for row in rows_of_source(source, Omissions()):
        if not (line := renaming.line(row)).strip():
            continue
        if config.max_samples is not None and usable == config.max_samples:
            break
        rows += 1
        try:
            columns = columns_in(line)
            if ERROR_COLUMN in columns:  # it cannot run, so it needs no image
                continue
            names = list_row_images(columns, config.docker_image)
        except ValueError as error:
            raise DatasetError(f"{config.dataset_file}: row {rows}: {error}") from error
        usable += 1
        yield from (name for name in dict.fromkeys(names) if name not in seen)
        seen.update(names)
    renaming.check(str(config.dataset_file))
    if not seen:
        raise DatasetError(
            f"{config.dataset_file}: none of its {plural(rows, 'row')} names an image "
            "(columns docker_image, image or image_name); give --rows or --docker_image"
        )
