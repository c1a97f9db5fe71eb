"""What the repository promises about its own structure.

Read `NODES` first: it is the map. A node is a folder or a module; each imports only from nodes
above it in the list and from itself.
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

ROOT = Path(__file__).parent.parent

PACKAGE = ROOT / "batch_trajectories"
TOPS = (
    "basics",
    "toolsets",
    "agent",
    "runs",
    "export",
    "api",
    "report",
    "view",
    "agents",
    "cli",
)
DOORS = ("run_agent", "batch_runner")

NODES = """
basics

toolsets/workspace
toolsets/images
toolsets/sandbox/inside  toolsets/sandbox
toolsets/net  toolsets  toolsets/builtin  toolsets/web  toolsets/browser  toolsets/catalog
toolsets/mcp

agent/messages
agent/models
agent/models/dialects
agent/models/dialects
agent/models/client
agent/models/batches
agent/wires
agent/state
agent/options  agent/loop  agent/views  agent  agent/flat
agent/gateway

records
mirror
dataset
dataset
config
engine/worker
engine
engine
engine
audit
engine
engine/worker
engine  ray_cluster
batch_api
engine
engine/supervisor
recording
maintenance
importing

export/conversation
export/masking
export/segments
export/templates
export/rows
export/formats
export
export/filters
scoring
export/dataset
export/parity

api

report  report/page

view/index
view/page
view

agents

cli

run_agent
batch_runner
""".split()  # noqa: SIM905 - a list of strings would hide the map in quotes
"""From the lowest to the highest. A module belongs to the longest node that begins its path.

A folder whose docstring says what "Other rooms import" is a room, with all folders inside it that
are no rooms.
"""

FOUND_BY_NAME = {"agent/models/dialects", "export/formats"}
"""Folders whose modules are found by their names, so that no list has to name them."""

SANDBOX = "toolsets/sandbox/"


def path_of(name: str) -> Path:
    """The folder of a room or node: the top level has those that the program's users import."""
    return ROOT / name if (ROOT / name.partition("/")[0]).is_dir() else PACKAGE / name


@cache
def modules() -> list[Path]:
    inside = [path for top in TOPS for path in path_of(top).rglob("*.py")]
    return sorted(inside + [ROOT / f"{door}.py" for door in DOORS])


def name_of(path: Path) -> str:
    base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def node_of(name: str) -> int:
    """Where in the list the node of a module is; -1 for a room's own `__init__`."""
    while name:
        if name in NODES:
            return NODES.index(name)
        name = name.rpartition("/")[0]
    return -1


@cache
def names_of_modules() -> frozenset[str]:
    return frozenset(map(name_of, modules()))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All statements in a body, also inside others; without their expressions, which are most."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, field, ()))


@cache
def imports_of(path: Path) -> set[str]:
    """The modules of ours that a module imports, wherever in it: lazily and for types too."""
    collected = set()
    for node in statements(tree_of(path).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            place = name.removeprefix(f"{PACKAGE.name}.").replace(".", "/")
            collected |= {
                one for one in (place, place.rpartition("/")[0]) if one in names_of_modules()
            }
    return collected


def folders() -> list[Path]:
    return sorted({path.parent for path in modules() if path.parent != ROOT})


def docstring_of(folder: Path) -> str:
    return ast.get_docstring(tree_of(folder / "__init__.py")) or ""


@cache
def rooms() -> dict[str, set[str]]:
    """By room, the modules that its docstring says are open to others."""
    seams = {}
    for folder in folders():
        stated = re.search(r"^Other rooms import ([\w/,\s]+)\.$", docstring_of(folder), re.M)
        if stated is not None:
            names = re.split(r",\s+", stated[1])
            if names == ["all modules"]:
                names = [path.stem for path in folder.glob("[!_]*.py")]
            room = name_of(folder / "__init__.py")
            seams[room] = {f"{room}/{name}" for name in names}
    return seams


def room_of(name: str) -> str:
    """The room of a module, which is the innermost; a door is a room of its own."""
    inner = name
    while inner not in (*rooms(), *DOORS):
        inner = inner.rpartition("/")[0]
        assert inner, f"{name} is in no room: its folder does not say what others import"
    return inner


def test_imports_run_one_way() -> None:
    """A module imports from its own node and from nodes above it in the list."""
    wrong = {}
    for path in modules():
        mine = node_of(name_of(path))
        assert mine >= 0 or path.name == "__init__.py", f"{name_of(path)} is in no node"
        wrong[name_of(path)] = {name for name in imports_of(path) if node_of(name) > mine}
    assert not {name: further_down for name, further_down in wrong.items() if further_down}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not for types. A kind of sandbox and its sandboxes in images know each other."""
    graph = {
        name_of(path): {
            name
            for name in imports_of(path) - {name_of(path)}
            if not (name.startswith(SANDBOX) and name_of(path).startswith(SANDBOX))
        }
        for path in modules()
        if path.name != "__init__.py"
    }
    TopologicalSorter(graph).prepare()  # raises `CycleError`


def test_a_module_says_what_it_is_for() -> None:
    assert not [name_of(path) for path in modules() if not ast.get_docstring(tree_of(path))]


def test_a_room_says_which_modules_others_import() -> None:
    """Other rooms import exactly the modules that the docstring of a room lists."""
    used: dict[str, set[str]] = {room: set() for room in rooms()}
    users: dict[str, set[str]] = {room: set() for room in rooms()}
    for path in modules():
        for name in imports_of(path):
            room, user = room_of(name), room_of(name_of(path))
            if room != user and not path_of(name).is_dir():
                used[room].add(name)
                users[room].add(user)
    TopologicalSorter(users).prepare()  # raises `CycleError` where rooms import each other
    for room, stated in rooms().items():
        assert stated == used[room], f"{room}: {sorted(stated ^ used[room])}"


def test_a_folder_names_its_files() -> None:
    """The docstring of a folder says what each file and folder in it is."""
    for folder in folders():
        inside = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        named = set(re.findall(r"^(\w+)(?:\.\w+|/)?(?:,? .*)? {2,}\S", docstring_of(folder), re.M))
        names = {path.stem for path in inside}
        if name_of(folder / "__init__.py") in FOUND_BY_NAME:
            assert not named, folder
            continue
        names |= {path.parent.name for path in folder.glob("*/__init__.py")}
        assert names <= named, f"not named in {folder}: {sorted(names - named)}"
        others = {path.stem for path in folder.iterdir()}
        assert named <= names | others, f"not in {folder}: {sorted(named - names - others)}"
        data = {path.suffix for path in folder.iterdir() if path.is_file()} - {".py"}
        assert data <= {".css", ".html", ".js", ".toml", ".txt", ".typed"}, folder


def test_no_two_modules_of_a_room_have_one_name() -> None:
    places = defaultdict(list)
    for path in modules():
        if path.name != "__init__.py":
            places[name_of(path).split("/")[0], path.stem].append(name_of(path))
    assert not {name: there for name, there in places.items() if len(there) > 1}


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(path))
    assert not {name: there for name, there in places.items() if len(there) > 1}


def test_the_wheel_holds_our_rooms_and_nothing_else() -> None:
    """Packages are found by the names in pyproject.toml; tests and the like stay outside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    top = {path.relative_to(ROOT).parts[0] for path in modules()} - {f"{door}.py" for door in DOORS}
    # Presets: `--config=NAME`, `--rows=NAME` and `--agent=NAME` find them in an installed program.
    included = {name.removesuffix("*") for name in project["packages"]["find"]["include"]}
    assert included == top | {"configs"}
    assert set(project["py-modules"]) == set(DOORS)


OUTSIDE = {
    "testing": {"tests", "benchmarks"},
    "tests": {"benchmarks"},
    "benchmarks": {"tests"},
    **{top: {"testing", "tests", "benchmarks"} for top in (*TOPS, *DOORS)},
}
"""What is not in the wheel, by who must not import it: `testing` is what all of them share."""


def test_the_product_imports_no_test_and_tests_no_benchmark() -> None:
    for place, outside in OUTSIDE.items():
        inside = [ROOT / f"{place}.py"] if place in DOORS else sorted(path_of(place).rglob("*.py"))
        assert inside
        imported = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(outside)})\b", re.M)
        assert not [path for path in inside if imported.search(path.read_text())]


def test_a_folder_of_tests_names_its_files() -> None:
    for folder in (path.parent for path in (ROOT / "tests").rglob("__init__.py")):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        named = {word for line in text.splitlines() for word in line.partition("  ")[0].split()}
        inside = {path.stem for path in folder.glob("*.py")} - {"__init__", "conftest"}
        inside |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
        assert inside <= named, f"not named in {folder.name}: {sorted(inside - named)}"
        tests = {word for word in named if word.startswith("test_")}
        assert tests <= inside, f"not in {folder.name}: {sorted(tests - inside)}"


def test_three_modules_know_the_batch_api() -> None:
    """A start, its supervisor and `verify`: nothing else of a run imports `batch_api`."""
    outside = {
        name_of(path)
        for path in modules()
        if name_of(path).startswith("runs/") and not name_of(path).startswith("batch_api")
        if any(name.startswith("batch_api/") for name in imports_of(path))
    }
    assert outside == {
        "engine/supervisor/run",
        "engine/supervisor/worker_pool",
        "maintenance/verify_batches",
    }
