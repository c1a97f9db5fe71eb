"""Directories of formats that an export does not write stay, with what describes them.

The manifest of a dataset describes its last export. Its key `earlier` has a part of the manifest of
each export before it whose files are still there: the recipe, the counts, and the formats that no
later export has written. The file `rejects.jsonl` and the card are those of the last export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batch_trajectories.export.rows.recipe import Recipe

_LAST_EXPORT_KEYS = ("earlier", "rejects", "parity", "statistics", "models", "evaluation")


def written_folders(recipe: Recipe) -> set[str]:
    """The directories that an export by `recipe` writes: `openai`, `openai_parquet`."""
    formats = recipe.row_formats
    lines = {one.name for one in formats if recipe.writes_lines or not one.columns}
    return lines | {f"{one.name}_{copies.name}" for one in formats for copies in recipe.copies}


def parts_that_stay(manifest: Mapping[str, Any], written: set[str]) -> list[dict[str, Any]]:
    """The value of `earlier` after an export into the directories `written`.

    `manifest` is that of the export before. If it was interrupted, its own files are not whole, but
    those of the exports before it are.
    """
    stay = []
    own = () if manifest.get("unfinished") else (manifest,)
    for one in (*own, *manifest.get("earlier", ())):
        formats = []
        for part in one["formats"]:
            if files := [file for file in part["files"] if _folder(file) not in written]:
                formats.append({**part, "files": files})
        if formats:
            kept = {name: value for name, value in one.items() if name not in _LAST_EXPORT_KEYS}
            kept["formats"] = formats
            kept["other_files"] = [
                file
                for file in one["other_files"]
                if "/" in file["path"] and _folder(file) not in written
            ]
            stay.append(kept)
    return stay


def all_parts(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a manifest about formats: those of its last export, then the earlier ones."""
    yield from manifest["formats"]
    for one in manifest.get("earlier", ()):
        yield from one["formats"]


def run_names(manifest: Mapping[str, Any]) -> list[str]:
    """The names of the runs that a dataset is made from."""
    return [str(run["name"]) for run in manifest.get("runs") or [manifest["run"]]]


def _folder(file: Mapping[str, Any]) -> str:
    return str(file["path"]).partition("/")[0]
