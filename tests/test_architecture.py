"""The rooms of the house and the arrows between them are law."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "toolsets": set(),
    "agent": {"toolsets"},
    "runs": {"agent", "toolsets"},
    "export": {"agent", "runs", "toolsets"},
    "report": {"agent", "runs", "export", "toolsets"},
    "run_agent": {"agent", "runs", "export", "toolsets"},
    "cli": {"agent", "runs", "export", "report", "toolsets"},
    "batch_runner": {"runs", "cli"},
}
"""What each room may import beside itself; imports run one way, down."""

MAX_LINES = 500


def modules() -> list[Path]:
    rooms = [ROOT / name for name in MAY_IMPORT]
    files = [path for room in rooms if room.is_dir() for path in room.rglob("*.py")]
    return sorted(files + [room.with_suffix(".py") for room in rooms if not room.is_dir()])


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found.add((node.module or "").split(".")[0])
    return found & set(MAY_IMPORT)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """No module imports a room above its own."""
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert imported_rooms(path) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_fits_in_the_head(path: Path) -> None:
    """No module is longer than 500 lines, and each says in its docstring what it is for."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def imported_modules(path: Path) -> set[Path]:
    """Our modules that `path` imports at its top level, at run time."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(ROOT / f"{node.module.replace('.', '/')}.py")
    return {module for module in found if module.exists()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {path: imported_modules(path) for path in modules()}
    while free := {path for path, imports in left.items() if not imports & left.keys()}:
        left = {path: imports for path, imports in left.items() if path not in free}
    assert not left, sorted(str(path.relative_to(ROOT)) for path in left)


def test_the_wheel_holds_our_rooms_and_nothing_else() -> None:
    """Every package is named in pyproject.toml; tests, benchmarks and configs stay outside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = [ROOT / name for name in MAY_IMPORT if (ROOT / name).is_dir()]
    packages = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for room in rooms
        for path in room.rglob("__init__.py")
    }
    assert set(project["packages"]) == packages
    assert set(project["py-modules"]) == {
        name for name in MAY_IMPORT if (ROOT / f"{name}.py").exists()
    }
