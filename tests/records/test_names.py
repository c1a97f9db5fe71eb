"""The names of a run's files stand once in the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from batch_trajectories.records import names
from tests.helpers.running import ROOT
from toolsets.sandbox.inside import namespaces
from toolsets.workspace.workspace import HOME, OPAQUE

INSIDE = ROOT / "toolsets" / "sandbox" / "inside"
"""Started in sandboxes, without our packages."""


def literals(source: str) -> Iterator[str]:
    """The strings of a module, also those in f-strings; docstrings are none of them."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def places_of(wanted: set[str], *folders: str) -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), text)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(INSIDE)
        and any(text in (source := path.read_text()) for text in wanted)
        for text in literals(source)
        if text in wanted
    ]


def test_the_name_of_a_file_of_a_run_stands_once() -> None:
    # Names of directories are common words, which mean other things elsewhere.
    files = {text for name, text in vars(names).items() if name.isupper() and "." in text}
    own = "batch_trajectories/records/names.py"
    assert {place for place, _ in places_of(files, "batch_trajectories")} == {own}


def test_names_differ() -> None:
    values = [text for name, text in vars(names).items() if name.isupper()]
    assert len(values) == len(set(values))


def test_paths_and_marks_of_workspaces_stand_once() -> None:
    found = places_of({HOME, OPAQUE}, "agent", "toolsets", "batch_trajectories")
    assert found == [("toolsets/workspace/workspace.py", text) for text in (OPAQUE, HOME)]


def test_the_code_in_sandboxes_has_the_same_path() -> None:
    assert namespaces._WORKSPACE == HOME
