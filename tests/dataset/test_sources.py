"""Datasets that are not plain JSONL: what is read of them, and that a run keeps them."""

from __future__ import annotations

import datetime
import errno
import gzip
import json
import os
import re
import shlex
import signal
import tempfile
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batch_runner import main
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import DatasetError, RunLocked
from batch_trajectories.dataset import file_rows
from batch_trajectories.dataset.arrow_rows import Omissions, table_rows
from batch_trajectories.dataset.kept_dataset import DatasetSnapshot, rows_of_source, take_snapshot
from batch_trajectories.dataset.lines import TOO_LONG, columns_in
from batch_trajectories.dataset.row import RowRules
from batch_trajectories.dataset.source import parse_source
from batch_trajectories.engine.run_dir import find_stale_files
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.fake_hub import REPOSITORY, REVISION, fake_hub
from tests.helpers.running import SCRIPTED, WRITE_A_NOTE, lines, run, started, wait_until

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "What is 2 + 2?", "expected": "4"},
    {"id": "b", "prompt": "Zürich, \u2028 or\nBern?"},
    {"prompt": "no id", "expected": "007"},
]
"""Text only, so that CSV can hold them."""

LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)

CSV = 'id,prompt,expected\na,What is 2 + 2?,4\nb,"Zürich, \u2028 or\nBern?",\n,no id,007\n'


def write_jsonl(path: Path) -> None:
    path.write_text(LINES)


def write_list(path: Path) -> None:
    path.write_text("\ufeff" + json.dumps(ROWS, indent=2))


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES[:40].encode()) + gzip.compress(LINES[40:].encode()))


def write_zstd(path: Path) -> None:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(LINES.encode())


def write_csv(path: Path) -> None:
    path.write_text("\ufeff" + CSV, newline="")


def write_tsv(path: Path) -> None:
    path.write_text(CSV.replace(",", "\t").replace("Zürich\t", "Zürich,"), newline="")


def write_parquet(path: Path) -> None:
    columns = {name: [row.get(name) for row in ROWS] for name in ("id", "prompt", "expected")}
    pq.write_table(pa.table({**columns, "empty": pa.nulls(len(ROWS))}), path)


def write_directory(path: Path) -> None:
    (path / "more").mkdir(parents=True)
    (path / "README.md").write_text("not data")
    (path / ".hidden.jsonl").write_text("not data")
    (path / "1.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (path / "more" / "1.json").write_text(json.dumps(ROWS[1:]))


def write_saved(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = {name: [row.get(name) for row in ROWS] for name in ("id", "prompt", "expected")}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(whole)}).save_to_disk(path)


SOURCES = {
    "p.jsonl": write_jsonl,
    "p.json": write_list,
    "p.jsonl.gz": write_gzip,
    "p.jsonl.zst": write_zstd,
    "p.csv": write_csv,
    "p.tsv": write_tsv,
    "p.parquet": write_parquet,
    "files": write_directory,
    "saved": write_saved,
}

every_source = pytest.mark.parametrize("name", SOURCES)


def read(path: Path) -> list[Any]:
    """The rows of a source, read."""
    rows = rows_of_source(parse_source(path), Omissions())
    return [json.loads(row) if isinstance(row, bytes) else row for row in rows]


def keep(source: Path, run_dir: Path, **options: Any) -> DatasetSnapshot:
    given: dict[str, Any] = {
        "columns": {},
        "rows": None,
        "rules": RowRules(),
        "max_samples": None,
        "writes": True,
        "say": print,
    }
    return take_snapshot(source, run_dir, **{**given, **options})


@every_source
def test_each_kind_of_source_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path / name)
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("way", ["above", "absolute", "a link", "a split", "a linked split"])
def test_a_saved_dataset_that_leads_outside_of_itself_is_refused(tmp_path: Path, way: str) -> None:
    """Somebody else may have made it, and its rows go to a model."""
    datasets = pytest.importorskip("datasets")
    private, saved = tmp_path / "private", tmp_path / "saved"
    datasets.Dataset.from_dict({"prompt": ["secret"]}).save_to_disk(private)
    write_saved(saved)
    state = json.loads((saved / "train" / "state.json").read_text())
    (arrow,) = private.glob("*.arrow")
    match way:
        case "above" | "absolute":
            name = str(arrow) if way == "absolute" else f"../../private/{arrow.name}"
            state["_data_files"] = [{"filename": name}]
            (saved / "train" / "state.json").write_text(json.dumps(state))
        case "a link":
            own = saved / "train" / state["_data_files"][0]["filename"]
            own.unlink()
            own.symlink_to(arrow)
        case "a split":
            (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["../private"]}))
        case "a linked split":
            (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "other"]}))
            (saved / "other").symlink_to(private)
    with pytest.raises(DatasetError, match=r"(state|dataset_dict)\.json: names '.*outside of"):
        read(saved)
    if "split" not in way:
        with pytest.raises(DatasetError, match="outside of"):
            read(saved / "train")


def write_parquet_json(path: Path) -> None:
    rows = [json.dumps(one) for one in JSON_VALUES]
    of_json = pa.ExtensionArray.from_storage(pa.json_(), pa.array([*rows, None, "null"]))
    nested = pa.StructArray.from_arrays([of_json], names=["inner"])
    offsets = pa.array(range(len(rows) + 3), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, of_json)
    maps = pa.MapArray.from_arrays(offsets, pa.array(["k"] * (len(rows) + 2)), of_json)
    table = pa.table({"own": of_json, "object": nested, "list": lists, "map": maps})
    pq.write_table(table, path, store_schema=path.stem != "plain")


JSON_VALUES = [{"role": "user", "n": [1, None, {"a": None}]}, "text", 7, False, [], 2**70]


@pytest.mark.parametrize("name", ["own.parquet", "plain.parquet"])
def test_values_of_arrows_type_for_json_are_what_their_text_says(tmp_path: Path, name: str) -> None:
    write_parquet_json(tmp_path / name)
    assert read(tmp_path / name) == [
        *(
            {"own": one, "object": {"inner": one}, "list": [one], "map": {"k": one}}
            for one in JSON_VALUES
        ),
        *[{"object": {}, "list": [None], "map": {}}] * 2,
    ]


def test_rows_that_datasets_stores_as_json_come_back(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"expected": one, "messages": [{"role": "user", "content": one}]} for one in JSON_VALUES[:4]
    ]
    features = datasets.Features(
        {"expected": datasets.Json(), "messages": datasets.List(datasets.Json())}
    )
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "p.parquet")
    assert read(tmp_path / "saved") == read(tmp_path / "p.parquet") == rows


def test_a_row_with_torn_json_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    """As a torn line of JSONL is: the row keeps its position."""
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', "{", "7"]))
    pq.write_table(pa.table({"files": column}), tmp_path / "p.parquet")
    first, torn, last = rows_of_source(parse_source(tmp_path / "p.parquet"), Omissions())
    assert (first, last) == ({"files": {"a": 1}}, {"files": 7})
    assert isinstance(torn, bytes)
    with pytest.raises(ValueError, match="column 'files': its type is JSON, but its text is not"):
        columns_in(torn)
    path = keep(tmp_path / "p.parquet", tmp_path / "run").path
    assert [line[:6] for line in path.read_bytes().splitlines()] == [
        b'{"file',
        b"it can",
        b'{"file',
    ]


def test_an_arrow_file_is_named_as_one(tmp_path: Path) -> None:
    """Also in the form of a stream, as the cache of `datasets` holds it."""
    table = pa.table({"prompt": ["a"]})
    for name, new in {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}.items():
        with new(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DatasetError, match=rf"{name}\.arrow is an Arrow file; give the dir"):
            read(tmp_path / f"{name}.arrow")


def test_a_json_list_is_read_across_the_borders_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "_BLOCK", 7)
    rows = [{"prompt": "x" * n, "n": [n, -1.5e3, None, {"": "]},{"}]} for n in range(40)]
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    assert read(tmp_path / "p.json") == rows


def test_a_json_list_keeps_long_integers_and_elements_that_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"n": 123456789012345678901234567890}, 12, "x", []]')
    rows = list(rows_of_source(parse_source(tmp_path / "p.json"), Omissions()))
    assert rows == [b'{"n": 123456789012345678901234567890}', b"12", b'"x"', b"[]"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.json",
            b'[{"prompt": "a"}, {"prompt"',
            "p.json:1: not a JSON array of rows: Expecting ':' delimiter",
        ),
        ("p.json", b'[{"prompt": "a"}] {}', "more follows its end"),
        ("p.json", b'[{"prompt": "\xff"}]', "not UTF-8"),
        (
            "p.json",
            '[\n{"prompt": "é"},\n{"prompt": "'.encode() + b'\xe9"}]',
            "p.json:3: not UTF-8",
        ),
        ("p.json", b"[" * 100_000, "nested too deeply"),
        ("p.csv", b"prompt,prompt\na,b\n", "p.csv:1: two columns have the name 'prompt'"),
        ("p.csv", b"prompt\na,b\n", "p.csv:2: 2 cells, but the header names 1 columns"),
        ("p.csv", b'prompt\n"a\n', "not CSV"),
        ("p.csv", "prompt\nä\n".encode("utf-16"), "p.csv is UTF-16"),
        ("p.csv", b"prompt\n" * 9 + b"\xff\n", "p.csv:10: not UTF-8"),
        ("p.csv", b"id;prompt\n1;a, b\n", "p.csv:1: the header is one column, 'id;prompt'"),
        ("p.tsv", b"id,prompt\n1,a\n", "separated by ',', not '\\t'"),
        (
            "p.csv",
            gzip.compress(b"prompt\na\n", mtime=0),
            "is gzip-compressed; end its name in .gz",
        ),
        ("p.jsonl.gz", gzip.compress("[]".encode("utf-16"), mtime=0), "is UTF-16"),
        ("p.json.gz", gzip.compress(b'[\n{"prompt": "a"}\n{}]', mtime=0), "p.json.gz:3: "),
        (
            "p.json",
            b'[\n{"prompt": "a\0b"}]',
            "p.json:2: not a JSON array of rows: Invalid control",
        ),
        ("p.json", b"[]" + b" " * 200_000 + b"[]", "more follows its end"),
        ("p.parquet.gz", gzip.compress(b"PAR1", mtime=0), "Parquet compresses its columns itself"),
        ("p.parquet", b"PAR1 and then nothing", "cannot read it as Parquet"),
        ("p.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:30], "cannot read the dataset"),
        ("p.jsonl.gz", b"not compressed", "cannot read the dataset"),
        ("p.jsonl.zst", b"not compressed", "cannot read the dataset"),
    ],
)
def test_a_damaged_source_is_one_error_that_names_it(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=f"{name}.*") as raised:
        read(tmp_path / name)
    assert message in str(raised.value)


def test_compressed_jsonl_may_be_named_json(tmp_path: Path) -> None:
    write_zstd(tmp_path / "p.json.zst")
    assert read(tmp_path / "p.json.zst") == ROWS


def test_a_csv_file_may_end_its_lines_as_old_macs_did(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_bytes(b"\r\rid,prompt\ra,x\rb,y\r")
    assert read(tmp_path / "p.csv") == [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]


def test_an_endless_line_is_refused_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "_MAX_CSV_CHARS", 1000)
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(b"prompt\n" + b"a" * 1_000_000))
    with pytest.raises(DatasetError, match=r"p\.csv\.gz:2: longer than"):
        read(tmp_path / "p.csv.gz")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("ends", [b"", b"\n", b'\n{"prompt": "b"}\n'])
def test_a_line_that_is_too_long_is_one_bad_row_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, ends: bytes
) -> None:
    """A few kilobytes can be gigabytes of one line."""
    monkeypatch.setattr(file_rows, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / {"gzip": "p.jsonl.gz", "zstd": "p.jsonl.zst"}[compression]
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write(b'{"prompt": "a"}\n{"prompt": "')
        for _ in range(40):
            stream.write(b"a" * (1 << 20))
        stream.write(b'"}' + ends)
    tracemalloc.start()
    rows = list(rows_of_source(parse_source(path), Omissions()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [b'{"prompt": "a"}', TOO_LONG, *([b'{"prompt": "b"}'] if ends[1:] else [])]
    assert peak < 4 << 20
    with pytest.raises(ValueError, match=r"^longer than 256 MiB$"):
        columns_in(TOO_LONG)


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20])
def test_a_line_may_be_as_long_as_its_limit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(file_rows, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "p.jsonl.gz"
    line = json.dumps({"prompt": "a" * 4}).replace("aaaa", "a" * (size - 16)).encode() + b"\n"
    assert len(line) == size - 1
    path.write_bytes(gzip.compress(line + b"\n" + line))
    rows = list(rows_of_source(parse_source(path), Omissions()))
    assert rows == [line.rstrip(), b"", line.rstrip()]


def test_an_element_that_is_too_long_is_refused_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters take up to four bytes each, in a file and in memory."""
    monkeypatch.setattr(file_rows, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "p.json.gz"
    text = json.dumps([{"prompt": "😀" * (1 << 19)}], ensure_ascii=False)
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DatasetError, match=r"p\.json\.gz:1: .* longer than 1 MiB"):
        read(path)


@pytest.mark.parametrize("name", ["p.csv", "p.json", "p.parquet", "p.jsonl.gz", "shards/1.csv"])
def test_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "shards").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DatasetError, match=f"{Path(name).name} is a pipe or device"):
        parse_source(tmp_path / name.partition("/")[0])


class TestDirectories:
    def test_links_are_followed_once(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "p.jsonl")
        (tmp_path / "real").mkdir()
        write_jsonl(tmp_path / "real" / "p.jsonl")
        for folder in (tmp_path, tmp_path / "real"):
            (folder / "loop").symlink_to(tmp_path)
        (tmp_path / "the same").symlink_to(tmp_path / "real")
        assert len(read(tmp_path)) == 2 * len(ROWS)

    def test_a_link_to_nothing_is_an_error(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "1.jsonl")
        (tmp_path / "2.jsonl").symlink_to("gone")
        with pytest.raises(DatasetError, match=r"2\.jsonl: no such dataset file"):
            keep(tmp_path, tmp_path / "run")

    def test_one_that_cannot_be_listed_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_jsonl(tmp_path / "1.jsonl")
        (tmp_path / "more").mkdir()
        scandir = os.scandir

        def refuse(path: Any) -> Any:  # the superuser may list everything
            if str(path).endswith("more"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(DatasetError, match="more: cannot read the dataset: Permission denied"):
            parse_source(tmp_path)


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DatasetError, match="no dataset in this directory"):
        parse_source(tmp_path)


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.string())])
    table = pa.table(
        {
            "prompt": ["x"],
            "nested": pa.array([{"a": 1}], kind),
            "list": pa.array([[{"a": None, "b": "y"}, None]], pa.list_(kind)),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "day": [datetime.date(2026, 1, 2)],
            "price": [Decimal("1.10")],
            "nan": [float("nan")],
            "picture": [{"bytes": b"\x00", "path": "a.png"}],
        }
    )
    pq.write_table(table, tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet") == [
        {
            "prompt": "x",
            "nested": {"a": 1},
            "list": [{"b": "y"}, None],
            "map": {"k": 1},
            "day": "2026-01-02",
            "price": "1.10",
            "picture": {"path": "a.png"},
        }
    ]


def table_of(name: str, column: pa.Array) -> pa.Table:
    return pa.table({"prompt": ["x"] * len(column), name: column})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            lambda: pa.Table.from_arrays([pa.array(["a"])] * 2, names=["n", "n"]),
            "have the name 'n'",
        ),
        (lambda: table_of("n", pa.array([2**60], pa.timestamp("ms"))), "column 'n', rows from 1: "),
        (lambda: table_of("n", pa.array([1], pa.timestamp("us", tz="Mars/Phobos"))), "column 'n'"),
        (lambda: table_of("n", pa.array([b"\xff"]).view(pa.string())), "column 'n'"),
        (
            lambda: table_of(
                "n", pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))
            ),
            "'n'",
        ),
    ],
)
def test_a_value_that_python_cannot_hold_is_an_error_that_names_its_column(
    tmp_path: Path, table: Callable[[], pa.Table], message: str
) -> None:
    pq.write_table(table(), tmp_path / "p.parquet")
    with pytest.raises(DatasetError, match=r"p\.parquet: ") as raised:
        read(tmp_path / "p.parquet")
    assert message in str(raised.value)


def test_rows_without_columns_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"sound": [b"x", b"y"]}), tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet") == [{}, {}]


def test_maps_become_objects(tmp_path: Path) -> None:
    maps = [[], [(1, "x")]]
    pq.write_table(
        table_of("m", pa.array(maps, pa.map_(pa.int64(), pa.string()))), tmp_path / "p.parquet"
    )
    assert [row["m"] for row in read(tmp_path / "p.parquet")] == [{}, {"1": "x"}]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("number", pa.array([1.5, float("nan")])),
        ("half", pa.array([1.5, float("-inf")], pa.float16())),
        ("list", pa.array([[1.0, float("inf")], None])),
        ("object", pa.array([{"a": [{"b": float("nan")}]}, None])),
        ("map", pa.array([[("a", float("nan"))], None], pa.map_(pa.string(), pa.float64()))),
        ("dictionary", pa.array([1.5, float("nan")]).dictionary_encode()),
        ("repeated", pc.run_end_encode(pa.array([1.5, float("nan")]))),
        ("tensor", pa.FixedShapeTensorArray.from_numpy_ndarray(numpy.array([[numpy.inf], [1]]))),
    ],
)
def test_columns_with_numbers_that_json_lacks_are_named(name: str, values: pa.Array) -> None:
    table = pa.table({name: values, "other": [1.5, None], "text": ["nan", "inf"]})
    left_out = Omissions()
    rows: list[Any] = list(table_rows([table], "p", left_out))
    assert left_out.numbers == {name}
    assert "NaN" not in json.dumps(rows)
    assert [row["text"] for row in rows] == ["nan", "inf"]
    exact_json.dumps(rows)


class TestKeeping:
    def test_numbers_that_json_lacks_are_named_by_the_start_and_look(self, tmp_path: Path) -> None:
        table = {
            "prompt": ["1 + 1", "2 + 2", "3 + 3"],
            "x": [1.5, float("nan"), float("inf")],
            "v": [[1.0, float("nan")], [float("inf")], [2.0]],
        }
        pq.write_table(pa.table(table), tmp_path / "p.parquet")
        said: list[str] = []
        for writes in (False, True):
            kept = keep(tmp_path / "p.parquet", tmp_path / "run", say=said.append, writes=writes)
            assert kept.path.read_bytes().split(b"\n")[:2] == [
                b'{"prompt":"1 + 1","x":1.5,"v":[1.0,null]}',
                b'{"prompt":"2 + 2","v":[null]}',
            ]
        message = (
            f"{tmp_path / 'p.parquet'}: NaN and infinite numbers are left out (null in lists), "
            "because JSON has none; they are in: v, x"
        )
        assert said == [message] * 2
        assert message in CliRunner().invoke(main, ["look", str(tmp_path / "p.parquet")]).output

    def test_columns_of_bytes_are_named(self, tmp_path: Path) -> None:
        picture = {"bytes": b"x", "path": "a.png"}
        table = pa.table(
            {"prompt": ["x"], "sound": [b"x"], "pictures": [[picture]], "label": [b"x"]}
        )
        table = table.set_column(3, "label", table["label"].dictionary_encode())
        (tmp_path / "of").mkdir()
        for name in ("1", "2"):
            pq.write_table(table, tmp_path / "of" / f"{name}.parquet")
        said: list[str] = []
        kept = keep(tmp_path / "of", tmp_path / "run", say=said.append)
        expected = "left out, because they hold bytes: label, pictures.bytes, sound"
        assert said == [f"{tmp_path / 'of'}: {expected}"]
        assert kept.path.read_bytes().split(b"\n")[0] == (
            b'{"prompt":"x","pictures":[{"path":"a.png"}]}'
        )
        shown = CliRunner().invoke(main, ["look", str(tmp_path / "of")])
        assert expected in shown.output

    def test_a_source_that_changes_while_it_is_read_is_refused(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        write_list(tmp_path / "q.json")

        class Appends(RowRules, frozen=True):
            def read(self, columns: Any) -> Any:
                with (tmp_path / "p.csv").open("a") as file:
                    file.write("c,new,\n")
                return super().read(columns)

        with pytest.raises(DatasetError, match="changed while it was read"):
            keep(tmp_path / "p.csv", tmp_path / "run", rules=Appends(), max_samples=9)
        assert list((tmp_path / "run").iterdir()) == []

    def test_what_a_killed_start_has_left_is_removed_before_writing(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".dataset-0.jsonl.1.tmp").write_text("half")
        keep(tmp_path / "p.csv", tmp_path / "run")
        assert not list((tmp_path / "run").glob(".*.tmp"))

    def test_of_two_starts_one_writes(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")

        class Starts(RowRules, frozen=True):
            def read(self, columns: Any) -> Any:
                with pytest.raises(RunLocked, match="another process is starting this run"):
                    keep(tmp_path / "p.csv", tmp_path / "run")
                for file in find_stale_files(tmp_path / "run"):
                    file.unlink()
                return super().read(columns)

        with pytest.raises(RunLocked, match="another process is starting this run"):
            keep(tmp_path / "p.csv", tmp_path / "run", rules=Starts(), max_samples=9)

    def test_a_dry_run_that_fails_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "p.csv").write_text("prompt\na,b\n")
        with pytest.raises(DatasetError):
            keep(tmp_path / "p.csv", tmp_path / "run", writes=False)
        assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]

    def test_a_plain_file_is_read_where_it_is(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "p.jsonl")
        kept = keep(tmp_path / "p.jsonl", tmp_path / "run")
        assert (kept.path, kept.source) == (tmp_path / "p.jsonl", None)
        assert not (tmp_path / "run").exists()

    def test_a_source_is_written_once(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        first = keep(tmp_path / "p.csv", tmp_path)
        written = first.path.stat().st_ino
        again = keep(tmp_path / "p.csv", tmp_path)
        assert (again.path, again.path.stat().st_ino) == (first.path, written)
        assert [json.loads(line) for line in first.path.read_text().split("\n")[:-1]] == ROWS
        assert first.source is not None
        (file,) = first.source["files"]
        assert (file["path"], file["bytes"]) == ("p.csv", (tmp_path / "p.csv").stat().st_size)

    def test_a_source_that_changed_is_written_beside_the_old_one(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        before = keep(tmp_path / "p.csv", tmp_path).path
        with (tmp_path / "p.csv").open("a") as file:
            file.write("c,new,\n")
        after = keep(tmp_path / "p.csv", tmp_path).path
        assert before.exists()
        assert len(after.read_text().split("\n")) == len(before.read_text().split("\n")) + 1

    def test_a_damaged_file_is_written_again(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        path = keep(tmp_path / "p.csv", tmp_path).path
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"Bern", b"Born"))
        assert keep(tmp_path / "p.csv", tmp_path).path.read_bytes() == whole

    def test_a_dry_run_leaves_nothing(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "p.csv")
        kept = keep(tmp_path / "p.csv", tmp_path / "run", writes=False)
        place = kept.path
        assert place.read_text().count("\n") == len(ROWS)
        del kept
        assert not place.exists()
        assert not (tmp_path / "run").exists()

    def test_no_more_is_read_than_the_samples_need(self, tmp_path: Path) -> None:
        rows = [{"prompt": ""}, *({"prompt": str(n)} for n in range(9))]
        (tmp_path / "p.json").write_text(json.dumps(rows))
        some = keep(tmp_path / "p.json", tmp_path, max_samples=3).path
        assert some.read_text().count("\n") == 4  # one of them is unusable
        assert keep(tmp_path / "p.json", tmp_path, max_samples=3).path == some
        assert keep(tmp_path / "p.json", tmp_path, max_samples=5).path != some
        whole = keep(tmp_path / "p.json", tmp_path).path
        assert whole.read_text().count("\n") == len(rows)
        assert keep(tmp_path / "p.json", tmp_path, max_samples=3).path in (some, whole)

    def test_columns_are_renamed(self, tmp_path: Path) -> None:
        rows = [{"problem": "x", "answer": 123456789012345678901, "prompt": "old", "k": 1}, 7]
        text = "".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n"
        (tmp_path / "p.jsonl").write_text(text)
        columns = {"prompt": "problem", "expected": "answer"}
        path = keep(tmp_path / "p.jsonl", tmp_path, columns=columns).path
        first, *rest = path.read_text().split("\n")
        expected = {"prompt": "x", "expected": 123456789012345678901, "k": 1}
        assert json.loads(first) == expected
        assert rest == ["7", "not JSON", ""]

    def test_a_column_that_no_row_has_is_named(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "p.jsonl")
        with pytest.raises(DatasetError, match=r"has no column 'promt'; did you mean 'prompt'"):
            keep(tmp_path / "p.jsonl", tmp_path, columns={"question": "promt"})


class TestRuns:
    """Whole runs of a source."""

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        write_csv(tmp_path / "p.csv")
        (tmp_path / "s.json").write_text('[{"content": "done"}]')
        script = {"enabled_toolsets": "none", "script_file": "s.json"}
        return {**SCRIPTED, **script, "dataset_file": "p.csv"}

    def test_a_run_that_was_moved_is_read_where_it_is(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        assert run(tmp_path, **options).returncode == 0
        (tmp_path / "trajectories").rename(tmp_path / "moved")
        for command in ("verify", "report"):
            ended = run(tmp_path, command, "moved/r")
            assert ended.returncode == 0, ended.stdout + ended.stderr

    def test_a_first_start_with_fresh_moves_nothing_aside(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        ended = run(tmp_path, "--fresh", **options)
        assert ended.returncode == 0, ended.stderr
        assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == [
            "r",
            "r.jsonl",
        ]

    def test_errors_name_the_source(self, tmp_path: Path, options: dict[str, Any]) -> None:
        (tmp_path / "p.csv").write_text("prompt,id\n,x\nfine,y\n")
        ended = run(tmp_path, "--dry_run", **options)
        assert ended.returncode == 0, ended.stderr
        assert "p.csv: row 1: discarded: no `prompt` field (fields: id)" in ended.stderr
        (tmp_path / "p.csv").write_text("task,id\nfine,y\n")
        ended = run(tmp_path, "--dry_run", **options)
        assert ended.returncode == 2
        assert "error: p.csv: no usable row among 1" in ended.stderr


def revisions(run_dir: Path) -> list[str]:
    """Of the datasets in a run directory."""
    listed = sorted(run_dir.glob("dataset-*.json"))
    assert [file.stem for file in listed] == sorted(f.stem for f in run_dir.glob("dataset-*.jsonl"))
    return [json.loads(file.read_text())["revision"] for file in listed]


class TestTheHub:
    @pytest.fixture
    def files(self, tmp_path: Path) -> dict[str, bytes]:
        pytest.importorskip("datasets")
        write_parquet(tmp_path / "p.parquet")
        return {"data/train-0.parquet": (tmp_path / "p.parquet").read_bytes()}

    @pytest.mark.slow
    def test_a_run_needs_the_hub_once(self, tmp_path: Path, files: dict[str, bytes]) -> None:
        options = {**SCRIPTED, "enabled_toolsets": "none", "script_file": "s.json"}
        (tmp_path / "s.json").write_text('[{"content": "done"}]')
        home = {"HF_HOME": str(tmp_path / "home")}
        with fake_hub(files) as (environment, paths):
            env = {**home, **environment}
            hub = {**options, "dataset_file": f"hf:{REPOSITORY}:train"}
            first = run(tmp_path, env=env, **hub)
            assert paths
        assert first.returncode == 0, first.stderr
        result = (tmp_path / "trajectories" / "r.jsonl").read_bytes()
        again = run(tmp_path, env=env, **hub)
        assert again.returncode == 0, again.stderr
        (kept,) = (tmp_path / "trajectories" / "r").glob("dataset-*.json")
        assert json.loads(kept.read_text())["revision"] == REVISION
        write_jsonl(tmp_path / "p.jsonl")
        twin = run(tmp_path, **{**options, "run_name": "twin"})
        assert twin.returncode == 0, twin.stderr
        assert (tmp_path / "trajectories" / "twin.jsonl").read_bytes() == result

    @pytest.mark.slow
    def test_fresh_takes_the_revision_of_the_hub_now(
        self, tmp_path: Path, files: dict[str, bytes]
    ) -> None:
        """The run that is moved aside keeps its own."""
        (tmp_path / "s.json").write_text('[{"content": "done"}]')
        hub = {**SCRIPTED, "enabled_toolsets": "none", "script_file": "s.json"}
        hub["dataset_file"] = f"hf:{REPOSITORY}:train"
        home = {"HF_HOME": str(tmp_path / "home")}
        run_dir = tmp_path / "trajectories" / "r"

        def start(environment: dict[str, str], *flags: str) -> list[str]:
            ended = run(tmp_path, *flags, env={**home, **environment}, **hub)
            assert ended.returncode == 0, ended.stderr
            return revisions(run_dir)

        with fake_hub(files) as (environment, _):
            assert start(environment) == [REVISION]
        newer = "b" * 40
        pq.write_table(pa.table({"prompt": ["new"]}), tmp_path / "new.parquet")
        content = {"data/train-0.parquet": (tmp_path / "new.parquet").read_bytes()}
        with fake_hub(content, newer) as (environment, _):
            assert start(environment) == [REVISION]
            assert start(environment, "--dry_run", "--fresh") == [REVISION]
            assert start(environment, "--fresh") == [newer]
            assert (run_dir.parent / "r.jsonl").read_bytes().count(b"\n") == 1
            (aside,) = (p for p in run_dir.parent.iterdir() if p.is_dir() and p != run_dir)
            assert revisions(aside) == [REVISION]
        assert start(environment) == [newer], "without the hub"

    @pytest.mark.slow
    def test_what_is_not_there_is_said(self, tmp_path: Path, files: dict[str, bytes]) -> None:
        with fake_hub(files) as (environment, _):
            env = {**environment, "HF_HOME": str(tmp_path / "home")}
            unknown = run(tmp_path, "look", "hf:org/other", env=env)
            split = run(tmp_path, "look", f"hf:{REPOSITORY}:test", env=env)
        gone = run(tmp_path, "look", f"hf:{REPOSITORY}", env=env)
        assert (unknown.returncode, split.returncode, gone.returncode) == (2, 2, 4)
        assert "the hub refuses it" in unknown.stderr
        assert "Available splits: ['train']" in split.stderr
        assert "cannot reach the hub" in gone.stderr
        assert "Traceback" not in unknown.stderr + split.stderr + gone.stderr

    @pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:a/b:train[:10]", "hf:a/b@", "hf:../b:"])
    def test_a_name_that_is_none_is_refused(self, name: str) -> None:
        with pytest.raises(DatasetError, match=r"hf:ORG/NAME|name of a split"):
            parse_source(Path(name))


@pytest.mark.slow
def test_a_killed_run_of_each_source_resumes_to_the_same_training_file(tmp_path: Path) -> None:
    with FakeEndpoint(turns=3, latency_s=0.2, **WRITE_A_NOTE) as endpoint:
        options: dict[str, Any] = {
            "model": "m",
            "base_url": endpoint.openai_url,
            "key_env": "none",
            "run_name": "r",
            "enabled_toolsets": "file",
            "num_workers": 1,
        }
        results = {}
        for name, write in SOURCES.items():
            folder = tmp_path / f"of {name}"
            folder.mkdir()
            write(folder / name)
            before = endpoint.journal()["replies"]
            with started(folder, **options, dataset_file=name) as process:
                wait_until(lambda count=before: endpoint.journal()["replies"] > count)
                os.killpg(process.pid, signal.SIGKILL)
            ended = run(folder, **options, dataset_file=name)
            assert ended.returncode == 0, ended.stderr
            verified = run(folder, "verify", "r")
            assert verified.returncode == 0, verified.stdout + verified.stderr
            results[name] = (folder / "trajectories" / "r.jsonl").read_bytes()
    assert results["p.jsonl"].count(b"\n") == len(ROWS)
    assert {name for name, result in results.items() if result != results["p.jsonl"]} == set()


@pytest.mark.slow
def test_a_run_of_a_csv_file_is_started_over_merged_and_forked(tmp_path: Path) -> None:
    write_csv(tmp_path / "p.csv")
    call = {"name": "list_files", "arguments": {}}
    script = [{"tool_calls": [call]}, {"content": "done"}]
    (tmp_path / "s.json").write_text(json.dumps(script))
    options = {**SCRIPTED, "script_file": "s.json", "dataset_file": "p.csv"}
    for fresh in ((), ("--fresh",)):
        ended = run(tmp_path, *fresh, **options)
        assert ended.returncode == 0, ended.stderr
    for shard in ("0/2", "1/2"):
        one = {**options, "run_name": f"s{shard[0]}", "shard": shard}
        assert run(tmp_path, **one).returncode in (0, 2)
    merged = run(tmp_path, "merge", "s0", "s1", into="whole")
    assert merged.returncode == 0, merged.stderr
    trajectories = tmp_path / "trajectories"
    assert (trajectories / "whole.jsonl").read_bytes() == (trajectories / "r.jsonl").read_bytes()
    resumed = run(tmp_path, **{**options, "run_name": "whole"})
    assert resumed.returncode == 0, resumed.stderr
    forked = run(tmp_path, "fork", "r", at_turn=1, n=1, run_name="f")
    assert forked.returncode == 0, forked.stderr


def test_look_shows_columns_and_proposes_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("problem,answer\nWhat is 2 + 2?,4\n")
    shown = CliRunner().invoke(main, ["look", str(tmp_path / "p.csv")])
    assert shown.exit_code == 0, shown.output
    assert "0 of 1 row can be used" in shown.output
    proposed = f"--dataset_file={tmp_path / 'p.csv'} --columns=prompt=problem,expected=answer\n"
    assert proposed in shown.output
    assert "Is `answer` the right answer? As the column `expected`, answers are compared" in (
        shown.output
    )
    renamed = CliRunner().invoke(
        main, ["look", str(tmp_path / "p.csv"), "--columns=prompt=problem,expected=answer"]
    )
    assert "1 of 1 row can be used" in renamed.output
    assert '{"prompt":"What is 2 + 2?","expected":"4"}' in renamed.output
    assert "p.csv --columns=prompt=problem,expected=answer\n" in renamed.output


@pytest.mark.parametrize(
    ("row", "option"),
    [
        ({"Prompt": "a"}, "prompt=Prompt"),
        ({" prompt ": "a"}, '{"prompt":" prompt "}'),
        ({"pro,mpt": "a", "PROMPT": "a"}, "prompt=PROMPT"),
        ({"Question": "a", "Answer": 4}, "prompt=Question,expected=Answer"),
        ({" question": "a", "target ": "b"}, '{"prompt":" question","expected":"target "}'),
        ({"Messages": [{"role": "user", "content": "a"}]}, "messages=Messages"),
        ({"prompt": "a", "answer": "b", "expected": None}, "expected=answer"),
        ({"prompt": "a", "answer": " ", "ground_truth": "b"}, "expected=ground_truth"),
        ({"prompt": "a", "answer": ["b"]}, None),
        ({"prompt": "a", "answer": "b", "target": "c"}, None),
        ({"messages": [{"role": "user", "content": "a"}], "task": "b"}, None),
    ],
)
def test_look_proposes_columns_whose_names_are_nearly_right(
    tmp_path: Path, row: dict[str, Any], option: str | None
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    said = run(tmp_path, "look", "p.jsonl").stdout
    flag = "" if option is None else f" --columns={shlex.quote(option)}"
    assert said.endswith(f"To run it: --dataset_file=p.jsonl{flag}\n")
    if option is not None:
        renamed = run(tmp_path, "look", "p.jsonl", f"--columns={option}").stdout
        assert "p.jsonl: 1 of 1 row can be used" in renamed
        assert "Is `" not in renamed


def test_a_prompt_whose_name_is_nearly_right_is_proposed_by_the_start(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(" prompt ,id\na,1\n")
    refused = run(tmp_path, "--dry_run", **{**SCRIPTED, "dataset_file": "p.csv"})
    assert refused.returncode == 2
    assert 'to take ` prompt ` give --columns \'{"prompt":" prompt "}\'' in refused.stderr


def test_look_says_what_a_column_would_be_under_its_right_name(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", " ID": 1, "Note": 2}) + "\n")
    said = run(tmp_path, "look", "p.jsonl").stdout
    assert "; kept with the record; named `id`, it would be: the id of the row\n" in said
    assert "Note    a number; kept with the record\n" in said


def test_look_names_rows_that_a_run_refuses(tmp_path: Path) -> None:
    deep = "[" * 300 + "]" * 300
    lines = [f'{{"prompt": "x", "deep": {deep}}}', "[1]", "{", '{"prompt": "y"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    shown = CliRunner().invoke(main, ["look", str(tmp_path / "p.jsonl")])
    assert "p.jsonl: 1 of 4 rows can be used" in shown.output
    assert "row 1: nested deeper than 100 levels" in shown.output
    assert "row 2: the line is an array; it must be a JSON object" in shown.output
    assert "row 3: not a JSON object: this looks like one over several lines" in shown.output


def test_look_names_rows_where_an_object_has_a_key_twice(tmp_path: Path) -> None:
    """As in all JSON readers the last value counts, at any depth."""
    rows = [
        '{"prompt": "x", "metadata": {"a": 1, "b": {"a": 1}}}',
        '{"prompt": "lost", "prompt": "y"}',
        '{"prompt": [{"role": "user", "content": "lost", "\\u0063ontent": "z"}]}',
        '{"prompt": "x", "m": [[1], [{"a": {"b": 1, "c": {}, "b": {"d": 1}}}]]}',
        '{"prompt": "x", "m": {"m": {"a": 1, "a": 2}}, "m": {}}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    shown = CliRunner().invoke(main, ["look", str(tmp_path / "p.jsonl"), "--rows=3"])
    assert "p.jsonl: 5 of 5 rows can be used" in shown.output
    assert (
        "4 rows with a key twice in one object, whose last value counts: row 2, `prompt`; "
        "row 3, `prompt[0].content`; row 4, `m[1][0].a.b`; row 5, `m`\n"
    ) in shown.output
    assert 'row 2: {"prompt":"y"}' in shown.output
    assert '"content":"z"' in shown.output


@pytest.mark.parametrize(
    ("row", "proposed", "asked"),
    [
        ({"input": "Two?", "target": "2"}, "input", []),
        ({"input": [{"role": "user", "content": "Two?"}], "target": "2"}, "input", []),
        (
            {"instruction": "Translate.", "input": "cat", "output": "Katze"},
            "instruction",
            ["input"],
        ),
        ({"instruction": "Sing.", "input": "", "output": "La"}, "instruction", []),
        (
            {"question": "Q", "choices": ["a", "b"], "context": "C"},
            "question",
            ["choices", "context"],
        ),
        ({"prompt": "Q", "context": "C"}, None, ["context"]),
        ({"numbers": [1]}, None, []),
    ],
)
def test_look_proposes_columns_and_asks_about_further_ones(
    tmp_path: Path, row: dict[str, Any], proposed: str | None, asked: list[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    said = run(tmp_path, "look", "p.jsonl").stdout
    assert (f"--columns=prompt={proposed}" in said) == (proposed is not None)
    assert re.findall(r"Does `(\w+)` belong to the prompt\?", said) == asked
    for name in asked:
        assert f'prompt: "{{{{{proposed or "prompt"}}}}}\\n\\n{{{{{name}}}}}"' in said
    if proposed:
        done = run(tmp_path, "look", "p.jsonl", "--columns", f"prompt={proposed}").stdout
        assert "p.jsonl: 1 of 1 row can be used" in done


def test_look_says_that_tools_and_models_of_rows_have_no_part(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}], "model": "m"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    said = run(tmp_path, "look", "p.jsonl").stdout
    assert (
        "  tools     an array; kept with the record; the model is offered --tools instead" in said
    )
    assert "  model     text; one of --models, without which it means nothing" in said


def test_a_refusal_and_a_bad_row_name_the_file_of_the_user_and_not_our_copy(tmp_path: Path) -> None:
    source = tmp_path / "e.csv"
    source.write_text("prompt,note\na,1\nb,2\n,3\n")
    (tmp_path / "turns.yaml").write_text("- content: y\n")
    options = {**SCRIPTED, "dataset_file": "e.csv", "script_file": "turns.yaml"}
    assert run(tmp_path, **options).returncode == 0
    [failure] = lines(tmp_path / "trajectories" / "r" / "failures.jsonl")
    assert (failure["kind"], failure["file"], failure["line"]) == ("bad_row", "e.csv", 3)
    source.write_text("prompt,note\na,1\nb,3\n,3\n")
    for dry in (("--dry_run",), ()):
        refused = run(tmp_path, *dry, **options)
        assert refused.returncode == 2
        assert "trajectories/r: e.csv: 1 of the 2 finished tasks of this run are" in refused.stderr
        assert "dataset-" not in refused.stderr
