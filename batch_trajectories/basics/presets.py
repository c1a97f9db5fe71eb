"""Presets: files in configs/ that options name, such as `--config=openai` and `--agent=codex`."""

from __future__ import annotations

import re
from pathlib import Path

from batch_trajectories.basics.validation import did_you_mean

CONFIGS = Path(__file__).parents[2] / "configs"


def presets(kind: str = "") -> dict[str, Path]:
    """The presets in a folder of configs/, by name. A folder with a `run.yaml` is a preset, too."""
    paths = [*(CONFIGS / kind).glob("*.yaml"), *(CONFIGS / kind).glob("*/run.yaml")]
    names = ((path.parent.name if path.stem == "run" else path.stem, path) for path in paths)
    return dict(sorted(names))


def preset_or_path(value: str, kind: str = "") -> tuple[Path, bool]:
    """The file that `value` names, and whether it is a preset; a slash or a dot makes it a path.

    Raises `ValueError` if neither a preset nor a file of the current directory has this name.
    """
    if not re.fullmatch(r"[\w-]+", value):
        return Path(value), False
    known = presets(kind)
    if value in known:
        return known[value], True
    if Path(value).is_file():
        return Path(value), False
    hint = did_you_mean(value, known) or f"known: {', '.join(known)}, or the path of a file"
    raise ValueError(f"no such preset: {value!r}; {hint}")
