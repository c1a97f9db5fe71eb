"""The frame of a page, and the scripts that all kinds of pages share."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

CORE = ("core.js",)
SHARED = (
    "summary.js",
    "charts.js",
    "overview.js",
    "table.js",
    "results.js",
    "conversation.js",
    "audit.js",
)
MAIN = ("main.js",)
"""Joined in this order with the source of a kind of page before `MAIN`, they are one module."""


def frame_page(parts: Mapping[str, bytes]) -> bytes:
    """The page with these parts in their places; a place without a part is empty."""
    pieces = read_part("page.html").encode().split(b"@@")
    return b"".join(
        parts.get(piece.decode(), b"") if n % 2 else piece for n, piece in enumerate(pieces)
    )


def join_scripts(*, sources: str) -> str:
    """The script of a page; `sources` is the text of its own scripts."""
    before = [read_part(name) for name in (*CORE, *SHARED)]
    return "\n".join([*before, sources, *map(read_part, MAIN)])


def read_part(name: str, package: str = "batch_trajectories.report.page") -> str:
    """The text of a file of the page."""
    return resources.files(package).joinpath(name).read_text("utf-8")
