"""Settings for all tests."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from toolsets.sandbox import cgroup
from toolsets.sandbox.fork_servers import FORK_SERVERS

# Runs of tests are marked as this user's; the key for that is not the user's own.
_CONFIG_HOME = TemporaryDirectory(prefix="config-home-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG_HOME.name

# Processes that tests start would each compile the program again, as would each worker the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest.register_assert_rewrite("batch_trajectories.sandbox_conformance")

# What starts the tests may ignore these, as nohup does, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every machine, however slow it is: a failure is of the code, not of the day.
settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=15,
)
# `-m hypothesis --hypothesis-profile=full`
settings.register_profile("full", settings.get_profile("quick"), max_examples=100)
settings.register_profile("long", settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")


def pytest_collection(session: pytest.Session) -> None:
    """Each worker compiles other tests first, and loads what the others have compiled.

    pytest compiles a test module when it is imported, which takes seconds for all of them.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    root = Path(__file__).parent
    paths = [path for path in _paths(session.config.args) if path.is_relative_to(root)]
    begin = len(paths) * number // count
    for path in paths[begin:] + paths[:begin]:
        parts = path.relative_to(root.parent).with_suffix("").parts
        # Whatever it raises or skips, collection reports.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(parts))


def _paths(args: list[str]) -> list[Path]:
    """The test modules below directories that were named."""
    folders = [Path(arg).absolute() for arg in args if Path(arg).is_dir()]
    return sorted({path for folder in folders for path in folder.rglob("test_*.py")})


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests wait for processes and endpoints for a fifth of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def fork_servers_end() -> Iterator[None]:
    """A test that uses sandboxes in this process stops them, in the event loop that they are of."""
    yield
    left = list(FORK_SERVERS._loops)
    FORK_SERVERS._loops.clear()  # the next test is not to blame
    assert not left, "a sandbox was not stopped: its fork server still runs"


@pytest.fixture
def crowded() -> Iterator[Path]:
    """A control group for processes, as a container has one around it all."""
    parent = cgroup._parent("pids")
    if parent is None:
        pytest.skip("no control groups can be made here")
    path = parent / f"test-{os.getpid()}"
    path.mkdir()
    yield path
    for left in (*path.glob("*/"), path):
        left.rmdir()
