"""Runs whose rows name images, on nodes of a Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint
from tests.fakes.ray_cluster import TwoNodes, actors, two_nodes
from tests.helpers.running import records_by_id, run, started, wait_until, write_rows
from tests.images.conftest import podman
from tests.images.test_agent_images import FIXED as FIXED_BY_AGENT
from tests.images.test_agent_images import in_image, work
from tests.images.test_image_runs import FIXED, FIXES, OPTIONS, row, terminal
from toolsets.sandbox.base import SandboxSettings
from toolsets.sandbox.factory import sandbox_problem

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
    pytest.mark.xdist_group("ray"),
]

WITHOUT = ("bwrap", "podman")
"""Programs that one of the nodes does not have."""
PODMAN = {"sandbox": "docker", "container_engine": "podman"}
TURNS = (
    terminal("echo kept > /file; sed -i s/-/+/ pkg/calc.py"),
    terminal("touch begun; sleep 1000"),
    terminal("cat /file"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def on_ray(cluster: TwoNodes, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "executor": "ray", "ray_address": cluster.address, **more}


def assert_nothing_is_left(cluster: TwoNodes, cwd: Path) -> None:
    wait_until(lambda: not actors())
    assert list((cwd / "trajectories/r/workspaces").iterdir()) == []
    assert [path for path in cluster.temporary.glob("batch-*/**/*") if path.is_file()] == []
    assert str(cwd) not in Path("/proc/self/mounts").read_text()


def read_verdicts(cwd: Path) -> dict[str, bool]:
    return {name: record["check"]["passed"] for name, record in records_by_id(cwd).items()}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["driver", "shared"])
def test_rows_are_worked_on_in_images_of_nodes(
    images: Path, tmp_path: Path, cluster: TwoNodes, storage: str
) -> None:
    write_rows(tmp_path / "p.jsonl", *FIXES)
    given = on_ray(cluster, images=images, ray_storage=storage)
    done = run(tmp_path, "--row_setup", **given)
    assert done.returncode == 0, done.stderr
    assert read_verdicts(tmp_path) == {fix["id"]: fix["id"] != "not at all" for fix in FIXES}
    assert_nothing_is_left(cluster, tmp_path)


def kill_actors_in_second_turn(cwd: Path, given: dict[str, Any], begun: Any) -> None:
    """Others continue the conversations of those that are killed, to the end of the run."""
    check = f"python3 -c '{FIXED}'"
    write_rows(cwd / "p.jsonl", *(row(name, "python:1", *TURNS, check=check) for name in "ab"))
    with started(cwd, "--row_setup", **given) as process:
        wait_until(lambda: begun() == 2, timeout_s=120)
        for pid in actors():
            os.kill(pid, signal.SIGKILL)
        assert process.wait(200) == 0, (cwd / "output.txt").read_text()
    for record in records_by_id(cwd).values():
        assert [resume["workspace_kept"] for resume in record["resumes"]] == [True]
        assert "kept" in record["messages"][-2]["content"]
        assert record["check"]["passed"]


@pytest.mark.slow
def test_conversations_of_killed_actors_continue_with_their_files(
    images: Path, tmp_path: Path, cluster: TwoNodes
) -> None:
    given = on_ray(cluster, images=images)

    def begun() -> int:
        return len(list(cluster.temporary.glob("*/*/r/workspaces/*/upper/testbed/begun")))

    kill_actors_in_second_turn(tmp_path, given, begun)
    assert_nothing_is_left(cluster, tmp_path)


@pytest.mark.slow
def test_agents_work_in_images_of_nodes(images: Path, tmp_path: Path, cluster: TwoNodes) -> None:
    """Also where actors die: agents begin again in their images, and pay nothing twice."""
    rows = [work(name, "python:1", steps=3, check=FIXED_BY_AGENT) for name in "abcd"]
    write_rows(tmp_path / "p.jsonl", *rows)
    with AgentEndpoint() as endpoint:
        given = {**in_image(images, endpoint), "num_workers": 2, "batch_size": 2}
        given |= {"executor": "ray", "ray_address": cluster.address}
        endpoint.answers = 6
        with started(tmp_path, "--row_setup", **given) as process:
            wait_until(lambda: len(endpoint.exchanges) == 6, timeout_s=120)
            for pid in actors():
                os.kill(pid, signal.SIGKILL)
            endpoint.answer_all()
            assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
        found = records_by_id(tmp_path)
        assert read_verdicts(tmp_path) == dict.fromkeys("abcd", True)
        assert {record["diverged_at"] for record in found.values()} == {None}
        assert sum(record["api_calls"] for record in found.values()) == 4 * 4
        assert len(endpoint.exchanges) <= 4 * 4 + 4, "so many conversations were in flight"
    assert max(record["agent"]["starts"] for record in found.values()) == 2
    assert_nothing_is_left(cluster, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("storage", ["driver", "shared"])
@pytest.mark.usefixtures("engine")
def test_containers_are_those_of_nodes(tmp_path: Path, storage: str) -> None:
    """None is left on a node, neither of a conversation that continued there nor elsewhere."""
    with two_nodes(tmp_path) as cluster:  # nodes with the variables of this engine
        given = on_ray(cluster, **PODMAN, ray_storage=storage)

        def begun() -> int:
            names = podman("ps", "--format", "{{.Names}}").split()
            return sum("begun" in podman("exec", name, "ls", "/testbed") for name in names)

        kill_actors_in_second_turn(tmp_path, given, begun)
        assert podman("ps", "--all", "--quiet") == ""
        assert_nothing_is_left(cluster, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sandbox bwrap: "),
        (PODMAN, "sandbox docker: the program podman was not found"),
    ],
)
def test_a_node_without_the_programs_is_refused_before_any_call(
    images: Path, tmp_path: Path, cluster: TwoNodes, options: dict[str, Any], message: str
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for path in Path(directory).glob("*"):
            if path.name not in WITHOUT and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    if sandbox_problem(options.get("sandbox", "bwrap"), SandboxSettings(engine="podman")):
        pytest.skip("podman does not work here")
    cluster.add(PATH=str(programs))
    write_rows(tmp_path / "p.jsonl", row("a", "python:1", *TURNS))
    given = on_ray(cluster, **options, worker_resources="other=1", num_workers=1)
    given |= {} if options else {"images": images}
    done = run(tmp_path, **given)
    assert done.returncode == 4, done.stderr
    assert f"on {os.uname().nodename}: {message}" in done.stderr
    assert not (tmp_path / "trajectories/r/records.jsonl").read_bytes()
