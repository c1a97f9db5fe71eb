"""Whole runs whose bucket fails: a proxy before an emulator slows, cuts and refuses requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("obstore", reason="needs the extra `mirror`")

from batch_trajectories.mirror.copies import update_copy
from batch_trajectories.mirror.mirror import LAG_S
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import finished_lines, judge_run_dir
from tests.faults.test_concurrency import fake_clock
from tests.faults.test_process import asking
from tests.helpers.running import WRITE_A_NOTE, run, started, wait_until, write_prompts
from tests.mirror.emulators import Emulated, needs_emulators
from tests.mirror.proxy import Fault

pytestmark = [pytest.mark.slow, needs_emulators]

SHORT = [
    Fault("answers", 500, "InternalError"),
    Fault("answers", 503, "SlowDown"),
    Fault("answers", 409, "ConditionalRequestConflict", method="PUT"),
    Fault("cut before"),
    Fault("cut after"),
    Fault("slow", seconds=2.0),
    Fault("stalls"),
]
"""Each is met by some requests, and heals."""

LASTING = {
    "errors": Fault("answers", 500, "InternalError"),
    "full": Fault("answers", 507, "QuotaExceeded", method="PUT"),
    "refuses": Fault("answers", 403, "AccessDenied"),
    "conflicts": Fault("answers", 409, "ContainerBeingDeleted", method="PUT"),
    "cut": Fault("cut after"),
    "stalls": Fault("stalls"),
}


def records_of(bucket: Emulated) -> Path:
    """The records that the mirror has."""
    return update_copy(f"{bucket.url}/r") / "records.jsonl"


@pytest.mark.parametrize("bucket", ["s3", "az", "gs"], indirect=True)
def test_a_run_outlives_a_bucket_that_fails_for_a_while(bucket: Emulated, tmp_path: Path) -> None:
    """Nothing is lost or there twice, and there is at most a request per second and worker."""
    write_prompts(tmp_path / "p.jsonl", 400)
    workers = 2
    with FakeEndpoint(turns=3, latency_s=0.3, answers=50, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, mirror=bucket.url, num_workers=workers, batch_size=2)
        bucket.proxy.fail(Fault("cut after", method="PUT"))
        with started(tmp_path, **given) as process:
            wait_until(lambda: bucket.proxy.met >= 1)  # a start tries again, too
            bucket.proxy.fail(None)
            wait_until(lambda: endpoint.journal()["requests"])
            for number, fault in enumerate(SHORT):
                wait_until(lambda: bucket.proxy.met >= 2)
                bucket.proxy.fail(fault)
                endpoint.answer(50 * (number + 2))  # there is something to send
                wait_until(lambda: bucket.proxy.met >= 1)
                if fault.kind != "stalls":
                    wait_until(lambda: bucket.proxy.met >= 3)
                bucket.proxy.fail(None)
            wait_until(lambda: bucket.proxy.met >= 2)
            endpoint.answer(None)
            assert process.wait(120) == 0, (tmp_path / "output.txt").read_text()
        judge_run_dir(tmp_path / "trajectories/r", tasks=400)
    at = [request.at for request in bucket.proxy.requests]
    window = 10
    for number, begins in enumerate(at):
        within = sum(begins <= other < begins + window for other in at[number:])
        assert within <= workers * window + 2, "more than a request per second and worker"
    of_run = (tmp_path / "trajectories/r/records.jsonl").read_bytes()
    assert records_of(bucket).read_bytes() == of_run


@pytest.mark.parametrize(
    ("bucket", "name"),
    [*(("s3", name) for name in LASTING), ("az", "refuses"), ("gs", "full")],
    indirect=["bucket"],
)
def test_a_bucket_that_fails_stops_the_run_in_order(
    bucket: Emulated, name: str, tmp_path: Path
) -> None:
    """The mirror has all that is old enough; the next start sends the rest."""
    write_prompts(tmp_path / "p.jsonl", 2000)
    run_dir = tmp_path / "trajectories/r"
    with FakeEndpoint(turns=2, latency_s=0.3, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, mirror=bucket.url, num_workers=1, batch_size=2)
        with started(tmp_path, **given) as process:
            wait_until(lambda: len(finished_lines(run_dir / "records.jsonl")) > 8)
            failed_at = time.time()
            bucket.proxy.fail(LASTING[name])
            assert process.wait(120) == 4, (tmp_path / "output.txt").read_text()
        said = (tmp_path / "output.txt").read_text()
        assert "lacks the last" in said
        done = finished_lines(run_dir / "records.jsonl")
        bucket.proxy.fail(None)
        there = finished_lines(records_of(bucket))
        assert all(done[key] == line for key, line in there.items())
        lost = list(done)[len(there) :]
        assert lost
        assert list(there) == list(done)[: len(there)], "the oldest ones are there"
        finished = orjson.loads(done[lost[0]])["finished_at"]
        assert finished > failed_at - LAG_S
        write_prompts(tmp_path / "p.jsonl", len(done))
        ended = run(tmp_path, **given, accept_config_change="dataset_file")
        assert ended.returncode == 0, ended.stderr
    assert records_of(bucket).read_bytes() == (run_dir / "records.jsonl").read_bytes()


@pytest.mark.parametrize("bucket", ["s3", "az"], indirect=True)
def test_a_clock_that_is_off_stops_a_start_whose_bucket_looks_at_it(
    bucket: Emulated, tmp_path: Path
) -> None:
    """As S3 and Azure do. Where the bucket does not look, nothing depends on the clock."""
    library = fake_clock()
    if library is None:
        pytest.skip("libfaketime is not installed (LIBFAKETIME names one elsewhere)")
    clock = {"LD_PRELOAD": library, "FAKETIME": "-2d", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    write_prompts(tmp_path / "p.jsonl", 4)
    with FakeEndpoint(turns=2, **WRITE_A_NOTE) as endpoint:
        given: dict[str, Any] = asking(endpoint, mirror=bucket.url)
        bucket.proxy.fail(Fault("checks the clock"))
        refused = run(tmp_path, **given, env=clock)
        assert refused.returncode == 4, refused.stderr
        assert "RequestTimeTooSkewed" in refused.stderr
        assert not endpoint.journal()["requests"]
        bucket.proxy.fail(None)
        assert run(tmp_path, **given, env=clock).returncode == 0
        bucket.proxy.fail(Fault("checks the clock"))
        assert run(tmp_path, **given).returncode == 0
    assert finished_lines(records_of(bucket)) == finished_lines(
        tmp_path / "trajectories/r/records.jsonl"
    )
