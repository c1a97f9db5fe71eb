"""Take the lease of a mirror again and again, and send a line at a time while it is held.

`python -m tests.mirror.holding RUN_DIR URL STALE_S`: prints a line at each take.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

from batch_trajectories.basics.errors import RunLocked
from batch_trajectories.mirror import mirror as module
from batch_trajectories.mirror.mirror import Mirror


def main(run_dir: Path, url: str, stale_s: float) -> None:
    """Until it is killed."""
    module.SEND_EVERY_S = 0.02
    (run_dir / "lock").touch()
    while True:
        mirror = Mirror(url, run_dir, stale_s=stale_s)
        mirror.take()
        print("taken", flush=True)
        (run_dir / "run.json").write_text("{}")
        writing = threading.Event()
        try:
            mirror.start(run_dir / "prompts.jsonl")
            while mirror.problem is None:
                with (run_dir / "records.jsonl").open("a") as file:
                    file.write(f"{run_dir}\n")
                writing.wait(0.01)
            assert isinstance(mirror.problem, RunLocked), mirror.problem
        except RunLocked:
            continue
        finally:
            with suppress(RunLocked):  # lost before the first part was sent
                mirror.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
