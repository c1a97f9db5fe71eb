"""The directory of a dataset: rows, card and manifest, replaced together.

    <format>/<split>.jsonl          rows; with shards <format>/<split>/<split>-00000-of-00003.jsonl
    <format>_parquet/...            copies as Parquet
    <format>_hf/                    copies that `datasets.load_from_disk` loads
    llamafactory/dataset_info.json  how LLaMA-Factory is to read its rows
    rejects.jsonl                   {"id", "status", "format" (null: in none), "reason", "detail"}
    README.md                       the card
    manifest.json                   recipe, counts that sum to all tasks, sha256 of every file

The manifest is written last, and says `unfinished` while files change. Directories of formats that
an export does not write stay; see `earlier`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from batch_trajectories.basics.bucket import Bucket, download_all
from batch_trajectories.basics.console import LongWork, say
from batch_trajectories.basics.errors import (
    ConfigError,
    EnvironmentStop,
    RunError,
    help_for_write,
    stop_on_machine_failure,
)
from batch_trajectories.basics.text import first_few
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.export.dataset.build import SCHEMA_VERSION, write_rows
from batch_trajectories.export.dataset.card import card, model_name
from batch_trajectories.export.dataset.earlier import (
    all_parts,
    parts_that_stay,
    run_names,
    written_folders,
)
from batch_trajectories.export.dataset.losses import describe_losses
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.format import load_format
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.rows.row_files import FileTarget, HashOnlyTarget, Staging, Written
from batch_trajectories.records.files import (
    StorageError,
    lock_directory,
    make_directory,
    refuse_links,
    replace_file,
    replace_json,
)
from batch_trajectories.records.names import MANIFEST_FILE

_MAX_NAMES = 5
"""Maximum number of removed files that a message names."""


class _File(BaseModel):
    path: str
    rows: int
    bytes: int
    sha256: str


class _Format(BaseModel):
    format: str
    rows: int
    used: int
    rejected: int
    files: list[_File]


_CARD = "README.md"


class NoRows(RunError):
    """A format has no row, and its directory has rows of an earlier export, which stay."""

    exit_code = 1


class _Earlier(BaseModel):
    formats: list[_Format]
    recipe: dict[str, Any]
    other_files: list[_File]


class _FinishedManifest(BaseModel):
    """The keys of a manifest that this program reads back."""

    tasks: int
    discarded: int
    failed: int
    pending: int
    rejected: int
    selected: int
    formats: list[_Format]
    rejects: _File
    other_files: list[_File]
    recipe: dict[str, Any]
    versions: dict[str, str]
    earlier: list[_Earlier] = []


class _UnfinishedManifest(BaseModel):
    paths: list[str]
    earlier: list[_Earlier] = []


def export_dataset(
    source: Source, recipe: Recipe, directory: Path, *, replace: bool = False
) -> dict[str, Any]:
    """Write a dataset; returns its manifest.

    Directories of formats that an earlier export wrote and this one does not are left alone, unless
    `replace`. Files that are in no manifest are always left alone.

    Raises `ConfigError` if `directory` holds something else. Without `replace`, also for the
    dataset of other runs, and `NoRows` if a format has no row where an earlier export had some,
    which stay. Raises `RunLocked` while another export writes there, `RunDirError` for links in the
    run, and `StorageError`.
    """
    refuse_links(source.run_dir)
    try:
        _make_directory(directory)
        refusal = f"{directory}: another export writes here; wait for it or name another --output"
        with lock_directory(directory, refusal):
            before = _read_earlier(directory)
            if not replace:
                _refuse_other_runs(directory, before, source)
            old = paths_in(before) if before else set()
            is_whole = before is not None and not before.get("unfinished")
            stay = (
                []
                if before is None or replace
                else parts_that_stay(before, written_folders(recipe))
            )
            with Staging(directory) as staging:
                manifest = _write_dataset(source, recipe, staging, earlier=stay)
                if is_whole and before and not replace:
                    _refuse_no_rows(directory, before, manifest)
                _write_manifest(directory, unfinished_manifest({*old, *staging.paths()}, stay))
                staging.publish()
                gone = old - set(staging.paths()) - paths_in(manifest)
                _remove(directory, gone)
            _write_manifest(directory, manifest)
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot write the dataset: {error.strerror or error}. The records are "
            f"safe; {help_for_write(error)}, then run the same command again."
        ) from error
    say_removed(directory, gone)
    return manifest


def _refuse_other_runs(directory: Path, before: Mapping[str, Any] | None, source: Source) -> None:
    """Raise `ConfigError` if the dataset in `directory` has a run that the new one has not."""
    if before is None or before.get("unfinished"):
        return
    now = {one.name for one in (source, *source.others)}
    if others := [name for name in run_names(before) if name not in now]:
        raise ConfigError(
            f"{directory}: holds a dataset of {first_few(others, _MAX_NAMES)}; name another "
            "--output, or add --replace to remove it"
        )


def _refuse_no_rows(
    directory: Path, before: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    """Raise `NoRows` if a format without a row would replace rows."""
    had_rows = {part["format"] for part in all_parts(before) if part["rows"]}
    for part in manifest["formats"]:
        if not part["rows"] and part["format"] in had_rows:
            raise NoRows(
                f"{directory}: nothing was written, as there is no row of {part['format']} "
                f"({describe_losses(manifest, part)}). The files of the earlier export stay; "
                "--replace removes them"
            )


def say_removed(directory: Path | str, gone: Collection[str]) -> None:
    """Tell the user which files of an earlier export were removed, if any."""
    if gone:
        say(
            f"removed from {directory}, where this export replaces them: "
            f"{first_few(sorted(gone), _MAX_NAMES)}"
        )


def unfinished_manifest(
    paths: Iterable[str], earlier: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The manifest of a dataset while its files are replaced.

    `paths` has old and new files, `earlier` what describes those that stay.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "dataset",
        "unfinished": True,
        "paths": sorted(paths),
        "earlier": [*earlier],
    }


def add_parity(
    directory: Path, manifest: Mapping[str, Any], recipe: Recipe, parity: Sequence[Any]
) -> dict[str, Any]:
    """Write what chat templates make of a dataset into its manifest and its card.

    Returns the manifest. Raises `StorageError`.
    """
    proved = {**manifest, "parity": [*parity]}
    content = card(proved, recipe).encode()
    others = [file for file in manifest["other_files"] if file["path"] != _CARD]
    proved["other_files"] = [*others, _describe_file(_CARD, content).to_json()]
    try:
        with lock_directory(directory, f"{directory}: another export writes here; wait for it"):
            replace_file(directory / _CARD, content)
            _write_manifest(directory, proved)
    except OSError as error:
        raise StorageError(f"{directory}: cannot write: {error.strerror or error}") from error
    return proved


def _make_directory(directory: Path) -> None:
    try:
        make_directory(directory, is_inside=False, parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{directory}: not a directory; name another --output") from error


def derive_manifest(
    source: Source,
    recipe: Recipe,
    parity: Sequence[Any] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The manifest of the dataset that `export_dataset` would write; writes nothing.

    `parity` is the part of an earlier manifest about chat templates; None without one. `earlier` is
    the part about earlier exports.
    """
    return _write_dataset(source, recipe, HashOnlyTarget(), parity=parity, earlier=earlier)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a dataset. Raises `ConfigError` without a valid one."""
    try:
        manifest = orjson.loads((directory / MANIFEST_FILE).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"{directory / MANIFEST_FILE}: cannot read it: {error}; export the dataset first"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "dataset":
        raise ConfigError(f"{directory / MANIFEST_FILE}: not the manifest of a dataset")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{directory / MANIFEST_FILE}: of another version of this program; export again"
        )
    try:
        (_UnfinishedManifest if manifest.get("unfinished") else _FinishedManifest).model_validate(
            manifest
        )
    except ValidationError as error:
        raise ConfigError(
            f"{directory / MANIFEST_FILE}: {mistakes_in(error)[0].describe()}; it was changed "
            "since it was written. Put it back, or remove the directory and export again"
        ) from error
    root = directory.resolve()
    # `Path.resolve` raises a RuntimeError at a link that leads to itself.
    real = {path: Path(os.path.realpath(root / path)) for path in paths_in(manifest)}
    if out := [path for path in real if not real[path].is_relative_to(root)]:
        raise ConfigError(
            f"{directory / MANIFEST_FILE}: lists {out[0]!r}, which is outside; name another "
            "--output"
        )
    return manifest


def listed_files(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files that a manifest lists: `path`, `rows`, `bytes`, `sha256`."""
    files = [file for part in all_parts(manifest) for file in part["files"]]
    others = [file for one in manifest.get("earlier", ()) for file in one["other_files"]]
    return [*files, manifest["rejects"], *manifest["other_files"], *others]


def paths_in(manifest: Mapping[str, Any]) -> set[str]:
    """The paths of the files of a manifest, finished or not."""
    if manifest.get("unfinished"):
        return {str(path) for path in manifest["paths"]}
    return {str(file["path"]) for file in listed_files(manifest)}


def _write_dataset(
    source: Source,
    recipe: Recipe,
    target: FileTarget,
    *,
    parity: Sequence[Any] | None = None,
    earlier: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    manifest = write_rows(source, recipe, target)
    if earlier:
        manifest["earlier"] = [*earlier]
    if parity is not None:
        manifest["parity"] = parity
    others = []
    for part in manifest["formats"]:
        for path, content in _side_files(part, model_name(manifest), recipe):
            others.append(_write(target, path, _dump_indented(content)))
    others.append(_write(target, _CARD, card(manifest, recipe).encode()))
    return {**manifest, "other_files": [file.to_json() for file in others]}


def _side_files(part: Mapping[str, Any], run: str, recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The JSON files beside the rows of a format and beside their copies, by path."""
    format = load_format(part["format"])
    if format.side_files is not None:
        for name, content in format.side_files(part, run).items():
            yield f"{format.name}/{name}", content
    for copies in recipe.copies:
        folder = f"{format.name}_{copies.name}"
        files = [file for file in part["files"] if file["path"].startswith(f"{folder}/")]
        if files and copies.side_files is not None:
            for name, content in copies.side_files(format, files, recipe.copies_list_tools).items():
                yield f"{folder}/{name}", content


def _write(target: FileTarget, path: str, content: bytes) -> Written:
    with target.open(path) as file:
        file.write(content)
    return _describe_file(path, content)


def _describe_file(path: str, content: bytes) -> Written:
    digest = hashlib.sha256(content).hexdigest()
    return Written(path=path, rows=0, size=len(content), sha256=digest)


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    replace_json(directory / MANIFEST_FILE, manifest)


def _dump_indented(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def _read_earlier(directory: Path) -> dict[str, Any] | None:
    """The manifest of an earlier export; None if there was none.

    Raises `ConfigError` for a directory with other things.
    """
    if not (directory / MANIFEST_FILE).exists():
        if any(not path.name.startswith(".export.") for path in directory.iterdir()):
            raise ConfigError(f"{directory}: holds files but no dataset; name another --output")
        return None
    return read_manifest(directory)


def _remove(directory: Path, paths: set[str]) -> None:
    for name in paths:
        (directory / name).unlink(missing_ok=True)
    folders = {parent for name in paths for parent in Path(name).parents} - {Path()}
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        path = directory / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


_STAYS = ("rejects.jsonl",)
"""Files that are not uploaded, as they quote rejected conversations."""


def plan_upload(directory: Path, repo: str, manifest: Mapping[str, Any]) -> str:
    """A description of the upload that a push would make."""
    paths = _upload_paths(directory, manifest)
    sizes = {path: (directory / path).stat().st_size for path in paths}
    lines = [f"would send {len(paths)} files, {sum(sizes.values()):,} bytes, to {repo} (private):"]
    lines += [f"{size:>15,}  {path}" for path, size in sizes.items()]
    lines += [f"{'stays':>15}  {path}" for path in _STAYS]
    if manifest["recipe"]["filters"]["secrets"] == "off":
        lines.append("not scanned for secrets; a recipe with filters: {secrets: all} does it")
    if manifest["pending"]:
        lines.append(f"{manifest['pending']:,} tasks of the run are pending and not in it")
    lines.append("nothing was sent; --push_for_real does it")
    return "\n".join(lines)


def upload(
    directory: Path, repo: str, manifest: Mapping[str, Any], *, replaces: bool | None = None
) -> str:
    """Send a dataset to a repository, made private if it is new; returns its address.

    `replaces`: whether it takes the place of the dataset that is there, whose other files are
    removed; False: such a dataset is an error; None: files are added to what is there. Raises
    `ConfigError`, and `EnvironmentStop` if the hub refuses or cannot be reached.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        if replaces is False and api.file_exists(repo, MANIFEST_FILE, repo_type="dataset"):
            raise ConfigError(f"{repo}: there is a dataset already; add --replace")
        done = api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=directory,
            allow_patterns=_upload_paths(directory, manifest),
            delete_patterns="*" if replaces else None,
            commit_message=f"Dataset of run {model_name(manifest)}",
        )
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        failed = "the hub refused" if isinstance(error, HfHubHTTPError) else "cannot reach the hub"
        raise EnvironmentStop(
            f"{repo}: {failed}: {reason}. The dataset is whole in {directory}."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--push_to_hub={repo}: {error}") from error
    return str(done)


def _upload_paths(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files to upload. Raises `ConfigError` for files of a dataset at a URL."""
    listed = [file["path"] for file in listed_files(manifest)]
    paths = [path for path in sorted([*listed, MANIFEST_FILE]) if path not in _STAYS]
    if away := [path for path in paths if not (directory / path).exists()]:
        raise ConfigError(
            f"--push_to_hub: {away[0]} of an earlier export is only at the URL of the dataset; "
            "export all formats at once, or into a directory"
        )
    return paths


# A dataset at a URL: made in a temporary directory, then sent whole, its manifest last.


@contextmanager
def open_dataset(url: str, *, writes: bool) -> Iterator[Path]:
    """Yield a local directory for the dataset at a URL.

    With `writes`, the directory has only the manifest of the dataset at the URL, if there is one,
    and what is exported into it is sent at the end. Without, it holds a copy of the dataset at the
    URL. While files are sent, the manifest in the bucket says that the dataset is unfinished.
    Raises `ConfigError` if the URL has other objects, and `BucketFailed`.
    """
    bucket = Bucket(url.rstrip("/"), of_files=True)
    with TemporaryDirectory(prefix="batch-trajectories-") as name, stop_on_machine_failure():
        directory = Path(name) / "dataset"
        if not writes:
            download_all(url, directory)
            yield directory
            return
        before = _read_remote(bucket)
        old = set[str]()
        if before is not None:
            directory.mkdir()
            (directory / MANIFEST_FILE).write_bytes(before)
            old = paths_in(read_manifest(directory))
        yield directory
        manifest = directory / MANIFEST_FILE
        if manifest.exists() and manifest.read_bytes() != before:  # else nothing was exported
            _send(bucket, directory, old)


def _read_remote(bucket: Bucket) -> bytes | None:
    """The manifest in a bucket; None if it is empty. Raises `ConfigError` for other objects."""
    content = bucket.read(MANIFEST_FILE)
    if content is None and (there := bucket.list_files()):
        raise ConfigError(
            f"{bucket.url}: holds {there[0].name} but no dataset; name another --output"
        )
    return content


def _send(bucket: Bucket, directory: Path, old: set[str]) -> None:
    manifest = read_manifest(directory)
    listed = paths_in(manifest)
    gone = old - listed
    paths = {path for path in listed if (directory / path).exists()}
    total = sum((directory / path).stat().st_size for path in paths)
    with LongWork(f"sending {bucket.url}", total=total, unit="B") as work:
        bucket.upload(
            MANIFEST_FILE,
            orjson.dumps(unfinished_manifest(old | listed, manifest.get("earlier", ()))),
        )
        for path in sorted(paths):
            bucket.upload(path, directory / path)
            work.advance((directory / path).stat().st_size)
        bucket.remove(sorted(gone))
        bucket.upload(MANIFEST_FILE, directory / MANIFEST_FILE)
    say_removed(bucket.url, gone)
