"""Make the page of a report: one file with template, style and scripts that loads nothing else.

All text of models, tools and users is data in JSON, never markup: scripts insert it as text. The
content policy allows only the page's own scripts and, if its data is in files beside it, these
script files; no other address, image, frame or form.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from batch_trajectories.basics import exact_json

_SCRIPTS = ("core.js", "charts.js", "table.js", "conversation.js", "main.js")


def render_page(meta: dict[str, Any], *, rows: bytes, records: bytes) -> bytes:
    """The page with its data: `rows` and `records` are JSON, `meta` describes the run."""
    style = _read("page.css")
    script = "\n".join(map(_read, _SCRIPTS))
    files = " 'self' file:" if meta["row_pieces"] else ""
    policy = (
        f"default-src 'none'; script-src {_source(script)}{files}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types report-files"
    )
    page = _read("page.html")
    parts = {
        "POLICY": policy.encode(),
        "TITLE": _as_text(meta["run_name"]).encode(),
        "STYLE": style.encode(),
        "META": embedded(exact_json.dumps(meta)),
        "ROWS": embedded(rows),
        "RECORDS": embedded(records),
        "SCRIPT": script.encode(),
    }
    pieces = page.encode().split(b"@@")
    return b"".join(parts[piece.decode()] if n % 2 else piece for n, piece in enumerate(pieces))


def embedded(json: bytes) -> bytes:
    """JSON for use inside a script element: without `<` it cannot end the element."""
    return json.replace(b"<", b"\\u003c")


def _read(name: str) -> str:
    return resources.files("batch_trajectories.report.page").joinpath(name).read_text("utf-8")


def _source(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _as_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
