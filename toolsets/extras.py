"""How to install the packages that only some tools, exports and executors need."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that installs an extra.

    It names the directory because the program is in no registry, where its name may be taken.
    """
    return f"pip install -e '.[{extra}]' in the directory of this program"
