"""Open a model for calls: its endpoint, with retries around it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from agent.models.admission import CallAdmission
from agent.models.bodies.dialect import RELAYED, dialect_of
from agent.models.client.endpoint import EndpointModel
from agent.models.client.key_command import RenewableKey
from agent.models.client.retrying import Retry, RetryingModel
from agent.models.connection import Share
from agent.models.endpoint_words import load_words
from agent.models.model import ModelSettings

if TYPE_CHECKING:
    from agent.models.client.fleet import Fleet


def load_client(settings: ModelSettings) -> None:
    """Import what `open_model` and its calls need, so that processes that are forked share it."""
    if settings.api in RELAYED:
        dialect_of(settings.api)
        load_words()


def open_model(
    settings: ModelSettings,
    *,
    api_key: str | RenewableKey,
    on_retry: Callable[[Retry], None],
    gate: CallAdmission | None = None,
    say: Callable[[str], None] | None = None,
    share: Share | None = None,
    fleets: MutableMapping[str, Fleet] | None = None,
) -> RetryingModel:
    """A model ready to be asked, in the running event loop; see `RetryingModel`.

    `say` shows a message to the user, if no other process has shown it; None: to the log. `share`
    is the part of this process in a run of several. `fleets` has the replicas of endpoints that
    several models share, and gets new ones.
    """
    adapter = EndpointModel(settings, api_key, say, share, fleets)
    known = api_key if isinstance(api_key, str) else ""
    return RetryingModel(adapter, settings, api_key=known, on_retry=on_retry, gate=gate)
