"""An endpoint that the config of a run gives a name: where it is, and what holds for it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from agent.models.model import Price
from agent.models.resolve import Api, Endpoint, known_at, root_of
from agent.options import PositiveFloat, PositiveInt

_OURS = frozenset({"messages", "input", "model", "tools", "stream", "n"})
"""Without what these say of a request, its reply could not be read, or would be that to another."""

HOLDS_SECRET: Final = "holds_secret"
"""Type of the error for a value that may hold a secret, and so is not to be shown."""


def check_url(value: str) -> str:
    """A base URL in one form; raises `ValueError` for one that may not be written into files."""
    if not value.startswith(("http://", "https://")):
        msg = "must start with http:// or https://"
        raise ValueError(msg)
    url = urlsplit(value)
    if not url.hostname or any(c.isspace() for c in value):
        msg = "must name a host, and hold no blanks"
        raise ValueError(msg)
    if url.username is not None or url.query:
        msg = "must hold no password and no query, which would be written into files; see key_env"
        raise PydanticCustomError(HOLDS_SECRET, msg)
    _ = url.port  # raises where that is no port
    return value.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(check_url)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OF_MODELS = ("temperature", "top_p", "max_tokens", "reasoning_effort", "extra_body")
"""What its models are asked with, in place of what the run says: part of what the data is."""


def _keeps_the_request(value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
    if taken := _OURS.intersection(value or {}):
        msg = f"{', '.join(sorted(taken))}: not in extra_body, for the program itself decides that"
        raise ValueError(msg)
    return value


ExtraBody = Annotated[dict[str, JsonValue] | None, AfterValidator(_keeps_the_request)]
"""What is merged into every request body."""


Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PriceConfig(BaseModel):
    """What a model costs, in dollars per million tokens; what is left out costs as `input` does."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    input: Dollars
    output: Dollars
    cache_read: Dollars | None = None
    """Input that came from the provider's cache."""
    cache_write: Dollars | None = None
    """Input that was written into it."""

    def to_price(self) -> Price:
        """For `ModelSettings`."""
        return Price(
            self.input,
            self.output,
            self.input if self.cache_read is None else self.cache_read,
            self.input if self.cache_write is None else self.cache_write,
        )


Prices = Mapping[str, PriceConfig]


def to_prices(prices: Prices) -> dict[str, Price]:
    """For `ModelSettings`, by the names that the user gave."""
    return {name: one.to_price() for name, one in prices.items()}


class EndpointConfig(BaseModel):
    """One entry of `endpoints`. What it does not say is as the run says."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    base_url: BaseUrl
    api: Api | None = None
    """None: that of the provider whose URL it is, of those that are known, else openai_chat."""
    key_env: str | None = Field(None, min_length=1)
    """Environment variable that holds the API key. None: a known provider's own at its URL, and
    elsewhere "none", for no key leaves unasked."""
    provider: str | None = None
    """Id of the provider in the price table, where neither URL nor the model's name tells."""
    prices: dict[str, PriceConfig] = {}
    """What its models cost, by the names that it knows them by."""
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: PositiveInt | None = None
    reasoning_effort: Effort | None = None
    extra_body: ExtraBody = None
    max_in_flight: PositiveInt | None = None
    rpm: PositiveFloat | None = None
    tpm: PositiveFloat | None = None

    @property
    def key(self) -> str:
        """See `ModelSettings.endpoint`."""
        _, base_url, key_env, _, _ = self.to_endpoint()
        return f"{base_url} {key_env}"

    def to_endpoint(self) -> Endpoint:
        """For `resolve_model`."""
        known = known_at(self.base_url)
        options = {name: value for name in _OF_MODELS if (value := getattr(self, name)) is not None}
        if self.prices:
            options["endpoint_prices"] = to_prices(self.prices)
        return Endpoint(
            self._api,
            root_of(self.base_url, self._api),
            self.key_env or (known.key_env if known else "none"),
            self.provider or (known.provider if known else None),
            options,
        )

    def meaning(self) -> dict[str, Any]:
        """What of it decides what the data is, JSON-ready."""
        return {"api": self._api, **{name: getattr(self, name) for name in _OF_MODELS}}

    @property
    def _api(self) -> str:
        known = known_at(self.base_url)
        return self.api or (known.api if known else "openai_chat")
