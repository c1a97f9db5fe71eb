"""The work that other processes do for the server.

    python -m batch_trajectories.view.index.making WHAT RUN [RUN]

Their memory is gone when they end, and they may fork, as no other thread runs in them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from batch_trajectories.basics.console import show
from batch_trajectories.basics.errors import RunError, RunLocked, stop_on_machine_failure
from batch_trajectories.view.index.parts import extend, find_origin, make_cache

_NICE = 10
"""Whoever looks at what is there already is served first."""


def rows(run_dir: Path) -> None:
    """Make the index of a run."""
    origin = find_origin(run_dir)
    if origin is not None:
        extend(run_dir, make_cache(run_dir), origin)


def texts(run_dir: Path) -> None:
    """Make its text index."""
    from batch_trajectories.view.index.texts import extend_texts

    origin = find_origin(run_dir)
    if origin is not None:
        extend_texts(run_dir, make_cache(run_dir), origin)


def facts(run_dir: Path) -> None:
    """Read the whole run for what is known of it."""
    from batch_trajectories.view.index.facts import make_facts

    make_facts(run_dir, make_cache(run_dir))


def compare_runs(first: Path, second: Path) -> None:
    """Print how two runs differ."""
    from batch_trajectories.view.index.differences import differences

    show(differences(first, second))


def main(what: str, *runs: str) -> int:
    """Make what is named; the exit code."""
    os.nice(_NICE)
    try:
        with stop_on_machine_failure():
            _MAKES[what](*map(Path, runs))
    except RunLocked:
        return 0  # another process makes the same
    except (RunError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


_MAKES: Mapping[str, Callable[..., None]] = {
    "rows": rows,
    "texts": texts,
    "facts": facts,
    "compare": compare_runs,
}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
