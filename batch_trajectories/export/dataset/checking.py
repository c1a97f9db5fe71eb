"""Compares a dataset with its manifest and with its records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import mistakes_in
from batch_trajectories.engine.origin import FLAG
from batch_trajectories.export.dataset.directory import derive_manifest, listed_files, read_manifest
from batch_trajectories.export.dataset.recipe_origin import untrusted_parts
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.records.names import MANIFEST_FILE

_MAX_VALUE_CHARS = 100

_SUMS = ("discarded", "failed", "pending", "rejected", "selected")


def find_problems(source: Source, directory: Path, *, trusted: bool = False) -> Iterator[str]:
    """The problems of a dataset, one line each.

    Every file is read, and made again from the records with the recipe of the manifest. Raises
    `ConfigError` without a dataset, and for a recipe that calls functions or opens files if this
    user did not write it and it is not `trusted`.
    """
    manifest = read_manifest(directory)
    untrusted: dict[str, Any] = {}
    for one in (manifest, *manifest.get("earlier", ())):
        untrusted |= untrusted_parts(one)
    if not trusted and untrusted:
        listed = ", ".join(
            f"{key}={clip(str(value), max_chars=_MAX_VALUE_CHARS)}"
            for key, value in untrusted.items()
        )
        raise ConfigError(
            f"{directory / MANIFEST_FILE}: you did not write this recipe here, and it has "
            f"functions called or files opened: {listed}; export the dataset again, or add {FLAG} "
            "to use them"
        )
    if manifest.get("unfinished"):
        yield "an export into this directory was interrupted; export again"
        return
    yield from find_wrong_sums(manifest)
    files = {file["path"]: file for file in listed_files(manifest)}
    for path, file in files.items():
        yield from _file(directory, path, file)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in files and name != MANIFEST_FILE:
            yield f"{name}: not in the manifest; remove it, or loaders may read it"
    earlier = manifest.get("earlier", [])
    again = _derive(source, manifest, parity=manifest.get("parity"), earlier=earlier)
    if isinstance(again, str):
        yield again
        return
    yield from _file_differences(manifest, again, files)
    yield from _manifest_differences(manifest, again)
    for one in earlier:
        yield from _earlier_differences(source, one)


def _derive(source: Source, manifest: Mapping[str, Any], **parts: Any) -> dict[str, Any] | str:
    """The manifest that the recipe of `manifest` gives today, or what is wrong with the recipe."""
    try:
        recipe = Recipe.model_validate(manifest["recipe"])
    except ValidationError as error:
        mistake = mistakes_in(error)[0].describe()
        return f"its recipe is not one of this version: {mistake}; export again"
    again: dict[str, Any] = orjson.loads(orjson.dumps(derive_manifest(source, recipe, **parts)))
    return again


def _earlier_differences(source: Source, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Name files of an earlier export for which the records give other rows today."""
    again = _derive(source, manifest)
    if isinstance(again, str):
        yield again
        return
    derived = {file["path"]: file for file in listed_files(again)}
    same_tools = again["versions"] == manifest["versions"]
    for part in manifest["formats"]:
        for file in part["files"]:
            path = file["path"]
            is_library = _is_copy(path) and not same_tools
            key = "rows" if is_library else "sha256"
            if derived.get(path, {}).get(key) != file[key]:
                yield (
                    f"{path}: belongs to an earlier export, and the records now give other rows; "
                    f"export {part['format']} again"
                )


def find_wrong_sums(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Name counts of a manifest that do not add up."""
    if (total := sum(manifest[key] for key in _SUMS)) != manifest["tasks"]:
        yield f"{' + '.join(_SUMS)} = {total}, but there are {manifest['tasks']} tasks"
    for part in manifest["formats"]:
        if (total := part["used"] + part["rejected"]) != manifest["selected"]:
            yield f"{part['format']}: {total} used or rejected of {manifest['selected']} selected"
        for suffix in {Path(file["path"]).suffix for file in part["files"]}:
            rows = sum(f["rows"] for f in part["files"] if f["path"].endswith(suffix))
            if rows != part["rows"]:
                yield f"{part['format']}: {rows} rows in {suffix} files, {part['rows']} in all"


def _file(directory: Path, name: str, file: Mapping[str, Any]) -> Iterator[str]:
    digest = hashlib.sha256()
    rows = size = 0
    try:
        with (
            (directory / name).open("rb") as content,
            LongWork(f"reading {name}", total=file["bytes"], unit="B") as work,
        ):
            for line in content:
                work.advance(len(line))
                digest.update(line)
                size += len(line)
                rows += 1
                if name.endswith(".jsonl") and (fault := _fault(line)):
                    yield f"{name}, line {rows}: {fault}"
    except OSError as error:
        yield f"{name}: {error.strerror or error}"
        return
    if size != file["bytes"] or digest.hexdigest() != file["sha256"]:
        yield f"{name}: was changed since it was exported ({size} bytes, {file['bytes']} then)"
    elif name.endswith(".jsonl") and rows != file["rows"]:
        yield f"{name}: {rows} rows, but the manifest says {file['rows']}"


def _fault(line: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return "torn"
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not JSON: {error}"
    return None if isinstance(row, dict) else "not an object"


def _file_differences(
    manifest: Mapping[str, Any], again: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for key in ("tasks", *_SUMS):
        if again[key] != manifest[key]:
            yield f"{key}: {manifest[key]}, but the records now give {again[key]}; export again"
    same_tools = again["versions"] == manifest["versions"]
    derived = {file["path"]: file for file in listed_files(again)}
    for path in sorted({*files, *derived}):
        if path not in derived:
            yield f"{path}: the records give no such file"
        elif path not in files:
            yield f"{path}: missing; the records give {derived[path]['rows']} rows"
        elif not same_tools and _is_copy(path):
            if derived[path]["rows"] != files[path]["rows"]:
                yield (
                    f"{path}: {files[path]['rows']} rows, but the records give "
                    f"{derived[path]['rows']}; export again"
                )
        elif derived[path]["sha256"] != files[path]["sha256"]:
            yield f"{path}: the records give other bytes; export again"


def _is_copy(path: str) -> bool:
    """Whether a library wrote a file, so that its bytes depend on the version of the library."""
    return path.split("/")[0].endswith(("_parquet", "_hf"))


def _manifest_differences(manifest: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """Differences in the rest of the manifest: statistics, reasons, splits."""
    apart = {"tasks", *_SUMS, "recipe", "versions", "rejects", "other_files", "formats"}
    for key in sorted(({*manifest} | {*again}) - apart):
        if manifest.get(key) != again.get(key):
            yield f"{MANIFEST_FILE}: {key}: the records give another value; export again"
    for ours, theirs in zip(manifest["formats"], again["formats"], strict=False):
        for key in sorted(({*ours} | {*theirs}) - {"files"}):
            if ours.get(key) != theirs.get(key):
                where = f"{MANIFEST_FILE}: {ours['format']}: {key}"
                yield f"{where}: the records give another value; export again"
        splits = {file["path"]: file["split"] for file in theirs["files"]}
        for file in ours["files"]:
            if file.get("split") != splits.get(file["path"], file.get("split")):
                yield f"{file['path']}: the records put it into {splits[file['path']]}"
