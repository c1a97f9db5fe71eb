"""What sandboxes cost: CPU of a start, of a first `python` call and of a further command; memory.

    python -m tests.benchmarks.sandboxes [--sandboxes bwrap,local] [--number 40] [--rounds 5]
    python -m tests.benchmarks.sandboxes --sandboxes bwrap,image,podman --venvs DIR

Each round measures everything once, so that ratios hold on a busy machine. The yardstick is
`bwrap true` and a bare `python3 -I -S -c pass` together, and for a further command one of a `bash`
that reads from a pipe and answers into another. `image` is bwrap in a container image
that all share; `podman` is the docker environment of mini-swe-agent in the same image, for
comparison. It needs a podman that manages its control groups itself (`cgroup_manager="cgroupfs"`),
and installs mini-swe-agent into DIR the first time. CPU is that of a control group, so it counts
every process, also those that nobody waits for; making one needs root.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from tests.benchmarks.peers import PACKAGES, environment
from tests.benchmarks.throughput import Table
from tests.fakes.fake_images import layer_of_tree, make_repository, tree_of_programs, write_layout
from toolsets.images.store import ImageStore
from toolsets.sandbox.base import ImageSpec, Limits, Sandbox
from toolsets.sandbox.factory import make_sandbox
from toolsets.sandbox.image_bwrap import BwrapImageSandbox
from toolsets.sandbox.inside.processes import descendants
from toolsets.workspace.workspace import Workspace

PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")
YARDSTICK = {
    "bwrap true": (
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--as-pid-1",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--",
        "true",
    ),
    "bare python": (PYTHON, "-I", "-S", "-c", "pass"),
}
FURTHER = 20
CALC = {"pkg/calc.py": "def add(a, b):\n    return a - b\n"}


class Meter:
    """The CPU time of this process and all that it starts."""

    def __init__(self, group: Path) -> None:
        self.group = group
        self._usage = group / "cpuacct.usage"
        self._stat = group / "cpu.stat"

    def ms(self) -> float:
        """So far."""
        if self._usage.exists():
            return int(self._usage.read_text()) / 1e6
        return int(self._stat.read_text().split()[1]) / 1e3


@contextmanager
def start_meter() -> Iterator[Meter]:
    """Put this process into a control group of its own."""
    groups = Path("/sys/fs/cgroup")
    root = groups / "cpuacct" if (groups / "cpuacct").is_dir() else groups
    group = root / f"benchmark-{os.getpid()}"
    # Beside it an engine makes groups for its containers.
    own = group / "own"
    own.mkdir(parents=True)
    try:
        (own / "cgroup.procs").write_text("0")
        yield Meter(group)
    finally:
        (root / "cgroup.procs").write_text("0")
        for made in [*groups.glob(f"*/{group.name}"), *groups.glob(group.name)]:
            for directory, _, _ in os.walk(made, topdown=False):
                Path(directory).rmdir()


def run_alone(argv: Sequence[str]) -> None:
    """Run a command with as little around it as possible."""
    pid = os.posix_spawnp(argv[0], list(argv), {})
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{argv[0]} failed")


def run_in_bare_shells(number: int, meter: Meter) -> float:
    """CPU of a further command in shells with nothing around them."""
    argv = ["bash", "--norc", "--noprofile"]
    pipe = subprocess.PIPE
    shells = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, bufsize=0) for _ in range(number)]

    def all_run() -> None:
        for shell in shells:
            assert shell.stdin is not None
            assert shell.stdout is not None
            shell.stdin.write(b"echo hi\n")
            if shell.stdout.read(100) != b"hi\n":
                raise RuntimeError("a bare shell failed")

    all_run()
    begun = meter.ms()
    for _ in range(FURTHER):
        all_run()
    taken = (meter.ms() - begun) / (FURTHER * number)
    for shell in shells:
        shell.communicate()
    return taken


def private_mb(sandboxes: int, servers: set[int]) -> float:
    """Private memory of all processes that were started since, per sandbox."""
    total = 0
    for pid, _ in descendants():
        if pid not in servers:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Private_"):
                    total += int(line.split()[1])
    return total / 1024 / sandboxes


def make_image(place: Path, files: Mapping[str, str]) -> ImageStore:
    """An image with bash, git, Python and a repository with these files."""
    tree = place / "tree"
    tree.mkdir()
    tree_of_programs(tree, with_caches=True)
    make_repository(tree / "testbed", files)
    write_layout(
        place / "images" / "made",
        [layer_of_tree(tree)],
        name="1",
        config={"WorkingDir": "/testbed"},
    )
    shutil.rmtree(tree)
    store = ImageStore(place / "images")
    store.unpack("made:1")
    return store


def make_sandboxes(
    name: str, spaces: Sequence[Workspace], limits: Limits, store: ImageStore | None
) -> list[Sandbox]:
    """The sandboxes of one kind."""
    if name != "image":
        return [make_sandbox(name, space, limits) for space in spaces]
    assert store is not None
    image = store.unpack("made:1")
    spec = ImageSpec("made:1")
    return [BwrapImageSandbox(space, limits, image=image, spec=spec) for space in spaces]


def measure_podman(
    number: int, meter: Meter, store: ImageStore | None, venvs: Path
) -> dict[str, float]:
    """One round of the containers of mini-swe-agent, in ms of CPU."""
    assert store is not None
    arguments = ["podman", "pull", "--quiet", f"oci:{store.directory}/made:1"]
    image = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()[-1]
    python = environment(venvs.resolve() / "mini", PACKAGES["mini"])
    script = str(Path(__file__).parent / "peering" / "mini_containers.py")
    command = [str(python), script, "podman", image, str(number), str(meter.group)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"mini-swe-agent failed: {done.stderr[-1000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


async def measure(
    name: str, number: int, meter: Meter, place: Path, store: ImageStore | None
) -> dict[str, float]:
    """One round of one sandbox, in ms of CPU and MB."""
    limits = Limits()
    spaces = [Workspace(place / f"{name}-{n}") for n in range(number + 1)]
    first, *others = make_sandboxes(name, spaces, limits, store)
    await first.run("shell", "true")  # what a worker pays once
    servers = {pid for pid, _ in descendants()}

    async def all_run(session: str, code: str, among: Sequence[Sandbox]) -> float:
        begun = meter.ms()
        for sandbox in among:
            result = await sandbox.run(session, code)  # type: ignore[arg-type]
            if result.exit_code != 0:
                raise RuntimeError(f"{code}: {result}")
        return (meter.ms() - begun) / len(among)

    figures = {"start and first command": await all_run("shell", "echo hi", others)}
    figures["MB of an idle sandbox"] = private_mb(number, servers)
    further = [await all_run("shell", "echo hi", others) for _ in range(FURTHER)]
    figures["further command"] = sum(further) / FURTHER
    figures["first python call"] = await all_run("python", "1 + 1", others)
    figures["further cell"] = await all_run("python", "1 + 1", others)
    begun = meter.ms()
    await asyncio.gather(*(sandbox.stop() for sandbox in others))
    figures["stop"] = (meter.ms() - begun) / number
    figures["start, first command and stop"] = figures["start and first command"] + figures["stop"]
    await first.stop()
    return figures


@click.command()
@click.option("--sandboxes", default="bwrap,local", show_default=True)
@click.option("--number", default=40, show_default=True, help="Sandboxes at a time.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--venvs", type=click.Path(path_type=Path), help="Where mini-swe-agent is installed.")
def main(sandboxes: str, number: int, rounds: int, venvs: Path | None) -> None:
    """Measure in rounds."""
    table = Table()
    with start_meter() as meter, tempfile.TemporaryDirectory() as place:
        needs_image = bool({"image", "podman"} & {*sandboxes.split(",")})
        store = make_image(Path(place), CALC) if needs_image else None
        for round_number in range(rounds):
            sum_ms = 0.0
            for title, argv in YARDSTICK.items():
                begun = meter.ms()
                for _ in range(number):
                    run_alone(argv)
                taken = (meter.ms() - begun) / number
                sum_ms += taken
                table.add(title, taken)
            table.add("bare bash: further command", run_in_bare_shells(number, meter))
            for name in sandboxes.split(","):
                directory = Path(place, f"{name}-{round_number}")
                directory.mkdir()
                begun_s = time.monotonic()
                if name == "podman":
                    figures = measure_podman(number, meter, store, venvs or Path(place, "venvs"))
                else:
                    figures = asyncio.run(measure(name, number, meter, directory, store))
                for figure, value in figures.items():
                    table.add(f"{name}: {figure}", value)
                    if "start" in figure or "first" in figure:
                        table.add(f"{name}: {figure}, over the yardstick", value / sum_ms)
                print(f"{name}: {time.monotonic() - begun_s:.1f} s", file=sys.stderr)
    table.show(f"ms of CPU, {number} sandboxes at a time")


if __name__ == "__main__":
    main()
