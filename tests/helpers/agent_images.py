"""An image of this machine's programs in which agents of this machine run; see `real_agents`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.fakes.fake_images import (
    layer_of_tree,
    make_repository,
    put_libraries,
    put_program,
    tree_of_programs,
    write_layout,
)

IMAGE = "made:1"
_HOME = "workspace"
"""Where commands of the endpoint's tasks go, as outside of images."""
_FURTHER = ("node", "seq", "base64")


def in_image(preset: dict[str, Any], images: Path) -> dict[str, Any]:
    """The preset of an agent that runs in `IMAGE`, which is made in `images`.

    Its packages are seen in the image at their paths; what these need of the machine is in it.
    """
    name = preset["command"][0]
    found = shutil.which(name)
    assert found is not None, f"{name} is not on the PATH"
    program = Path(found).resolve()
    packages = next((one for one in program.parents if one.name == "node_modules"), program.parent)
    is_script = program.suffix == ".js"
    tree = images.with_name("tree")
    tree.mkdir()
    tree_of_programs(tree, with_caches=True)
    for further in _FURTHER:
        if (path := shutil.which(further)) is not None:
            put_program(tree, Path(path))
    put_libraries(tree, program)
    make_repository(tree / _HOME, {"calc.py": "def add(a, b):\n    return a - b\n"})
    config = {"WorkingDir": f"/{_HOME}", "Env": ["PATH=/usr/bin:/bin"]}
    write_layout(images / "made", [layer_of_tree(tree)], name="1", config=config)
    shutil.rmtree(tree)
    started = [*(["node"] if is_script else []), str(program)]
    version = preset.get("version", [name, "--version"])
    return {
        **preset,
        "command": [*started, *preset["command"][1:]],
        "version": [*started, *version[1:]] if version[:1] == [name] else version,
        "programs": [str(packages)],
    }
