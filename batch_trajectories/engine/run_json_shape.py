"""The shape of run.json: which types its parts have that commands use as they are.

A run directory may come from somebody else, or be damaged. Whatever is wrong with its run.json is
said in a sentence that names the part, before anything is computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LATEST_S = 253_402_300_799
"""Epoch seconds of the end of the year 9999, the last that calendars here can show."""

_NONE = type(None)

_SHAPE: Mapping[tuple[str, ...], tuple[type, ...]] = {
    ("api",): (str,),
    ("created",): (float, int),
    ("meaning",): (dict,),
    ("meaning", "distribution"): (dict, _NONE),
    ("meaning", "endpoints"): (dict,),
    ("config",): (dict,),
    ("dataset",): (dict,),
    ("dataset", "path"): (str,),
    ("dataset", "rows"): (int,),
    ("dataset", "bad_rows"): (int,),
    ("dataset", "sha256"): (str,),
    ("dataset", "source"): (dict, _NONE),
    ("dataset", "toolsets"): (list, _NONE),
    ("history",): (list,),
    ("versions",): (dict,),
    ("images",): (dict,),
    ("digest",): (str,),
    ("run_name",): (str,),
    **{
        ("config", name): types
        for name, types in {
            "accept_rows": (list,),
            "agent": (dict, str, _NONE),
            "base_url": (str, _NONE),
            "dataset_file": (str,),
            "empty_think": (str,),
            "max_attempts": (int,),
            "mcp": (dict, str, _NONE),
            "model": (str, _NONE),
            "models": (dict, list, str, _NONE),
            "num_samples": (int,),
            "run_name": (str,),
            "shard": (str, _NONE),
            "until_passed": (int, _NONE),
        }.items()
    },
}
"""The types of parts by their keys, including parts that runs of earlier versions lack."""

_NEEDED = (
    ("api",),
    ("created",),
    ("meaning",),
    ("config",),
    ("dataset",),
    ("history",),
    ("dataset", "path"),
    ("dataset", "rows"),
    ("dataset", "bad_rows"),
    ("dataset", "sha256"),
    ("config", "num_samples"),
    ("config", "run_name"),
    ("config", "dataset_file"),
)

_NOT_NEGATIVE = (
    ("created",),
    ("dataset", "rows"),
    ("dataset", "bad_rows"),
    ("config", "num_samples"),
    ("config", "max_attempts"),
)

_MAX_TASKS = 1 << 40
"""Highest number of rows or samples; more than any disk holds."""


def find_faults(run: Mapping[str, Any]) -> list[str]:
    """The parts of a run.json that are missing or of a wrong type, by dotted keys."""
    faults = []
    for keys, types in _SHAPE.items():
        holder: Any = run
        for key in keys[:-1]:
            holder = holder.get(key) if isinstance(holder, Mapping) else None
        if not isinstance(holder, Mapping):
            continue  # named by itself
        if keys[-1] not in holder:
            if keys in _NEEDED:
                faults.append(".".join(keys))
        elif not _has_shape(holder[keys[-1]], types, keys):
            faults.append(".".join(keys))
    if not faults:
        faults += _faults_inside(run)
    return faults


def _has_shape(value: Any, types: tuple[type, ...], keys: tuple[str, ...]) -> bool:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return False
    if keys not in _NOT_NEGATIVE:
        return True
    number: Any = value
    return bool(0 <= number <= (_LATEST_S if keys == ("created",) else _MAX_TASKS))


def _faults_inside(run: Mapping[str, Any]) -> list[str]:
    faults = [
        f"history[{n}]"
        for n, entry in enumerate(run["history"])
        if not isinstance(entry, dict)
        or not isinstance(entry.get("changes", {}), dict)
        or not _is_time(entry.get("at", 0))
    ]
    images = run.get("images", {})
    if not all(isinstance(digest, str) for digest in images.values()):
        faults.append("images")
    shard = run["config"].get("shard")
    if shard is not None and not re.fullmatch(r"\d{1,9}/\d{1,9}", shard):
        faults.append("config.shard")
    return faults


def _is_time(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _LATEST_S
