"""What a worker is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.models.scripted import ScriptedTurn
from runs.amounts import Cost, EndpointLimits
from runs.config.run_config import RunConfig
from runs.record import Provenance


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker process is started with. Crosses the process border; holds no secrets."""

    number: int
    parent_pid: int
    run_dir: Path
    config: RunConfig
    api: str
    """The dialect of the run's models, which says what a row's script is."""
    provenance: Provenance
    script: list[ScriptedTurn] | None
    bounds: Mapping[str, EndpointLimits]
    """On the calls of the run to each endpoint."""
    budget: Cost | None
    proven: frozenset[str]
    """The base URLs that have answered already."""
    place: str = ""
    """Names the storage that workspaces are on; "" where it is the run's own directory."""
    is_remote: bool = False
    """It shares no disk with the parent, who keeps its journal and its log."""
    clock_offset_s: float = 0.0
    """What to add to the monotonic clock here for that of the parent's machine."""
