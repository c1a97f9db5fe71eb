"""Record the model calls of programs that others run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing

from batch_trajectories.api.results import write_results
from batch_trajectories.api.start import RunEnd, end_of
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.recording.recording import Listening, open_recording, run_recording
from batch_trajectories.runs.recording.upstream import Models


def record(
    config: RunConfig,
    upstream: str,
    listening: Listening,
    *,
    fresh: bool = False,
    accept_config_change: Collection[str] = (),
    say: Callable[[str], object],
) -> RunEnd:
    """Record until a signal ends it; see the command `record`.

    Raises `RunError`, as `run` does.
    """
    models = Models(config, upstream)
    accepted = tuple(accept_config_change)
    with closing(open_recording(config, models, fresh=fresh, accept_changes=accepted)) as run_dir:
        outcome, scan = run_recording(config, models, run_dir, listening, say=say)
        totals = write_results(run_dir.path, scan, config, last_start=outcome.to_json())
    return end_of(run_dir.path, outcome, totals)
