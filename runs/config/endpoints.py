"""The user's own endpoints: a name, a URL, and options for their models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from agent.models.model import Price
from agent.models.resolve import Api, Endpoint, known_at, root_of
from agent.options import PositiveFloat, PositiveInt

_RESERVED = frozenset({"messages", "input", "model", "tools", "stream", "n"})
"""Fields of a request body that only this program may set."""

HOLDS_SECRET: Final = "holds_secret"
"""Type of the error for a value that must not be shown: it may contain a secret."""


def check_url(value: str) -> str:
    """Normalize a base URL. Raises `ValueError` if it is invalid or may contain a secret."""
    if not value.startswith(("http://", "https://")):
        msg = "must start with http:// or https://"
        raise ValueError(msg)
    url = urlsplit(value)
    if not url.hostname or any(c.isspace() for c in value):
        msg = "must name a host and contain no blanks"
        raise ValueError(msg)
    if url.username is not None or url.query:
        msg = "must not have a password or query, which would be written to files; see key_env"
        raise PydanticCustomError(HOLDS_SECRET, msg)
    _ = url.port  # raises ValueError if it is not a port number
    return value.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(check_url)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OF_MODELS = ("temperature", "top_p", "max_tokens", "reasoning_effort", "extra_body")
"""Options of an endpoint that override those of the run and affect the data."""


def _check_extra_body(value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
    if taken := _RESERVED.intersection(value or {}):
        msg = f"{', '.join(sorted(taken))}: not allowed in extra_body; this program sets it"
        raise ValueError(msg)
    return value


ExtraBody = Annotated[dict[str, JsonValue] | None, AfterValidator(_check_extra_body)]
"""An object that is merged into every request body."""


Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PriceConfig(BaseModel):
    """The price of a model in dollars per million tokens; cache prices default to `input`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    input: Dollars
    output: Dollars
    cache_read: Dollars | None = None
    """Input read from the provider's cache."""
    cache_write: Dollars | None = None
    """Input written to it."""

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
    return {name: price.to_price() for name, price in prices.items()}


class EndpointConfig(BaseModel):
    """One entry of `endpoints`. Options that it leaves out are those of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    base_url: BaseUrl
    api: Api | None = None
    """None: that of the known provider with this URL, else openai_chat."""
    key_env: str | None = Field(None, min_length=1)
    """Environment variable with the API key. None: that of the known provider with this URL, else
    no key is sent."""
    provider: str | None = None
    """Id of the provider in the price table, if neither URL nor model name determines it."""
    prices: dict[str, PriceConfig] = {}
    """Prices of its models, by the endpoint's names for them."""
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
        """The options that affect the data, JSON-ready."""
        return {"api": self._api, **{name: getattr(self, name) for name in _OF_MODELS}}

    @property
    def _api(self) -> str:
        known = known_at(self.base_url)
        return self.api or (known.api if known else "openai_chat")
