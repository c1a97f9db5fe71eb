"""Runs whose workers are Ray actors keep every promise that local ones keep."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent_endpoint import AgentEndpoint
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.ray_cluster import TwoNodes, actors, two_nodes
from tests.faults.oracle import assert_gone, judge_run_dir, resume_and_judge
from tests.helpers.running import (
    LONG_S,
    PATIENCE_S,
    ROOT,
    SCRIPTED,
    WRITE_A_NOTE,
    command,
    lines,
    run,
    session_of,
    started,
    wait_until,
    workers_of,
    write_prompts,
    write_rows,
)
from tests.program.test_agent_runs import options, prompt, scripted_agent
from tests.toolsets.test_sandbox import needs_bwrap

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
    pytest.mark.xdist_group("ray"),
]

IN_FLIGHT = 8
"""Two workers with four conversations each."""

SCRATCH = Path(tempfile.gettempdir()) / f"batch-trajectories-{os.getuid()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def asking(endpoint: FakeEndpoint, **more: object) -> dict[str, Any]:
    """Options of a run of two local workers that asks `endpoint`."""
    return {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "enabled_toolsets": "file",
        "model": "openai:m",
        "key_env": "none",
        "base_url": endpoint.openai_url,
        "num_workers": 2,
        "batch_size": IN_FLIGHT // 2,
        "heartbeat_timeout_s": 20,
        **more,
    }


def on_ray(endpoint: FakeEndpoint, cluster: TwoNodes, **more: object) -> dict[str, Any]:
    """The same in a cluster."""
    return asking(endpoint, executor="ray", ray_address=cluster.address, **more)


def wait_for(endpoint: FakeEndpoint, replies: int) -> None:
    """Wait until the endpoint has given so many."""
    wait_until(lambda: endpoint.journal()["replies"] >= replies)


def kill_actor(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def leftovers() -> list[Path]:
    return list(SCRATCH.iterdir()) if SCRATCH.exists() else []


def test_the_training_file_is_that_of_local_workers(tmp_path: Path, cluster: TwoNodes) -> None:
    """Journals in flight lie with the driver, workspaces with the node; nothing of it is left."""
    before = leftovers()
    local, spread = tmp_path / "local", tmp_path / "spread"
    with FakeEndpoint(turns=3, latency_s=0.02, **WRITE_A_NOTE) as endpoint:
        for cwd in (local, spread):
            cwd.mkdir()
            write_prompts(cwd / "p.jsonl", 40)
        assert run(local, **asking(endpoint)).returncode == 0
        done = run(spread, **on_ray(endpoint, cluster))
    assert done.returncode == 0, done.stderr
    judge_run_dir(spread / "trajectories/r", tasks=40)
    exported = [(cwd / "trajectories/r.jsonl").read_bytes() for cwd in (local, spread)]
    assert exported[0] == exported[1]
    assert "worker-1 on" in (spread / "trajectories/r/run.log").read_text(), "logs travel too"
    wait_until(lambda: not actors())
    assert leftovers() == before


@needs_bwrap
def test_agents_that_are_commands_run_on_nodes(tmp_path: Path, cluster: TwoNodes) -> None:
    """Also where an actor dies: the agent starts again, and nothing is paid for twice."""
    local, spread = tmp_path / "local", tmp_path / "spread"
    rows = [{"id": f"p{n}", "prompt": prompt(f"t{n}", 3)} for n in range(4)]
    with AgentEndpoint(reasoning="Let me think.", latency_s=0.2) as endpoint:
        for cwd in (local, spread):
            cwd.mkdir()
            write_rows(cwd / "p.jsonl", *rows)
        given = {**options(endpoint, scripted_agent()), "num_workers": 2, "batch_size": 2}
        assert run(local, **given).returncode == 0
        asked = len(endpoint.exchanges)
        given |= {"executor": "ray", "ray_address": cluster.address}
        with started(spread, **given) as process:
            wait_until(
                lambda: len(endpoint.exchanges) >= asked + 4 or process.poll() is not None,
                timeout_s=LONG_S,
            )
            kill_actor(next(iter(actors())))
            wait_until(lambda: process.poll() is not None, timeout_s=LONG_S)
        assert process.returncode == 0, (spread / "output.txt").read_text()
        assert asked <= len(endpoint.exchanges) - asked <= asked + 4
    judge_run_dir(spread / "trajectories/r", tasks=4)
    held = [
        sorted(
            (record["id"], record["status"], record["api_calls"], record["agent"]["version"])
            for record in lines(cwd / "trajectories/r/records.jsonl")
        )
        for cwd in (local, spread)
    ]
    assert held[0] == held[1]


@pytest.mark.parametrize("storage", ["driver", "shared"])
def test_actors_are_killed(tmp_path: Path, cluster: TwoNodes, storage: str) -> None:
    """Others take over where their journals end; Ray restarts and retries nothing."""
    write_prompts(tmp_path / "p.jsonl", 30)
    with FakeEndpoint(turns=4, latency_s=0.05, answers=20, **WRITE_A_NOTE) as endpoint:
        given = on_ray(endpoint, cluster, ray_storage=storage)
        with started(tmp_path, **given) as process:
            wait_for(endpoint, 20)
            for pid in actors():  # on a loaded machine the other may hold nothing yet
                kill_actor(pid)
            endpoint.answer(None)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "output.txt").read_text()
        assert endpoint.journal()["repeated"] <= IN_FLIGHT
    judge_run_dir(tmp_path / "trajectories/r", tasks=30)
    assert "died; another worker takes over" in (tmp_path / "output.txt").read_text()


def test_a_silent_actor_is_replaced(tmp_path: Path, cluster: TwoNodes) -> None:
    """A stopped actor delays nobody, and its late results do not count."""
    write_prompts(tmp_path / "p.jsonl", 30)
    with FakeEndpoint(turns=4, latency_s=0.05, answers=20, **WRITE_A_NOTE) as endpoint:
        with started(tmp_path, **on_ray(endpoint, cluster, heartbeat_timeout_s=10)) as process:
            wait_for(endpoint, 20)
            stopped = actors()[0]
            os.kill(stopped, signal.SIGSTOP)
            endpoint.answer(None)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "output.txt").read_text()
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        assert endpoint.journal()["repeated"] <= IN_FLIGHT // 2
    judge_run_dir(tmp_path / "trajectories/r", tasks=30)
    wait_until(lambda: not actors())


def test_the_driver_is_killed(tmp_path: Path, cluster: TwoNodes) -> None:
    """Its actors end with it; the same command continues, as does one with local workers."""
    write_prompts(tmp_path / "p.jsonl", 30)
    with FakeEndpoint(turns=4, latency_s=0.05, answers=0, **WRITE_A_NOTE) as endpoint:
        given = on_ray(endpoint, cluster)
        for replies in (20, 60):
            endpoint.answer(replies + 2 * IN_FLIGHT)
            with started(tmp_path, **given) as process:
                wait_for(endpoint, replies)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                wait_until(lambda: not actors())
        endpoint.answer(None)
        local = {name: text for name, text in given.items() if name != "executor"}
        resume_and_judge(tmp_path, local, tasks=30, endpoint=endpoint, wasted=2 * IN_FLIGHT)


@pytest.mark.parametrize("where", ["cluster", "own"])
def test_ctrl_c_ends_running_turns(tmp_path: Path, cluster: TwoNodes, where: str) -> None:
    """The signal goes to the whole process group; then the run can be resumed."""
    write_prompts(tmp_path / "p.jsonl", 30)
    with FakeEndpoint(turns=4, latency_s=0.1, answers=10, **WRITE_A_NOTE) as endpoint:
        given = on_ray(endpoint, cluster, grace_s=60)
        if where == "own":
            del given["ray_address"]
        with started(tmp_path, **given) as process:
            wait_for(endpoint, 10)
            os.killpg(process.pid, signal.SIGINT)
            wait_until(lambda: "stopping" in (tmp_path / "output.txt").read_text())
            endpoint.answer(None)
            assert process.wait(PATIENCE_S) == 130, (tmp_path / "output.txt").read_text()
            assert_gone(process.pid)
        output = (tmp_path / "output.txt").read_text()
        assert "run the same command again" in output
        assert "Traceback" not in output
        del given["executor"]
        resume_and_judge(tmp_path, given, tasks=30, endpoint=endpoint, wasted=0)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, cluster: TwoNodes) -> None:
    write_prompts(tmp_path / "p.jsonl", 12)
    with FakeEndpoint(turns=2, latency_s=60.0, **WRITE_A_NOTE) as endpoint:
        with started(tmp_path, **on_ray(endpoint, cluster, grace_s=120)) as process:
            wait_until(lambda: endpoint.journal()["in_flight"] > 0)
            os.kill(process.pid, signal.SIGTERM)
            wait_until(lambda: "stopping" in (tmp_path / "output.txt").read_text())
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 143
        wait_until(lambda: not actors())


def test_a_cluster_that_the_run_started_ends_with_it(tmp_path: Path) -> None:
    """Without an address one is started here; its processes show no keys."""
    write_prompts(tmp_path / "p.jsonl", 12)
    with FakeEndpoint(turns=3, latency_s=0.02, answers=8, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, executor="ray", key_env="CANARY_KEY")
        os.environ["CANARY_KEY"] = "canary-secret"
        try:
            with started(tmp_path, **given) as process:
                wait_for(endpoint, 8)
                assert not workers_of(process.pid), "no local ones"
                of_ray = [pid for pid in session_of(process.pid) if pid != process.pid]
                assert of_ray
                assert not [pid for pid in of_ray if b"canary-secret" in environ(pid)]
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                # Two agents of Ray's own need some seconds more to find that it is gone.
                wait_until(lambda: not actors())
            endpoint.answer(None)
            resume_and_judge(
                tmp_path,
                {**given, "executor": "local"},
                tasks=12,
                endpoint=endpoint,
                wasted=IN_FLIGHT,
            )
        finally:
            del os.environ["CANARY_KEY"]


def environ(pid: int) -> bytes:
    """What a process shows of its environment."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_task_that_kills_its_worker_is_quarantined(tmp_path: Path, cluster: TwoNodes) -> None:
    """The task fails after three deaths, all others complete, and the run ends."""
    (cluster.modules / "poison.py").write_text(
        "import os\n\nfrom toolsets.tool import tool\n\n\n@tool(idempotent=True)\n"
        'def drink(what: str) -> str:\n    """Drink it.\n\n    Args:\n        what: It.\n'
        '    """\n    if what == "poison":\n        os._exit(1)\n    return "well"\n\n\n'
        "TOOLS = [drink]\n"
    )
    rows = [
        {
            "id": f"p{n}",
            "prompt": f"{n}?",
            "script": [
                {"tool_calls": [{"name": "drink", "arguments": {"what": what}}]},
                {"content": "done"},
            ],
        }
        for n, what in enumerate(["water"] * 5 + ["poison"] + ["water"] * 6)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    done = run(
        tmp_path,
        env={"PYTHONPATH": str(cluster.modules)},
        run_name="r",
        dataset_file="p.jsonl",
        model="scripted",
        tools="poison:TOOLS",
        enabled_toolsets="poison",
        num_workers=2,
        batch_size=4,
        executor="ray",
        ray_address=cluster.address,
    )
    assert done.returncode == 1, done.stderr
    records = {record["id"]: record for record in lines(tmp_path / "trajectories/r/records.jsonl")}
    assert len(records) == 12
    failed = [name for name, record in records.items() if record["status"] == "failed"]
    assert failed == ["p5"]
    assert records["p5"]["error"]["class"] == "worker_died"


def test_a_key_that_a_node_lacks(tmp_path: Path, cluster: TwoNodes) -> None:
    """The driver's own does not travel; the message names the node and the variable."""
    write_prompts(tmp_path / "p.jsonl", 2)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        given = on_ray(endpoint, cluster, key_env="CANARY_KEY")
        done = run(tmp_path, env={"CANARY_KEY": "canary-secret"}, **given)
        assert endpoint.journal()["requests"] == 0
    assert done.returncode == 4, done.stderr
    assert f"on {os.uname().nodename}: no API key" in done.stderr
    assert "CANARY_KEY" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = run(tmp_path, **SCRIPTED, executor="ray", ray_address=address)
    assert done.returncode == 2, done.stderr
    assert f"ray_address: {address}: cannot join" in done.stderr


def test_a_cluster_whose_token_this_machine_lacks(tmp_path: Path, cluster: TwoNodes) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    given = {**SCRIPTED, "executor": "ray", "ray_address": cluster.address}
    done = run(tmp_path, env=environment, **given)
    assert done.returncode == 2, done.stderr
    assert f"ray_address: {cluster.address}: cannot join" in done.stderr
    assert "~/.ray/auth_token" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_home_directory_that_takes_no_token(tmp_path: Path) -> None:
    """The variables by which Ray does without it reach the cluster that the run starts."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    home, token = tmp_path / "home", tmp_path / "token"
    home.write_text("no directory")
    token.write_text("0123456789abcdef" * 4)
    given = {**SCRIPTED, "executor": "ray"}
    done = run(tmp_path, env={"HOME": str(home)}, **given)
    assert done.returncode == 2, done.stderr
    assert "cannot start a Ray cluster on this machine" in done.stderr
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr
    for name, value in (("RAY_AUTH_TOKEN_PATH", token), ("RAY_AUTH_MODE", "disabled")):
        environment = {"HOME": str(home), name: str(value)}
        done = run(tmp_path, env=environment, **given | {"run_name": name})
        assert done.returncode == 0, done.stderr


def test_a_run_in_the_directory_that_ray_made_for_a_job_is_refused(tmp_path: Path) -> None:
    """`ray job submit --working-dir` runs the driver there; Ray deletes it some day."""
    made = tmp_path / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    made.mkdir(parents=True)
    write_rows(made / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    done = run(made, **SCRIPTED)
    assert done.returncode == 2, done.stderr
    assert "output_dir: trajectories" in done.stderr
    assert not (made / "trajectories").exists()
    assert run(made, **SCRIPTED, output_dir=tmp_path / "runs").returncode == 0


def test_other_code_on_a_node(tmp_path: Path, cluster: TwoNodes) -> None:
    for top in ("agent", "batch_trajectories", "toolsets"):
        shutil.copytree(ROOT / top, tmp_path / "other" / top)
    with (tmp_path / "other/toolsets/tool.py").open("a") as module:
        module.write("# another version\n")
    cluster.add(PYTHONPATH=str(tmp_path / "other"))
    write_prompts(tmp_path / "p.jsonl", 2)
    with FakeEndpoint(turns=1, latency_s=0.0) as endpoint:
        given = on_ray(endpoint, cluster, worker_resources="other=1", num_workers=1)
        program = "import sys; sys.argv[0] = 'x'; from batch_runner import cli; cli()"
        arguments = command(**given)[2:]
        # Not from its file: Ray lets its workers look for modules beside that first.
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert endpoint.journal()["requests"] == 0
    assert done.returncode == 4, done.stderr
    assert "has another version of this program" in done.stderr


def test_a_node_is_lost(tmp_path: Path) -> None:
    """The tasks of its workers continue elsewhere, in fresh workspaces, and is paid once."""
    write_prompts(tmp_path / "p.jsonl", 40)
    with (
        two_nodes(tmp_path) as cluster,
        FakeEndpoint(turns=4, latency_s=0.05, answers=40, **WRITE_A_NOTE) as endpoint,
    ):
        given = on_ray(endpoint, cluster, num_workers=4, batch_size=4)
        with started(tmp_path, **given) as process:
            wait_for(endpoint, 40)
            cluster.remove_latest()
            endpoint.answer(None)
            wait_until(lambda: process.poll() is not None)
        assert process.returncode == 0, (tmp_path / "output.txt").read_text()
        assert endpoint.journal()["repeated"] <= 2 * 4
    judge_run_dir(tmp_path / "trajectories/r", tasks=40)
    assert "wait for a place" in (tmp_path / "output.txt").read_text() or not actors()


@pytest.mark.long
def test_a_long_run_through_every_death(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 prompts: actors, a node and the driver die; nothing is lost, doubled or torn."""
    local, spread = tmp_path / "local", tmp_path / "spread"
    for cwd in (local, spread):
        cwd.mkdir()
        write_prompts(cwd / "p.jsonl", 2_000)
    plays: dict[str, Any] = {"turns": 3, "latency_s": 0.05, **WRITE_A_NOTE}
    with FakeEndpoint(**plays) as endpoint:
        assert run(local, **asking(endpoint, batch_size=16)).returncode == 0
    with two_nodes(tmp_path) as cluster, FakeEndpoint(**plays) as endpoint:
        given = on_ray(endpoint, cluster, num_workers=4, batch_size=16)
        in_flight = 4 * 16
        with started(spread, **given) as process:
            for replies in (500, 1_000, 1_500):
                wait_for(endpoint, replies)
                kill_actor(actors()[0])
            wait_for(endpoint, 2_000)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_until(lambda: not actors(), timeout_s=10)
        with started(spread, **given) as process:
            wait_for(endpoint, 3_000)
            cluster.remove_latest()
            wait_for(endpoint, 4_000)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_until(lambda: not actors(), timeout_s=10)
        given |= {"num_workers": 2}
        limit = 3 * 16 + 2 * 16 + 2 * in_flight
        resume_and_judge(spread, given, tasks=2_000, endpoint=endpoint, wasted=limit)
        repeated = endpoint.journal()["repeated"]
    exported = [(cwd / "trajectories/r.jsonl").read_bytes() for cwd in (local, spread)]
    assert len(exported[0].splitlines()) == 2_000
    assert exported[0] == exported[1]
    with capsys.disabled():
        print(f"\n{repeated} calls were repeated, at most {limit} may be")
