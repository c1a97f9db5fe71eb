"""Types of options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from agent.options import split_commas

Resource = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]

RowFlaw = Literal[
    "control_token",
    "unknown_tool",
    "arguments_not_json",
    "arguments_not_object",
    "marker_in_text",
    "marker_in_arguments",
    "marker_in_result",
]
"""Reasons why exports reject rows that some formats can represent."""

AcceptedRows = Annotated[tuple[RowFlaw, ...], BeforeValidator(split_commas)]


def plain_name(value: str) -> str:
    """Return `value` if it is a valid name of a run. Raises `ValueError`."""
    if not value or not all(c.isalnum() or c in "._-" for c in value) or value[0] in ".-":
        msg = "must be letters, digits, '.', '_' and '-' only, starting with a letter, digit or '_'"
        raise ValueError(msg)
    return value


def parse_resources(value: Any) -> Any:
    """Before-validator: turn `num_cpus=1,memory=4e9` (as in flags) or JSON into a mapping."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as error:
            msg = f"not JSON: {error}"
            raise ValueError(msg) from error
    resources = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, sign, amount = part.partition("=")
        if not sign:
            msg = f"{part!r}: give NAME=AMOUNT, such as num_cpus=1"
            raise ValueError(msg)
        resources[name.strip()] = amount.strip()
    return resources
