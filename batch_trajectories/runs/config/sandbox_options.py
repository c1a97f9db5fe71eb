"""The options of a run about where commands run, what they work on, and how it is judged."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from agent.options import AgentOptions, PositiveFloat, PositiveInt, meaning
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.runs.config.option_types import LocalPath, Names, Place, running
from toolsets.sandbox.base import Engine, Pull, SandboxError, SandboxSettings


class SandboxOptions(AgentOptions):
    """The options of conversations, and those of sandboxes."""

    sandbox: str = meaning(
        "bwrap",
        "Name of the sandbox where commands run (docs/tools.md); local does NOT isolate them.",
    )
    docker_image: str | None = meaning(
        None,
        "Image for rows without one; without --workspace=image it must contain python3.",
    )
    workspace: Literal["directory", "image"] = meaning(
        "directory",
        "Work in an empty directory, or in a directory of each row's image.",
    )
    workdir: str | None = meaning(
        None,
        "With --workspace=image: the workspace of rows without `workdir`; default: the image's.",
    )
    images: Place | None = running(
        None,
        "Directory of images (OCI layouts, archives of `docker save`) or its URL (s3, gs, az), for "
        "--sandbox=bwrap --workspace=image.",
    )
    container_engine: Engine = running(
        "docker", "Program that runs the containers of --sandbox=docker."
    )
    container_runtime: str | None = running(
        None, "OCI runtime of these containers, as runsc (gVisor); default: the engine's."
    )
    pull: Pull = running(
        "never", "With --sandbox=docker: whether images that the engine lacks are pulled."
    )
    row_setup: bool = meaning(
        False,
        "Use each row's columns `files`, `setup`, `cwd` and `check`.",
    )
    check_in: Literal["same", "fresh"] = meaning(
        "same",
        "Where checks run: the workspace as the model left it, or the image with the diff applied.",
    )
    check_network: bool = meaning(
        False,
        "Give the checks of rows that ask for it network access.",
    )
    env_from: Names = meaning(
        (),
        "Variables of this machine that `env` of rows may name as ${NAME}.",
    )
    keep_workspaces: PositiveInt | None = running(
        None,
        "Keep workspaces that have up to so many MB, so that `check` can judge them again.",
    )
    audit: bool = meaning(False, "A run of `check_tasks`: steps in place of conversations.")
    checked_run: LocalPath | None = running(
        None, "A run of `check`: the directory of the run whose conversations are judged."
    )
    only_sound: str | None = running(
        None,
        "Name or directory of an audit (`check_tasks`): use only the rows that it found sound.",
        min_length=1,
    )
    reward: Names = running(
        (),
        "Functions that give rewards: MODULE:FUNCTION or FILE.py:FUNCTION (docs/rewards.md).",
    )
    reward_timeout_s: PositiveFloat = running(60.0, "Time limit of a reward function.")
    command_memory_mb: PositiveInt = meaning(
        2048, "Memory limit of a conversation's commands, per process and in total."
    )
    max_processes: PositiveInt = meaning(512, "Process limit of a conversation's commands.")
    workspace_mb: PositiveInt = meaning(4096, "Size limit of a workspace.")
    network: bool = meaning(False, "Give sandboxed commands network access.")

    @model_validator(mode="after")
    def _has_images(self) -> SandboxOptions:
        if not self.is_inside:
            if self.images is not None or self.workdir is not None:
                name = "workdir" if self.images is None else "images"
                raise ValueError(f"{name}: needs --workspace=image")
            return self
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError("workdir: must be an absolute path")
        return self

    def sandbox_settings(self, image: str | None = None) -> SandboxSettings:
        """What sandboxes are to know, with the image of a row in the place of the run's."""
        return SandboxSettings(
            image=image or self.docker_image,
            engine=self.container_engine,
            runtime=self.container_runtime,
            images=self.images,
            pull=self.pull,
        )

    @property
    def is_inside(self) -> bool:
        """The workspace is a directory of an image."""
        return self.workspace == "image"

    @property
    def uses_images(self) -> bool:
        """Whether commands run in container images, whose programs are not this machine's.

        Raises `ConfigError` for a sandbox that is not installed here, as of a stored run.
        """
        if self.is_inside:
            return True
        from toolsets.sandbox.factory import sandbox_kind  # --help does without sandboxes

        try:
            return sandbox_kind(self.sandbox).needs_image
        except SandboxError as error:
            raise ConfigError(str(error)) from error
