"""`build_images`: with an engine that is played by a script, and with a real Podman."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batch_trajectories.dataset.harbor import HarborTask
from tests.dataset.test_harbor import SIMPLE, write_task
from tests.fakes.fake_images import Entry, layer_of, write_saved
from tests.fakes.fake_registry import FakeRegistry
from tests.helpers.running import run
from toolsets.images.store import ImageStore

ENGINE = """\
#!{python}
import os, sys
from pathlib import Path
args, had = sys.argv[1:], Path({had!r})
name = lambda image: had / image.replace("/", "_")
if args[0] == "version":
    sys.exit(0)
if args[:2] == ["image", "inspect"]:
    if not name(args[-1]).exists():
        sys.exit("no such image: " + args[-1])
    print("1234 {{}}")
elif args[0] == "build":
    dockerfile = Path(args[args.index("--file") + 1])
    with open({log!r}, "a") as log:
        print(dockerfile.parents[1].name, args[-1] == str(dockerfile.parent), file=log)
    if "broken" in dockerfile.read_text():
        sys.exit("first line\\nunknown instruction: broken")
    name(args[args.index("--tag") + 1]).touch()
elif args[0] == "save":
    with open({log!r}, "a") as log:
        print("saved", file=log)
    Path(args[args.index("--output") + 1]).write_bytes(Path({had!r}, "archive").read_bytes())
else:
    sys.exit("unexpected: " + " ".join(args))
"""


def write_tasks(tasks: Path, *, dockerfile: str = "FROM scratch\n") -> None:
    for name in ("one", "two"):
        write_task(tasks / name, "", **{"environment/Dockerfile": dockerfile})
    write_task(tasks / "named", SIMPLE)
    write_task(tasks / "gpus", "[environment]\ngpus = 1\n")


class TestPlayed:
    @pytest.fixture
    def log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The tasks whose images the engine was asked to build."""
        log, had, program = tmp_path / "log", tmp_path / "had", tmp_path / "bin" / "docker"
        had.mkdir()
        program.parent.mkdir()
        program.write_text(ENGINE.format(python=sys.executable, had=str(had), log=str(log)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return log

    def test_each_image_is_built_once(self, tmp_path: Path, log: Path) -> None:
        write_tasks(tmp_path / "tasks")
        built = run(tmp_path, "build-images", "tasks")
        assert built.returncode == 0, built.stderr
        assert (
            "tasks: 2 images built or there already, 0 failed; 1 task naming an image, 1 task "
            "that cannot run (see `look`)"
        ) in built.stdout
        assert log.read_text() == "one True\ntwo True\n"
        run(tmp_path, "build-images", "tasks")
        (tmp_path / "tasks" / "two" / "environment" / "data").write_text("new")
        run(tmp_path, "build-images", "tasks")
        assert log.read_text() == "one True\ntwo True\ntwo True\n"

    def test_a_failure_does_not_stop_the_others(self, tmp_path: Path, log: Path) -> None:
        write_tasks(tmp_path / "tasks")
        (tmp_path / "tasks" / "one" / "environment" / "Dockerfile").write_text("broken")
        built = run(tmp_path, "build-images", "tasks")
        assert built.returncode == 1
        assert "one: " in built.stderr
        assert "docker cannot build it: first line | unknown instruction: broken" in built.stderr
        assert "1 image built or there already, 1 failed" in built.stdout
        assert log.read_text() == "one True\ntwo True\n"

    def test_images_are_saved_once_for_machines_without_an_engine(
        self, tmp_path: Path, log: Path
    ) -> None:
        """Into one layout: what images have in common is in it once."""
        write_tasks(tmp_path / "tasks")
        layers = [layer_of([Entry("base", os.urandom(1 << 20))]), layer_of([Entry("own", b"1")])]
        write_saved(tmp_path / "had/archive", layers, name="any:1")
        for _ in range(2):
            done = run(tmp_path, "build-images", "tasks", save="images")
            assert done.returncode == 0, done.stderr
        # The engine says that both are one image, so it is asked for one.
        assert log.read_text().split().count("saved") == 1
        store = ImageStore(tmp_path / "images")
        for name in ("one", "two"):
            image = HarborTask(tmp_path / "tasks" / name).row()["image"]
            assert (store.unpack(image).rootfs / "own").read_bytes() == b"1"
        layout = tmp_path / "images" / "built"
        sizes = sorted(path.stat().st_size for path in (layout / "blobs/sha256").iterdir())
        assert len(sizes) == 4
        assert sum(sizes) < 1.1 * (1 << 20)

    def test_an_image_that_is_saved_in_any_form_is_not_saved_again(
        self, tmp_path: Path, log: Path
    ) -> None:
        write_tasks(tmp_path / "tasks")
        (tmp_path / "images").mkdir()
        for name in ("one", "two"):
            image = HarborTask(tmp_path / "tasks" / name).row()["image"]
            path = tmp_path / "images" / f"{name}.tar"
            write_saved(path, [layer_of([Entry("own", b"1")])], name=image)
        done = run(tmp_path, "build-images", "tasks", save="images")
        assert done.returncode == 0, done.stderr
        assert "saved" not in log.read_text()

    def test_images_fetches_what_tasks_name_and_builds_the_rest(
        self, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        write_tasks(tmp_path / "tasks")
        (tmp_path / "tasks" / "two" / "environment" / "Dockerfile").write_text("broken")
        layers = [layer_of([Entry("own", b"1")])]
        write_saved(tmp_path / "had/archive", layers, name="any:1")
        with FakeRegistry() as registry:
            registry.add_image("named", "1", layers)
            named = f"{registry.host}/named:1"
            write_task(tmp_path / "tasks" / "named", SIMPLE.replace("org/task:1", named))
            # The rows decide: the first has no image that must be built.
            first = run(tmp_path, "images", "tasks", images="images", max_samples=1)
            assert first.returncode == 0, first.stderr
            assert "1 image: 1 fetched, 0 here already, 0 failed" in first.stdout
            assert not log.exists()
            done = run(tmp_path, "images", "tasks", images="images")
            assert done.returncode == 1
            assert "3 images: 0 fetched, 1 built, 1 here already, 1 failed" in done.stdout
            assert "two: " in done.stderr
            assert "unknown instruction: broken" in done.stderr
            assert "1 of 3 images could not be built" in done.stderr
            (tmp_path / "tasks" / "two" / "environment" / "Dockerfile").write_text("FROM scratch")
            again = run(tmp_path, "images", "tasks", images="images")
            assert again.returncode == 0, again.stderr
            assert "3 images: 0 fetched, 1 built, 2 here already, 0 failed" in again.stdout
        store = ImageStore(tmp_path / "images")
        for name in ("one", "two"):
            assert store.has(HarborTask(tmp_path / "tasks" / name).row()["image"])
        assert store.has(named)

    def test_images_of_tasks_need_an_engine_only_for_what_is_not_there(
        self, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_task(tmp_path / "tasks" / "one", "", **{"environment/Dockerfile": "FROM scratch\n"})
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
        refused = run(tmp_path, "images", "tasks", images="images")
        assert refused.returncode == 4
        assert "1 image must be built: sandbox docker: the program docker" in refused.stderr
        write_saved(
            tmp_path / "images" / "one.tar",
            [layer_of([Entry("own", b"1")])],
            name=HarborTask(tmp_path / "tasks" / "one").row()["image"],
        )
        done = run(tmp_path, "images", "tasks", images="images")
        assert done.returncode == 0, done.stderr
        assert "1 image: 0 fetched, 1 here already, 0 failed" in done.stdout

    def test_a_directory_without_tasks_is_refused(self, tmp_path: Path, log: Path) -> None:
        refused = run(tmp_path, "build-images", str(tmp_path))
        assert refused.returncode == 2
        assert "no task directory: none holds a task.toml" in refused.stderr


def podman_problem() -> str | None:
    if shutil.which("podman") is None:
        return "there is no podman"
    done = subprocess.run(["podman", "info"], capture_output=True, check=False, text=True)
    return None if done.returncode == 0 else done.stderr[-300:]


@pytest.mark.long
def test_podman_builds_and_saves_images(tmp_path: Path) -> None:
    if problem := podman_problem():
        pytest.skip(problem)
    dockerfile = "FROM scratch\nCOPY data /app/\nWORKDIR /app\n"
    write_tasks(tmp_path / "tasks", dockerfile=dockerfile)
    for name in ("one", "two"):
        (tmp_path / "tasks" / name / "environment" / "data").write_text(f"{tmp_path}")
    images = [HarborTask(tmp_path / "tasks" / name).row()["image"] for name in ("one", "two")]
    try:
        built = run(tmp_path, "build-images", "tasks", container_engine="podman", save="images")
        assert built.returncode == 0, built.stderr
        store = ImageStore(tmp_path / "images")
        for image in images:
            unpacked = store.unpack(image)
            assert (unpacked.rootfs / "app/data").read_text() == str(tmp_path)
            assert unpacked.workdir == "/app"
        # The same command fetches what is fetched and builds what is built.
        brought = run(tmp_path, "images", "tasks", container_engine="podman", images="others")
        assert brought.returncode == 1  # org/task:1 is in no registry that can be reached
        assert "2 built" in brought.stdout
        assert all(ImageStore(tmp_path / "others").has(image) for image in images)
    finally:
        subprocess.run(["podman", "rmi", "--force", *images], capture_output=True, check=False)
