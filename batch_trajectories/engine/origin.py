"""Whether this user started a run here, or the run directory came from elsewhere.

run.json carries a MAC of its content. The key is below the user's configuration directory, so
whoever writes a run.json elsewhere cannot make one. A run without a MAC that fits, also of an
earlier version of this program, counts as received: its options that run code, or name a variable,
a file, an address or a model, need a flag. Starting or resuming a run takes its options from the
command line, and gives it the MAC.

The MAC covers run.json, not the records: these are data wherever they come from.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.presets import presets
from batch_trajectories.basics.text import clip
from batch_trajectories.config.run_config import RunConfig

log = logging.getLogger(__name__)

MAC = "mac"
"""The key of run.json with the MAC."""

FLAG = "--trust_run"

_KEY_BYTES = 32

ACTIVE = (
    # Code and programs.
    "agent",
    "approve",
    "container_runtime",
    "executor",
    "mcp",
    "reward",
    "sandbox",
    "tools",
    # Variables and files of this machine.
    "checked_run",
    "dataset_file",
    "distribution",
    "env_from",
    "images",
    "key_env",
    "only_sound",
    "output_dir",
    "prefill_messages",
    "rows",
    "script_file",
    # Addresses, what is sent to them, and what is paid there.
    "base_url",
    "check_network",
    "docker_image",
    "enabled_toolsets",
    "endpoints",
    "extra_body",
    "mirror",
    "model",
    "models",
    "network",
    "preparation_toolsets",
    "pull",
    "ray_address",
    "registry",
    "shared_limits",
    "simulated_user",
    "subagents",
    "web_allow",
    "web_search_provider",
    # The value of a budget in dollars.
    "prices",
)
"""Options of a run that run code, or name a variable, a file, an address or a model."""

HARMLESS = (
    # How a conversation goes, and what its model is told.
    "api",
    "awaiting_input",
    "bad_arguments",
    "check_expected",
    "compact_after",
    "completion_tools",
    "continue_cut",
    "disabled_toolsets",
    "ephemeral_system_prompt",
    "expected_attempts",
    "expected_match",
    "final_summary",
    "forks",
    "max_conversation_s",
    "max_cost_usd",
    "max_errors",
    "max_reasks",
    "max_subagent_depth",
    "max_tokens",
    "max_total_tokens",
    "max_turns",
    "observation_chars",
    "parallel_tools",
    "plan",
    "preparation",
    "prompt_caching",
    "reasoning_effort",
    "repair_tool_names",
    "repeat_limit",
    "result_references",
    "state_max_turns",
    "summarize_keep",
    "summarize_over_messages",
    "summarize_over_tokens",
    "system_prompt",
    "temperature",
    "text_protocol",
    "token_ids",
    "top_p",
    # Rows and samples.
    "also_failed",
    "columns",
    "escalate_after",
    "max_samples",
    "model_budgets",
    "num_samples",
    "on_bad_row",
    "run_name",
    "seed",
    "shard",
    "until_passed",
    # Sandboxes and checks, without where they run.
    "audit",
    "check_in",
    "command_memory_mb",
    "command_timeout_s",
    "container_engine",
    "keep_workspaces",
    "max_processes",
    "max_rebuild_s",
    "reward_timeout_s",
    "row_setup",
    "tool_timeout_s",
    "workdir",
    "workspace",
    "workspace_mb",
    # Limits, times and files of the run.
    "accept_rows",
    "attempt_timeout_s",
    "batch_api",
    "batch_max_requests",
    "batch_size",
    "batch_wait_s",
    "call_attempts",
    "call_timeout_s",
    "concurrency",
    "empty_think",
    "grace_s",
    "heartbeat_timeout_s",
    "idle_timeout_s",
    "log_level",
    "max_attempts",
    "max_in_flight",
    "max_run_cost_usd",
    "stop_if",
    "max_run_tokens",
    "num_workers",
    "ray_storage",
    "require_passed",
    "require_reasoning",
    "rpm",
    "start_in_flight",
    "stream_replies",
    "tpm",
    "worker_resources",
)
"""All other options; a test compares both lists with the options that there are."""

_HARMLESS_VALUES: Mapping[str, Collection[Any]] = {
    "sandbox": ("bwrap", "docker"),
    "model": ("scripted",),
}
"""Values of active options, beside their defaults, that do none of this."""

_NETWORK_TOOLSETS = frozenset({"browser", "web"})
"""Toolsets whose tools ask addresses that a model names."""

_MODELS = ("model", "models")
"""Whoever gives one of these says which models are called."""

_MAX_VALUE_CHARS = 100


def compute_mac(content: bytes) -> str | None:
    """The MAC of a run.json that this user writes; None where no key can be kept."""
    key = _key() or _new_key()
    return None if key is None else _mac(key, content)


def is_own(content: bytes, mac: Any) -> bool:
    """Whether this user has written a run.json with this content and MAC."""
    key = _key()
    return key is not None and isinstance(mac, str) and hmac.compare_digest(_mac(key, content), mac)


def harmless_options(config: Mapping[str, Any], *, given: Collection[str] = ()) -> dict[str, Any]:
    """The options of a received run without the active ones.

    `given` are those that the user gives anew: of `model` and `models` only one may be there.
    """
    left_out = {"output_dir", *(name for name in ACTIVE if _is_active(name, config))}
    if not given_models(given).isdisjoint(_MODELS):
        left_out |= {*_MODELS}
    return {name: value for name, value in config.items() if name not in left_out}


def given_models(given: Collection[str]) -> set[str]:
    """The options that the user gives, with both names of the models if one of them is there."""
    return {*given, *(_MODELS if not set(_MODELS).isdisjoint(given) else ())}


def describe_unused(path: Path, config: Mapping[str, Any], *, given: Collection[str]) -> str:
    """Describe the options of a received run that have no effect because they are not `given`
    anew; "" if none."""
    active = _active_options(config, without=given_models(given))
    if not active:
        return ""
    return (
        f"{describe_received(path)}, so these options of its run.json are not used: "
        f"{_describe_values(active)}. Give them yourself, or add {FLAG} to use them"
    )


def describe_trust(path: Path, config: Mapping[str, Any], *, given: Collection[str] = ()) -> str:
    """Describe the options of a received run that a command uses because the user trusts the
    run."""
    active = _active_options(config, without=given_models(given))
    used = _describe_values(active) or "nothing that acts"
    return f"{describe_received(path)}; with {FLAG} it is used: {used}"


def _active_options(config: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The active options of a config that a user has to know of: not where its files went."""
    return {
        name: config[name]
        for name in ACTIVE
        if name != "output_dir" and name not in without and _is_active(name, config)
    }


def describe_received(path: Path) -> str:
    """The beginning of a message about a received run."""
    return (
        f"{path}: this run was not started here by you (if it was, by an earlier version: its own "
        "command marks it as yours)"
    )


def _describe_values(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={clip(exact_json.dumps(value).decode(), max_chars=_MAX_VALUE_CHARS)}"
        for name, value in options.items()
    )


def _is_active(name: str, config: Mapping[str, Any]) -> bool:
    value = config.get(name)
    match name:
        case "enabled_toolsets" | "preparation_toolsets" if isinstance(value, list | tuple):
            return not _NETWORK_TOOLSETS.isdisjoint(map(str, value))
        case "distribution" if isinstance(value, str):
            from toolsets.catalog.distributions import DISTRIBUTIONS

            # Any other name is the path of a file.
            return not _NETWORK_TOOLSETS.isdisjoint(DISTRIBUTIONS.get(value, _NETWORK_TOOLSETS))
        case "rows" if isinstance(value, str):
            return value not in presets("rows")
        case "prefill_messages":
            return isinstance(value, str)  # a path; a run holds the messages
        case "subagents" if isinstance(value, list):
            return not all(map(_is_harmless_agent, value))
        case "simulated_user":
            return value is not None and not _is_harmless_agent(value)
    field = RunConfig.model_fields[name]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    is_default = value is None or value == default or value in ([], {}, "", False)
    return not is_default and value not in _HARMLESS_VALUES.get(name, ())


def _is_harmless_agent(value: Any) -> bool:
    """Whether a subagent or a simulated user names no model to call, and does not use the web."""
    if not isinstance(value, dict):
        return False
    toolsets = value.get("enabled_toolsets") or ()
    return value.get("model") in (None, *_HARMLESS_VALUES["model"]) and (
        isinstance(toolsets, list | tuple) and _NETWORK_TOOLSETS.isdisjoint(map(str, toolsets))
    )


def _mac(key: bytes, content: bytes) -> str:
    return hmac.digest(key, content, "sha256").hex()


def _key_file() -> Path:
    """Raises `RuntimeError` where there is no home directory."""
    home = os.environ.get("XDG_CONFIG_HOME")
    base = Path(home) if home else Path.home() / ".config"
    return base / "batch-trajectories" / "run_key"


def _key() -> bytes | None:
    try:
        key = _key_file().read_bytes()
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _KEY_BYTES else None


def _new_key() -> bytes | None:
    """Make the key, unless another start does so first."""
    try:
        path = _key_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    except (OSError, RuntimeError) as error:
        log.debug("There is no key to sign run.json yet, and a new one is made: %s", error)
    return _key()
