"""The models of one process, each opened once in the running event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.models.model import ModelSettings
from batch_trajectories.basics.closing import close_all

if TYPE_CHECKING:
    from agent.models.admission import CallAdmission
    from agent.models.client.fleet import Fleet
    from agent.models.client.key_command import RenewableKey
    from agent.models.client.retrying import Retry, RetryingModel
    from agent.models.connection import Share

    KeyOf = Callable[[ModelSettings], str | RenewableKey]
    OnRetry = Callable[[ModelSettings, Retry], None]


class ModelPool:
    """Opens models when they are first asked for, and closes them all."""

    def __init__(
        self,
        *,
        key_of: KeyOf,
        on_retry: OnRetry,
        admission_of: Callable[[ModelSettings], CallAdmission | None] = lambda settings: None,
        say: Callable[[str], None] | None = None,
        share: Share | None = None,
    ) -> None:
        """Open no model yet.

        `key_of` gives the API key for a model's endpoint, and `admission_of` the admission of its
        calls (None: they need not wait). `on_retry` gets every failure after which a call is
        repeated. See `open_model` for `say` and `share`.
        """
        self._say, self._share = say, share
        self._fleets: dict[str, Fleet] = {}
        self._key_of = key_of
        self._on_retry = on_retry
        self._admission_of = admission_of
        self._open: dict[ModelSettings, RetryingModel] = {}

    def get(self, settings: ModelSettings) -> RetryingModel:
        """Open the model of these settings, or return it if it is open."""
        if (model := self._open.get(settings)) is None:
            from agent.models.client.endpoint import open_model  # the client and a dialect

            model = self._open[settings] = open_model(
                settings,
                api_key=self._key_of(settings),
                on_retry=lambda retry: self._on_retry(settings, retry),
                gate=self._admission_of(settings),
                say=self._say,
                share=self._share,
                fleets=self._fleets,
            )
        return model

    async def close(self) -> None:
        """Release all connections."""
        await close_all(*(model.close for model in self._open.values()))
