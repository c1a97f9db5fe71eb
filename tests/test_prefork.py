"""A forked command does what a new process does."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.prefork import Forked, can_fork
from tests.helpers.running import PATIENCE_S, SCRIPTED, command, run, started, write_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [("errors",), ("status", "nothing"), ("--no_such_option",), ("tools", "--json")]
)
def test_output_and_exit_code_are_the_same(tmp_path: Path, args: tuple[str, ...]) -> None:
    forked = run(tmp_path, *args)
    new = subprocess.run(
        command(*args), cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        new.returncode,
        new.stdout,
        new.stderr,
    )


def test_it_has_the_environment_and_the_umask_of_its_start(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "y"}]})
    before = os.umask(0o027)
    try:
        assert run(tmp_path, **SCRIPTED).returncode == 0
    finally:
        os.umask(before)
    assert (tmp_path / "trajectories").stat().st_mode & 0o777 == 0o750
    options = {**SCRIPTED, "run_name": "s", "model": "openai:m", "key_env": "OF_THIS_TEST"}
    refused = run(tmp_path, "--dry_run", **options)
    assert "OF_THIS_TEST" in refused.stderr
    given = run(tmp_path, "--dry_run", **options, env={"OF_THIS_TEST": "sk-1"})
    assert given.returncode == 0, given.stderr


def test_it_leads_a_session_and_a_signal_ends_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with started(tmp_path, **SCRIPTED) as process:
        assert isinstance(process, Forked)
        assert os.getsid(process.pid) == process.pid, "from the start: tests kill its group"
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "LC_ALL", "TZ"])
def test_variables_that_an_interpreter_reads_at_its_start_need_a_new_one(name: str) -> None:
    assert can_fork(os.environ)
    assert can_fork({**os.environ, "ANY_OTHER": "x"})
    assert not can_fork({**os.environ, name: "x"})
