"""Whether this user started a run here, or the run directory came from elsewhere.

run.json carries a MAC of its content. The key is below the user's configuration directory, so
whoever writes a run.json elsewhere cannot make one. A run without a MAC that fits, also of an
earlier version of this program, counts as received: its options that run code, or name a variable
or an address, need a flag. Starting or resuming a run takes its options from the command line, and
gives it the MAC.

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
from batch_trajectories.basics.text import clip
from batch_trajectories.basics.validation import is_url
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.source import HUB_PREFIX

log = logging.getLogger(__name__)

MAC = "mac"
"""The key of run.json with the MAC."""

FLAG = "--trust_run"

_KEY_BYTES = 32

_ACTIVE = (
    # Code and programs.
    "agent",
    "approve",
    "container_runtime",
    "mcp",
    "reward",
    "sandbox",
    "tools",
    # Variables and files of this machine.
    "env_from",
    "key_env",
    "prefill_messages",
    # Addresses, and what is sent to them.
    "base_url",
    "check_network",
    "dataset_file",
    "docker_image",
    "endpoints",
    "extra_body",
    "images",
    "mirror",
    "network",
    "pull",
    "ray_address",
    "shared_limits",
    "web_allow",
    # The value of a budget in dollars.
    "prices",
)
"""Options of a run that run code, or name a variable or an address."""

_HARMLESS = {"sandbox": ("bwrap", "docker")}
"""Values of such options, beside their defaults, that do none of this."""

_SHOWN = 100


def mac_of(content: bytes) -> str | None:
    """The MAC of a run.json that this user writes; None where no key can be kept."""
    key = _key() or _new_key()
    return None if key is None else _mac(key, content)


def is_own(content: bytes, mac: Any) -> bool:
    """Whether this user has written a run.json with this content and MAC."""
    key = _key()
    return key is not None and isinstance(mac, str) and hmac.compare_digest(_mac(key, content), mac)


def harmless_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a received run without those that run code, or name a variable, an address or
    where to write."""
    left_out = {"output_dir", *(name for name in _ACTIVE if _is_active(name, config))}
    return {name: value for name, value in config.items() if name not in left_out}


def describe_unused(path: Path, config: Mapping[str, Any], *, given: Collection[str]) -> str:
    """Which of its options a received run has in vain, as they are not `given` anew; "" if none."""
    active = {
        name: config[name] for name in _ACTIVE if name not in given and _is_active(name, config)
    }
    if not active:
        return ""
    return (
        f"{received(path)}, so these options of its run.json are not used: {_described(active)}. "
        f"Give them yourself, or add {FLAG} to use them"
    )


def describe_trust(path: Path, config: Mapping[str, Any]) -> str:
    """What a command uses of a received run that the user trusts, for a message."""
    active = {name: config[name] for name in _ACTIVE if _is_active(name, config)}
    return f"{received(path)}; with {FLAG} it is used: {_described(active) or 'nothing that acts'}"


def received(path: Path) -> str:
    """The beginning of a message about a received run."""
    return (
        f"{path}: this run was not started here by you (if it was, by an earlier version: its own "
        "command marks it as yours)"
    )


def _described(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={clip(exact_json.dumps(value).decode(), max_chars=_SHOWN)}"
        for name, value in options.items()
    )


def _is_active(name: str, config: Mapping[str, Any]) -> bool:
    value = config.get(name)
    if name == "dataset_file":
        return isinstance(value, str) and (is_url(value) or value.startswith(HUB_PREFIX))
    if name == "prefill_messages":
        return isinstance(value, str)  # a path; a run holds the messages
    default = RunConfig.model_fields[name].get_default(call_default_factory=True)
    is_default = value is None or value == default or value in ([], {}, False)
    return not is_default and value not in _HARMLESS.get(name, ())


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
        log.debug("no key for run.json: %s", error)
    return _key()
