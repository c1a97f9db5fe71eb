"""`score --teacher`: each segment of a run gets its figures once, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import time
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.formats.rl import sampled_segments
from batch_trajectories.records.reader import stored_records
from batch_trajectories.teacher.servers import SERVERS
from tests.export.test_export_rl import FIRST, SECOND, play_record, with_discarded, with_subagents
from tests.fakes.fake_teacher import (
    NAME,
    VOCABULARY,
    Kind,
    Teacher,
    as_sglang,
    as_vllm,
    logprob_of,
    most_likely,
    teaching,
)
from tests.helpers.answering import JSON
from tests.helpers.exporting import call_record, export_to_dataset, make_run
from tests.helpers.running import PATIENCE_S, command, lines, run, wait_until

KINDS: tuple[Kind, ...] = ("vllm", "sglang")
PRICES = json.dumps({NAME: {"input": 1000, "output": 0}})
"""A thousandth of a dollar per token that is read."""


def conversation(seed: int) -> JSON:
    """A record of three turns with token ids; its second prompt has tokens of a result."""
    rng = random.Random(seed)
    ids: list[int] = []
    turns = []
    for _ in range(3):
        ids = [*ids, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5)))]
        reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        turns.append((ids, reply))
        ids = ids + reply
    return play_record(*turns)


def make(folder: Path, count: int) -> Source:
    return make_run(folder, *(conversation(seed) for seed in range(count)))


def score(folder: Path, teacher: Teacher, *flags: str, kind: Kind = "vllm", **more: Any) -> Any:
    return run(folder, *arguments(*flags), **options(teacher, kind, **more))


def arguments(*flags: str) -> tuple[str, ...]:
    same = () if any("tokenizer" in flag for flag in flags) else ("--same_tokenizer",)
    return ("score", "r", *same, *flags)


def options(teacher: Teacher, kind: Kind, **more: Any) -> dict[str, Any]:
    return {
        "teacher": f"{kind}:{NAME}",
        "base_url": f"{teacher.url}/v1",
        "call_attempts": 1,
        "output_dir": ".",
        **more,
    }


def figures(source: Source) -> list[JSON]:
    path = source.run_dir / "teacher.jsonl"
    return lines(path) if path.exists() else []


def floats(packed: str) -> list[float]:
    content = b64decode(packed)
    return list(struct.unpack(f"<{len(content) // 4}f", content))


def ints(packed: str) -> list[int]:
    content = b64decode(packed)
    return list(struct.unpack(f"<{len(content) // 4}I", content))


def teacher_logprobs(row: JSON) -> list[float]:
    """What the teacher says of the learnt tokens of a row."""
    ids = row["prompt_ids"] + row["response_ids"]
    first = len(row["prompt_ids"])
    learnt = [first + n for n, loss in enumerate(row["loss_mask"]) if loss]
    return [logprob_of(ids[:place], ids[place]) for place in learnt]


def rl_rows(source: Source, **recipe: Any) -> tuple[list[JSON], JSON]:
    directory, manifest = export_to_dataset(source, formats="rl", teacher=NAME, **recipe)
    return lines(directory / "rl" / "train.jsonl"), manifest["formats"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_what_the_teacher_says_of_their_learnt_tokens(tmp_path: Path, kind: Kind) -> None:
    source = make(tmp_path, 6)
    records = (source.run_dir / "records.jsonl").read_bytes()
    with teaching() as teacher:
        done = score(tmp_path, teacher, kind=kind)
        assert done.returncode == 0, done.stderr
        assert len(teacher.requests) == 6, "one request gives the figures of all turns"
        assert "6 segments with " in done.stdout
        again = score(tmp_path, teacher, kind=kind)
        assert "0 segments with 0 sampled tokens; 6 had figures before, 0 failed" in again.stdout
        assert len(teacher.requests) == 6
    found, part = rl_rows(source)
    assert len(found) == 6
    for row in found:
        assert floats(row["teacher_logprobs"]) == teacher_logprobs(row)
        assert "teacher_top_ids" not in row
    assert part["rows_without_teacher"] == 0
    assert (source.run_dir / "records.jsonl").read_bytes() == records
    assert all(line["usage"]["input_tokens"] for line in figures(source))
    assert {line["server"] for line in figures(source)} == {kind}


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_likely_tokens_come_too_and_fewer_of_them_cost_nothing(
    tmp_path: Path, kind: Kind
) -> None:
    source = make(tmp_path, 2)
    with teaching() as teacher:
        assert score(tmp_path, teacher, kind=kind, top_logprobs=3).returncode == 0
        assert score(tmp_path, teacher, kind=kind, top_logprobs=2).returncode == 0
        assert score(tmp_path, teacher, kind=kind).returncode == 0
        assert len(teacher.requests) == 2, "the first two of three are known"
        assert score(tmp_path, teacher, kind=kind, top_logprobs=5).returncode == 0
        assert len(teacher.requests) == 4
    for top in (1, 2, 5):
        for row in rl_rows(source, teacher_top=top)[0]:
            assert floats(row["teacher_logprobs"]) == teacher_logprobs(row)
            ids, first = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            places = [first + n for n, loss in enumerate(row["loss_mask"]) if loss]
            best = [one for place in places for one in most_likely(ids[:place], top)]
            assert ints(row["teacher_top_ids"]) == [id for id, _ in best]
            assert floats(row["teacher_top_logprobs"]) == [value for _, value in best]


def test_figures_skip_masked_turns_and_parquet_has_arrays(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    records = [conversation(seed) for seed in range(3)]
    records[1]["messages"][2] |= {"is_error": True, "details": {"failure": "exception"}}
    source = make_run(tmp_path, *records)
    with teaching() as teacher:
        assert score(tmp_path, teacher, top_logprobs=2).returncode == 0
    unmasked = [len(floats(row["teacher_logprobs"])) for row in rl_rows(source)[0]]
    directory, _ = export_to_dataset(
        source, formats="rl,rl_parquet", teacher=NAME, teacher_top=2, mask={"failed_call": True}
    )
    found = lines(directory / "rl" / "train.jsonl")
    table = pq.read_table(directory / "rl_parquet" / "train.parquet")
    types = {name: str(table.schema.field(name).type) for name in table.schema.names}
    assert types["teacher_logprobs"] == types["logprobs"] == "list<element: float>"
    assert types["teacher_top_ids"] == types["response_ids"] == "list<element: int32>"
    for row, other in zip(found, table.to_pylist(), strict=True):
        assert floats(row["teacher_logprobs"]) == teacher_logprobs(row) == other["teacher_logprobs"]
        assert ints(row["teacher_top_ids"]) == other["teacher_top_ids"]
        assert floats(row["teacher_top_logprobs"]) == other["teacher_top_logprobs"]
        for name in ("id", "prompt_ids", "response_ids", "loss_mask", "logprobs", "masked"):
            assert row[name] == other[name], name
    masked = [len(floats(row["teacher_logprobs"])) for row in found]
    assert [a - b > 0 for a, b in zip(unmasked, masked, strict=True)] == [False, True, False]


def test_equal_segments_share_their_figures_and_a_row_without_says_null(tmp_path: Path) -> None:
    source = make_run(tmp_path, conversation(1), conversation(1), conversation(2))
    with teaching() as teacher:
        done = score(tmp_path, teacher)
        assert done.returncode == 0, done.stderr
        assert len(teacher.requests) == len(figures(source)) == 2
    path = source.run_dir / "teacher.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    found, part = rl_rows(source)
    assert [row["teacher_logprobs"] is None for row in found].count(True) in (1, 2)
    assert part["rows_without_teacher"] == [r["teacher_logprobs"] for r in found].count(None)


def test_equal_ids_of_which_others_were_sampled_are_other_segments(tmp_path: Path) -> None:
    source = make_run(tmp_path, play_record(([1, 2], [3, 4])), play_record(([1, 2, 3], [4])))
    with teaching() as teacher:
        assert score(tmp_path, teacher).returncode == 0
        assert len(teacher.requests) == 2
    found, _ = rl_rows(source)
    assert [floats(row["teacher_logprobs"]) for row in found] == [*map(teacher_logprobs, found)]


def test_every_segment_of_a_split_conversation_is_scored(tmp_path: Path) -> None:
    source = make_run(tmp_path, play_record(FIRST, ([1, 9, 5], [6])))
    with teaching() as teacher:
        assert score(tmp_path, teacher, kind="sglang").returncode == 0
        assert {request["logprob_start_len"] for request in teacher.requests} == {1, 2}
    found, _ = rl_rows(source)
    assert [row["segments"] for row in found] == [2, 2]
    assert [floats(row["teacher_logprobs"]) for row in found] == [*map(teacher_logprobs, found)]


def test_subagents_and_discarded_replies_are_scored_if_asked_for(tmp_path: Path) -> None:
    source = make_run(tmp_path, with_subagents(), with_discarded())
    both = {"subagents": True, "discarded": True}
    with teaching() as teacher:
        assert score(tmp_path, teacher).returncode == 0
        found, part = rl_rows(source, **both)
        scored = [row for row in found if row["teacher_logprobs"] is not None]
        assert {row["thread"] for row in scored} == {"main"}
        assert part["rows_without_teacher"] == len(found) - len(scored) == 6
        assert score(tmp_path, teacher, "--subagents", "--discarded").returncode == 0
    found, part = rl_rows(source, **both)
    assert part["rows_without_teacher"] == 0
    assert [floats(row["teacher_logprobs"]) for row in found] == [*map(teacher_logprobs, found)]


def test_a_first_token_without_a_context_has_no_figure(tmp_path: Path) -> None:
    make_run(tmp_path, play_record(([], [1, 2])), play_record(FIRST, SECOND))
    with teaching() as teacher:
        done = score(tmp_path, teacher)
        assert (done.returncode, len(teacher.requests)) == (1, 1)
    assert "r: t0, turn 1: no_context: its first token has no token before it" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_would_be_too_large_is_not_paid_for(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path, 12)
    with teaching() as teacher:
        sizes = []
        for record in stored_records(source.run_dir):
            (segment,) = sampled_segments(record)
            reply = (as_vllm if kind == "vllm" else as_sglang)(
                dict(SERVERS[kind].body(NAME, segment, 3))
            )
            whole = len(json.dumps(reply, separators=(",", ":")))
            sizes.append(SERVERS[kind].least_reply_bytes(segment, 3))
            assert whole / 3 < sizes[-1] < whole, "it is a lower bound, and near"
        limit = sorted(sizes)[6]
        monkeypatch.setattr("batch_trajectories.teacher.score.MAX_REPLY_BYTES", limit)
        done = score(tmp_path, teacher, kind=kind, top_logprobs=3)
        fitting = sum(size <= limit for size in sizes)
        assert (done.returncode, len(teacher.requests)) == (1, fitting)
    assert "too_large: the reply about" in done.stderr


def test_a_dataset_is_made_again_and_a_merged_run_keeps_the_figures(tmp_path: Path) -> None:
    make(tmp_path, 3)
    with teaching() as teacher:
        assert score(tmp_path, teacher).returncode == 0
    more: dict[str, Any] = {"format": "rl,rl_parquet", "teacher": f"vllm:{NAME}", "output_dir": "."}
    done = run(tmp_path, "export", "r", output="data", **more)
    assert done.returncode == 0, done.stderr
    checked = run(tmp_path, "export", "r", "--check", output="data", output_dir=".")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    merged = run(tmp_path, "merge", "r", output_dir=".", into="m")
    assert merged.returncode == 0, merged.stderr
    done = run(tmp_path, "export", "m", output="again", **more)
    assert done.returncode == 0, done.stderr
    name = "rl/train.jsonl"
    assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    found = run(tmp_path, "verify", "r", "--read_data", output_dir=".")
    assert "teacher.jsonl" not in found.stdout + found.stderr


def test_no_more_requests_are_in_flight_than_allowed(tmp_path: Path) -> None:
    make(tmp_path, 12)
    with teaching() as teacher:
        teacher.latency_s = 0.05
        assert score(tmp_path, teacher, max_in_flight=3).returncode == 0
        assert teacher.most_at_once == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "a run records token ids, and not the tokenizer that made them"),
        (("--tokenizer=a",), "Give --tokenizer DIR and --teacher_tokenizer DIR"),
        (
            ("--tokenizer=a", "--teacher_tokenizer=b"),
            "1 ids stand for other tokens than in a. The first is id 2: '<think>', not no token",
        ),
        (("--tokenizer=a", "--teacher_tokenizer=none"), "cannot read none"),
        (("--tokenizer=a", "--teacher_tokenizer=r/run.json"), "is no tokenizer.json"),
        (("--same_tokenizer", "--tokenizer=a"), "leave it out, or leave both of them out"),
    ],
)
def test_tokenizers_must_be_the_same_or_be_stated_to_be(
    tmp_path: Path, flags: Sequence[str], message: str
) -> None:
    source = make(tmp_path, 1)
    write_tokenizers(tmp_path)
    with teaching() as teacher:
        done = run(tmp_path, "score", "r", *flags, **options(teacher, "vllm"))
        assert (done.returncode, teacher.requests) == (2, []), done.stderr
    assert message in " ".join(done.stderr.split())
    assert not figures(source)


def test_a_common_tokenizer_is_kept_by_its_digest(tmp_path: Path) -> None:
    source = make(tmp_path, 1)
    write_tokenizers(tmp_path)
    flags = ("--tokenizer=a", "--teacher_tokenizer=a2/tokenizer.json")
    with teaching() as teacher:
        assert score(tmp_path, teacher, *flags).returncode == 0
        (line,) = figures(source)
        assert len(line["tokenizer"]) == 32
        other = score(tmp_path, teacher, "--tokenizer=b", "--teacher_tokenizer=b")
        assert other.returncode == 2
        assert "for another tokenizer (digest" in other.stderr


def write_tokenizers(folder: Path) -> None:
    vocabulary = {"a": 0, "b": 1}
    think = {"id": 2, "content": "<think>"}
    for name, added in (("a", []), ("a2", []), ("b", [think])):
        (folder / name).mkdir()
        content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added}
        (folder / name / "tokenizer.json").write_text(json.dumps(content))


def test_a_run_without_token_ids_is_refused_with_the_next_command(tmp_path: Path) -> None:
    make_run(tmp_path, call_record(), call_record())
    with teaching() as teacher:
        done = score(tmp_path, teacher)
    assert done.returncode == 2
    assert "no turn has token ids, so there is nothing to score" in done.stderr
    command = f"--dataset_file={tmp_path / 'p.jsonl'} --run_name=NEW_NAME --model=vllm:NAME"
    assert f"{command} --base_url=URL --token_ids" in " ".join(done.stderr.split())


def test_records_without_ids_are_left_out_and_counted(tmp_path: Path) -> None:
    make_run(tmp_path, call_record(), conversation(1))
    with teaching() as teacher:
        done = score(tmp_path, teacher)
        assert len(teacher.requests) == 1
    assert done.returncode == 0
    assert "1  no_token_ids: none of 2 turns has token ids" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": NAME}, f"write vllm:{NAME} or sglang:{NAME}"),
        ({"teacher": f"vllm:{NAME}", "temperature": 1}, "--temperature means nothing without"),
        ({"teacher": f"vllm:{NAME}", "judge": "j"}, "give --reward MODULE:FUNCTION, or --judge"),
        ({"judge": "j", "top_logprobs": 1}, "--same_tokenizer means nothing without --teacher"),
        ({"teacher": f"vllm:{NAME}", "max_teacher_cost_usd": 1}, "is unknown; give --prices"),
    ],
)
def test_options_must_fit(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    make(tmp_path, 1)
    with teaching() as teacher:
        url = {} if "judge" in given else {"base_url": f"{teacher.url}/v1"}
        done = run(tmp_path, *arguments(), output_dir=".", **{**url, **given})
        assert teacher.requests == []
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_server_with_another_model_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with teaching() as teacher:
        teacher.models = ["other", "more"]
        done = score(tmp_path, teacher)
        assert teacher.requests == []
    assert done.returncode == 2
    assert f"serves more, other, and not '{NAME}'" in done.stderr


def test_a_reply_of_another_model_stops_and_is_kept_only_as_paid(tmp_path: Path) -> None:
    source = make(tmp_path, 5)
    with teaching(lambda _, reply: (200, {**reply, "model": "other"})) as teacher:
        done = score(tmp_path, teacher, max_in_flight=1)
        assert (done.returncode, len(teacher.requests)) == (4, 1)
    assert "by the model 'other', not" in done.stderr
    (line,) = figures(source)
    assert line["error"]
    assert line["logprobs"] is None
    with teaching() as teacher:
        assert score(tmp_path, teacher).returncode == 0
        assert len(teacher.requests) == 5


def test_a_reply_by_another_name_of_the_same_weights_is_taken(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with teaching(lambda _, reply: (200, {**reply, "model": "alias"})) as teacher:
        teacher.models = ["alias", NAME]
        assert score(tmp_path, teacher).returncode == 0


def test_money_and_requests_are_limited(tmp_path: Path) -> None:
    source = make(tmp_path, 8)
    with teaching() as teacher:
        done = score(tmp_path, teacher, max_teacher_requests=3, max_in_flight=2)
        assert (done.returncode, len(teacher.requests)) == (3, 3), done.stderr
        assert "--max_teacher_requests=3" in done.stderr
        assert len(figures(source)) == 3, "what was in flight is kept"
        # The worst case of a call has 1,000 tokens for what a server may add.
        dollars: dict[str, Any] = {"prices": PRICES, "max_teacher_cost_usd": 1.06}
        done = score(tmp_path, teacher, max_in_flight=4, **dollars)
        assert done.returncode == 3
        assert "--max_teacher_cost_usd=1.06" in done.stderr
        spent = sum(line["cost_usd"] or 0 for line in figures(source))
        assert 0 < spent <= 1.06
        sent = len(teacher.requests)
        assert score(tmp_path, teacher, **dollars).returncode == 3
        assert len(teacher.requests) == sent, "the budget is of all commands together"
        assert score(tmp_path, teacher, prices=PRICES).returncode == 0
        assert len(figures(source)) == len(teacher.requests) == 8
    assert len({line["segment"] for line in figures(source)}) == 8


class TestFaults:
    @pytest.mark.parametrize(
        "status", [429, *(pytest.param(code, marks=pytest.mark.slow) for code in (500, 503))]
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_the_server_are_retried(self, tmp_path: Path, status: int, kind: Kind) -> None:
        source = make(tmp_path, 4)
        refused: list[JSON] = []

        def change(request: JSON, _: JSON) -> tuple[int, Any] | None:
            if request in refused:
                return None
            refused.append(request)
            return status, {"error": {"message": "not now", "type": "x", "code": status}}

        with teaching(change) as teacher:
            done = score(tmp_path, teacher, kind=kind, call_attempts=4)
            assert done.returncode == 0, done.stderr
            assert len(teacher.answered) == 4
        assert len(figures(source)) == 4

    @pytest.mark.parametrize("kind", KINDS)
    def test_that_cut_replies_are_retried(self, tmp_path: Path, kind: Kind) -> None:
        source = make(tmp_path, 2)
        cut: list[JSON] = []

        def change(request: JSON, reply: JSON) -> tuple[int, Any] | None:
            if request in cut:
                return None
            cut.append(request)
            return 200, json.dumps(reply).encode()[: -40 * len(cut)]

        with teaching(change) as teacher:
            done = score(tmp_path, teacher, kind=kind, call_attempts=4)
        assert done.returncode == 0, done.stderr
        assert len(figures(source)) == 2
        for row in rl_rows(source)[0]:
            assert floats(row["teacher_logprobs"]) == teacher_logprobs(row)

    @pytest.mark.parametrize(
        ("kind", "field", "edit", "message"),
        [
            ("vllm", "prompt_logprobs", lambda e: None, "is missing: this server does not give it"),
            ("vllm", "prompt_logprobs", lambda e: e[:-1], " entries for "),
            ("vllm", "prompt_logprobs", lambda e: [*e, None], " entries for "),
            ("vllm", "prompt_logprobs", lambda e: [None] * len(e), "is None, not an object"),
            ("vllm", "prompt_logprobs", lambda e: [e[0], *e[:-1]], ""),
            (
                "vllm",
                "prompt_logprobs",
                lambda e: [one and {key: {"logprob": None} for key in one} for one in e],
                "has None for a log-probability",
            ),
            (
                "vllm",
                "prompt_logprobs",
                lambda e: [one and {key: {"logprob": 2.5} for key in one} for one in e],
                "has 2.5, and a log-probability is at most 0",
            ),
            ("vllm", "prompt_logprobs", lambda e: [one and {} for one in e], "which was sent"),
            ("sglang", "input_token_logprobs", lambda e: None, "is missing"),
            ("sglang", "input_token_logprobs", lambda e: e[1:], " entries for "),
            (
                "sglang",
                "input_token_logprobs",
                lambda e: [[None, id, text] for _, id, text in e],
                "has None for a log-probability",
            ),
            (
                "sglang",
                "input_token_logprobs",
                lambda e: [[value, id + 1, text] for value, id, text in e],
                " was sent",
            ),
            ("sglang", "input_top_logprobs", lambda e: [None] * len(e), "is None, not a list"),
            ("sglang", "input_top_logprobs", lambda e: [t and t[:1] for t in e], "not 2"),
        ],
    )
    def test_in_figures_are_named_with_run_row_and_field_and_not_retried(
        self, tmp_path: Path, kind: Kind, field: str, edit: Any, message: str
    ) -> None:
        """No figure is taken, the cost is kept, and a server that never fits is asked once."""
        source = make(tmp_path, 4)

        def change(_: JSON, reply: JSON) -> tuple[int, Any]:
            part = reply["choices"][0] if kind == "vllm" else reply["meta_info"]
            return 200, reply | {} if part.update({field: edit(part[field])}) else (reply)

        with teaching(change) as teacher:
            more: dict[str, Any] = {
                "top_logprobs": 2,
                "max_in_flight": 1,
                "call_attempts": 4,
                "prices": PRICES,
            }
            done = score(tmp_path, teacher, kind=kind, **more)
            assert (done.returncode, len(teacher.requests)) == (4, 1), done.stderr
        assert message in done.stderr
        assert (
            f"r: t0, turns 1 to 3: misfit: {'choices[0]' if kind == 'vllm' else 'meta_info'}"
            in (done.stderr)
        )
        assert field in done.stderr
        (line,) = figures(source)
        assert (line["logprobs"], line["error"] is None) == (None, False)
        assert line["cost_usd"] > 0
        with teaching() as teacher:
            assert score(tmp_path, teacher, kind=kind).returncode == 0
            assert len(teacher.requests) == 4

    def test_of_one_segment_leave_the_others(self, tmp_path: Path) -> None:
        """A context that is too long for the teacher is no reason to stop."""
        source = make(tmp_path, 4)
        longest = max(len(line) for line in ids_of(source))
        text = f"This model's maximum context length is {longest - 1} tokens."

        def change(request: JSON, _: JSON) -> tuple[int, Any] | None:
            if len(request["prompt"]) < longest:
                return None
            error = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
            return 400, {"error": error}

        with teaching(change) as teacher:
            done = score(tmp_path, teacher)
        assert done.returncode == 1
        assert "context_exceeded" in done.stdout
        assert 0 < len(figures(source)) < 4

    def test_in_the_file_are_named_and_repaired(self, tmp_path: Path) -> None:
        source = make(tmp_path, 3)
        path = source.run_dir / "teacher.jsonl"
        with teaching() as teacher:
            score(tmp_path, teacher)
            whole = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(whole[0] + whole[1].replace(b'"top"', b'"tip"') + whole[2][:50])
            done = score(tmp_path, teacher)
            assert done.returncode == 2
            assert "teacher.jsonl:2: not a line of figures" in done.stderr
            found = run(tmp_path, "verify", "r", output_dir=".")
            assert "teacher.jsonl" in found.stdout + found.stderr
            path.write_bytes(whole[0] + whole[2][:50])
            assert score(tmp_path, teacher).returncode == 0
            assert len(teacher.requests) == 5
        assert len({line["segment"] for line in figures(source)}) == len(figures(source)) == 3


def ids_of(source: Source) -> list[list[int]]:
    directory, _ = export_to_dataset(source, formats="rl")
    found = lines(directory / "rl" / "train.jsonl")
    return [row["prompt_ids"] + row["response_ids"] for row in found]


def test_rows_with_too_few_of_the_most_likely_tokens_count_as_not_scored(tmp_path: Path) -> None:
    source = make(tmp_path, 3)
    with teaching() as teacher:
        one = score(tmp_path, teacher, top_logprobs=4, max_teacher_requests=1, max_in_flight=1)
        assert one.returncode == 3
        assert score(tmp_path, teacher, top_logprobs=2).returncode == 0
    assert rl_rows(source, teacher_top=2)[1]["rows_without_teacher"] == 0
    found, part = rl_rows(source, teacher_top=3)
    assert part["rows_without_teacher"] == 2
    assert [row["teacher_logprobs"] for row in found].count(None) == 2
    given: dict[str, Any] = {"format": "rl", "teacher": NAME, "output_dir": "."}
    done = run(tmp_path, "export", "r", teacher_top=3, **given)
    assert "2 rows without figures of the teacher: `score --teacher`" in done.stdout
    given["teacher_top"] = 5
    done = run(tmp_path, "export", "r", **given)
    assert done.returncode == 2
    message = f"with the 5 most likely tokens. It has: {NAME}, top 2, {NAME}, top 4."
    assert message in " ".join(done.stderr.split())


def test_ids_of_several_models_need_a_statement(tmp_path: Path) -> None:
    other = conversation(2)
    other["turns"][0]["model"] = "another"
    make_run(tmp_path, conversation(1), other)
    write_tokenizers(tmp_path)
    with teaching() as teacher:
        done = score(tmp_path, teacher, "--tokenizer=a", "--teacher_tokenizer=a2")
        assert (done.returncode, teacher.requests) == (2, [])
        assert "token ids of 2 models: another, m-2026" in done.stderr
        assert score(tmp_path, teacher, "--same_tokenizer").returncode == 0


def test_an_export_without_figures_names_the_next_command(tmp_path: Path) -> None:
    make(tmp_path, 1)
    done = run(tmp_path, "export", "r", format="rl", teacher="vllm:T", output_dir=".")
    assert done.returncode == 2
    assert "score r --teacher=vllm:T --base_url=URL" in " ".join(done.stderr.split())
    done = run(tmp_path, "export", "r", format="openai", teacher="T", output_dir=".")
    assert "only rl has columns for it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_figure_is_paid_for_twice_in_20_kills(tmp_path: Path, kind: Kind) -> None:
    """A figure on disk at a kill is never asked for again; a kill loses only calls in flight."""
    in_flight, kills, count = 4, 20, 300
    source = make(tmp_path, count)
    path = source.run_dir / "teacher.jsonl"
    rng = random.Random(7)
    with teaching() as teacher:
        teacher.latency_s = 0.01
        given = options(teacher, kind, max_in_flight=in_flight)
        for number in range(kills):
            before = len(figures(source))
            known = {line["segment"] for line in figures(source)}
            process = subprocess.Popen(
                command(*arguments(), **given),
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            enough = before + rng.randint(1, count // (kills + 5))
            try:
                wait_until(
                    lambda enough=enough: path.exists() and path.read_bytes().count(b"\n") >= enough
                )
                time.sleep(rng.random() * 0.02)
                assert process.poll() is None, f"kill {number} came too late"
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(PATIENCE_S)
            # Over all kills: the server may count a call after the process that made it.
            assert len(teacher.requests) <= len(figures(source)) + in_flight * (number + 1)
            assert known <= {line["segment"] for line in figures(source)}
        assert run(tmp_path, *arguments(), **given).returncode == 0
        asked = len(teacher.requests)
        assert run(tmp_path, *arguments(), **given).returncode == 0
        assert len(teacher.requests) == asked
    found = [line["segment"] for line in figures(source)]
    assert len(found) == len(set(found)) == count
    assert asked <= count + kills * in_flight
    for row in rl_rows(source)[0]:
        assert floats(row["teacher_logprobs"]) == teacher_logprobs(row)
