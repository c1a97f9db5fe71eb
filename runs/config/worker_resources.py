"""What a worker needs of a cluster's node."""

from __future__ import annotations

from typing import Any

import orjson


def parse_resources(value: Any) -> Any:
    """Before-validator: `num_cpus=1,memory=4e9`, as flags give it, or JSON, becomes a mapping."""
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
