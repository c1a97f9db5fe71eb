"""What other processes do for the server.

    python -m batch_trajectories.view.index.making WHAT RUN

Their memory is gone when they end, and they may fork, as no other thread runs in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from batch_trajectories.basics.errors import RunError, RunLocked, machine_failures_as_stops
from batch_trajectories.view.index.parts import cache_of, extend, origin_of


def rows(run_dir: Path) -> None:
    """Make the index of a run."""
    origin = origin_of(run_dir)
    if origin is not None:
        extend(run_dir, cache_of(run_dir), origin)


def main(what: str, run: str) -> int:
    """Make what is named; the exit code."""
    run_dir = Path(run)
    try:
        with machine_failures_as_stops():
            _MAKES[what](run_dir)
    except RunLocked:
        return 0  # another process makes the same
    except (RunError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


_MAKES = {"rows": rows}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
