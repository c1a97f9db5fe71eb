"""Read the config of a run: a YAML file, flags on top, and a clear error for each mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from agent.options import split_commas
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.option_names import describe_unknown, rename_former
from batch_trajectories.basics.presets import preset_or_path
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import (
    HOLDS_SECRET,
    UNKNOWN_KEY,
    Mistake,
    is_url,
    mistakes_in,
    resolve_function,
)
from batch_trajectories.config.option_types import holds_nul, is_text
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.source import HUB_PREFIX

_INPUT_PATHS = ("dataset_file", "script_file", "prefill_messages")
"""Paths that a config file gives relative to itself."""

ONLY_FLAGS = frozenset(
    {"config", "fresh", "accept_config_change", "dry_run", "pilot", "help", "help_all"}
)
"""Options of `run` and `estimate` that are about one start, so that no config file has them."""


def load_config(config_file: Path | None, flags: Mapping[str, Any]) -> RunConfig:
    """Read `config_file` (YAML, or a preset's name), override it by the flags that are not None,
    and check the result.

    Input paths in the file are relative to the file; those in flags to the current directory.
    Raises `ConfigError` that names the file, the key and what is allowed.
    """
    flags = rename_former({key: value for key, value in flags.items() if value is not None})
    for key, value in flags.items():
        # Python decodes arguments that are not UTF-8 to lone surrogates.
        if not is_text(value):
            raise ConfigError(f"--{key}: not UTF-8 (got {clip(repr(value), max_chars=200)})")
    values = {}
    if config_file is not None:
        try:
            config_file, _ = preset_or_path(str(config_file))
        except ValueError as error:
            raise ConfigError(f"--config: {error}") from error
        values = _read_config(config_file)
    values.update(flags)
    if _is_path(path := values.get("prefill_messages")):
        try:
            values["prefill_messages"] = exact_json.loads(Path(path).read_bytes())
        except (OSError, exact_json.JSONDecodeError) as error:
            raise ConfigError(f"prefill_messages: {path}: cannot read it: {error}") from error
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(mistake, config_file, flags) for mistake in mistakes_in(error)]
        raise ConfigError("\n".join(lines)) from error


def _is_path(value: Any) -> TypeGuard[str]:
    """Whether the value of an input is a path of this machine, not content or a URL."""
    is_elsewhere = ("[", HUB_PREFIX)
    return (
        isinstance(value, str) and not is_url(value) and not value.lstrip().startswith(is_elsewhere)
    )


def read_mapping(path: Path, kind: str) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines; errors call it a `kind`. Raises `ConfigError`."""
    from batch_trajectories.basics.yaml_file import (  # a run without a file needs no YAML
        YamlFileError,
        read_yaml,
    )

    try:
        loaded = read_yaml(path, kind)
    except YamlFileError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a {kind} must have `key: value` lines")
    return {str(key): value for key, value in loaded.items()}


def _read_config(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    for written, value in read_mapping(path, "config file").items():
        key = written.replace("-", "_")
        if key in loaded:
            place = locate_key(path, (key,))
            raise ConfigError(f"{place}: {key}: given twice, once with dashes")
        if holds_nul(value):
            place = locate_key(path, (key,))
            raise ConfigError(f"{place}: {key}: holds the character NUL (U+0000)")
        loaded[key] = value
    loaded = rename_former(loaded)
    for key in _INPUT_PATHS:
        if _is_path(loaded.get(key)):
            loaded[key] = str(path.parent / loaded[key])
    if "tools" in loaded:
        loaded["tools"] = [_resolve_tool(place, path.parent) for place in _to_list(loaded["tools"])]
    if "reward" in loaded:
        loaded["reward"] = [
            resolve_function(one, path.parent) for one in _to_list(loaded["reward"])
        ]
    if "approve" in loaded:
        loaded["approve"] = resolve_function(loaded["approve"], path.parent)
    for key in ("distribution", "rows", "agent"):
        if isinstance(loaded.get(key), str) and loaded[key].endswith((".yaml", ".yml")):
            loaded[key] = str(path.parent / loaded[key])
    if isinstance(agent := loaded.get("agent"), dict):
        from batch_trajectories.config.agents import resolve_programs  # few runs have agents

        loaded["agent"] = resolve_programs(agent, path.parent)
    return loaded


def _to_list(value: Any) -> list[Any]:
    value = split_commas(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _resolve_tool(place: Any, directory: Path) -> Any:
    """Find the file of FILE.py:ATTRIBUTE relative to the config file's directory."""
    file = place.rpartition(":")[0] if isinstance(place, str) else ""
    return str(directory / place) if file.endswith(".py") else place


def locate_key(file: Path, keys: Sequence[str]) -> str:
    """FILE:LINE of the value at these keys in a YAML file; only FILE if the keys are missing."""
    from batch_trajectories.basics.yaml_file import find_line  # which has read this file

    line = find_line(file, keys)
    return str(file) if line is None else f"{file}:{line}"


def _explain(mistake: Mistake, config_file: Path | None, flags: Mapping[str, Any]) -> str:
    if not mistake.keys:
        return mistake.reason
    key, *inside = mistake.keys
    place = f"--{key}"
    if key not in flags and config_file is not None:
        place = f"{locate_key(config_file, mistake.keys)}: {key}"
    if inside:
        place += f", in {'.'.join(inside)}"
    elif mistake.kind == "missing":
        return f"--{key} is missing: {RunConfig.model_fields[key].description}"
    elif mistake.kind == UNKNOWN_KEY and key in ONLY_FLAGS:
        return f"{place}: only on the command line: --{key}"
    elif mistake.kind == UNKNOWN_KEY:
        why = describe_unknown(key, RunConfig.model_fields, "see --help for the known ones")
        return f"{place}: {why}"
    if mistake.kind == HOLDS_SECRET:
        return f"{place}: {mistake.reason}"
    return f"{place}: {mistake.with_value()}"
