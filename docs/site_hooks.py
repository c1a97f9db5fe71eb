"""Changes that only the built site needs."""

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/, which the site does not have, by their text."""
    up = r"\.\./" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({up}[^)]*\)", r"\1", markdown)
