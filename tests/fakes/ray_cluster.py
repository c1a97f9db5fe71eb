"""A Ray cluster of two nodes on this machine, in processes of its own, for tests.

Ran as a program it obeys the lines on its standard input and answers each with one line:
`remove` takes the latest node away at once, `add JSON` adds a node that has the custom resource
`other` and these variables. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MEMORY = 80 << 20


class TwoNodes:
    """The other end: the process that holds the cluster."""

    def __init__(self, process: subprocess.Popen[str], modules: Path, temporary: Path) -> None:
        self._process = process
        self.modules = modules
        """Where the nodes look for modules, too."""
        self.temporary = temporary
        """Their directory for temporary files."""
        self.address = self._answer()

    def remove_latest(self) -> None:
        """Take the node away that came last, with all that runs there."""
        self._ask("remove")

    def add(self, **variables: str) -> None:
        """Add a node with these variables, and the resource `other`."""
        self._ask(f"add {json.dumps(variables)}")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the cluster has died"
        return answer


@contextmanager
def two_nodes(scratch: Path) -> Iterator[TwoNodes]:
    """Start a cluster of two nodes with room for two workers each; its log lies in `scratch`."""
    # No key reaches the nodes, whatever those who test have in their environment.
    environment = {name: text for name, text in os.environ.items() if not name.endswith("_KEY")}
    # Of a short path: names of sockets have at most 107 bytes.
    temporary = Path(tempfile.mkdtemp(prefix="nodes-"))
    with (scratch / "cluster.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env={
                **environment,
                "RAY_USAGE_STATS_ENABLED": "0",
                "PYTHONPATH": str(scratch),
                "TMPDIR": str(temporary),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield TwoNodes(process, scratch, temporary)
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(temporary)


def actors() -> list[int]:
    """The processes of all living workers of ours in clusters on this machine."""
    collected = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if cmdline.read_bytes().startswith(b"ray::RayWorkerActor"):
                collected.append(int(cmdline.parent.name))
    return sorted(collected)


def _serve() -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": _MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    added = [cluster.add_node(num_cpus=2, object_store_memory=_MEMORY)]
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order, _, variables = line.strip().partition(" ")
        if order == "remove":
            cluster.remove_node(added.pop(), allow_graceful=False)
        else:
            node = cluster.add_node(
                num_cpus=1,
                resources={"other": 1},
                object_store_memory=_MEMORY,
                env_vars=json.loads(variables),
            )
            added.append(node)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
