"""Generate tool-using agent trajectories in bulk, as training data.

`from batch_trajectories import RunConfig, run, open_run, AIAgent`; docs/api.md describes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_trajectories.api.ai_agent import AIAgent
    from batch_trajectories.api.start import RunEnd, run
    from batch_trajectories.api.stored_run import StoredRun, open_run
    from batch_trajectories.basics.errors import RunError, RunLocked
    from batch_trajectories.config.run_config import RunConfig

__all__ = [
    "AIAgent",
    "RunConfig",
    "RunEnd",
    "RunError",
    "RunLocked",
    "StoredRun",
    "open_run",
    "run",
]

_PLACES = {
    "AIAgent": "batch_trajectories.api.ai_agent",
    "RunConfig": "batch_trajectories.config.run_config",
    "RunEnd": "batch_trajectories.api.start",
    "RunError": "batch_trajectories.basics.errors",
    "RunLocked": "batch_trajectories.basics.errors",
    "StoredRun": "batch_trajectories.api.stored_run",
    "open_run": "batch_trajectories.api.stored_run",
    "run": "batch_trajectories.api.start",
}


def __getattr__(name: str) -> Any:
    """Load public names when a script imports them: commands need few of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
