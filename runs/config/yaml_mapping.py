"""Reads YAML files of `key: value` lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from runs.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys in a mapping; YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Later, keys of merged mappings (`<<`) are among those of the file.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"duplicate key {key.value!r}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def read_mapping(path: Path, kind: str) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines; errors call it a `kind`. Raises `ConfigError`."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        msg = f"{path}: cannot read this {kind}: {reason}"
        raise ConfigError(msg) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        msg = f"{path}{place}: not YAML: {error.problem}"
        raise ConfigError(msg) from error
    except yaml.YAMLError as error:
        msg = f"{path}: not YAML: {error}"
        raise ConfigError(msg) from error
    except RecursionError as error:
        msg = f"{path}: cannot read this {kind}: nested too deeply"
        raise ConfigError(msg) from error
    if not isinstance(loaded, dict):
        msg = f"{path}: a {kind} must have `key: value` lines"
        raise ConfigError(msg)
    return {str(key): value for key, value in loaded.items()}
