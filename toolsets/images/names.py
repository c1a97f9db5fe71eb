"""References to images, their comparison, and the error of an image."""

from __future__ import annotations

import re

from batch_trajectories.basics.errors import ToolError


class ImageError(ToolError):
    """An image is missing, damaged, or has content that cannot be unpacked."""


DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DEFAULT_PREFIXES = ("docker.io/", "index.docker.io/", "localhost/", "library/")


def parse_digest(reference: str) -> str | None:
    """Return the digest in `sha256:...` or `name@sha256:...`; None if there is none."""
    digest = reference.rpartition("@")[2]
    return digest if DIGEST.fullmatch(digest) else None


def full_name(reference: str) -> str:
    """Return a reference in its comparable form: with a tag, without the default registry."""
    name = reference.rpartition("@")[0] or reference
    for prefix in _DEFAULT_PREFIXES:
        name = name.removeprefix(prefix)
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
