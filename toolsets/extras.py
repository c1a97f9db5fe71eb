"""Packages that only some tools, exports and executors need."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that installs what an extra names.

    The program is run from its own directory and is in no registry, where its name may be taken.
    """
    return f"pip install -e '.[{extra}]' in the directory of this program"
