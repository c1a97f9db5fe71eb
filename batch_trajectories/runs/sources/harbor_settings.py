"""What task.toml of a Harbor task says, read one setting at a time (schema 1.4)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

_MAX_SIZE = 1e15
_MEGABYTES = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024, "": 1 / (1 << 20)}

_MAIN = "main"
"""The service of a task that is no compose file."""
_PUBLISHED = "/logs/artifacts"

_HEALTH = {
    **{"interval_sec": 5, "timeout_sec": 30, "start_period_sec": 0, "start_interval_sec": 5},
    "retries": 3,
}
"""The numbers of a health check, with their defaults."""

_WAIT = """\
command={command}
limit=
! command -v timeout >/dev/null || limit="timeout {timeout_sec}"
began=$(date +%s)
failed=0
until $limit sh -c "$command" >/dev/null 2>&1; do
    if [ $(($(date +%s) - began)) -lt {start_period_sec:.0f} ]; then
        sleep {start_interval_sec}
        continue
    fi
    failed=$((failed + 1))
    if [ "$failed" -ge {retries} ]; then
        echo "the health check failed $failed times: $command" >&2
        exit 1
    fi
    sleep {interval_sec}
done
"""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_NETWORK_MODES = {"public": True, "no-network": False}


class TaskRefused(Exception):
    """A task cannot run: where, and why."""

    def __init__(self, why: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.keys = keys


def network_of(table: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Whether an environment has a network. Raises `TaskRefused`, as all here do."""
    mode = table.get("network_mode")
    if mode is None:
        return default
    if not isinstance(mode, str) or mode not in _NETWORK_MODES:
        raise TaskRefused(
            f"{mode} is not supported; say public or no-network", (name, "network_mode")
        )
    return _NETWORK_MODES[mode]


def by_old_name(environment: Mapping[str, Any]) -> bool:
    """The same as files of before say it: they have a network unless they refuse it."""
    return environment.get("allow_internet", True) is not False


def limits_of(environment: Mapping[str, Any]) -> dict[str, float]:
    """CPUs; memory and disk in megabytes, under their names of today and of before."""
    limits: dict[str, float] = {}
    if (cpus := environment.get("cpus")) is not None:
        if not isinstance(cpus, int | float) or isinstance(cpus, bool) or not cpus > 0:
            raise TaskRefused(f"{cpus!r} is not a number of CPUs", ("environment", "cpus"))
        limits["cpus"] = cpus
    for name, keys in {
        "memory_mb": ("memory_mb", "memory"),
        "disk_mb": ("storage_mb", "storage"),
    }.items():
        for key in keys:
            if (raw := environment.get(key)) is not None:
                size = _SIZE.fullmatch(str(raw).strip())
                unit = "m" if key.endswith("_mb") else size and size[2].lower()
                if size is None or not 0 < float(size[1]) < _MAX_SIZE:
                    raise TaskRefused(f"{raw!r} is not a size", ("environment", key))
                said = max(1, int(float(size[1]) * _MEGABYTES[unit or ""]))
                if limits.get(name, said) != said:
                    raise TaskRefused(f"{raw!r} is not what `{keys[0]}` says", ("environment", key))
                limits[name] = said
    return limits


def is_separate(verifier: Mapping[str, Any]) -> bool:
    """Whether the verifier has a container of its own."""
    default = "separate" if "environment" in verifier else "shared"
    return bool(verifier.get("environment_mode", default) == "separate")


def network_of_verifier(verifier: Mapping[str, Any], *, default: bool) -> bool:
    """Whether that container has a network; `default` if it is a copy of the task's."""
    if (own := verifier.get("environment")) is None:
        return default
    return network_of(own, "verifier.environment", default=by_old_name(own))


def hooks_of(verifier: Mapping[str, Any], agent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The commands that run in the conversation's container before the check."""
    commands = []
    for hook in _tables(verifier.get("collect"), ("verifier", "collect")):
        if hook.get("service", _MAIN) != _MAIN:
            raise TaskRefused("services of compose are not supported", ("verifier", "collect"))
        if (user := hook.get("user")) is not None and user != agent.get("user"):
            raise TaskRefused(f"another user ({user}) is not supported", ("verifier", "collect"))
        commands.append({"command": hook.get("command"), "timeout_s": hook.get("timeout_sec", 60)})
    return commands


def mcp_servers_of(environment: Mapping[str, Any], *, has_network: bool) -> list[dict[str, Any]]:
    """The MCP servers that the agent is told of; of several with a name the last."""
    keys = ("environment", "mcp_servers")
    servers = {}
    for raw in _tables(environment.get("mcp_servers"), keys):
        name, args = raw.get("name"), raw.get("args", [])
        transport = raw.get("transport", "sse")
        transport = "streamable-http" if transport == "http" else transport
        if not isinstance(name, str) or not name:
            raise TaskRefused("each needs a `name`", keys)
        if raw.get("headers"):
            raise TaskRefused(f"{name}: headers are not supported: no key enters a sandbox", keys)
        if transport == "stdio":
            if not isinstance(raw.get("command"), str) or not raw["command"]:
                raise TaskRefused(f"{name}: stdio needs `command`", keys)
            if not isinstance(args, list) or not all(isinstance(item, str) for item in args):
                raise TaskRefused(f"{name}: `args` must be a list of texts", keys)
            server = {"command": raw["command"], "args": args}
        elif transport in ("sse", "streamable-http"):
            url = raw.get("url")
            host = urlsplit(url).hostname if isinstance(url, str) else None
            if host is None:
                raise TaskRefused(f"{name}: {transport} needs `url`", keys)
            if not has_network and host not in _LOOPBACK:
                raise TaskRefused(f"{name}: {host} needs a network, which the task has not", keys)
            server = {"url": url}
        else:
            raise TaskRefused(f"{name}: the transport {transport!r} is not known", keys)
        servers[name] = {"name": name, "transport": transport, **server}
    return [*servers.values()]


def artifacts_of(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files of the agent's container that a task keeps; where they go on the host is ours."""
    found = []
    entries = task.get("artifacts", [])
    for raw in entries if isinstance(entries, list) else [entries]:
        entry = {"source": raw} if isinstance(raw, str) else raw
        if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
            raise TaskRefused("must be a list of paths, or of tables with `source`", ("artifacts",))
        if entry.get("service", _MAIN) != _MAIN:
            raise TaskRefused("services of compose are not supported", ("artifacts",))
        exclude = entry.get("exclude", [])
        if not isinstance(exclude, list) or not all(isinstance(text, str) for text in exclude):
            raise TaskRefused("`exclude` must be a list of patterns", ("artifacts",))
        if ".." in entry["source"].split("/"):
            raise TaskRefused(f"{entry['source']!r} must not contain `..`", ("artifacts",))
        found.append({"path": entry["source"], "exclude": exclude})
    return found


def with_published(artifacts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a verifier's container gets: also /logs/artifacts, which it always gets."""
    if any(entry["path"].rstrip("/") == _PUBLISHED for entry in artifacts):
        return [*artifacts]
    return [{"path": _PUBLISHED}, *artifacts]


def health_command(raw: Any) -> str:
    """The command that waits until a health check passes, as Docker's HEALTHCHECK does."""
    keys = ("environment", "healthcheck")
    if not isinstance(raw, dict) or not isinstance(raw.get("command"), str):
        raise TaskRefused("must be a table with `command`", keys)
    numbers = {}
    for key, default in _HEALTH.items():
        numbers[key] = value = raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
            raise TaskRefused(f"{value!r} is not a number of seconds or retries", (*keys, key))
    return _WAIT.format(command=shlex.quote(raw["command"]), **numbers)


def _tables(raw: Any, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    tables = [] if raw is None else raw
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise TaskRefused("must be a list of tables", keys)
    return tables


def variables_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The `env` of a table of the verifier. Raises `TaskRefused`."""
    env = table.get("env", {})
    if not isinstance(env, dict):
        raise TaskRefused('`env` must be a table: NAME = "value"', ("verifier",))
    return env


def jsonable(value: Any) -> Any:
    """Dates of TOML as ISO 8601 text."""
    match value:
        case dict():
            return {key: jsonable(member) for key, member in value.items()}
        case list():
            return [jsonable(item) for item in value]
        case str() | int() | float():
            return value
    return value.isoformat()
