"""Makes the config of an audit from the config of a run, without model and agent.

It also defines the steps of an audit.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from agent.options import SimulatedUser
from batch_trajectories.config.run_config import RunConfig

# The steps of an audit by the number of the sample: more repetitions only add samples.

Name = Literal["untouched", "reference", "leak", "tamper"]

WAYS = ("conftest", "startup", "path")
"""Ways in which an agent could forge a result: a plugin of pytest, code that each Python runs at
its start, and programs with the names of those that a check calls or runs from the workspace."""


class AuditStep(NamedTuple):
    """The step that one sample of a row carries out."""

    name: Name
    repetition: int = 1
    way: str = ""
    """One of `WAYS` for the step `tamper`; else empty."""


_ONCE = (
    AuditStep("untouched"),
    AuditStep("reference"),
    AuditStep("leak"),
    *(AuditStep("tamper", 1, w) for w in WAYS),
)
_REPEATED: tuple[Name, ...] = ("untouched", "reference")


def audit_step(sample: int) -> AuditStep:
    """The step of a sample; samples are counted from 0."""
    if sample < len(_ONCE):
        return _ONCE[sample]
    repetition, which = divmod(sample - len(_ONCE), len(_REPEATED))
    return AuditStep(_REPEATED[which], repetition + 2)


def samples_per_row(repeats: int) -> int:
    """Samples per row if a check runs `repeats` times with and without the solution."""
    return len(_ONCE) + len(_REPEATED) * (repeats - 1)


SAME_IN_RUNS = (
    "workspace",
    "workdir",
    "docker_image",
    "check_in",
    "check_network",
    "network",
    "check_expected",
    "command_timeout_s",
)
"""Options that a task depends on besides its row. A verdict holds for runs with equal values."""

SHARED_OPTIONS = (
    *SAME_IN_RUNS,
    "dataset_file",
    "columns",
    "rows",
    "run_name",
    "output_dir",
    "max_samples",
    "shard",
    "on_bad_row",
    "seed",
    "sandbox",
    "images",
    "container_engine",
    "pull",
    "registry",
    "env_from",
    "command_memory_mb",
    "max_processes",
    "workspace_mb",
    "batch_size",
    "num_workers",
    "concurrency",
    "executor",
    "ray_address",
    "worker_resources",
    "ray_storage",
    "ray_scratch_dir",
    "grace_s",
    "heartbeat_timeout_s",
    "log_level",
)
"""Options of a run that its audit and `check` take over."""


def make_audit_config(config: RunConfig, *, repeats: int) -> RunConfig:
    """The config of an audit of the tasks of a run; options of conversations have no effect."""
    return make_config_without_model(config, num_samples=samples_per_row(repeats))


def make_config_without_model(config: RunConfig, **changes: Any) -> RunConfig:
    """The config of a run without a model that judges the tasks or conversations of another run."""
    taken = {
        name: getattr(config, name) for name in SHARED_OPTIONS if name in config.model_fields_set
    }
    user = config.simulated_user
    return RunConfig.model_construct(
        **{
            name: taken.get(name, field.get_default(call_default_factory=True))
            for name, field in RunConfig.model_fields.items()
        }
        | {
            "model": "scripted",
            "audit": True,
            "row_setup": True,
            "enabled_toolsets": ("none",),
            # Rows without a prompt can be used as in the run.
            "simulated_user": SimulatedUser(writes_first=True)
            if user is not None and user.writes_first
            else None,
            "max_attempts": 1,  # a repetition is a step of its own
        }
        | changes
    )
