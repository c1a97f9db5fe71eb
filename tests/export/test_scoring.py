"""The command `score`: every record gets its score once, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from export.dataset.build import Source
from runs.store.reader import stored_records
from tests.exporting import make_run, worked
from tests.running import command, lines, run, wait_until

GRADERS = """
from pathlib import Path

def length(conversation, workspace, row):
    assert workspace is None
    if "fault" in row:
        raise ValueError(row["fault"])
    return len(conversation["messages"][-1]["content"])

def nothing(conversation, workspace, row):
    return {"calls": [0] * len(conversation["turns"])}

def held(conversation, workspace, row):
    hold = Path("hold")
    while hold.exists() and int(conversation["id"][1:]) >= int(hold.read_text()):
        pass
    return 1
"""


def make(folder: Path, count: int, **changes: Any) -> Source:
    (folder / "graders.py").write_text(GRADERS)
    return make_run(folder, *(worked(f"Answer {n}", **changes) for n in range(count)))


def scores(source: Source) -> list[dict[str, Any]]:
    return lines(source.run_dir / "scores.jsonl")


def counts(found: Any) -> tuple[int, int]:
    """How many scores a command gave, and how many failed."""
    words = found.stdout.rpartition(": ")[2].split()
    return int(words[0]), int(words[2])


class TestFunctions:
    def test_score_each_record_once_and_leave_records_as_they_are(self, tmp_path: Path) -> None:
        source = make(tmp_path, 12)
        before = (source.run_dir / "records.jsonl").read_bytes()
        done = run(tmp_path, "score", "r", reward="graders:length,graders:nothing", output_dir=".")
        assert done.returncode == 0, done.stderr
        assert counts(done) == (24, 0)
        found = scores(source)
        assert {line["id"] for line in found} == {f"t{n}" for n in range(12)}
        assert {line["source"] for line in found} == {"graders:length", "graders:nothing"}
        assert all(line["version"] and line["at"] for line in found)
        again = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(again) == (0, 0)
        assert (source.run_dir / "records.jsonl").read_bytes() == before
        first = next(stored_records(source.run_dir)).record
        given = {score["source"]: score for score in first["scores"]}
        assert given["graders:length"]["rewards"] == {"length": len("Answer 0")}
        assert given["graders:nothing"]["turn_rewards"] == {"calls": [0, 0]}

    def test_that_fail_are_repeated_and_others_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "graders.py").write_text(GRADERS)
        source = make_run(tmp_path, worked(), worked(), prompts=[{"fault": "x"}, {}])
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert (done.returncode, counts(done)) == (1, (2, 1))
        (failed,) = [line for line in scores(source) if line["error"]]
        assert (failed["id"], failed["rewards"]) == ("t0", None)
        assert failed["error"] == "ValueError: x (graders.py:7)"
        again = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert (again.returncode, counts(again)) == (1, (1, 1))

    def test_that_changed_score_again(self, tmp_path: Path) -> None:
        source = make(tmp_path, 2)
        run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        (tmp_path / "graders.py").write_text(GRADERS.replace("[-1]", "[0]"))
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (2, 0)
        first = next(stored_records(source.run_dir)).record
        assert [score["rewards"] for score in first["scores"]] == [{"length": len("Be brief.")}]

    def test_of_the_run_itself_are_not_repeated(self, tmp_path: Path) -> None:
        source = make(tmp_path, 1)
        run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        (score,) = scores(source)
        kept = {key: score[key] for key in ("source", "version", "rewards", "error")}
        source = make_run(tmp_path, worked("Answer 0", scores=[kept]), worked())
        (source.run_dir / "scores.jsonl").unlink()
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (1, 0)
        assert [line["id"] for line in scores(source)] == ["t1"]

    def test_do_not_see_conversations_that_failed(self, tmp_path: Path) -> None:
        error = {"class": "bad_request", "message": "no"}
        make(tmp_path, 2, status="failed", error=error)
        done = run(tmp_path, "score", "r", reward="graders:length", output_dir=".")
        assert counts(done) == (0, 0)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"reward": "graders:none"}, "cannot import 'graders:none'"),
            ({"reward": " , "}, "give --reward MODULE:FUNCTION"),
            ({}, "give --reward MODULE:FUNCTION"),
            ({"reward": "graders:length", "reward_timeout_s": 0}, "reward_timeout_s"),
        ],
    )
    def test_must_be_given_and_found(self, tmp_path: Path, given: Any, words: str) -> None:
        source = make(tmp_path, 1)
        done = run(tmp_path, "score", "r", output_dir=".", **given)
        assert done.returncode == 2
        assert words in done.stderr
        assert not (source.run_dir / "scores.jsonl").exists()

    @pytest.mark.slow
    def test_survive_kills(self, tmp_path: Path) -> None:
        """What was on disk at a kill is not scored again, and a second command is refused."""
        source = make(tmp_path, 60)
        path = source.run_dir / "scores.jsonl"
        arguments = ("score", "r")
        options = {"reward": "graders:held", "output_dir": "."}
        hold = tmp_path / "hold"
        for count in (1, 17, 40):
            hold.write_text(str(count))
            process = subprocess.Popen(command(*arguments, **options), cwd=tmp_path)
            try:
                wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)  # noqa: B023
                if count == 17:
                    refused = run(tmp_path, *arguments, **options)
                    assert refused.returncode == 5
                    assert "another `score` or export works on it" in refused.stderr
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        hold.unlink()
        assert run(tmp_path, *arguments, **options).returncode == 0
        given = Counter(line["id"] for line in scores(source))
        assert given == Counter({f"t{n}": 1 for n in range(60)})
        assert json.loads(path.read_bytes().splitlines()[0])["crc32"]
