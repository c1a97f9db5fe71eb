"""tests/seeds.md has a line for each behaviour, and each line a test that exists or a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.helpers.running import ROOT

BEHAVIOURS = {"S1": 33, "S2": 57, "S3": 29, "S4": 38, "S5": 18}
"""How many each of the five systems has."""

ROW = re.compile(r"\| (?P<number>S\d\.\d+) \| (?P<mark>\S+) \| (?P<text>.+?) \| (?P<proof>.*) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py::[\w:]+)`")
REASON = re.compile(r"\*\*(left out|differs|not built):\*\* \S")


class Line(NamedTuple):
    """One line of a table."""

    number: str
    mark: str
    text: str
    proof: str

    @property
    def tests(self) -> list[str]:
        return TEST.findall(self.proof)

    @property
    def reason(self) -> str | None:
        match = REASON.search(self.proof)
        return match[1] if match else None


def read(document: str) -> list[Line]:
    """All lines of all tables; one that looks like a row and cannot be read is an error."""
    lines = []
    for line in document.splitlines():
        if line.startswith("| S"):
            match = ROW.fullmatch(line)
            assert match, line
            lines.append(Line(*match.groups()))
    return lines


LINES = read((ROOT / "tests" / "seeds.md").read_text())


@cache
def defined_in(path: str) -> frozenset[str]:
    """The tests that a file defines: functions, and methods of classes as `Class::function`."""
    return frozenset(_defined(ast.parse((ROOT / path).read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _defined(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name


def test_each_behaviour_has_one_line_in_its_place() -> None:
    """Neither missing nor there twice, and in order."""
    expected = [f"{seed}.{n}" for seed, count in BEHAVIOURS.items() for n in range(1, count + 1)]
    assert [line.number for line in LINES] == expected


def test_a_line_has_a_proof_or_a_reason() -> None:
    for line in LINES:
        assert line.mark in ("M", "A", "O", "X"), line
        if line.mark == "X":
            assert (line.reason, line.tests) == ("left out", []), line
        else:
            assert line.tests or line.reason in ("differs", "not built"), line


def test_the_tests_of_a_line_exist() -> None:
    for test in (test for line in LINES for test in line.tests):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert name in defined_in(path), test


def test_nothing_in_a_line_goes_unread() -> None:
    """A name that is not written as a test would otherwise prove nothing, and nobody would see."""
    for line in LINES:
        named, _, _ = line.proof.partition("**")
        parts = [part for part in named.split("<br>") if part]
        assert parts == [f"`{test}`" for test in line.tests], line
