"""Which code of ours a process runs, so that machines that work together can compare."""

from __future__ import annotations

import hashlib
from pathlib import Path

_ROOMS = ("agent", "runs", "toolsets")
"""All that a worker imports."""


def code_digest() -> str:
    """16 hex digits over the modules that workers run."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
