"""What an image starts by itself, beside the commands of a conversation and of its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_images import Entry, layer_of, layer_of_tree, write_layout
from tests.helpers.running import records_by_id, run, write_rows
from tests.images.conftest import podman
from tests.images.test_image_runs import OPTIONS, row, terminal
from tests.images.test_image_sandbox import act
from tests.images.test_task_runs import results_of
from toolsets.images.store import ImageStore
from toolsets.sandbox.image_bwrap import BwrapImageSandbox
from toolsets.sandbox.image_files import ImageFiles

pytestmark = pytest.mark.slow

SERVICE = "while :; do cat /asked > /answered 2>/dev/null; sleep 0.05; done"
ENTRYPOINT = f"""\
#!/bin/sh
echo $GREETING from $PWD > /entered
({SERVICE}) &
exec "$@"
"""
# Its worker, as of a server for each connection, answers after the command that asked has ended.
LATE = (
    "while :; do if [ -e /asked ]; then rm /asked; (sleep 0.3; echo late > /answered) & fi; "
    "sleep 0.02; done"
)
ASK = "cat /entered; rm -f /answered; echo {0} > /asked; until grep -q {0} /answered; do :; done"


@pytest.fixture(scope="module")
def entering(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with an ENTRYPOINT: a service, one that only serves, one that fails, and none."""
    directory = tmp_path_factory.mktemp("entering")
    programs = layer_of_tree(images.with_name("trees") / "python")
    script = layer_of([Entry("enter.sh", ENTRYPOINT.encode(), mode=0o755)])
    for name, words in {
        "service": ["/enter.sh"],
        "server": ["sh", "-c", f"echo only > /entered; {SERVICE}"],
        "late": ["sh", "-c", f'({LATE}) & exec "$@"', "sh"],
        "failing": ["/missing"],
        "none": None,
    }.items():
        config = {"WorkingDir": "/work", "Env": ["GREETING=hi", "PATH=/usr/bin:/bin"]}
        write_layout(
            directory / name, [programs, script], name="1", config={**config, "Entrypoint": words}
        )
    return directory


def enter(tmp_path: Path, **options: Any) -> None:
    """A service is there for the conversation, and for its check."""
    script = ASK.format("model")
    rows = [
        row(name, f"{name}:1", terminal(script), check=ASK.format("check"))
        for name in ("service", "server")
    ]
    rows += [row(name, f"{name}:1", terminal("ls /entered")) for name in ("failing", "none")]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(tmp_path, "--row_setup", **options)
    assert done.returncode == 0, done.stderr
    done_records = records_by_id(tmp_path)
    said = {name: results_of(record)[0] for name, record in done_records.items()}
    assert said["service"]["stdout"] == "hi from /work\n"
    assert said["server"]["stdout"] == "only\n"
    for name in ("service", "server"):
        assert done_records[name]["check"]["passed"], done_records[name]["check"]
    for name in ("failing", "none"):
        assert said[name]["exit_code"] == 2
    assert not [*(tmp_path / "trajectories/r/workspaces").iterdir()]


@pytest.mark.slow
def test_a_service_of_an_image_runs_beside_commands(entering: Path, tmp_path: Path) -> None:
    enter(tmp_path, **OPTIONS, images=entering)


@pytest.mark.long
@pytest.mark.usefixtures("engine")
def test_a_service_of_an_image_runs_in_its_container(entering: Path, tmp_path: Path) -> None:
    for name in ("service", "server", "failing", "none"):
        made = podman("pull", "--quiet", f"oci:{entering / name}:1")
        podman("tag", made.split()[-1], f"localhost/{name}:1")
    enter(tmp_path, **{**OPTIONS, "sandbox": "docker", "container_engine": "podman"})


@pytest.mark.slow
def test_a_command_ends_nothing_of_a_service(entering: Path, tmp_path: Path) -> None:
    """Neither one that has just been started, nor what it starts meanwhile."""

    async def doing(sandbox: BwrapImageSandbox, files: ImageFiles) -> None:
        for _ in range(3):
            asked = await sandbox.exec(
                ["sh", "-c", "echo > /asked; while [ -e /asked ]; do :; done"], timeout_s=20
            )
            assert not asked.timed_out
            answered = await sandbox.exec(
                ["sh", "-c", "until [ -s /answered ]; do :; done; rm /answered"], timeout_s=20
            )
            assert not answered.timed_out

    for number in range(5):
        act(entering, tmp_path / str(number), doing, "late:1")


def test_an_image_that_an_earlier_version_unpacked_has_its_entrypoint(entering: Path) -> None:
    image = ImageStore(entering).unpack("service:1")
    assert image.entrypoint == ("/enter.sh",)
    path = image.path / "config.json"
    config = json.loads(path.read_text())
    del config["entrypoint"]
    path.write_text(json.dumps(config))
    assert ImageStore(entering).unpack("service:1") == image
    assert "entrypoint" in json.loads(path.read_text())
