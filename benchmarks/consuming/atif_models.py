"""Documents of the format atif, checked with the models of the harbor package."""

from __future__ import annotations

import importlib
import json
import sys
import types
from importlib import metadata, util
from pathlib import Path


def main(directory: Path) -> None:
    """Validate every document strictly."""
    model = importlib.import_module("harbor.models.trajectories.trajectory").Trajectory
    count = 0
    for path in sorted((directory / "atif").glob("*.jsonl")):
        with path.open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                model.model_validate(json.loads(line), strict=True)
                count += 1
    print(f"= harbor {metadata.version('harbor')}: {count} documents are valid")


def _without_the_rest() -> None:
    """Make the models importable without what the package imports for its other work."""
    spec = util.find_spec("harbor")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    for name, path in (("harbor", root), ("harbor.models", root / "models")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


if __name__ == "__main__":
    _without_the_rest()
    main(Path(sys.argv[1]))
