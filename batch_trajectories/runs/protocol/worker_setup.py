"""The settings that a worker starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.models.scripted import ScriptedTurn
from batch_trajectories.runs.config.amounts import Cost, EndpointLimits
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.protocol.record import Provenance


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The settings of a worker, sent to its process. Contains no secrets."""

    number: int
    parent_pid: int
    run_dir: Path
    config: RunConfig
    api: str
    """The dialect of the run's models."""
    provenance: Provenance
    script: list[ScriptedTurn] | None
    limits: Mapping[str, EndpointLimits]
    """The run's limits on calls, by endpoint."""
    budget: Cost | None
    proven: frozenset[str]
    """Base URLs that have answered before."""
    images: Mapping[str, str] = field(default_factory=dict)
    """The digests of images that finished conversations used, by reference."""
    place: str = ""
    """Names the storage with the workspaces; "" for the run directory."""
    is_remote: bool = False
    """It shares no disk with the parent, which keeps its journal and log."""
    clock_offset_s: float = 0.0
    """Add this to the local monotonic clock to get that of the parent's machine."""
