"""An entry of `endpoints`: its URL, its credentials, and options for its models.

Imported only where a config has endpoints, so that `--help` need not wait for it.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from agent.models.connection import (
    DIRECT,
    HEALTH_PATH,
    KEY_REFRESH_S,
    Connection,
    Replication,
    find_proxy,
)
from agent.models.model import ModelSettings, endpoint_id
from agent.models.providers import CLIENTS, NO_KEY, PROVIDERS, Api, Provider, find_provider
from agent.models.resolve import Endpoint, complete_base_url, provider_fields
from agent.options import Float, PositiveFloat, PositiveInt
from batch_trajectories.basics.validation import HOLDS_SECRET, did_you_mean
from batch_trajectories.config.endpoints import (
    BaseUrl,
    Effort,
    ExtraBody,
    PriceConfig,
    is_secret,
    is_secret_name,
    to_prices,
)

NO_ID = "none"
"""The value of `session_header` with which no request names its conversation."""

_REPLICA_OPTIONS = ("health_path", "replica_max_in_flight", "replica_rpm")
"""Options of an endpoint of several replicas."""

_MODEL_OPTIONS = ("temperature", "top_p", "max_tokens", "reasoning_effort", "extra_body")
"""Options of an endpoint that override those of the run and affect the data."""


def _check_proxy(value: str) -> str:
    if value == DIRECT:
        return value
    if urlsplit(value).username is not None:
        raise PydanticCustomError(
            HOLDS_SECRET,
            "must hold no password, which would be written into files; give such a proxy as "
            "HTTPS_PROXY in the environment",
        )
    find_proxy("http://localhost", value)  # raises where that is no HTTP proxy
    return value


def _refuse_secrets(where: str, advice: str) -> AfterValidator:
    """Refuses names and values that look like credentials."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        for name, value in values.items():
            if is_secret_name(name) or is_secret(str(value)):
                msg = f"{where} {name!r} seems to hold a secret, and a config is written into files"
                raise PydanticCustomError(
                    HOLDS_SECRET,
                    "{msg}: {advice}",
                    {"msg": msg, "advice": advice.replace("NAME", name)},
                )
        return values

    return AfterValidator(check)


_BODY_HEADERS = {"connection", "content-encoding", "content-length", "transfer-encoding"}
"""Headers that would make a request unreadable if they did not fit it."""


_CREDENTIAL_HEADERS = {"authorization", "api-key", "x-api-key", "host", "content-type", "accept"}


def _check_header_names(headers: dict[str, str]) -> dict[str, str]:
    if bad := [name for name in headers if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name)]:
        raise ValueError(f"{bad[0]!r} cannot be the name of a header")
    if bad := [name for name in headers if name.lower() in _BODY_HEADERS]:
        raise ValueError(f"{bad[0]!r} describes the body of a request; this program sets it")
    if bad := [
        value for value in headers.values() if not (value.isascii() and value.isprintable())
    ]:
        raise ValueError(f"{bad[0]!r} cannot be the value of a header")
    return headers


def _check_session_header(name: str) -> str:
    _check_header_names({name: ""})
    if name.lower() in _CREDENTIAL_HEADERS:
        raise ValueError(f"{name!r} is the header of a key; choose one that a router reads")
    return name


def _none_for_false(value: Any) -> Any:
    return NO_ID if value is False else value  # YAML reads `off` and `no` as false


def _split_command(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    if any(map(is_secret, command)):
        raise PydanticCustomError(
            HOLDS_SECRET,
            "seems to hold a secret, and a config is written into files; read it from a variable",
        )
    return command


def _check_client(value: str) -> str:
    if value not in CLIENTS and not re.fullmatch(r".+:\w+", value):
        hint = did_you_mean(value, CLIENTS)
        raise ValueError(
            f"must be {', '.join(CLIENTS)} or MODULE:FUNCTION{f'; {hint}' if hint else ''}"
        )
    return value


_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_VARIABLE_ADVICE = "name the variable that holds it, as headers_env: {NAME: VARIABLE}"
Headers = Annotated[
    dict[str, str], AfterValidator(_check_header_names), _refuse_secrets("header", _VARIABLE_ADVICE)
]
HeadersEnv = Annotated[dict[str, _Variable], AfterValidator(_check_header_names)]
Query = Annotated[
    dict[str, str],
    _refuse_secrets("parameter", "send it as a header, whose variable headers_env names"),
]
Command = Annotated[
    tuple[str, ...], BeforeValidator(_split_command), AfterValidator(_check_command)
]
SessionHeader = Annotated[
    str, BeforeValidator(_none_for_false), AfterValidator(_check_session_header)
]
ClientOptions = Annotated[
    dict[str, str | int | float | bool],
    _refuse_secrets("argument", "set the variable that the client reads, or key_env"),
]


class EndpointConfig(BaseModel):
    """One entry of `endpoints`. Options that it leaves out are those of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    base_url: BaseUrl | None = None
    """The base URL; None only with `client`, which knows it, and with `base_urls`."""
    base_urls: tuple[BaseUrl, ...] = ()
    """URLs of several replicas with the same models, without a router, instead of `base_url`."""
    health_path: str = Field(HEALTH_PATH, pattern=r"^(/\S*|none)$")
    """Path of the health check of each of `base_urls`, from its root; "none": no health check."""
    replica_max_in_flight: PositiveInt | None = None
    """The most calls at once at each of `base_urls`; `max_in_flight` limits all together."""
    replica_rpm: PositiveFloat | None = None
    api: Api | None = None
    """The API; None: that of the known provider with this URL, else openai_chat."""
    key_env: str | None = Field(
        None, min_length=1, validation_alias=AliasChoices("key_env", "api_key_env")
    )
    """Environment variable that holds the API key. None: a known provider's own at its URL, and
    elsewhere "none": no key is sent unless it is named."""
    headers: Headers = {}
    """Headers of every request, such as {anthropic-beta: ...}; no secrets."""
    headers_env: HeadersEnv = {}
    """Headers, each with the environment variable that holds its value. With them and without
    `key_env`, no other credentials are sent."""
    session_header: SessionHeader | None = None
    """The header in which each request has the id of its conversation, or "none" to send no id.
    None: those that the provider reads; see `agent.models.providers`."""
    query: Query = {}
    """Parameters of every URL, such as {api-version: ...}; no secrets."""
    key_command: Command = ()
    """A program that prints the key; run at the start, after `key_refresh_s`, and after a 401."""
    key_refresh_s: PositiveFloat = KEY_REFRESH_S
    proxy: Annotated[str, AfterValidator(_check_proxy)] | None = None
    """An HTTP proxy in place of the environment's, or "none"."""
    client: Annotated[str, AfterValidator(_check_client)] | None = None
    """azure, bedrock, vertex, foundry, or MODULE:FUNCTION, which returns a client of the openai or
    anthropic package: its URL and credentials are used."""
    client_options: ClientOptions = {}
    """Arguments for that client; no secrets."""
    provider: str | None = None
    """Id of the provider in the price table, if neither URL nor model name determines it."""
    prices: dict[str, PriceConfig] = {}
    """Prices of the endpoint's models, by its names for them."""
    temperature: Float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: Float | None = Field(None, gt=0, le=1)
    max_tokens: PositiveInt | None = None
    reasoning_effort: Effort | None = None
    extra_body: ExtraBody = None
    max_in_flight: PositiveInt | None = None
    rpm: PositiveFloat | None = None
    tpm: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_reachable(self) -> EndpointConfig:
        if self.client is None and self.base_url is None and not self.base_urls:
            raise ValueError("base_url is missing; only an endpoint with `client` needs none")
        if self.base_urls and (self.base_url is not None or self.client is not None):
            raise ValueError("base_urls: not with base_url or client; give one of them")
        if repeated := [url for url in self.base_urls if self.base_urls.count(url) > 1]:
            raise ValueError(f"base_urls: {repeated[0]} is there twice")
        # A stored config has every field, also those with their defaults.
        fields = type(self).model_fields
        given = [name for name in _REPLICA_OPTIONS if getattr(self, name) != fields[name].default]
        if given and not self.base_urls:
            raise ValueError(f"{given[0]}: only with `base_urls`")
        if self.client is None and self.client_options:
            raise ValueError("client_options: only with `client`")
        if self.client is not None and self.key_command:
            raise ValueError("key_command: not with `client`, which has its own credentials")
        if self.key_command and self.key_env not in (None, NO_KEY):
            raise ValueError("key_command and key_env both say where the key is; give one")
        return self

    def to_endpoint(self) -> Endpoint:
        """The entry in the form of `resolve_model`."""
        known = self.provider_row
        options = {
            name: value for name in _MODEL_OPTIONS if (value := getattr(self, name)) is not None
        }
        if known:
            options |= provider_fields(known)
        if self.session_header == NO_ID:
            options |= {"session_headers": (), "cache_key_apis": ()}
        elif self.session_header is not None:
            options["session_headers"] = (self.session_header,)
        if self.prices:
            options["endpoint_prices"] = to_prices(self.prices)
        replication = None
        if self.base_urls:
            replication = Replication(
                urls=tuple(complete_base_url(url, self._api or "") for url in self.base_urls),
                health_path=self.health_path,
                max_in_flight=self.replica_max_in_flight,
                rpm=self.replica_rpm,
            )
        arguments = dict(self.client_options)
        if self.client is not None and self.base_url is not None:
            arguments["base_url"] = self.base_url
        api = self._api
        has_own = bool(self.headers_env or self.key_command or self.client)
        return Endpoint(
            api=api,
            base_url=complete_base_url(self.url, api) if self.url and api else "",
            key_env=self.key_env or (known.key_env if known and not has_own else NO_KEY),
            provider=self.provider or (known.prices if known else None),
            options=options,
            connection=Connection(
                headers=self.headers,
                headers_env=self.headers_env,
                query=self.query,
                key_command=self.key_command,
                key_refresh_s=self.key_refresh_s,
                proxy=self.proxy,
                client=self.client,
                client_options=arguments,
                replication=replication,
            ),
        )

    def serves(self, settings: ModelSettings) -> bool:
        """Whether calls of a model count against the limits of this entry."""
        endpoint = self.to_endpoint()
        if self.client is not None:
            is_same_client = endpoint.connection == settings.connection
            return is_same_client and endpoint.key_env == settings.key_env
        own_id = endpoint_id(endpoint.base_url, endpoint.key_env, endpoint.connection)
        return own_id == settings.endpoint

    def meaning(self) -> dict[str, Any]:
        """The options that affect the data, JSON-ready."""
        api = self._api or (self.provider_row.api if self.provider_row else None)
        return {"api": api, **{name: getattr(self, name) for name in _MODEL_OPTIONS}}

    @property
    def url(self) -> str | None:
        """The URL by which the endpoint is known; with `base_urls` the first."""
        return self.base_urls[0] if self.base_urls else self.base_url

    @property
    def provider_row(self) -> Provider | None:
        """The known provider of the endpoint; None for a server of the user's own."""
        return PROVIDERS.get(self.client) if self.client else find_provider(self.url or "")

    @property
    def _api(self) -> Api | None:
        if self.api is not None or self.client is not None:
            return self.api
        return self.provider_row.api if self.provider_row else "openai_chat"


_ENTRIES = TypeAdapter(dict[str, EndpointConfig])


def read_endpoints(entries: dict[str, Any]) -> dict[str, EndpointConfig]:
    """The entries of a config by name. Raises `ValidationError`."""
    return _ENTRIES.validate_python(entries)
