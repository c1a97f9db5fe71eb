"""A digest of the code that workers run, to compare machines."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGES = ("agent", "batch_trajectories", "toolsets")
"""The packages that a worker imports."""


def code_digest() -> str:
    """16 hex digits over the modules of workers."""
    root = Path(__file__).parents[4]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
