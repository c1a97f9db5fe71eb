"""The page of `view` as the server sends it: the report's page with its own places and scripts."""

from __future__ import annotations

from batch_trajectories.report.page.frame import frame_page, join_scripts, read_part

_HERE = "batch_trajectories.view.page"
_SCRIPTS = ("server.js", "runs.js", "comparing.js", "reading.js", "deciding.js", "steering.js")


def html() -> bytes:
    """The page, which loads `script` from /static/page.js and `style` from /static/page.css."""
    pieces = read_part("view.html", _HERE).encode().split(b"@@")
    return frame_page(
        {
            name.decode(): content.lstrip(b"\n")
            for name, content in zip(pieces[1::2], pieces[2::2], strict=True)
        }
    )


def script() -> bytes:
    """All scripts as one module."""
    return join_scripts(sources="\n".join(read_part(name, _HERE) for name in _SCRIPTS)).encode()


def style() -> bytes:
    """The style of the report and that of the view."""
    return (read_part("page.css") + read_part("view.css", _HERE)).encode()
