"""Signals that stop a command while it runs an event loop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers.running import ROOT

PROGRAM = """
import asyncio, time
from batch_trajectories.basics.event_loop import run_coroutine
from batch_trajectories.cli.exit_codes import errors_as_exit_codes

async def work():
    print("ready", flush=True)
    ends = time.monotonic() + 1.5
    try:
        while time.monotonic() < ends:
            pass
        print("a whole step")
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        print("tidied up")
        raise

async def main():
    await asyncio.gather(work(), work())

with errors_as_exit_codes():
    run_coroutine(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_step_end_and_cancels_all(number: signal.Signals) -> None:
    """A handler that raises in the middle of a step would leave tasks that nobody wakes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    printed, said = process.communicate(timeout=60)
    assert printed.splitlines() == [
        "a whole step",
        "ready",
        "a whole step",
        "tidied up",
        "tidied up",
    ]
    assert process.returncode == 128 + number
    assert said.count("error: ") == 1, said
