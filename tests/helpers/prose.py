"""The mechanical part of the style of docs/: `python -m tests.helpers.prose` names what breaks it.

Judged are paragraphs and list items, not tables, titles and code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(r"^( *)(```+).*?^ *\2 *$", re.DOTALL | re.MULTILINE)

LONGEST = 40
"""Words of a sentence."""

RULES = {
    r";": "two sentences instead of a semicolon",
    r"(?:^|[,(] |\bbut |\band )where (?!the\b[^,.]*\?)": "`if` for a condition, not `where`",
    r"\bOf (?:a|the|these|those|them)\b": "the verb early, not `Of a ...`",
    r", also (?:after|by|for|if|in|not|of|when|with|without)\b": "`even` or `too`, not `also`",
    r"\bruns? that works?\b|\bwhile (?:it|(?:a|the) run) works\b": "a run is in progress",
}

EXCEPT = {"options.md", "records.md"}
"""Pages that are generated from docstrings and help texts."""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page, each with the line where its paragraph begins."""
    text = re.sub(
        r"^( *)(```+).*?^ *\2 *$", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M
    )
    number = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?= *(?:[-*]|\d+\.) ))", text):
        first = number
        number += paragraph.count("\n")
        plain = paragraph.strip()
        if (
            not plain
            or plain.startswith(("#", "<", ":::"))
            or re.search(r"^[^`\n]*---\|", plain, re.M)
        ):
            continue
        plain = re.sub(r"`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", plain))
        plain = re.sub(r"\([^()]*\)", "", re.sub(r"^(?:[-*]|\d+\.) ", "", plain))
        for sentence in re.split(r"(?<=[.!?:])(?:\*\*)?\s+", " ".join(plain.split())):
            yield first, sentence


def problems(text: str) -> Iterator[str]:
    """What breaks the style in a page: line, rule and sentence."""
    for line, sentence in sentences(text):
        words = len(sentence.split())
        if words > LONGEST and sentence.count(",") < words / 6:  # a list of things may be long
            yield f"{line}: {words} words: {sentence}"
        for pattern, advice in RULES.items():
            if re.search(pattern, sentence):
                yield f"{line}: {advice}: {sentence}"


def pages() -> list[Path]:
    """The pages that are held to the style."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in found if path.name not in EXCEPT]


def main() -> int:
    """Print each problem. Return 1 if there is one."""
    found = [
        f"{path.relative_to(ROOT)}:{one}" for path in pages() for one in problems(path.read_text())
    ]
    sys.stdout.writelines(f"{one}\n" for one in found)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
