"""Run directories on file systems across a network, and on those that keep no locks."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batch_trajectories.engine.file_systems import explain_missing_locks, find_network_type
from tests.helpers.running import run, write_prompts

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:40 / {place} rw - {kind} server:/export rw
31 22 0:41 / {place}/my\\040runs rw - ext4 /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("kind", "found"),
    [("nfs4", "nfs4"), ("lustre", "lustre"), ("fuse.sshfs", "fuse.sshfs"), ("xfs", None)],
)
def test_the_type_of_a_network_file_system_is_found(
    tmp_path: Path, kind: str, found: str | None
) -> None:
    mounts = MOUNTS.format(place=tmp_path, kind=kind)
    (tmp_path / "my runs").mkdir()
    assert find_network_type(tmp_path / "trajectories" / "r", mounts) == found
    assert find_network_type(tmp_path / "my runs" / "r", mounts) is None
    assert find_network_type(tmp_path.parent, mounts) is None


def test_a_later_mount_covers_an_earlier_one(tmp_path: Path) -> None:
    mounts = MOUNTS.format(place=tmp_path, kind="nfs")
    over = f"32 30 0:42 / {tmp_path} rw - tmpfs tmpfs rw\n"
    assert find_network_type(tmp_path, mounts + over) is None


def test_a_start_names_the_file_system_and_runs(tmp_path: Path) -> None:
    if shutil.which("bindfs") is None or os.geteuid() != 0:
        pytest.skip("needs bindfs and root")
    below, place = tmp_path / "below", tmp_path / "place"
    below.mkdir()
    place.mkdir()
    mounted = subprocess.run(["bindfs", below, place], check=False)
    if mounted.returncode != 0:
        pytest.skip("bindfs cannot mount here")
    try:
        write_prompts(tmp_path / "p.jsonl", 2)
        (tmp_path / "s.json").write_text('[{"content": "Done."}]')
        done = run(
            tmp_path,
            dataset_file="p.jsonl",
            run_name="r",
            model="scripted",
            script_file="s.json",
            output_dir=str(place),
        )
        assert done.returncode == 0, done.stderr
        assert f"{place}/r is on a file system of type fuse" in done.stderr
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("error=ENOSYS", "it refuses locks: Function not implemented"),
        ("retval=0", "it gives the same lock twice"),
    ],
)
def test_a_file_system_without_locks_is_refused(tmp_path: Path, outcome: str, told: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    trace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject=flock:{outcome}"]
    program = (
        "import sys; from pathlib import Path; from batch_trajectories.engine.run_dir import lock\n"
        "from batch_trajectories.basics.errors import RunDirError\n"
        "try: lock(Path(sys.argv[1]))\n"
        "except RunDirError as error: print(error)"
    )
    done = subprocess.run(
        [*trace, sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{tmp_path}: its file system keeps no locks ({told})" in done.stdout
    assert "--output_dir" in done.stdout


def test_a_lock_that_is_kept_is_proved(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        assert explain_missing_locks(file.fileno(), tmp_path / "lock") is not None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert explain_missing_locks(file.fileno(), tmp_path / "lock") is None
