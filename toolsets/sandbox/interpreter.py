"""Where the Python that tools run is found."""

from __future__ import annotations

import sys
from pathlib import Path


def python_prefix() -> Path:
    """Return where the running Python is installed, also when this is a virtual environment."""
    return Path(sys.base_prefix)


def python_bin() -> Path:
    """Return the directory that holds that Python's `python3`."""
    return python_prefix() / "bin"
