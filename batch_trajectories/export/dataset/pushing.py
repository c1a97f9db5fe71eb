"""Uploads a dataset to the Hugging Face hub, or shows what an upload would send."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import ConfigError, EnvironmentStop
from batch_trajectories.export.dataset.directory import MANIFEST, listed_files

_STAYS = ("rejects.jsonl",)
"""Files that quote rejected conversations."""


def plan(directory: Path, repo: str, manifest: Mapping[str, Any]) -> str:
    """A description of what a push would send."""
    paths = _paths(manifest)
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


def push(directory: Path, repo: str, manifest: Mapping[str, Any]) -> str:
    """Send a dataset to a repository, made private if it is new; returns its address.

    Raises `EnvironmentStop` if the hub refuses or cannot be reached.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=directory,
            allow_patterns=_paths(manifest),
            commit_message=f"Dataset of run {manifest['run']['name']}",
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


def _paths(manifest: Mapping[str, Any]) -> list[str]:
    listed = [file["path"] for file in listed_files(manifest)]
    return [path for path in sorted([*listed, MANIFEST]) if path not in _STAYS]
