"""What the repository promises about its own structure.

Read `FLOORS` first: it is the map. A folder imports only from itself and from those above it in the
list. No number limits the length of a file or the width of a folder; `make map` shows both.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from batch_trajectories.engine.features import FEATURES, find_feature

ROOT = Path(__file__).parent.parent
PACKAGE = "batch_trajectories"

FLOORS = """
basics

toolsets
agent

records
mirror
dataset
config
engine

batch_api
ray_cluster
audit
maintenance
importing
image_pulls

export
api
publishing
scoring
teacher
recording
report
agents
view
cli

run_agent
batch_runner
""".split()  # noqa: SIM905 - a list of strings would hide the map in quotes
"""The folders of the program, from the ground up; all but the doors, `agent` and `toolsets` stand
in `batch_trajectories/`."""

DOORS = ("run_agent", "batch_runner")
TOP = ("agent", "toolsets", PACKAGE)

NO_FLOOR = {PACKAGE, f"{PACKAGE}.sandbox_conformance"}
"""What users import; nothing of ours does."""


@cache
def modules() -> dict[str, Path]:
    """The product's modules by dotted name."""
    found = {}
    for path in [*(ROOT / f"{door}.py" for door in DOORS), *(p for top in TOP for p in _in(top))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _in(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def floor_of(module: str) -> str:
    """The folder of a module in `FLOORS`."""
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0]


class Source(NamedTuple):
    """What these tests ask of a module; the trees of all would fill the memory of a worker."""

    docstring: str | None
    imports: dict[str, set[str]]
    """The modules of ours that it imports, lazily and for types too, and which names."""
    classes: list[str]
    """Those of the module itself."""


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All statements in a body, also inside others; without their expressions, which are most."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, field, ()))


@cache
def sources() -> dict[str, Source]:
    """All modules of the product by dotted name."""
    return {name: _read_source(name, path) for name, path in modules().items()}


def _read_source(module: str, path: Path) -> Source:
    tree = ast.parse(path.read_text())
    imported: dict[str, set[str]] = defaultdict(set)
    for node in statements(tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules():
                    imported[alias.name].add("")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules():
                    imported[inner].add("")
                elif node.module in modules():
                    imported[str(node.module)].add(alias.name)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Source(ast.get_docstring(tree), imported, classes)


def test_no_import_goes_up() -> None:
    """A module imports from its own folder and from folders above it in `FLOORS`."""
    upward = []
    for module in modules().keys() - NO_FLOOR:
        floor = FLOORS.index(floor_of(module))
        upward += [
            f"{module} imports {other}"
            for other in sources()[module].imports.keys() - NO_FLOOR
            if FLOORS.index(floor_of(other)) > floor
        ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not for types."""
    graph = {
        module: sources()[module].imports.keys() - {module}
        for module, path in modules().items()
        if path.name != "__init__.py"
    }
    TopologicalSorter(graph).prepare()  # raises `CycleError`


def test_no_private_name_is_imported() -> None:
    """A name with `_` stays in its module."""
    private = [
        f"{module} imports {other}: {name}"
        for module, source in sources().items()
        for other, names in source.imports.items()
        for name in names
        if name.startswith("_")
    ]
    assert not private


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_where_its_row_says(feature: str) -> None:
    """Each row of `FEATURES` resolves, in a folder above the engine."""
    module = FEATURES[feature].partition(":")[0]
    assert FLOORS.index(floor_of(module)) > FLOORS.index("engine")
    if floor_of(module) == "ray_cluster" and module.endswith(".executor"):
        pytest.importorskip("ray")
    find_feature(feature)


def test_a_module_says_what_it_is_for() -> None:
    assert not [module for module, source in sources().items() if not source.docstring]


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module, source in sources().items():
        for name in source.classes:
            if not name.startswith("_"):
                places[name].append(module)
    assert not {name: there for name, there in places.items() if len(there) > 1}


def test_the_wheel_holds_our_packages_and_nothing_else() -> None:
    """Packages are found by the names in pyproject.toml; tests stay outside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    # Presets: `--config=NAME`, `--rows=NAME` and `--agent=NAME` find them in an installed program.
    included = {name.removesuffix("*") for name in project["packages"]["find"]["include"]}
    assert included == {*TOP, "configs"}
    assert set(project["py-modules"]) == set(DOORS)


OUTSIDE = {
    "tests/fakes": r"tests\.(?!fakes\b)",
    "tests": r"tests\.benchmarks\b",
    **{f"{top}": r"tests\b" for top in TOP},
}
"""What a folder must not import: the product no test, fakes only fakes, tests no benchmark."""


@pytest.mark.parametrize("folder", OUTSIDE)
def test_the_product_imports_no_test_and_tests_no_benchmark(folder: str) -> None:
    imported = re.compile(rf"^\s*(?:import|from)\s+(?:{OUTSIDE[folder]})", re.M)
    inside = [path for path in _in(folder) if "benchmarks" not in path.parts]
    assert inside
    assert not [path for path in inside if imported.search(path.read_text())]
