"""What is kept of a scan: it counts for the same dataset and the same questions, and no other."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from agent.options import AgentOptions
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.scan import scan, tasks
from batch_trajectories.dataset.scan_cache import (
    cached_keys,
    cached_scan,
    last_scan,
    load_scan,
    save_scan,
)
from batch_trajectories.dataset.shards import Shard
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import (
    PATIENCE_S,
    SCRIPTED,
    ids,
    lines,
    run,
    started,
    wait_until,
    write_rows,
)

ASKED: dict[str, Any] = {"shard": None, "max_samples": None, "rules": RowRules(), "num_samples": 2}


def some_lines(draw: random.Random, count: int) -> list[bytes]:
    """Rows with and without ids, equal ones, bad ones and blank lines."""
    made: list[bytes] = []
    for n in range(count):
        match draw.randrange(8):
            case 0:
                made.append(draw.choice([b"{", b"", b'{"prompt": 3}', b"  \r"]))
            case 1:
                made.append(orjson.dumps({"prompt": "again"}))
            case 2:
                made.append(orjson.dumps({"id": "used", "prompt": f"é {n}"}))
            case 3:
                made.append(orjson.dumps({"task_id": n, "prompt": f"q{n}"}) + b"\r")
            case _:
                made.append(orjson.dumps({"id": f"p{n}", "prompt": f"q{n}"}))
    return [orjson.dumps({"id": "p", "prompt": "first"}), *made]


def write(path: Path, rows: list[bytes]) -> Path:
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset whose scan is kept beside it."""
    path = write(tmp_path / "p.jsonl", some_lines(random.Random(0), 60))
    save_scan(tmp_path / "dataset.idx", scan(path, **ASKED))
    return path


def is_cache_used(dataset: Path, **options: Any) -> bool:
    """Whether what is kept is used; what is found must be what a scan finds, either way."""
    cache = dataset.with_name("dataset.idx")
    options = {**ASKED, **options}
    cached, scanned = cached_scan(cache, dataset, **options), scan(dataset, **options)
    assert cached == scanned
    every = list(tasks(scanned))
    assert list(tasks(cached)) == every
    assert [cached.key(n) for n in range(cached.tasks)] == [task.key for task in every]
    return load_scan(cache, dataset, **options) is not None


def test_the_same_dataset_is_not_scanned_again(dataset: Path) -> None:
    assert is_cache_used(dataset)
    os.utime(dataset, (1, 1))
    assert is_cache_used(dataset), "a file that was copied or touched is the same"


def test_keys_are_found_in_files_of_earlier_versions(tmp_path: Path) -> None:
    """They have an occurrence for each row, even where no id repeats."""
    path, kept = write(tmp_path / "p.jsonl", [b'{"prompt":"a"}', b'{"prompt":"b"}']), tmp_path / "k"
    scanned = scan(path, **ASKED)
    save_scan(kept, scanned)
    assert cached_keys(kept) == scanned.keys
    _, header, body = kept.read_bytes().split(b"\n", 2)
    fields = orjson.loads(header)
    assert fields.pop("occurrences") == 0
    ones = array("I", [1, 1]).tobytes()
    old = orjson.dumps(fields) + b"\n" + body[:16] + ones + body[16:]
    kept.write_bytes(blake2b(old, digest_size=32).hexdigest().encode() + b"\n" + old)
    assert cached_keys(kept) == scanned.keys


def test_a_scan_of_another_version_serves_readers_of_its_run(dataset: Path) -> None:
    kept, scanned = dataset.with_name("dataset.idx"), scan(dataset, **ASKED)
    _, header, body = kept.read_bytes().split(b"\n", 2)
    fields = orjson.loads(header) | {"for": "another version", "asked": {"seen": 1}}
    other = orjson.dumps(fields) + b"\n" + body
    kept.write_bytes(blake2b(other, digest_size=32).hexdigest().encode() + b"\n" + other)
    assert load_scan(kept, dataset, **ASKED) is None
    run = {"sha256": scanned.sha256, "rows": scanned.rows, "bad_rows": len(scanned.bad_rows)}
    assert last_scan(kept, dataset, run, **ASKED) == replace(scanned, asked={"seen": 1})
    for name, value in (("sha256", "0"), ("rows", 1), ("bad_rows", 1)):
        assert last_scan(kept, dataset, run | {name: value}, **ASKED) == scanned
    asked = ASKED | {"num_samples": 1}
    assert last_scan(kept, dataset, run, **asked) == scan(dataset, **asked)
    edited = dataset.read_bytes().replace(b"first", b"worst")
    dataset.write_bytes(edited)
    assert last_scan(kept, dataset, run, **ASKED) == scan(dataset, **ASKED)


def in_place(old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda rows: [row.replace(old, new) for row in rows]


EDITS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "edited in place": in_place(b"first", b"worst"),
    "an id edited in place": in_place(b'"used"', b'"uses"'),
    "a bad row mended in place": in_place(b'{"prompt": 3}', b'{"prompt":""}'),
    "appended": lambda rows: [*rows, b'{"prompt": "new"}'],
    "appended a used id": lambda rows: [*rows, b'{"id": "used", "prompt": "new"}'],
    "inserted": lambda rows: [b'{"prompt": "new"}', *rows],
    "reordered": lambda rows: [*reversed(rows)],
    "shortened": lambda rows: rows[:-1],
    "two rows exchanged": lambda rows: [rows[1], rows[0], *rows[2:]],
}


@pytest.mark.parametrize("name", EDITS)
def test_a_changed_dataset_is_scanned_even_with_its_old_size_and_time(
    dataset: Path, name: str
) -> None:
    before = dataset.stat()
    write(dataset, EDITS[name](dataset.read_bytes().split(b"\n")[:-1]))
    os.utime(dataset, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_cache_used(dataset)


def test_a_last_line_that_grew_is_another_line(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "dataset.idx"
    for bounds in (None, 2):
        dataset.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}')
        save_scan(cache, scan(dataset, **{**ASKED, "max_samples": bounds}))
        assert is_cache_used(dataset, max_samples=bounds)
        dataset.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"} and more')
        assert not is_cache_used(dataset, max_samples=bounds)


@pytest.mark.parametrize("name", ["appended", "edited in place"])
def test_rows_behind_max_samples_do_not_matter(dataset: Path, tmp_path: Path, name: str) -> None:
    save_scan(tmp_path / "dataset.idx", scan(dataset, **{**ASKED, "max_samples": 20}))
    write(dataset, EDITS[name](dataset.read_bytes().split(b"\n")[:-1]))
    assert is_cache_used(dataset, max_samples=20) is (name == "appended")


OTHER_RULES = [
    RowRules(script="allowed"),
    RowRules(system_prompt="s"),
    RowRules(is_priced=False),
    RowRules(toolsets=frozenset({"web", "file"})),
    RowRules(models=frozenset({"a", "b"})),
    RowRules(with_setup=True),
    RowRules(image="allowed"),
    RowRules(options=AgentOptions(max_turns=3)),
]


@pytest.mark.parametrize(
    "options",
    [
        {"num_samples": 1},
        {"shard": Shard(0, 2)},
        {"num_samples": 3},
        {"max_samples": 5},
        {"max_samples": 1000},
        *({"rules": rules} for rules in OTHER_RULES),
    ],
)
def test_a_scan_saved_with_other_options_is_not_used(
    dataset: Path, options: dict[str, Any]
) -> None:
    assert not is_cache_used(dataset, **options)
    save_scan(dataset.with_name("dataset.idx"), scan(dataset, **{**ASKED, **options}))
    assert is_cache_used(dataset, **options)
    assert not is_cache_used(dataset)


def test_rules_are_the_same_in_any_order_of_their_names(dataset: Path) -> None:
    names = [f"name{n}" for n in range(50)]
    options = {"rules": RowRules(models=frozenset(names), toolsets=frozenset(names))}
    save_scan(dataset.with_name("dataset.idx"), scan(dataset, **{**ASKED, **options}))
    assert is_cache_used(
        dataset, rules=RowRules(models=frozenset(names[::-1]), toolsets=frozenset(names))
    )


def test_a_damaged_scan_file_is_not_used_and_is_replaced(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "dataset.idx"
    right = cache.read_bytes()
    draw = random.Random(0)
    damaged = [right[:at] for at in draw.sample(range(len(right)), 20)]
    for at in draw.sample(range(len(right)), 20):
        damaged.append(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
    for content in (b"", b"\n\n", b"\0" * len(right), right + b"\0", *damaged):
        cache.write_bytes(content)
        assert not is_cache_used(dataset)
        save_scan(cache, cached_scan(cache, dataset, **ASKED))
        assert cache.read_bytes() == right
    cache.unlink()
    assert not is_cache_used(dataset)


def test_a_right_file_is_not_written_again(dataset: Path, tmp_path: Path) -> None:
    before = (tmp_path / "dataset.idx").stat().st_ino
    save_scan(tmp_path / "dataset.idx", scan(dataset, **ASKED))
    assert (tmp_path / "dataset.idx").stat().st_ino == before


@pytest.mark.parametrize("seed", range(20))
def test_a_dataset_that_is_edited_again_and_again_is_always_read_as_it_is(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    path, cache = tmp_path / "p.jsonl", tmp_path / "dataset.idx"
    rows = some_lines(draw, draw.randrange(40))
    for _ in range(12):
        write(path, rows)
        os.utime(path, (1, 1))
        options = {
            "max_samples": draw.choice([None, None, 3, 30]),
            "num_samples": draw.choice([1, 1, 2]),
        }
        is_cache_used(path, **options)
        if draw.randrange(3):
            save_scan(cache, cached_scan(cache, path, **{**ASKED, **options}))
        match draw.randrange(6):
            case 0:
                rows = rows + some_lines(draw, 3)
            case 1:
                draw.shuffle(rows)
            case 2:
                rows = rows[1:] or rows
            case 3:
                rows[-1] = rows[-1].replace(b"q", b"r")
            case _:
                pass


def test_a_scan_of_other_rules_differs_from_that_of_these(dataset: Path) -> None:
    """Otherwise the comparisons above would say nothing."""
    scanned = scan(dataset, **ASKED)
    assert scanned != replace(scanned, keys=bytes(len(scanned.keys)))


def test_a_run_takes_a_row_that_was_edited_in_place_as_new_work(tmp_path: Path) -> None:
    rows = [
        {"id": f"p{n}", "prompt": f"question {n}", "script": [{"content": "a"}]} for n in range(4)
    ]
    path = write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    inode = (run_dir / "dataset.idx").stat().st_ino
    before = path.stat()
    path.write_text(path.read_text().replace("question 2", "QUESTION 2"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert ids(run_dir / "records.jsonl")[4:] == ["p2"]
    exported = lines(tmp_path / "trajectories" / "r.jsonl")
    assert "QUESTION 2" in str(exported[2])
    assert len(exported) == 4
    assert (run_dir / "dataset.idx").stat().st_ino != inode
    (run_dir / "dataset.idx").write_bytes(b"torn")
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert len(ids(run_dir / "records.jsonl")) == 5
    assert "5 records, no problems found" in run(tmp_path, "verify", "r").stdout
    assert "1 task of rows that" in run(tmp_path, "status", "r").stdout


@pytest.mark.slow
def test_a_dataset_changed_during_a_run_stops_it_and_the_next_start_resumes(
    tmp_path: Path,
) -> None:
    long = "x" * 4096  # so that few rows are read ahead
    rows = [{"id": f"p{n:04}", "prompt": f"{n} {long}"} for n in range(40)]
    path = write_rows(tmp_path / "p.jsonl", *rows)
    run_dir = tmp_path / "trajectories" / "r"
    with FakeEndpoint(turns=1, latency_s=0.0, answers=1) as endpoint:
        given = {**SCRIPTED, "model": "openai:m", "key_env": "none", "enabled_toolsets": "none"}
        given |= {"base_url": endpoint.openai_url, "batch_size": 2}
        with started(tmp_path, **given) as process:
            wait_until(lambda: endpoint.journal()["replies"] >= 1)
            write_rows(path, *rows[:10], *rows[:9:-1])
            endpoint.answer(None)
            assert process.wait(timeout=PATIENCE_S) == 4
        said = (tmp_path / "output.txt").read_text()
        assert "has changed since this start began" in said
        assert "Traceback" not in said
        again = run(tmp_path, **given)
        assert again.returncode == 0, again.stderr
        assert sorted(ids(run_dir / "records.jsonl")) == [f"p{n:04}" for n in range(40)]
        assert not endpoint.journal()["repeated"]


def test_a_wrong_saved_scan_costs_one_start(tmp_path: Path) -> None:
    """As if a program of the same version had distinguished rows in another way."""
    script = [{"content": "a"}]
    write_rows(
        tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": "q", "script": script} for n in range(3))
    )
    assert run(tmp_path, **SCRIPTED).returncode == 0
    run_dir = tmp_path / "trajectories" / "r"
    cache = (run_dir / "dataset.idx").read_bytes().split(b"\n", 1)[1]
    cache = cache[:-32] + cache[-16:] + cache[-32:-16]
    digest = blake2b(cache, digest_size=32).hexdigest().encode()
    (run_dir / "dataset.idx").write_bytes(digest + b"\n" + cache)
    kept = [line for line in lines(run_dir / "records.jsonl") if line["id"] != "p2"]
    write_rows(run_dir / "records.jsonl", *kept)
    refused = run(tmp_path, **SCRIPTED)
    assert refused.returncode == 4
    assert "run the same command again" in refused.stderr
    assert run(tmp_path, **SCRIPTED).returncode == 0
    assert sorted(ids(run_dir / "records.jsonl")) == ["p0", "p1", "p2"]
