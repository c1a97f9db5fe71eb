"""Runs from Python: as a script, in a notebook's loop, in a thread; and reading them."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batch_runner import RunConfig, open_run, run
from batch_trajectories.api.start import explain_exit
from batch_trajectories.basics.errors import ConfigError, DatasetError, RunDirError, RunLocked
from batch_trajectories.basics.process import hide_environment, restore_settings
from batch_trajectories.engine.run_dir import hold_lock
from batch_trajectories.engine.run_totals import as_table
from batch_trajectories.engine.supervisor.run import Outcome
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import PATIENCE_S, ROOT, SCRIPTED, started, wait_until, write_rows
from tests.helpers.running import run as run_command
from tests.program.test_processes import AS_FIRST, needs_first_place

CALL = {"name": "list_files", "arguments": {}}
FAILS: dict[str, Any] = {"id": "bad", "prompt": "Q", "script": [{"tool_calls": [CALL]}]}
"""A row whose script ends too early."""


def scripted_config(folder: Path, count: int = 3, **options: Any) -> RunConfig:
    rows = [
        {"id": f"p{n}", "prompt": f"Question {n}", "script": [{"content": f"Answer {n}."}]}
        for n in range(count)
    ]
    dataset = write_rows(folder / "p.jsonl", *rows)
    return RunConfig.model_validate(
        {**SCRIPTED, "dataset_file": dataset, "output_dir": folder / "trajectories", **options}
    )


def script(folder: Path, code: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a script, written to a file, that can import the product."""
    file = folder / "script.py"
    file.write_text(code)
    return subprocess.run(
        [*before, sys.executable, str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


RUN = """
from batch_runner import RunConfig, run
config = RunConfig(dataset_file="p.jsonl", run_name="r", model="scripted",
                   enabled_toolsets="file", num_workers=2)
"""


class TestRun:
    @pytest.mark.slow
    def test_it_ends_as_the_command_does(self, tmp_path: Path) -> None:
        """The training file of both is the same, and so are the exit codes."""
        config = scripted_config(tmp_path)
        ended = run(config, progress=False)
        assert (ended.exit_code, ended.reason, ended.signal, ended.stopped_by) == (
            0,
            None,
            None,
            None,
        )
        assert ended.path == config.run_dir
        assert (ended.totals.total, ended.totals.done) == (3, 3)
        here = ended.training_file.read_bytes()
        other = tmp_path / "other"
        other.mkdir()
        write_rows(other / "p.jsonl", *lines_of(tmp_path / "p.jsonl"))
        assert run_command(other, **SCRIPTED).returncode == 0
        assert re.sub(rb"20\d\d-[^\"]*Z", b"", here) == re.sub(
            rb"20\d\d-[^\"]*Z", b"", (other / "trajectories" / "r.jsonl").read_bytes()
        )

    @pytest.mark.slow
    def test_the_same_call_resumes(self, tmp_path: Path) -> None:
        config = scripted_config(tmp_path)
        assert run(config, only=["p1"], progress=False).totals.done == 1
        assert [record["id"] for record in open_run(config.run_dir).records()] == ["p1"]
        assert run(config, progress=False).totals.done == 3

    def test_failed_tasks_are_exit_code_1(self, tmp_path: Path) -> None:
        config = scripted_config(tmp_path, max_attempts=1)
        write_rows(config.dataset_file, FAILS)
        ended = run(config, progress=False)
        assert (ended.exit_code, ended.totals.failed) == (1, 1)
        assert repr(ended) == f"<RunEnd {str(config.run_dir)!r}: exit 1; 1 failed; cost_usd=0.0000>"
        table = ended._repr_html_()
        assert "<td>1 failed</td>" in table
        assert "<td>not judged</td>" in table
        stored = open_run(config.run_dir)
        assert "<td>1 failed</td>" in stored._repr_html_()

    def test_an_unknown_cost_is_none(self, tmp_path: Path) -> None:
        """In the objects, their repr and the table; summary.json has 0 and the number of costs."""
        config = scripted_config(tmp_path)
        with answering(lambda path, body: (200, chat_reply("hi"))) as (url, _):
            served = {"model": "m", "base_url": f"{url}/v1", "key_env": "none"}
            ended = run(config.model_copy(update=served), progress=False)
        totals = ended.totals
        assert (ended.cost_usd, totals.cost_usd, totals.spent_usd) == (None, None, None)
        assert (totals.cost_unknown, totals.spent_unknown) == (3, 3)
        stored = open_run(config.run_dir)
        for shown in (ended, stored):
            assert "cost_usd=None" in repr(shown)
            assert "<th>cost</th><td>None</td>" in shown._repr_html_()
        costs = stored.statistics()["cost_usd"]
        assert (costs["known_total"], costs["spent_in_all"]) == (None, None)
        summary = json.loads((config.run_dir / "summary.json").read_bytes())
        assert (summary["spent_usd"], summary["spent_unknown"]) == (0, 3)

    def test_the_cost_of_replies_that_cannot_be_used_is_unknown(self, tmp_path: Path) -> None:
        """Without a price: as that of replies that are answers."""
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        empty = chat_reply("") | {"usage": usage}
        config = scripted_config(tmp_path, max_attempts=1, call_attempts=1)
        with answering(lambda path, body: (200, empty)) as (url, _):
            served = {"model": "m", "base_url": f"{url}/v1", "key_env": "none"}
            ended = run(config.model_copy(update=served), progress=False)
        totals = ended.totals
        assert (totals.turns, totals.input_tokens > 0) == (0, True)
        assert (totals.cost_usd, totals.spent_usd) == (None, None)
        assert (totals.cost_unknown, totals.spent_unknown) == (3, 3)
        assert "$" not in as_table(totals)
        costs = open_run(config.run_dir).statistics()["cost_usd"]
        assert (costs["known_total"], costs["spent_in_all"]) == (None, None)

    def test_the_budget_is_exit_code_3(self, tmp_path: Path) -> None:
        totals = run(scripted_config(tmp_path), progress=False).totals
        outcome = Outcome(stopped_by="the budget is spent", is_out_of_budget=True)
        code, reason = explain_exit(outcome, totals)
        assert code == 3
        assert "the budget is spent" in str(reason)

    def test_messages_go_to_a_function(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        config = scripted_config(tmp_path)
        with config.dataset_file.open("a") as file:
            file.write("{}\n")
        messages: list[str] = []
        run(config, progress=messages.append)
        assert any(":4: discarded" in message for message in messages)
        run(config, progress=False)
        assert capfd.readouterr() == ("", "")

    def test_errors_are_run_errors(self, tmp_path: Path) -> None:
        config = scripted_config(tmp_path)
        with pytest.raises(DatasetError):
            run(config.model_copy(update={"dataset_file": tmp_path / "none"}), progress=False)
        with pytest.raises(ConfigError, match="has no task 'p9'"):
            run(config, only=["p9"], progress=False)
        run(config, progress=False)
        with hold_lock(config.run_dir), pytest.raises(RunLocked):
            run(config, progress=False)
        with pytest.raises(ConfigError, match="max_turns"):
            run(config.model_copy(update={"max_turns": 3}), progress=False)
        accepted = run(
            config.model_copy(update={"max_turns": 3}),
            accept_config_change=["max_turns"],
            progress=False,
        )
        assert accepted.exit_code == 0

    @pytest.mark.slow
    def test_fresh_moves_a_run_aside(self, tmp_path: Path) -> None:
        config = scripted_config(tmp_path)
        run(config, progress=False)
        assert run(config, fresh=True, progress=False).totals.done == 3
        assert len([p for p in config.output_dir.iterdir() if p.is_dir()]) == 2


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestAsLibrary:
    @pytest.mark.slow
    def test_a_script_needs_no_guard(self, tmp_path: Path) -> None:
        """Workers do not import it, so it runs once."""
        scripted_config(tmp_path)
        code = RUN + "print('here')\nprint(run(config, progress=False).totals.done)\n"
        done = script(tmp_path, code)
        assert (done.stdout, done.stderr) == ("here\n3\n", "")

    @pytest.mark.slow
    def test_run_works_inside_a_running_event_loop(self, tmp_path: Path) -> None:
        """As in a notebook; listing MCP servers needs a loop of its own."""
        pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
        scripted_config(tmp_path)
        server = [sys.executable, "-S", str(ROOT / "tests" / "helpers/raw_mcp_server.py")]
        code = RUN + (
            "import asyncio\n"
            f"mcp = {{'raw': {{'command': {server[0]!r}, 'args': {server[1:]!r}}}}}\n"
            "config = RunConfig.model_validate({**config.model_dump(), 'mcp': mcp, "
            "'enabled_toolsets': ['raw']})\n"
            "async def main():\n"
            "    return run(config, progress=False).totals.done\n"
            "print(asyncio.run(main()))\n"
        )
        done = script(tmp_path, code)
        assert (done.stdout, done.stderr) == ("3\n", "")

    @pytest.mark.slow
    def test_a_thread_can_run_it(self, tmp_path: Path) -> None:
        """Signals stay with the main thread."""
        config, ends = scripted_config(tmp_path), []
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        thread = threading.Thread(target=lambda: ends.append(run(config, progress=False)))
        thread.start()
        thread.join()
        assert [end.totals.done for end in ends] == [3]
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    @pytest.mark.slow
    def test_the_process_is_left_as_it_was(self, tmp_path: Path) -> None:
        scripted_config(tmp_path)
        code = RUN + (
            "import ctypes, logging, resource, signal, sys\n"
            "logging.basicConfig(level=logging.ERROR, stream=sys.stdout)\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 4096))\n"
            "def state():\n"
            "    root = logging.getLogger()\n"
            "    return (root.handlers[:], root.level, logging.raiseExceptions,\n"
            "            logging.getLogger('asyncio').level,\n"
            "            resource.getrlimit(resource.RLIMIT_NOFILE),\n"
            "            ctypes.CDLL(None).prctl(3), dict(__import__('os').environ),\n"
            "            [signal.getsignal(n) for n in (1, 2, 15)], sys.modules['__main__'])\n"
            "before = state()\n"
            "run(config, progress=False)\n"
            "assert state() == before, (before, state())\n"
            "logging.error('heard')\n"
        )
        done = script(tmp_path, code)
        assert (done.stdout, done.stderr) == ("ERROR:root:heard\n", "")

    @pytest.mark.slow
    def test_sigterm_is_an_ending(self, tmp_path: Path) -> None:
        """In good order: the caller gets the totals and continues."""
        write_rows(tmp_path / "p.jsonl", *[{"id": f"p{n}", "prompt": "Q"} for n in range(4)])
        code = (
            "import os, signal, sys\n"
            "from batch_runner import RunConfig, run\n"
            "config = RunConfig(dataset_file='p.jsonl', run_name='r', model='m', key_env='none',\n"
            "                   base_url=sys.argv[1], enabled_toolsets='file', num_workers=1)\n"
            "ended = run(config, progress=False)\n"
            "print(ended.signal, ended.exit_code, ended.totals.pending)\n"
            "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        )
        (tmp_path / "script.py").write_text(code)
        called = threading.Event()

        def answer(path: str, body: JSON) -> tuple[int, JSON]:
            called.set()
            return 500, {}  # tried again after a pause, so no task ends

        with answering(answer) as (url, _):
            process = subprocess.Popen(
                [sys.executable, "script.py", url],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert called.wait(PATIENCE_S)
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert said == "15 143 4\n"

    @needs_first_place
    @pytest.mark.slow
    def test_process_1_stays_itself(self, tmp_path: Path) -> None:
        """Only the command moves into a child; a library does not fork its caller."""
        scripted_config(tmp_path)
        code = RUN + "import os\nprint(os.getpid(), run(config, progress=False).exit_code)\n"
        done = script(tmp_path, code + "print(os.getpid())\n", *AS_FIRST)
        assert (done.stdout, done.stderr) == ("1 0\n1\n", "")


class TestOpenRun:
    def test_a_run_is_read_whole(self, tmp_path: Path) -> None:
        config = scripted_config(tmp_path, max_attempts=1)
        with config.dataset_file.open("a") as file:
            file.write(f"{{}}\n{json.dumps(FAILS)}\n")
        run(config, progress=False)
        stored = open_run("r", tmp_path / "trajectories")
        assert stored.path == config.run_dir
        assert stored.config == config
        assert stored.identity["dataset"]["rows"] == 4
        assert stored.holder is None
        assert [task.id for task in stored.tasks()] == ["p0", "p1", "p2", "bad"]
        assert {record["id"] for record in stored.records()} == {"p0", "p1", "p2", "bad"}
        assert stored.record("p1")["messages"][-1]["content"] == "Answer 1."
        assert {failure["kind"] for failure in stored.failures()} == {"attempt", "bad_row"}
        assert stored.in_flight() == []
        assert (stored.totals().done, stored.totals().failed, stored.totals().discarded) == (
            3,
            1,
            1,
        )
        assert stored.statistics()["records"] == 4

    def test_a_run_can_be_read_while_it_works(self, tmp_path: Path) -> None:
        dataset = [{"id": f"p{n}", "prompt": "Q"} for n in range(2)]
        write_rows(tmp_path / "p.jsonl", *dataset)
        options = {"model": "m", "key_env": "none", "enabled_toolsets": "file"}
        with (
            answering(lambda path, body: (500, {})) as (url, requests),
            started(tmp_path, **{**SCRIPTED, **options, "base_url": url}) as process,
        ):
            wait_until(lambda: requests)
            stored = open_run(tmp_path / "trajectories" / "r")
            holder = stored.holder
            assert holder is not None
            assert holder["pid"] == process.pid
            assert stored.totals().pending == 2
            assert list(stored.records()) == []

    def test_no_run_names_those_that_there_are(self, tmp_path: Path) -> None:
        run(scripted_config(tmp_path), progress=False)
        with pytest.raises(RunDirError, match=r"there is no such run\. Runs in .*: r\. "):
            open_run("q", tmp_path / "trajectories")


def test_settings_come_back_after_an_error() -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(KeyError), restore_settings():
        root.addHandler(logging.NullHandler())
        hide_environment()
        raise KeyError
    assert root.handlers == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit
    assert Path("/proc/self/environ").read_bytes()


@pytest.mark.slow
def test_the_examples_of_the_docs_run(tmp_path: Path) -> None:
    """One after the other, as a reader would paste them, against an endpoint on loopback."""
    page = (ROOT / "docs" / "api.md").read_text()
    assert len(page.split()) <= 800
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(examples) == 7
    write_rows(tmp_path / "prompts.jsonl", {"prompt": "What is wax?"}, {"prompt": "And honey?"})
    message = {"role": "assistant", "content": "From bees."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        return 200, {"model": "my-model", "choices": [choice], "usage": usage}

    with answering(answer) as (url, requests):
        code = "\n".join(examples).replace("http://127.0.0.1:8000", url)
        done = script(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "0 2 trajectories/from_python.jsonl"
    assert done.stdout.splitlines()[-1] == "From bees."
    assert any(tool["function"]["name"] == "word_count" for tool in requests[-1]["tools"])
    transcripts = re.findall(r"transcripts/\w+\.jsonl", done.stdout)
    assert [lines_of(tmp_path / name)[0]["type"] for name in transcripts] == ["request"]
