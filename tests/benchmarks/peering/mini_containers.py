"""mini-swe-agent's containers for `tests.benchmarks.sandboxes`: started, used and removed.

python mini_containers.py PROGRAM IMAGE NUMBER GROUP

PROGRAM runs the containers within the control group with the directory GROUP. Prints JSON: ms of
CPU per container.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"

from minisweagent.environments.docker import DockerEnvironment


def main() -> None:
    """Measure once."""
    (program, image), number, group = sys.argv[1:3], int(sys.argv[3]), Path(sys.argv[4])

    def ms() -> float:
        if (usage := group / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e6 / number
        return int((group / "cpu.stat").read_text().split()[1]) / 1e3 / number

    begun = ms()
    environments = [
        DockerEnvironment(
            image=image,
            cwd="/testbed",
            executable=program,
            interpreter=["bash", "-c"],
            run_args=["--rm", "--network", "none", "--cgroup-parent", f"/{group.name}"],
        )
        for _ in range(number)
    ]
    for environment in environments:
        assert environment.execute({"command": "echo hi"})["output"] == "hi\n"
    started = ms()
    for environment in environments:
        environment.execute({"command": "echo hi"})
    used = ms()
    for environment in environments:
        environment.cleanup()  # in the background
        environment.container_id = None
    while [*group.glob("libpod-*")]:
        time.sleep(1)
    figures = {
        "start and first command": started - begun,
        "further command": used - started,
        "start, first command and stop": started - begun + ms() - used,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
