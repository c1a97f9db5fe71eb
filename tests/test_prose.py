"""Pages keep to the mechanical part of the style of docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.prose import pages, problems


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_a_page_keeps_to_the_style(path: Path) -> None:
    assert list(problems(path.read_text())) == []


def test_what_breaks_the_style_is_found_with_its_line() -> None:
    text = (
        "# Title; no sentence\n\nA good one.\n\n```text\na; b\n```\n\n"
        "a | b; c\n---|---\nd | e; f\n\n"
        "- It stops; the next start goes on.\n- It is undone, where it can be.\n\n"
        "Of a key that an object has twice, the last counts. " + "word " * 41 + "\n\n"
        "It goes on, also after a kill.\n\nLook at a run that works.\n"
    )
    found = [(one.split(": ")[0], one.split(": ")[1]) for one in problems(text)]
    assert found == [
        ("13", "two sentences instead of a semicolon"),
        ("14", "`if` for a condition, not `where`"),
        ("16", "the verb early, not `Of a ...`"),
        ("16", "41 words"),
        ("18", "`even` or `too`, not `also`"),
        ("20", "a run is in progress"),
    ]
