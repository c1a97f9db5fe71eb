"""What a run has spent in all, by the count of the endpoint that charged for it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import orjson
import pytest

from agent.messages.message import UNREADABLE
from agent.models.dialects.dialect import DIALECTS, read_reply
from agent.models.errors import ModelError
from batch_trajectories.engine.run_totals import Spent, read_spending, spent_by_judges
from batch_trajectories.records.failures import NO_LIMIT
from batch_trajectories.records.files import add_checksum, set_aside
from tests.agent.models.by_dialect import SAMPLES
from tests.helpers.answering import JSON, answering
from tests.helpers.running import (
    PATIENCE_S,
    kill_session,
    lines,
    run,
    started,
    wait_until,
    write_rows,
)

IN, OUT = 70, 30
PRICE = orjson.dumps({"m": {"input": 1_000_000, "output": 1_000_000}}).decode()
"""A dollar per token, so that sums are exact."""

USAGE = {"prompt_tokens": IN, "completion_tokens": OUT}
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "write_file", "arguments": '{"path": "a", "content": "b"}'},
}


class Charging:
    """An endpoint that plays by the words of the prompt, and counts what it charges for."""

    def __init__(self) -> None:
        self.replies = 0
        self.asked: Counter[tuple[str, int]] = Counter()
        self.is_held, self.let_go = Event(), Event()
        self.is_mended = False

    @property
    def charged(self) -> float:
        return float(self.replies * (IN + OUT))

    def __call__(self, path: str, body: JSON) -> tuple[int, JSON]:
        prompt = next(one["content"] for one in body["messages"] if one["role"] == "user")
        turn = sum(one["role"] == "assistant" for one in body["messages"])
        self.asked[prompt, turn] += 1
        time = self.asked[prompt, turn]
        message: JSON = {"role": "assistant", "content": "Done."}
        choices: list[JSON] = [{"message": message, "finish_reason": "stop"}]
        if prompt in ("fails once", "fails twice", "held") and turn == 0:
            message |= {"content": "", "tool_calls": [CALL]}
            choices[0]["finish_reason"] = "tool_calls"
        elif prompt == "held" and time == 1:
            self.is_held.set()
            self.let_go.wait(PATIENCE_S)
            return 500, {"error": {"message": "whoever asked is gone"}}
        # By a switch and not by a count: the first request of a start that is refused may be sent
        # a second time without the id of its conversation.
        elif (prompt == "fails once" and time == 1) or (
            prompt == "fails twice" and not self.is_mended
        ):
            return 400, {"error": {"message": "no"}}
        elif prompt == "unreadable" and time == 1:
            choices = []
        elif prompt == "blank" and time == 1:
            message["content"] = " "
        self.replies += 1
        return 200, {"model": "m", "choices": choices, "usage": USAGE}


PROMPTS = ("plain", "fails once", "fails twice", "unreadable", "blank", "held", "goes", "damaged")


@pytest.mark.slow
def test_all_that_was_charged_for_is_counted_used_or_not(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    write_rows(tmp_path / "p.jsonl", *rows)
    run_dir = tmp_path / "trajectories" / "r"
    records = run_dir / "records.jsonl"
    endpoint = Charging()
    with answering(endpoint) as (url, _):
        options: dict[str, Any] = {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "file",
            "model": "m",
            "base_url": url,
            "key_env": "none",
            "num_workers": 1,
            "prices": PRICE,
        }

        def spent() -> float:
            shown = run(tmp_path, "status", "r", "--json")
            parsed = orjson.loads(shown.stdout)
            assert parsed["spent_unknown"] == 0
            return float(parsed["spent_usd"])

        # A kill while all but one have ended, and two have failed.
        with started(tmp_path, **options, max_attempts=2) as process:
            endpoint.is_held.wait(PATIENCE_S)
            failures = run_dir / "failures.jsonl"
            wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") == 5)
            wait_until(lambda: failures.exists() and failures.read_bytes().count(b"\n") == 2)
            kill_session(process.pid)
        endpoint.let_go.set()
        assert spent() == endpoint.charged == 1000.0

        # What failed goes on, one of them to a record of its failure.
        run(tmp_path, **options, max_attempts=2)
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
        assert (summary["done"], summary["failed"]) == (7, 1)
        assert summary["cost_usd"] == summary["spent_usd"] == endpoint.charged
        assert spent() == endpoint.charged

        # That record is replaced by a better one.
        endpoint.is_mended = True
        run(tmp_path, **options, max_attempts=3)
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
        assert (summary["done"], summary["failed"]) == (8, 0)
        assert summary["spent_usd"] == endpoint.charged
        assert summary["cost_usd"] == endpoint.charged - 100

        # A record is damaged, another's row leaves the dataset, and the first is made anew.
        number = [line["prompt_id"] for line in lines(records)].index("r7")
        content = records.read_bytes().splitlines(keepends=True)
        content[number] = content[number].replace(b'{"id":', b'{"id" ', 1)
        records.write_bytes(b"".join(content))
        repaired = run(tmp_path, "verify", "r", "--repair")
        assert "not a complete record" in repaired.stdout
        assert spent() == endpoint.charged
        write_rows(tmp_path / "p.jsonl", *(row for row in rows if row["prompt"] != "goes"))
        options["accept_config_change"] = "dataset_file"
        done = run(tmp_path, **options, max_attempts=3)
        assert done.returncode == 0, done.stderr
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
        assert (summary["done"], summary["gone"]) == (7, 1)
        assert summary["spent_usd"] == endpoint.charged
        assert summary["cost_usd"] == endpoint.charged - 300
    in_all = f"spent in total ${endpoint.charged:,.4f}"
    assert f"cost of these tasks ${endpoint.charged - 300:,.4f}, {in_all}" in done.stdout

    # Wherever the cost is shown.
    stats = orjson.loads(run(tmp_path, "stats", "r", "--json").stdout)
    assert stats["cost_usd"]["spent_in_all"] == endpoint.charged
    assert f"spent in total ${endpoint.charged:,.4f}" in run(tmp_path, "stats", "r").stdout
    verdict: dict[str, object] = {
        "key": "k",
        "id": "r0",
        "judge": "j",
        "reply": "yes",
        "error": None,
    }
    verdict |= {"model": "j", "usage": None, "cost_usd": 2500.0, "at": 1.5}
    (run_dir / "verdicts.jsonl").write_bytes(add_checksum(orjson.dumps(verdict)))
    compared = run(tmp_path, "compare", "r", "r")
    assert re.search(r"total spent +\$1,?500", compared.stdout), compared.stdout
    assert re.search(r"judges +\$2,?500", compared.stdout), compared.stdout
    run(tmp_path, "report", "r")
    page = (run_dir / "report.html").read_bytes()
    assert b'"spent":{"usd":1500.0,"unknown":0},"judges":{"usd":2500.0,"unknown":0}' in page
    assert run(tmp_path, "verify", "r", "--read_data").returncode == 0

    # The record holds what was charged for nothing, and no rule took it for a bad reply.
    [record] = [line for line in lines(records) if line["prompt_id"] == "r3"]
    [discarded] = record["discarded"]
    assert discarded["discarded"] == UNREADABLE
    assert discarded["usage"]["output_tokens"] == OUT
    assert (record["api_calls"], record["cost_usd"], len(record["turns"])) == (2, 200.0, 1)


@pytest.mark.parametrize("api", DIALECTS)
def test_the_cost_of_an_unreadable_reply_is_known_in_every_dialect(api: str) -> None:
    sample = SAMPLES[api]
    with pytest.raises(ModelError) as caught:
        read_reply(api, orjson.dumps({"model": "m", "usage": sample.usage}))
    assert caught.value.paid is not None
    assert caught.value.paid.usage is not None
    assert caught.value.paid.usage["input_tokens"] == 7
    assert caught.value.paid.cost_usd == sample.cost_usd
    for nothing in (b"no json", b"[]", b"{}", b'{"usage": {}}', b'{"usage": 3}'):
        with pytest.raises(ModelError) as caught:
            read_reply(api, nothing)
        assert caught.value.paid is None


def test_damaged_lines_count_as_far_as_their_price_can_be_read(tmp_path: Path) -> None:
    """In the journal, and in what was set aside; whole lines there stand in records."""
    whole = (
        b'{"task":"a","input_digest":"d","deal":1,"position":0,"event":{"kind":"reply","turn":1,'
    )
    damaged = whole.replace(b'"task"', b'"task', 1)
    priced, unpriced = damaged + b'"cost_usd":0.25}}\n', damaged + b'"cost_usd":null}}\n'
    inflight, quarantine = tmp_path / "inflight", tmp_path / "quarantine"
    inflight.mkdir()
    segment = inflight / "worker-0-0.jsonl"
    segment.write_bytes(priced + unpriced + whole + b'"cost_usd":4.0}}\n' + priced[:-1])
    assert read_spending(tmp_path, NO_LIMIT) == Spent(4.25, 1)
    set_aside(quarantine, segment.name, segment.read_bytes())
    segment.unlink()
    assert read_spending(tmp_path, NO_LIMIT) == Spent(0.25, 1)
    record = b'{"turns":[{"cost_usd":7.0}],"inner":[{"cost_usd":1.0,"model_returned":"m"}],'
    set_aside(quarantine, "records.jsonl.line3", record + b'"cost_usd":8.0,"model_returned":"m"}}')
    set_aside(quarantine, "records.jsonl.line3", b"\0" * 20)
    set_aside(quarantine, "records.jsonl.900.torn", record + b'"cost_usd":8.0,"model_returned"')
    assert read_spending(tmp_path, NO_LIMIT) == Spent(8.25, 2)


def test_what_judges_were_paid_counts_where_its_price_can_be_read(tmp_path: Path) -> None:
    """Functions cost nothing, a failed call has no cost, and texts of replies are no prices."""
    assert spent_by_judges(tmp_path) == Spent(0.0, 0)
    text = '"cost_usd":64,"at":'
    paid = [
        {"source": "judge:j", "reply": text, "usage": None, "cost_usd": 0.25, "at": 1.5},
        {"source": "judge:j", "reply": "", "usage": None, "cost_usd": None, "at": 1.5},
        {"source": "judge:j", "reply": None, "error": "timeout", "at": 1.5},
        {"source": "m:f", "rewards": {"cost_usd": 32.0}, "error": None, "at": 1.5},
    ]
    scores, verdicts = (tmp_path / name for name in ("scores.jsonl", "verdicts.jsonl"))
    whole = b"".join(add_checksum(orjson.dumps(line)) for line in paid)
    scores.write_bytes(whole + whole[:-20])
    verdicts.write_bytes(
        add_checksum(orjson.dumps({"key": "k", "reply": "yes", "cost_usd": 1.0, "at": 1.5}))
    )
    assert spent_by_judges(tmp_path) == Spent(1.5, 2)
    set_aside(tmp_path / "quarantine", "scores.jsonl.line2", b'{"source" "j","cost_usd":8.0,"at":')
    set_aside(tmp_path / "quarantine", "failures.jsonl.line2", b'{"cost_usd":16.0,"at":1}')
    assert spent_by_judges(tmp_path) == Spent(9.5, 2)
