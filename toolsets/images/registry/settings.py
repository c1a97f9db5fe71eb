"""The option `--registry`: mirrors, and limits on downloads and disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from toolsets.images.registry.names import check_registry


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address such as https://mirror.example or http://host:5000")
    if parts.username or parts.password:
        raise ValueError(
            "must hold no user or password; log in with `docker login`, whose file is read"
        )
    if parts.query or parts.fragment:
        raise ValueError("must have no `?` and no `#`")
    return value.rstrip("/")


Host = Annotated[str, AfterValidator(check_registry)]
Address = Annotated[str, AfterValidator(_check_address)]


class RegistrySettings(BaseModel):
    """The settings for fetching images from registries."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mirrors: Mapping[Host, Annotated[tuple[Address, ...], BeforeValidator(_as_list)]] = Field(
        default_factory=dict
    )
    """Addresses that are asked before a registry, by the registry's host, such as `docker.io`. A
    path in an address precedes the names of repositories."""
    parallel: Annotated[int, Field(ge=1, le=64)] = 6
    """Maximum number of layers that all processes with one directory of images download at a
    time."""
    max_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum size of all fetched layers in gigabytes; None: as much as the disk has."""
