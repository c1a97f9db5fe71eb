"""Credentials for registries, from the files that `docker login` and `podman login` write.

They are never logged, and never part of an error.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from toolsets.images.names import ImageError
from toolsets.images.registry.names import HUB

_log = logging.getLogger(__name__)

_HELPER_TIMEOUT_S = 30
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io", HUB)
_TOKEN_USER = "<token>"
"""The user name by which a helper says that the secret is an identity token."""


class Credentials(NamedTuple):
    """The name and secret by which a registry knows its caller."""

    user: str
    password: str
    identity_token: str | None = None
    """A token in place of a password, which is exchanged for short-lived ones."""

    def __repr__(self) -> str:
        """Nothing of the secrets."""
        return "Credentials(...)"

    @property
    def basic(self) -> str:
        """The value of the header `Authorization`."""
        pair = f"{self.user}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


def find_credentials(registry: str) -> Credentials | None:
    """Return the credentials for a registry; None if nobody logged in there.

    Raises `ImageError` for a file or a helper that cannot be used. May wait for a helper, which is
    another program.
    """
    for path in _files():
        if (config := _read(path)) is not None:
            found = _find(config, registry, path)
            if found is not None:
                return found
    return None


def _files() -> list[Path]:
    """The files in the order in which they count."""
    environment = os.environ
    found = []
    if given := environment.get("REGISTRY_AUTH_FILE"):
        found.append(Path(given))
    docker = environment.get("DOCKER_CONFIG")
    found.append((Path(docker) if docker else Path("~/.docker").expanduser()) / "config.json")
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        found.append(Path(runtime) / "containers" / "auth.json")
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError:
        # The error would quote the file, which may hold secrets.
        raise ImageError(f"{path}: not JSON; repair it, or log in again") from None
    if not isinstance(value, dict):
        raise ImageError(f"{path}: not a JSON object; repair it, or log in again")
    return value


def _find(config: dict[str, Any], registry: str, path: Path) -> Credentials | None:
    keys = _HUB_KEYS if registry == HUB else (registry, f"https://{registry}", f"http://{registry}")
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict):
        for key in keys:
            if isinstance(name := helpers.get(key), str):
                return _ask_helper(name, key, path)
    auths = config.get("auths")
    entries = auths if isinstance(auths, dict) else {}
    known = {str(key).rstrip("/"): (str(key), entry) for key, entry in entries.items()}
    for key in keys:
        if (stored := known.get(key.rstrip("/"))) is None or not isinstance(stored[1], dict):
            continue
        if (found := _from_entry(stored[1], stored[0], path)) is not None:
            return found
        if isinstance(name := config.get("credsStore"), str):
            return _ask_helper(name, stored[0], path)
    return None


def _from_entry(entry: dict[str, Any], key: str, path: Path) -> Credentials | None:
    token = entry.get("identitytoken")
    identity = token if isinstance(token, str) and token else None
    user, password = entry.get("username"), entry.get("password")
    if isinstance(encoded := entry.get("auth"), str) and encoded:
        try:
            decoded = base64.b64decode(encoded, validate=True).decode().rstrip("\0")
        except (binascii.Error, UnicodeDecodeError):
            raise ImageError(f"{path}: auths.{key}.auth: not base64; log in again") from None
        user, _, password = decoded.partition(":")
    if identity is None and not (isinstance(user, str) and user):
        return None
    return Credentials(str(user or ""), str(password or ""), identity)


def _ask_helper(name: str, key: str, path: Path) -> Credentials | None:
    """Ask the program `docker-credential-NAME`, as `docker pull` does."""
    if not name or "/" in name:
        raise ImageError(f"{path}: {name!r} is not the name of a credential helper")
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key.encode(),
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ImageError(f"{path} names {program}, which is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{path} names {program}, which failed: {type(error).__name__}") from None
    if done.returncode != 0:
        # It says so on standard output if nobody logged in. The text itself is not quoted.
        _log.info("%s has no credentials for %s", program, key)
        return None
    try:
        answer = orjson.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ImageError(f"{path} names {program}, whose answer cannot be read") from None
    return Credentials("", "", secret) if user == _TOKEN_USER else Credentials(user, secret)
