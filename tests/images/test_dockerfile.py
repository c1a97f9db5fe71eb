"""The image of the program itself: built from the Dockerfile, without network, and run."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, ids
from tests.images.conftest import podman

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine")]

PIP = '#!/bin/sh\nexec python -m pip "$@"\n'


@pytest.fixture(scope="module")
def mounts() -> list[str]:
    """What a base of the usual kind brings: the system, Python, and packages in /deps."""
    python = Path(sys.base_prefix).resolve()
    packages = sysconfig.get_path("purelib")
    shown = {"/usr": "/usr", str(python): str(python), packages: "/deps"}
    if python.is_relative_to("/usr"):
        del shown[str(python)]
    return [f"--volume={source}:{target}:ro" for source, target in shown.items()]


@pytest.fixture(scope="module")
def built(
    engine: None, mounts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The image's name."""
    root = tmp_path_factory.mktemp("base")
    for name in ("etc", "tmp", "usr", "deps", sys.base_prefix.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    home = root / "opt" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = sorted(home.glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text("/deps\n")
    (home / "bin" / "pip").write_text(PIP)
    (home / "bin" / "pip").chmod(0o755)
    subprocess.run(["tar", "-C", root, "-cf", root.with_suffix(".tar"), "."], check=True)
    change = "--change=ENV PATH=/opt/python/bin:/usr/bin:/bin"
    offline = "--change=ENV PIP_NO_BUILD_ISOLATION=false"
    podman("import", "--quiet", change, offline, str(root.with_suffix(".tar")), "localhost/base:1")
    base = ("--network=none", "--build-arg", "BASE=localhost/base:1")
    podman("build", "--quiet", *mounts, *base, "--tag", "localhost/program:1", str(ROOT))
    yield "localhost/program:1"
    podman("rmi", "--force", "localhost/program:1", "localhost/base:1")


def test_the_demo_runs_in_the_image(built: str, mounts: list[str], tmp_path: Path) -> None:
    data = f"--volume={tmp_path}:/data"
    arguments = ("--config=demo", "--run_name=demo")
    podman("run", "--rm", "--network=none", *mounts, data, built, *arguments)
    assert len(ids(tmp_path / "trajectories" / "demo.jsonl")) == 24
    left = podman("run", "--rm", *mounts, "--entrypoint=ls", built, "/")
    assert "src" not in left.split()
