"""Make the stored runs of an earlier commit, which has a checkout of its own.

    git worktree add ../earlier COMMIT
    python -m tests.stored_runs.make ../earlier tests/stored_runs/COMMIT

A run of scripted rows is complete; one at the fake endpoint was killed in the middle. One ended
with failed attempts, which have turns in the journal and no record.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.answering import JSON, answering
from tests.helpers.running import wait_until

HERE = Path(__file__).parent

FINISHED = [
    "--config=finished.yaml",
    "--dataset_file=finished.jsonl",
    "--run_name=finished",
    "--tools=tools.py:TOOLS",
]
"""The options of the complete run, as its commit knows them."""

KILLED = [
    "--dataset_file=killed.jsonl",
    "--run_name=killed",
    "--model=fake",
    "--key_env=none",
    "--enabled_toolsets=file",
    "--sandbox=local",
    "--num_samples=2",
    "--num_workers=1",
]
"""Those of the one that was killed, without --base_url."""

FAILED = [
    "--dataset_file=failed.jsonl",
    "--run_name=failed",
    *KILLED[2:],
    "--max_attempts=3",
]
"""Those of the one with failed attempts, without --base_url."""

INPUTS = ("finished.yaml", "finished.jsonl", "killed.jsonl", "failed.jsonl", "tools.py")

CONVERSATIONS, TURNS, REPLIES = 8, 3, 18
"""Of the one that was killed, the replies those before."""
_NOT_KEPT = ("lock", "run.log", "progress.json", "workspaces")


def main(checkout: Path, target: Path) -> None:
    """Run them with the program in `checkout`, and copy their directories to `target`."""
    with tempfile.TemporaryDirectory(prefix="stored-") as made:
        cwd = Path(made)
        for name in INPUTS:
            shutil.copy(HERE / name, cwd)
        program = [sys.executable, str(checkout.resolve() / "batch_runner.py")]
        ended = subprocess.run([*program, *FINISHED], cwd=cwd, check=False)
        assert ended.returncode == 1, "one row fails"
        with FakeEndpoint(
            latency_s=0.0, turns=TURNS, answers=REPLIES, tool="write_file"
        ) as endpoint:
            process = subprocess.Popen(
                [*program, *KILLED, f"--base_url={endpoint.openai_url}"],
                cwd=cwd,
                start_new_session=True,
            )
            wait_until(lambda: _is_between_replies(endpoint, cwd / "trajectories" / "killed"))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with answering(answer_all_but_the_last_of_bad) as (url, _):
            subprocess.run([*program, *FAILED, f"--base_url={url}"], cwd=cwd, check=False)
        runs = cwd / "trajectories"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(runs, target, ignore=shutil.ignore_patterns(*_NOT_KEPT))


def answer_all_but_the_last_of_bad(path: str, body: JSON) -> tuple[int, JSON]:
    """Answer with two calls and a text; the prompt `bad` gets an error in the place of the text."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    message: JSON = {"role": "assistant", "content": "done"}
    if turn < 2:
        function = {"name": "list_files", "arguments": "{}"}
        calls = [{"id": f"c{turn}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    elif any(message["content"] == "bad" for message in body["messages"]):
        return 400, {"error": {"message": "no"}}
    reason = "stop" if turn == 2 else "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    return 200, {"id": "x", "model": "fake", "choices": [choice], "usage": usage}


def _is_between_replies(endpoint: FakeEndpoint, run: Path) -> bool:
    """Whether the endpoint holds back the next reply of each unfinished conversation."""
    records = run / "records.jsonl"
    finished = records.read_bytes().count(b"\n") if records.exists() else 0
    seen = endpoint.journal()
    return bool(seen["replies"] == REPLIES and seen["in_flight"] == CONVERSATIONS - finished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
