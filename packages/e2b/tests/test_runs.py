"""Whole runs on the loopback service, with kills, lost machines and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helping import children_of, keepers_of, wait_until
from loopback import KEY, Loopback

ROWS = 6
RUN = {
    "dataset_file": "rows.jsonl",
    "model": "scripted",
    "sandbox": "e2b",
    "enabled_toolsets": "terminal,python,file",
    "num_workers": 2,
    "batch_size": 3,
    "grace_s": 5,
}


def write_rows(directory: Path) -> None:
    """Conversations with state in the shell, in the interpreter and in files."""

    def call(name: str, **arguments: object) -> dict[str, Any]:
        return {"tool_calls": [{"name": name, "arguments": arguments}]}

    rows = [
        {
            "id": f"q{n}",
            "prompt": f"Question {n}",
            "script": [
                call("write_file", path="in.txt", content=f"{n} " * 100),
                call(
                    "terminal",
                    command=f"mkdir d; cd d; X={n}; wc -w < ../in.txt > words; sleep 0.3",
                ),
                call("python", code=f"x = {n}; open('d/x', 'w').write(str(x)); x + 1"),
                call("terminal", command="echo $X; cat words x; sleep 0.3; echo more > ../more"),
                call("read_file", path="more"),
                call("python", code="x * 2"),
                {"content": "Done."},
            ],
        }
        for n in range(ROWS)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(
    directory: Path, name: str, wrapper: Sequence[str] = (), **more: object
) -> subprocess.Popen[bytes]:
    options = [f"--{key}={value}" for key, value in {**RUN, "run_name": name, **more}.items()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (directory / f"{name}.out").open("ab") as out:
        return subprocess.Popen(
            [*wrapper, sys.executable, "-m", "batch_runner", *options],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def finish(directory: Path, name: str, wrapper: Sequence[str] = (), **more: object) -> None:
    assert start(directory, name, wrapper, **more).wait(300) == 0, (
        directory / f"{name}.out"
    ).read_text()


def results(directory: Path, name: str) -> dict[str, list[str]]:
    """The status and the results of tools of each conversation, by its id."""
    found = {}
    for line in (directory / "trajectories" / name / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        said = [one["content"] for one in record["messages"] if one["role"] == "tool"]
        found[record["id"]] = [record["status"], *said]
    return found


def files_with_key(directory: Path) -> list[Path]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.fixture
def directory(service: Loopback, tmp_path: Path) -> Path:
    """A directory with the dataset, in which the run `clean` has been made."""
    write_rows(tmp_path)
    finish(tmp_path, "clean")
    clean = results(tmp_path, "clean")
    assert set(clean) == {f"q{n}" for n in range(ROWS)}
    assert {said[0] for said in clean.values()} == {"completed"}
    assert json.loads(clean["q3"][4])["stdout"] == "3\n100\n3"
    wait_until(lambda: not service.machines, "all machines of the run have ended")
    return tmp_path


def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(
    service: Loopback, directory: Path
) -> None:
    """Half of the kills also take the keepers along."""
    begun = len(service.made)
    for kill in range(6):
        before = len(service.made)
        process = start(directory, "killed")
        wait_until(
            lambda before=before, process=process: (
                len(service.made) > before + 2 or process.poll() is not None
            ),
            "machines of the run",
        )
        time.sleep(0.2 * kill)
        workers = children_of(process.pid) if kill % 2 else []
        for keeper in [keeper for worker in workers for keeper in keepers_of(worker)]:
            os.kill(keeper, signal.SIGKILL)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finish(directory, "killed")
    assert results(directory, "killed") == results(directory, "clean")
    assert len(service.made) > begun + ROWS
    wait_until(lambda: not service.machines, "no machine of a killed worker lives")
    assert files_with_key(directory) == []


def test_a_machine_that_is_lost_fails_an_attempt_and_no_conversation(
    service: Loopback, directory: Path
) -> None:
    lost, code = 0, None
    for _ in range(9):
        process = start(directory, "lost", max_attempts=20)
        while (code := process.poll()) is None:
            time.sleep(0.7)
            if service.machines and lost < 8:
                lost += 1
                service.break_off(next(iter(service.machines)))
        if code == 0:
            break
        # Some attempts have failed; the next start continues them.
        assert code == 1, (directory / "lost.out").read_text()
    assert code == 0
    assert results(directory, "lost") == results(directory, "clean")
    failures = (directory / "trajectories" / "lost" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["class"] for line in failures} == {"sandbox_lost"}
    assert files_with_key(directory) == []


def test_a_service_that_refuses_stops_the_run_before_anything_is_paid(
    service: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path)
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    assert start(tmp_path, "refused").wait(120) == 2
    said = (tmp_path / "refused.out").read_text()
    assert "401: Invalid API key; set E2B_API_KEY" in said
    assert service.made == []


def test_templates_are_named_by_the_run(service: Loopback, tmp_path: Path) -> None:
    write_rows(tmp_path)
    finish(tmp_path, "other", docker_image="other")
    assert {one["templateID"] for one in service.made} == {"other"}
    assert json.loads((tmp_path / "trajectories/other/run.json").read_text())


def test_the_runner_needs_no_namespaces(service: Loopback, tmp_path: Path) -> None:
    """As in a pod of a cluster that forbids them, where bwrap does not work."""
    write_rows(tmp_path)
    helper = Path(__file__).parents[3] / "tests/helpers/without_namespaces.py"
    finish(tmp_path, "pod", wrapper=[sys.executable, str(helper)])
    assert {said[0] for said in results(tmp_path, "pod").values()} == {"completed"}
    assert len(service.made) == ROWS
