"""Prints the map of the program: `make map`. It fails nothing; look at it before you cut a file."""

from __future__ import annotations

from collections import Counter

from tests.test_architecture import FLOORS, floor_of, modules, sources

SHOWN = 10


def main() -> None:
    """Print each folder's size, the longest files, the widest folders, the most used modules."""
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    print(f"{len(lines)} modules, {sum(lines.values()):,} lines\n")
    for floor in FLOORS:
        inside = [name for name in lines if floor_of(name) == floor]
        print(f"{floor:14}{len(inside):5} modules{sum(lines[name] for name in inside):8,} lines")
    uses = Counter(other for name in lines for other in sources()[name].imports if other != name)
    folders = Counter(name.rpartition(".")[0] for name in lines)
    for title, counted in (
        ("longest files, lines", Counter(lines)),
        ("widest folders, modules", folders),
        ("most used modules, users", uses),
    ):
        print(f"\n{title}")
        for name, number in counted.most_common(SHOWN):
            print(f"{number:8,}  {name}")


if __name__ == "__main__":
    main()
