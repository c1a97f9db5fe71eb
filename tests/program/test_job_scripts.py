"""The job scripts of docs/ work in a directory that holds no clone of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.running import ROOT, lines, run, write_prompts

SHARDS = 2
REQUEUED = "scontrol.txt"


def start_job(directory: Path, shard: int) -> subprocess.Popen[str]:
    """Start slurm.sh as Slurm does: as a copy, with the variables of an array job."""
    environment = {
        **os.environ,
        "PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_COUNT": str(SHARDS),
        "SLURM_ARRAY_TASK_ID": str(shard),
        "SLURM_CPUS_PER_TASK": "1",
    }
    return subprocess.Popen(
        ["bash", "slurm.sh"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_job_array_of_slurm_is_interrupted_goes_on_and_is_merged(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "slurm.sh", tmp_path)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {REQUEUED}\n')
    scontrol.chmod(0o755)
    write_prompts(tmp_path / "p.jsonl", 8)
    settings = {
        "model": "scripted",
        "sandbox": "local",
        "enabled_toolsets": ["terminal"],
        "dataset_file": "p.jsonl",
        "script_file": "turns.yaml",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    go = tmp_path / "go"
    command = f"while test ! -e {go}; do sleep 0.1; done"
    wait = {"name": "terminal", "arguments": {"command": command}}
    (tmp_path / "turns.yaml").write_text(
        yaml.safe_dump([{"tool_calls": [wait]}, {"content": "Done."}])
    )
    first = start_job(tmp_path, 0)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("trajectories/big.0/inflight/*")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.terminate()
    time.sleep(1)
    go.touch()
    said, _ = first.communicate(timeout=90)
    assert first.returncode == 143, said
    assert (tmp_path / REQUEUED).read_text() == "requeue 7_0\n"
    for shard in range(SHARDS):
        job = start_job(tmp_path, shard)
        said, _ = job.communicate(timeout=90)
        assert job.returncode == 0, said
    merged = run(tmp_path, "merge", *(f"big.{shard}" for shard in range(SHARDS)), into="big")
    assert merged.returncode == 0, merged.stderr
    assert len(lines(tmp_path / "trajectories" / "big" / "records.jsonl")) == 8
