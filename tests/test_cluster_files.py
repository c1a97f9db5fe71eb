"""The files for clusters beside the docs: what their commands do on a machine like theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.running import PATIENCE_S, ROOT, lines, wait_until, write_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="they are for Linux"),
]
KEY = "secret-7d1f"
SHOW = (
    "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c MODEL_API_KEY=; "
    "unshare -U true 2>/dev/null && echo namespaces; sleep 1; echo shown"
)
WITHOUT_NAMESPACES = [sys.executable, "-m", "tests.helpers.without_namespaces"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "docs" / name).read_text()))


def new_home(at: Path) -> Path:
    """The home of a new machine, with the files that the user sends along."""
    job = at / "job"
    job.mkdir(parents=True)
    call = {"name": "terminal", "arguments": {"command": SHOW}}
    script = [{"tool_calls": [call]}, {"tool_calls": [call]}, {"content": "Done."}]
    rows = [{"id": f"q{n}", "prompt": "Look.", "script": script} for n in range(8)]
    write_rows(job / "prompts.jsonl", *rows)
    config = {
        "model": "scripted",
        "enabled_toolsets": ["terminal"],
        "dataset_file": str(job / "prompts.jsonl"),
        "num_workers": 1,
    }
    (job / "run.yaml").write_text(yaml.safe_dump(config))
    return at


def start(command: str, home: Path, wrapper: list[str], **more: str) -> subprocess.Popen[bytes]:
    """Run a command of one of the files as its machine would."""
    (bin_directory := home / "bin").mkdir(exist_ok=True)
    runner = bin_directory / "batch-runner"
    runner.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/batch_runner.py "$@"\n')
    runner.chmod(0o755)
    environment = {
        "HOME": str(home),
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MODEL_API_KEY": KEY,
        **more,
    }
    with (home / "out").open("ab") as out:
        return subprocess.Popen(
            [*wrapper, "bash", "-c", command],
            env=environment,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def test_a_run_of_skypilot_goes_on_on_the_machine_that_replaces_a_lost_one(tmp_path: Path) -> None:
    [task] = documents("skypilot.yaml")
    assert set(task["file_mounts"]) == {"~/job/run.yaml", "~/job/prompts.jsonl"}
    (bucket := tmp_path / "bucket").mkdir()
    mirror = dict.fromkeys(task["envs"], f"file://{bucket}")
    home = new_home(tmp_path / "first")
    records = "job/trajectories/big/records.jsonl"
    process = start(task["run"], home, [], **mirror)
    wait_until(lambda: (home / records).exists() and len(lines(home / records)) > 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: any(bucket.rglob("parts/*")))
    again = new_home(tmp_path / "second")
    assert start(task["run"], again, [], **mirror).wait(PATIENCE_S) == 0, (
        again / "out"
    ).read_text()
    found = lines(again / records)
    assert {one["id"] for one in found} == {f"q{n}" for n in range(8)}
    assert (again / "job/trajectories/big.jsonl").stat().st_size > 0


def test_a_pod_without_namespaces_is_a_worker_whose_key_commands_cannot_read(
    tmp_path: Path,
) -> None:
    """Both shards here have the seccomp profile and the capabilities of such a pod: none."""
    job, policy = documents("kubernetes_gvisor.yaml")
    pod = job["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    [container] = pod["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    [command] = container["args"]
    assert f'/{job["spec"]["completions"]}"' in command
    home = new_home(tmp_path / "pod")
    (bucket := home / "bucket").mkdir()
    for shown, here in (
        ("/config/", f"{home}/job/"),
        ("/work/", f"{home}/"),
        ("s3://bucket/runs", f"file://{bucket}"),
        ("/64", "/2"),
    ):
        assert shown in command
        command = command.replace(shown, here)
    for index in range(2):
        process = start(command, home, WITHOUT_NAMESPACES, JOB_COMPLETION_INDEX=str(index))
        assert process.wait(PATIENCE_S) == 0, (home / "out").read_text()
    found = [one for index in range(2) for one in lines(home / f"runs/big.{index}/records.jsonl")]
    assert {one["id"] for one in found} == {f"q{n}" for n in range(8)}
    for record in found:
        for message in record["messages"]:
            if message["role"] == "tool":
                assert json.dumps("0\nshown\n") in message["content"]


def test_a_pod_without_namespaces_refuses_bwrap_before_anything_is_paid(tmp_path: Path) -> None:
    home = new_home(tmp_path / "pod")
    command = "exec batch-runner --config=job/run.yaml --run_name=refused --sandbox=bwrap"
    assert start(command, home, WITHOUT_NAMESPACES).wait(PATIENCE_S) == 2
    said = (home / "out").read_text()
    assert "sandbox bwrap: it does not work here" in said
    assert "allow unprivileged user namespaces" in said
    assert not (home / "trajectories/refused/records.jsonl").exists()
