"""The names of the formats, which are the names of the modules in `export/formats/`."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "formats"

OTHER_NAMES = {"sharegpt": "hermes"}
"""Other names of formats. Trainers call rows with the keys from and value `sharegpt`, whatever the
texts hold. LLaMA-Factory needs other roles, which the format `llamafactory` has."""


def format_names() -> list[str]:
    """Names of formats and kinds of copies, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem != "__init__")


def format_summaries() -> dict[str, str]:
    """The first line of each format's module, by name; imports no module."""
    texts = {name: (_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in format_names()}
    return {name: text.partition("\n")[0].strip('"') for name, text in texts.items()}
