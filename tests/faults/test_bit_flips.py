"""Bits that a disk or a memory flips: found, named, repaired, and never in a training row."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.messages.message import MAX_TOKEN_COUNT
from agent.models.usage import count_or_none
from batch_trajectories.api.start import explain_exit
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.run_totals import RunTotals, compute_totals
from batch_trajectories.engine.supervisor.run import Outcome
from batch_trajectories.export.training_files import export_run
from batch_trajectories.records.files import (
    DamagedLine,
    add_checksum,
    read_object,
    strip_checksum,
)
from tests.fakes.bit_flips import FOUND, attack, flips, make_run
from tests.faults.oracle import judge_run_dir
from tests.faults.test_disk import scripted_rows
from tests.helpers.builders import assistant, record_of, user
from tests.helpers.exporting import make_run as make_records
from tests.helpers.running import SCRIPTED, run

LINE = {"id": "p1", "text": 'a ,"crc32":"00000000"} and é', "n": 1.5, "schema_version": 2}


def flip_bit(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_flip_of_a_line_is_found() -> None:
    line = add_checksum(orjson.dumps(LINE))
    for bit in range(8 * len(line)):
        with pytest.raises(DamagedLine):
            read_object(flip_bit(line, bit))


def test_a_line_is_read_with_and_without_checksum_and_newline() -> None:
    old = orjson.dumps(LINE) + b"\n"
    line = add_checksum(old[:-1])
    assert strip_checksum(line) == strip_checksum(old) == old
    for whole in (line, line[:-1], line[:-1] + b"\r\n", old, old[:-1]):
        assert read_object(whole) == LINE
    # Laid out in another way it is no line that this program wrote.
    edited = line.replace(b',"crc32":"', b', "crc32": "')
    with pytest.raises(DamagedLine, match="its checksum does not match"):
        read_object(edited)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("whole"))


COUNTS = [pytest.param(12, id="few"), pytest.param(1000, id="many", marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_flip_of_the_records_is_named_and_in_no_row(whole: Path, count: int) -> None:
    seen = Counter(
        attack(whole, "records.jsonl", bit, look=True)._replace(others=())
        for bit in flips(whole / "records.jsonl", count, seed=5)
    )
    (one,) = seen
    assert (one.verify, one.export, one.rows_changed, one.is_named) == (FOUND, 4, False, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["records.idx", "run.json", "summary.json", "dataset.idx"])
@pytest.mark.parametrize("count", [pytest.param(3, id="few"), COUNTS[1]])
def test_a_flip_of_another_file_changes_no_row(whole: Path, name: str, count: int) -> None:
    for bit in flips(whole / name, count, seed=6):
        seen = attack(whole, name, bit, look=True)
        assert not seen.has_defect(), bit
        assert not seen.rows_changed, bit


@pytest.mark.slow
def test_only_the_task_of_a_flipped_record_runs_again(tmp_path: Path) -> None:
    """By an export, which names it, and by a repair; then the run is what it was."""
    scripted_rows(tmp_path, 4)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    right = run_dir.with_suffix(".jsonl").read_bytes()
    records = run_dir / "records.jsonl"
    content = records.read_bytes()
    at = content.index(b'"content":"y"') + len(b'"content":"')
    records.write_bytes(flip_bit(content, 8 * at))
    number = content[:at].count(b"\n") + 1
    exported = run(tmp_path, "export", "r")
    assert exported.returncode == 4
    named = f"records.jsonl:{number}: the record ('p"
    assert named in exported.stderr
    assert re.search(
        r"its checksum does not match. `verify \S+ --repair` sets it aside", exported.stderr
    )
    assert run_dir.with_suffix(".jsonl").read_bytes() == right
    repaired = run(tmp_path, "verify", "r", "--repair")
    assert repaired.returncode == 0, repaired.stdout
    assert f"records.jsonl:{number}: not a complete record (id 'p" in repaired.stdout
    assert "to run 1 task:" in repaired.stdout
    assert len(list((run_dir / "quarantine").iterdir())) == 1
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert run_dir.with_suffix(".jsonl").read_bytes() == right
    judge_run_dir(run_dir, tasks=4)


@pytest.mark.slow
def test_an_identity_that_was_changed_is_named_and_can_be_accepted(tmp_path: Path) -> None:
    scripted_rows(tmp_path, 2)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    path = tmp_path / "trajectories" / "r" / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"max_turns": ', b'"max_turnS": '))
    for args in ({**SCRIPTED}, {}):
        refused = run(tmp_path, *([] if args else ["export", "r"]), **args)
        assert refused.returncode == 2
        assert "run.json: changed since it was written: its checksum" in refused.stderr
    accepted = orjson.loads(path.read_bytes())
    del accepted["crc32"]
    accepted["meaning"]["max_turns"] = accepted["meaning"].pop("max_turnS")
    path.write_bytes(orjson.dumps(accepted))
    assert run(tmp_path, **SCRIPTED).returncode == 0
    judge_run_dir(path.parent, tasks=2)


def answer_record(text: str, **changes: Any) -> dict[str, Any]:
    return record_of(user(), assistant(text), **changes)


def totals_of(folder: Path, *records: dict[str, Any], pending: int = 0) -> RunTotals:
    source = make_records(folder, *records, pending=pending)
    config = RunConfig(dataset_file=folder / "p.jsonl", run_name="r", output_dir=folder)
    export_run(source.run_dir, source.scan, num_samples=1)
    return compute_totals(source.run_dir, source.scan, config)


def test_a_run_that_ends_with_pending_tasks_is_not_complete(tmp_path: Path) -> None:
    """However their records were lost."""
    totals = totals_of(tmp_path, answer_record("Hi."), pending=3)
    code, reason = explain_exit(Outcome(), totals)
    assert code == 4
    assert "3 tasks without a record although the run has ended" in str(reason)
    assert explain_exit(Outcome(), totals, is_all=False) == (0, None)


def test_impossible_token_counts_are_unknown(tmp_path: Path) -> None:
    assert count_or_none(2**63 - 1) is None
    assert count_or_none(MAX_TOKEN_COUNT - 1) == MAX_TOKEN_COUNT - 1
    # As earlier versions recorded them: three of them fit no 64 bits.
    huge = {"input_tokens": 2**63 - 1, "output_tokens": 5}
    totals = totals_of(tmp_path, *[answer_record("Hi.", usage=huge)] * 3)
    assert orjson.dumps(totals.to_json())
    assert (totals.input_tokens, totals.tokens_unknown) == (0, 3)
    assert totals.output_tokens == 15
