"""The names of the formats: those of the modules in `export/formats/`. No list repeats them."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "formats"

OTHER_NAMES = {"sharegpt": "hermes"}
"""Other names of formats. Trainers call from/value with these roles `sharegpt`, whatever the texts
hold; LLaMA-Factory alone wants roles of its own, which `llamafactory` has."""


def names() -> list[str]:
    """All names, including those of copies, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem != "__init__")


def summaries() -> dict[str, str]:
    """What each format is, by name: the first line of its module, which is not imported."""
    texts = {name: (_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in names()}
    return {name: text.partition("\n")[0].strip('"') for name, text in texts.items()}
