"""The features of a run that have a folder of their own, and where the engine finds each.

The engine imports no feature. It defines the protocol that it needs (a collector of calls, an
executor, a runner of tasks), and loads what implements it only in runs that ask for it. A new
feature is a folder beside `engine/` and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

FEATURES: Mapping[str, str] = {
    # `check_tasks`: a `TaskRunner` whose tasks are the steps of an audit.
    "audit": "batch_trajectories.audit.runner:AuditRunner",
    # `--only_sound`: a `SoundRowsReader`.
    "only_sound": "batch_trajectories.audit.only_sound",
    # `check RUN`: a `TaskRunner` that judges finished conversations again.
    "recheck": "batch_trajectories.scoring.recheck_runner:RecheckRunner",
    # `export --teacher`: makes the figures that `score --teacher` got.
    "teacher": "batch_trajectories.teacher.figures:TeacherFigures",
    # `--agent`: an `AgentPrograms`, which runs agents that are commands.
    "agent": "batch_trajectories.agents.agent_runner:AgentRunner",
    # `--batch_api`: a `CallCollector` in the parent, a `CollectedCalls` in each worker, and an
    # `EarlierBatches` in every start of a run that has made batches.
    "batch_api": "batch_trajectories.batch_api.service:BatchService",
    "batch_api_calls": "batch_trajectories.batch_api.model:BatchApiClient",
    "batch_api_log": "batch_trajectories.batch_api.batch_log",
    # `--pull=missing` with `--images`: an `ImagesAhead`, which fetches images before their tasks.
    "images_ahead": "batch_trajectories.image_pulls.ahead:ImagesAhead",
    # `--executor=ray`: an `Executor`, and the `SentJournal` of a worker on another machine.
    "ray": "batch_trajectories.ray_cluster.executor:RayExecutor",
    "ray_journal": "batch_trajectories.ray_cluster.remote_journal:RemoteJournal",
}
"""Modules, or "module:attribute", by feature. No plain prompt loads a module of their folders."""


def find_feature(name: str) -> Any:
    """Import what implements a feature: a module, a class or a function."""
    module, _, attribute = FEATURES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found
