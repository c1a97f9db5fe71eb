"""The config of a run as it is published: run.yaml, and what a stranger has to bring himself.

run.yaml holds no option that names code, a program, a variable, a file or a server of the
publisher's machine. Each such option becomes a need, which names it. Who makes the dataset again
gives these options himself, so a received run.yaml never decides what his machine runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml
from pydantic_core import to_jsonable_python

from agent.models.providers import find_provider
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import clip
from batch_trajectories.config.endpoints import is_secret, is_secret_name
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.source import HUB_PREFIX
from batch_trajectories.engine.origin import HARMLESS
from batch_trajectories.export.dataset.recipe_origin import ACTIVE_KEYS
from batch_trajectories.export.rows.recipe import Recipe

CONFIG_FILE = "run.yaml"
RECIPE_FILE = "recipe.yaml"
PROMPTS_FILE = "prompts.jsonl"
SCRIPT_FILE = "script.yaml"
DISTRIBUTION_FILE = "distribution.yaml"

_LOCAL_OPTIONS = frozenset({"ephemeral_system_prompt", "log_level", "run_name"})
"""Harmless options that are not published: they belong to the start, or are a secret."""

KEPT = frozenset(
    {
        "check_network",
        "docker_image",
        "enabled_toolsets",
        "extra_body",
        "model",
        "models",
        "network",
        "prefill_messages",
        "preparation_toolsets",
        "prices",
        "pull",
        "simulated_user",
        "subagents",
        "web_search_provider",
    }
)
"""Options of `engine.origin.ACTIVE` that are published as they are."""

CHECKED = frozenset({"base_url", "dataset_file", "distribution", "sandbox", "script_file"})
"""Options of `engine.origin.ACTIVE` that are published if their value is the same everywhere."""

DROPPED = frozenset(
    {
        "checked_run",  # only of `check`, whose runs are refused
        "executor",
        "key_env",
        "mirror",
        "only_sound",  # the published prompts are what it left
        "output_dir",
        "ray_address",
        "registry",
        "rows",  # likewise; the options that it set are published
        "shared_limits",
    }
)
"""Options that are not published, because a run elsewhere has its own or needs none."""

NEEDED: Mapping[str, str] = {
    "agent": "the agent, a program that is called as a command",
    "approve": "the function that approves calls",
    "container_runtime": "the OCI runtime of the containers",
    "endpoints": "servers of the publisher",
    "env_from": "variables that rows name",
    "images": "a directory with the images of the rows",
    "mcp": "MCP servers, which are programs or addresses",
    "reward": "functions that give rewards",
    "tools": "plug-ins with tools",
    "web_allow": "addresses that web tools may reach",
}
"""Options that are not published but named, with a description of the value."""

_SANDBOXES = ("bwrap", "docker")
"""Sandboxes that isolate commands, and that are part of the program."""


class Need(NamedTuple):
    """Something that a stranger must bring to make the dataset again."""

    name: str
    """The option to give, or the key of the recipe."""
    what: str
    """The description of the value, without anything of the publisher's machine."""


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """The content of run.yaml, the files beside it, and the needs."""

    options: dict[str, Any]
    files: dict[str, Path]
    """Files of this machine to copy, by their name in the publication."""
    needs: list[Need]


def publish_config(config: RunConfig, *, name: str, with_prompts: bool) -> PublishedConfig:
    """Make the published form of the config of a run with this name.

    Exports draw by the name of the run, so the run of a stranger needs the same. Raises
    `ConfigError` for values that look secret.
    """
    stored = config.to_json()
    given = {
        key: value
        for key, value in stored.items()
        if key not in _LOCAL_OPTIONS and _is_given(key, value)
    }
    kept = {key: value for key, value in given.items() if key in (*HARMLESS, *KEPT)}
    options: dict[str, Any] = {"run_name": name, **kept}
    options.pop("columns", None)  # the published prompts have the new names
    _refuse_secrets(options)
    files: dict[str, Path] = {}
    needs = [Need(key, _describe_need(key, stored[key])) for key in NEEDED if key in given]
    if config.ephemeral_system_prompt is not None:
        needs.append(Need("ephemeral_system_prompt", "a system prompt that rows do not hold"))
    if (sandbox := given.get("sandbox")) is not None:
        if sandbox in _SANDBOXES:
            options["sandbox"] = sandbox
        else:
            what = "not isolated" if sandbox == "local" else "a plug-in"
            needs.append(Need("sandbox", f"the sandbox {sandbox!r}, {what}"))
    if config.base_url is not None:
        if find_provider(config.base_url):
            options["base_url"] = config.base_url
        else:
            needs.append(Need("base_url", f"the URL of a server that has {_models(config)}"))
    if config.script_file is not None:
        options["script_file"] = SCRIPT_FILE
        files[SCRIPT_FILE] = config.script_file
    if config.distribution is not None:
        options["distribution"] = config.distribution
        if config.distribution.endswith((".yaml", ".yml")):
            options["distribution"] = DISTRIBUTION_FILE
            files[DISTRIBUTION_FILE] = Path(config.distribution)
    if with_prompts:
        options["dataset_file"] = PROMPTS_FILE
    else:
        needs.append(Need("dataset_file", "the prompts, of which only digests are published"))
    return PublishedConfig(options, files, needs)


def find_foreign_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Describe the options of a received run.yaml that no publication has, one by one."""
    for name, value in options.items():
        match name:
            case "dataset_file" | "script_file":
                is_usual = value == {"dataset_file": PROMPTS_FILE}.get(name, SCRIPT_FILE)
            case "distribution":
                is_usual = isinstance(value, str) and (
                    value == DISTRIBUTION_FILE or not value.endswith((".yaml", ".yml"))
                )
            case "sandbox":
                is_usual = value in _SANDBOXES
            case "base_url":
                is_usual = isinstance(value, str) and find_provider(value) is not None
            case "run_name":
                is_usual = isinstance(value, str)  # a start checks it
            case "prefill_messages" | "subagents":
                is_usual = isinstance(value, list)
            case "simulated_user" | "prices" | "extra_body":
                is_usual = isinstance(value, dict)
            case "models":
                is_usual = isinstance(value, dict | list)
            case _:
                is_usual = name in KEPT or (name in HARMLESS and name not in _LOCAL_OPTIONS)
        if not is_usual:
            yield f"{CONFIG_FILE}: {name}: a publication has no such option; do not start this job"


def describe_acting(options: Mapping[str, Any]) -> str:
    """The options of a run.yaml that decide what is called, paid or reached, as NAME=VALUE."""
    acting = {name: options[name] for name in options if name in (KEPT | CHECKED)}
    acting.pop("dataset_file", None)
    return ", ".join(f"{name}={clip(str(acting[name]), max_chars=200)}" for name in sorted(acting))


def to_yaml(content: Mapping[str, Any]) -> bytes:
    """The content of a YAML file."""
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True).encode()


def publish_recipe(recipe: Recipe) -> tuple[dict[str, Any], list[Need]]:
    """The recipe with names in place of paths, and the files and functions that it needs."""
    stored = recipe.model_dump(mode="json")
    needs: list[Need] = []
    for keys in ACTIVE_KEYS:
        *above, last = keys
        part: Any = stored
        for key in above:
            part = part.get(key) if isinstance(part, dict) else None
        if not isinstance(part, dict) or not part.get(last):
            continue
        name = ".".join(keys)
        values = part[last] if isinstance(part[last], list) else [part[last]]
        published = [_plain_place(value, name, needs) for value in values]
        part[last] = published if isinstance(part[last], list) else published[0]
    return stored, needs


def _plain_place(value: str, name: str, needs: list[Need]) -> str:
    """The name of a file or function without its directory; notes what it is in `needs`."""
    if value.startswith(HUB_PREFIX):
        return value
    plain = PurePath(value).name
    file = Path(value.rpartition(":")[0] if name.endswith("function") else value)
    if file.is_dir():
        file /= "tokenizer.json"
    digest = f", sha256 {sha256(file.read_bytes()).hexdigest()}" if file.is_file() else ""
    needs.append(Need(name, f"{plain}{digest}, in the directory of the work"))
    return plain


def _is_given(name: str, value: Any) -> bool:
    field = RunConfig.model_fields[name]
    if field.is_required():
        return True
    default = to_jsonable_python(field.get_default(call_default_factory=True))
    return bool(value != default)


def _models(config: RunConfig) -> str:
    return ", ".join(config.model_weights())


def _describe_need(name: str, value: Any) -> str:
    """Describe the value of an option without paths, commands and addresses."""
    match value:
        case dict():
            named = sorted(map(str, value)) if name != "agent" else [str(value.get("name"))]
        case list() | tuple():
            named = [PurePath(str(one)).name for one in value]
        case _:
            named = []
    if name in ("images", "web_allow"):
        named = []
    return f"{NEEDED[name]}{': ' if named else ''}{', '.join(named)}"


def _refuse_secrets(options: Mapping[str, Any]) -> None:
    for name in ("extra_body", "simulated_user", "subagents"):
        for place, value in _leaves(options.get(name), name):
            key = place.rpartition(".")[2]
            if isinstance(value, str) and (is_secret_name(key) or is_secret(value)):
                raise ConfigError(
                    f"{place}: looks like a key or password, so the config cannot be published; "
                    "give it to the endpoint as key_env or headers_env, and run again"
                )


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, place)
    else:
        yield place, value
