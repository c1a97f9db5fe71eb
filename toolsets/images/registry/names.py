"""Names of images in registries: which host, which repository, and which image of it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from toolsets.images.names import DIGEST, ImageError

HUB = "docker.io"
"""The registry of names without a host, by the convention of all container programs."""
_HUB_NAMES = (HUB, "index.docker.io", "registry-1.docker.io")
_HUB_HOST = "registry-1.docker.io"
_HUB_PREFIX = "library/"

_HOST = re.compile(r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_CHARS = 255


@dataclass(frozen=True, slots=True)
class RegistryName:
    """The name of an image in a registry."""

    registry: str
    """The host, with its port if it has one."""
    repository: str
    tag: str | None
    """The tag; None if only a digest is given."""
    digest: str | None
    """The digest of the manifest, or of a list of manifests. It wins over the tag."""

    @property
    def target(self) -> str:
        """The last part of the address of the manifest."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        """The whole name."""
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.registry}/{self.repository}{tag}{digest}"


def parse_name(reference: str) -> RegistryName:
    """Read a name as container programs do. Raises `ImageError` if no registry can have it."""
    name, mark, digest = reference.partition("@")
    if DIGEST.fullmatch(reference) or not name:
        raise ImageError(f"image {reference!r}: a digest alone does not say which registry has it")
    if mark and not DIGEST.fullmatch(digest):
        raise ImageError(f"image {reference!r}: {digest[:100]!r} is not a digest of SHA-256")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, path = first, rest
    else:
        host, path = HUB, name
    if host == "localhost":
        raise ImageError(
            f"image {reference!r}: names below localhost/ are images of this machine, which no "
            "registry has; build them (`images TASKS`), or save them into the directory of --images"
        )
    repository, colon, tag = path.partition(":")
    if host in _HUB_NAMES:
        host = HUB
        repository = repository if "/" in repository else f"{_HUB_PREFIX}{repository}"
    if (
        not _HOST.fullmatch(host)
        or len(repository) > _MAX_CHARS
        or not _REPOSITORY.fullmatch(repository)
        or (colon and not _TAG.fullmatch(tag))
    ):
        raise ImageError(
            f"image {reference!r}: not the name of an image; it is [HOST[:PORT]/]NAME[:TAG], in "
            "lower-case letters except for HOST and TAG"
        )
    return RegistryName(host, repository, tag or (None if digest else "latest"), digest or None)


def check_registry(host: str) -> str:
    """Return the host of a registry as names have it. Raises `ValueError` for anything else."""
    if host in _HUB_NAMES and host != HUB:
        raise ValueError(f"{host!r} is called {HUB} in names of images")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not the host of a registry, such as {HUB} or host:5000")
    return host


def registry_address(registry: str) -> str:
    """The address of a registry: `https`, but `http` on this machine's own addresses."""
    host = _HUB_HOST if registry == HUB else registry
    return f"{'http' if _is_loopback(registry) else 'https'}://{host}"


def _is_loopback(registry: str) -> bool:
    host = registry.rpartition(":")[0] if re.search(r":[0-9]+$", registry) else registry
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
