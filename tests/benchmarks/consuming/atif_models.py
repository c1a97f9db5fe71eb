"""Documents of the format atif, checked with the models of the harbor package."""

from __future__ import annotations

import importlib
import json
import sys
import types
from importlib import metadata, util
from pathlib import Path
from typing import Any


def main(directory: Path) -> None:
    """Validate every document strictly."""
    model = importlib.import_module("harbor.models.trajectories.trajectory").Trajectory
    count = inside = 0
    for path in sorted((directory / "atif").glob("*.jsonl")):
        with path.open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                parsed = model.model_validate(json.loads(line), strict=True)
                count += 1
                inside += _check_references(parsed)
    told = f"{count} documents are valid, with {inside} of subagents in them"
    print(f"= harbor {metadata.version('harbor')}: {told}")


def _check_references(document: Any) -> int:
    """Exit unless every reference to a subagent leads to one; gives how many there are inside."""
    inside = document.subagent_trajectories or []
    known = {one.trajectory_id for one in inside}
    for step in document.steps:
        for result in step.observation.results if step.observation else ():
            for reference in result.subagent_trajectory_ref or ():
                if reference.trajectory_id not in known:
                    sys.exit(f"{document.trajectory_id}: no {reference.trajectory_id} in it")
    return len(inside) + sum(map(_check_references, inside))


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
