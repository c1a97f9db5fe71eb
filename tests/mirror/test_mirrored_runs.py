"""Whole runs with a mirror: machines that go, two starts at once, buckets that fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import orjson
import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.mirror.copies import update_copy
from batch_trajectories.mirror.mirror import LAG_S
from batch_trajectories.mirror.tail import unpack_part
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, finished_lines, judge_run_dir
from tests.faults.test_process import asking
from tests.helpers.running import (
    SCRIPTED,
    WRITE_A_NOTE,
    ids,
    lines,
    run,
    started,
    wait_until,
    write_prompts,
    write_rows,
)
from tests.toolsets.test_sandbox import needs_bwrap

TURNS = 5


def parts_in(bucket: Path) -> list[Path]:
    return sorted((bucket / "r/parts").glob("?" * 12))


def collected_at(bucket: Path) -> float:
    """The time of the last part but one: what was on the disk by then is in the bucket.

    The last part may have missed what was just being written.
    """
    return unpack_part(parts_in(bucket)[-2].read_bytes(), "part").at


@pytest.mark.slow
def test_a_mirrored_run_is_read_and_continued_without_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status`, `stats`, `export` and `report` take its URL; secrets of a bucket are in no file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-bucket")
    url = f"file://{tmp_path}/bucket"
    rows = [{"id": f"p{n}", "prompt": "Hi", "script": [{"content": "Done."}]} for n in range(3)]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED, mirror=url).returncode == 0
    training = (tmp_path / "trajectories/r.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "trajectories")
    (tmp_path / "p.jsonl").rename(tmp_path / "moved.jsonl")
    for name in ("status", "stats", "export", "report"):
        ended = run(tmp_path, name, f"{url}/r")
        assert ended.returncode == 0, ended.stderr
    (exported,) = (tmp_path / "cache").glob("**/r.jsonl")
    assert exported.read_bytes() == training
    refused = run(tmp_path, "status", f"{url}/other")
    assert refused.returncode == 2
    assert "no run here" in refused.stderr
    written = run(tmp_path, "score", f"{url}/r", reward="m:f")
    assert written.returncode == 2
    assert "this is a mirror" in written.stderr

    (tmp_path / "moved.jsonl").rename(tmp_path / "p.jsonl")
    assert run(tmp_path, **SCRIPTED, mirror=url).returncode == 0
    assert (tmp_path / "trajectories/r.jsonl").read_bytes() == training
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if b"a-secret-of-the-bucket" in file.read_bytes()]


@pytest.mark.slow
@needs_bwrap
def test_a_call_that_a_lost_machine_cut_off_runs_again_in_a_rebuilt_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/bucket"
    waits = "echo two >> f; for n in $(seq 100); do test -e {} && break; sleep 0.1; done; cat f"
    script = [
        {"tool_calls": [{"name": "terminal", "arguments": {"command": command}}]}
        for command in ("echo one > f; cat f", waits.format("nothing"))
    ]
    row = {"id": "p", "prompt": "Go.", "script": [*script, {"content": "Done."}]}
    given = {**SCRIPTED, "enabled_toolsets": "terminal", "sandbox": "bwrap", "mirror": url}

    def journaled() -> bytes:
        try:
            files = update_copy(f"{url}/r").glob("inflight/*")
        except RunDirError:  # nothing has been sent yet
            return b""
        return b"".join(file.read_bytes() for file in files if file.is_file())

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "p.jsonl", row)
    with started(tmp_path / "first", **given) as process:
        wait_until(lambda: journaled().count(b'"began"') == 2)
        os.killpg(process.pid, signal.SIGKILL)
        assert_gone(process.pid)
    shutil.rmtree(tmp_path / "first/trajectories")
    done = run(tmp_path / "second", **given)
    assert done.returncode == 0, done.stderr
    (record,) = lines(tmp_path / "second/trajectories/r/records.jsonl")
    (resumed,) = record["resumes"]
    assert (len(resumed["rebuilt"]), resumed["rebuild"]["calls"]) == (1, 1)
    outputs = [
        orjson.loads(m["content"])["stdout"] for m in record["messages"] if m["role"] == "tool"
    ]
    assert outputs == ["one\n", "one\ntwo\n"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [int(os.environ.get("MIRROR_KILLS", "3"))])
def test_a_machine_that_goes_takes_along_what_is_newer_than_the_last_parts(
    kills: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group is killed, its disk deleted, and the same command goes on in another directory.

    A part is due each second; a loaded machine may be late, but never by more than LAG_S.
    """
    prompts = 24 * (kills + 1)
    url, asked = f"file://{tmp_path}/bucket", tmp_path / "asked.jsonl"
    dice = random.Random(7)
    lost = again = 0
    killed_at: list[float] = []
    sent_at: list[float] = []
    epoch_s = time.time() - time.monotonic()
    with FakeEndpoint(
        turns=TURNS, latency_s=0.3, journal_path=str(asked), **WRITE_A_NOTE
    ) as endpoint:
        given = asking(endpoint, mirror=url, num_workers=2, batch_size=4)
        before: dict[str, bytes] = {}
        for number in range(kills + 1):
            place = tmp_path / f"machine{number}"
            place.mkdir()
            write_prompts(place / "p.jsonl", prompts)
            records = place / "trajectories/r/records.jsonl"
            with started(place, **given) as process:
                if number < kills:
                    had = len(parts_in(tmp_path / "bucket"))
                    wait_until(lambda had=had: len(parts_in(tmp_path / "bucket")) > had + 2)
                    time.sleep(dice.uniform(1, 4))  # the moment of the kill, which is at random
                    os.killpg(process.pid, signal.SIGKILL)
                    killed_at.append(time.monotonic())
                    assert_gone(process.pid)
                    sent_at.append(collected_at(tmp_path / "bucket") - epoch_s)
                    assert killed_at[-1] - sent_at[-1] < LAG_S
                else:
                    assert process.wait(300) == 0, (place / "output.txt").read_text()
            now = finished_lines(records)
            for name, line in before.items():
                if now.get(name) != line:
                    lost += 1
                    finished = orjson.loads(line)["finished_at"] - epoch_s
                    assert finished > sent_at[number - 1], name
            before = now
            if number < kills:
                shutil.rmtree(place)
        judge_run_dir(place / "trajectories/r", tasks=prompts)
        assert sorted(ids(place / "trajectories/r.jsonl")) == [f"p{n:04}" for n in range(prompts)]
    answered: dict[tuple[str, int], float] = {}
    for event in map(orjson.loads, asked.read_bytes().splitlines()):
        key = event["conversation"], event["turn"]
        if event["event"] == "answered":
            answered.setdefault(key, event["at"])
        elif event["event"] == "asked" and key in answered:
            sent = [at for at, kill in zip(sent_at, killed_at, strict=True) if kill <= event["at"]]
            assert answered.pop(key) > sent[-1], key
            again += 1
    with capsys.disabled():
        print(
            f"\n{kills} kills, {prompts} tasks: {lost} records made again, {again} replies, none "
            "older than the last parts"
        )


@pytest.mark.slow
def test_a_second_start_waits_and_a_first_that_comes_back_stops_with_5(tmp_path: Path) -> None:
    """The first is stopped until the second has taken the lease."""
    url = f"file://{tmp_path}/bucket"
    parts = tmp_path / "bucket/r/parts"
    with FakeEndpoint(turns=30, latency_s=0.3, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, mirror=url, num_workers=1, batch_size=4)
        places = [tmp_path / name for name in "ab"]
        for place in places:
            place.mkdir()
            write_prompts(place / "p.jsonl", 8)
        with started(places[0], **given) as first:
            wait_until(lambda: len([*parts.glob("?" * 12)]) > 3)
            # Stopped before the second starts: on a busy machine it may start so slowly that the
            # first is done by then. A start takes far less than the silence that ends a lease.
            os.killpg(first.pid, signal.SIGSTOP)
            with started(places[1], **given) as second:
                said = places[1] / "output.txt"
                wait_until(lambda: "works on this run; waiting" in said.read_text())
                wait_until(lambda: len(finished_lines_of(places[1])) > 0)
                os.killpg(first.pid, signal.SIGCONT)
                assert first.wait(60) == 5
                assert "has taken over this run" in (places[0] / "output.txt").read_text()
                assert second.wait(120) == 0, said.read_text()
        judge_run_dir(places[1] / "trajectories/r", tasks=8)


def finished_lines_of(place: Path) -> bytes:
    records = place / "trajectories/r/records.jsonl"
    return records.read_bytes() if records.exists() else b""


@pytest.mark.slow
def test_a_bucket_that_refuses_stops_the_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its lag; what is not in the mirror is on the disk, and the next start sends it."""
    url = f"file://{tmp_path}/bucket"
    parts = tmp_path / "bucket/r/parts"
    write_prompts(tmp_path / "p.jsonl", 400)
    with FakeEndpoint(turns=4, latency_s=0.3, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, mirror=url, num_workers=1, batch_size=2)
        with started(tmp_path, **given) as process:
            wait_until(lambda: len([*parts.glob("?" * 12)]) > 3)
            away = parts.rename(tmp_path / "away")
            parts.write_text("a file where the parts were")
            assert process.wait(120) == 4
        assert "lacks the last" in (tmp_path / "output.txt").read_text()
        done = finished_lines_of(tmp_path).count(b"\n")
        assert 0 < done < 400
        parts.unlink()
        away.rename(parts)
        write_prompts(tmp_path / "p.jsonl", done)
        ended = run(tmp_path, **given, accept_config_change="dataset_file")
        assert ended.returncode == 0, ended.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = (update_copy(f"{url}/r") / "records.jsonl").read_bytes()
    assert there == finished_lines_of(tmp_path)
