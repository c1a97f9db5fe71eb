"""The models of a conversation in a worker: they wait until earlier replies are on disk, and make
no call once the worker is stopping."""

from __future__ import annotations

from typing import Protocol

from agent.models.model import Completion, Model, Request
from agent.state.trajectory import Kept
from batch_trajectories.basics.errors import Stopped


class Stops(Protocol):
    """Whether the worker is stopping, and how a task makes it stop."""

    is_stopping: bool

    def halt(self, message: str) -> None:
        """Stop the whole run with this message."""
        ...

    def say(self, message: str) -> None:
        """Show a message to the user, if no worker has shown it before."""
        ...


class StoppableModel:
    """Makes no call before earlier replies are on disk, or once the worker is stopping."""

    def __init__(self, stops: Stops, model: Model, kept: Kept) -> None:
        self._stops = stops
        self._model = model
        self._kept = kept

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Raises `Stopped`."""
        if self._kept is not None:
            await self._kept()
        if self._stops.is_stopping:
            raise Stopped
        return await self._model.complete(request)
