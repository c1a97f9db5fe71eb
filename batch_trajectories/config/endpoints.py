"""Types of options about endpoints: URLs, prices, request bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from agent.models.connection import strip_call_path
from agent.models.model import Price
from batch_trajectories.basics.validation import HOLDS_SECRET

_RESERVED = frozenset({"messages", "input", "model", "tools", "stream", "n"})
"""Fields of a request body that only this program may set."""


def check_url(value: str) -> str:
    """Normalize a base URL. Raises `ValueError` if it is invalid or may contain a secret."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    url = urlsplit(value)
    if not url.hostname or any(c.isspace() for c in value):
        raise ValueError("must name a host and contain no blanks")
    if url.username is not None or url.query or is_secret(url.path):
        raise PydanticCustomError(
            HOLDS_SECRET,
            "must not have a password, key or query, which would be written to files: name the "
            "variable of a key as key_env, and give other parameters as the `query` of an endpoint",
        )
    _ = url.port  # raises ValueError if it is not a port number
    root = value.rstrip("/")
    if (base := strip_call_path(root)) != root:
        raise ValueError(f"must end before {root.removeprefix(base)}: {base}")
    return root


BaseUrl = Annotated[str, AfterValidator(check_url)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _check_extra_body(value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
    if taken := _RESERVED.intersection(value or {}):
        raise ValueError(
            f"{', '.join(sorted(taken))}: not allowed in extra_body; this program sets it"
        )
    if not _is_finite(value):
        raise ValueError("holds a number that JSON cannot represent (.nan or .inf)")
    return value


def _is_finite(value: JsonValue) -> bool:
    match value:
        case float():
            return isfinite(value)
        case dict():
            return all(map(_is_finite, value.values()))
        case list():
            return all(map(_is_finite, value))
    return True


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
    """Input written to the cache."""

    def to_price(self) -> Price:
        """The price in the form of `ModelSettings`."""
        return Price(
            input=self.input,
            output=self.output,
            cache_read=self.input if self.cache_read is None else self.cache_read,
            cache_write=self.input if self.cache_write is None else self.cache_write,
        )


Prices = Mapping[str, PriceConfig]


def to_prices(prices: Prices) -> dict[str, Price]:
    """The prices in the form of `ModelSettings`, by the names that the user gave."""
    return {name: price.to_price() for name, price in prices.items()}


_SECRET_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "credentials",
        "key",
        "passwd",
        "password",
        "pwd",
        "secret",
        "sig",
        "signature",
        "token",
    }
)
"""Words of names whose values are credentials."""

_LOCATION_WORDS = frozenset(
    {
        "endpoint",
        "env",
        "file",
        "header",
        "id",
        "name",
        "path",
        "provider",
        "scope",
        "type",
        "uri",
        "url",
        "variable",
        "vault",
        "version",
    }
)
"""Last words of names that tell where a credential is, such as `token_file`."""

_KEY_START = (
    r"(?:^|[\s=:/\"'])(?:sk-|sk_|pk-|gsk_|xai-|hf_|nvapi-|csk-|fw_|ghp_|github_pat_|glpat-|AIza|ya29\."
    r"|AKIA|ASIA|ABSK|eyJ[A-Za-z0-9_-]{10,}\.|Bearer\s+\S|Basic\s+\S)"
)
"""Beginnings of known providers' keys, of a JSON web token, and the two usual schemes."""

_LONG_WORD = r"[A-Za-z0-9+/_]{28,}"


def is_secret_name(name: str) -> bool:
    """Whether a value with this name is a credential, such as `api-key` or `aws_secret_key`."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower())
    return words[-1] not in _LOCATION_WORDS and not _SECRET_WORDS.isdisjoint(words)


def is_secret(value: str) -> bool:
    """Whether a text looks like a credential: it begins like one, or is long and random."""
    if re.search(_KEY_START, value):
        return True
    return any(
        re.search(r"\d", word) and re.search(r"[a-z]", word) and re.search(r"[A-Z]", word)
        for word in re.findall(_LONG_WORD, value)
    )


# Costs, and the limits of an endpoint: values that parent and workers share.


class Cost(msgspec.Struct, frozen=True):
    """Dollars and tokens; a unit without a budget stays 0."""

    usd: float = 0.0
    tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.usd + other.usd, self.tokens + other.tokens)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.usd - other.usd, self.tokens - other.tokens)

    def covers(self, other: Cost) -> bool:
        """Whether this is enough to pay `other`."""
        return self.usd >= other.usd and self.tokens >= other.tokens

    def to_json(self) -> list[float]:
        """The amounts as a list, for a message between processes."""
        return [self.usd, self.tokens]


class EndpointLimits(NamedTuple):
    """The user's limits on calls to one endpoint."""

    start: int
    """Initial limit on calls in flight."""
    ceiling: int
    """Maximum of that limit."""
    rpm: float | None
    """Requests per minute."""
    tpm: float | None
    """Tokens per minute, in and out."""
