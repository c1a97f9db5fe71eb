"""Links between Markdown files lead somewhere, on a code host and on the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.running import ROOT

FENCE = re.compile(r"^( *)(```+).*?^ *\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


def markdown_files() -> list[Path]:
    """The Markdown files that belong to the project."""
    folders = [path for name in ("docs", "tests", "trajectories") for path in [ROOT / name]]
    found = [path for folder in folders for path in folder.rglob("*.md")]
    outside = ROOT / "trajectories"
    kept = [path for path in found if path.parent == outside or outside not in path.parents]
    return sorted([*ROOT.glob("*.md"), *kept])


@cache
def prose(path: Path) -> str:
    """The text of a page without fenced blocks and code in lines."""
    return re.sub(r"(`+).+?\1", lambda code: "`" * len(code[0]), FENCE.sub("", path.read_text()))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names to which links can jump in a page, by the rules of GitHub."""
    text = FENCE.sub("", path.read_text())
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}-{number}"
        found.add(unique)
    return frozenset(found)


def broken_links(path: Path) -> list[str]:
    """The links of a page whose file or anchor does not exist."""
    broken = []
    for match in LINK.finditer(prose(path)):
        link = match[1] or match[2]
        if ELSEWHERE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        known = target.suffix != ".md" or not target.is_file() or anchor in anchors(target)
        if not target.exists() or (anchor and not known):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`: (x)\n\n[good](#a-title-x) [bad](#title) [gone](gone.md) ![no](no.png)\n"
        "`[code](gone.md)` [web](https://example.org/x)\n\n```text\n# no title\n[a](b.md)\n```\n"
    )
    assert broken_links(page) == ["#title", "gone.md", "no.png"]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_lists_and_tables_begin_after_an_empty_line(path: Path) -> None:
    """Code hosts show them without it, the site shows the lines of one paragraph."""
    lines = FENCE.sub("", path.read_text()).splitlines()
    item = re.compile(r" {0,3}(?:[-*]|\d+\.) ")
    for before, line in pairwise(lines):
        begins = item.match(line) and before.strip()
        assert not begins or item.match(before) or before.startswith(" "), line


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "python.html").read_text()
    assert "AIAgent" in page
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
