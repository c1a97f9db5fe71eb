"""Rows of a run of an agent in every format, compared with the endpoint's log.

Rows of segments say all that the model was shown: up to each turn that is learnt, a row is a
request of the log with its reply. The turns of whole conversations are replies of the log, also
where the agent changed them when it repeated them; what others say before a turn is that of its
request, unless the metadata of the row counts calls that saw something else. Copies (`parquet`,
`hf`) hold what the JSON lines hold. Token ids are those that the endpoint gave.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from datasets import load_from_disk

from tests.fakes.agent_endpoint import Exchange
from tests.helpers.running import ROOT, lines
from tests.helpers.wire_forms import (
    Atom,
    in_reply,
    in_request,
    in_row,
    in_sharegpt,
    of_model,
    steps,
)

Row = dict[str, Any]

_SHAREGPT = ("llamafactory", "hermes")
_CONVERSATIONS = ("openai", *_SHAREGPT)
_ACCEPTED = "--accept_rows=unknown_tool,interrupted,has_images,has_files"
_SEEN_OTHERWISE = ("rewritten_calls", "view_compacted", "summaries", "cut_results")
"""Counts in the metadata of a row whose calls saw something else than it shows."""
_REWARD = "def even(conversation, workspace, row):\n    return float(int(row['id'][1:]) % 2 == 0)\n"
"""The reward of half of the tasks, for rows that say what is good."""


class Exported(NamedTuple):
    """A format of a dataset."""

    part: dict[str, Any]
    """What the manifest says of it."""
    rows: list[Row]


class Log:
    """What the endpoint has been asked and has replied, in one form."""

    def __init__(self, exchanges: Sequence[Exchange], volatile: Sequence[str] = ()) -> None:
        """`volatile` are expressions for texts that differ between starts of the agent."""
        self.exchanges = exchanges
        self._volatile = re.compile("|".join(f"(?:{text})" for text in volatile) or "(?!)")
        asked = [[*in_request(_as_list(one.request))] for one in exchanges]
        replies = [[*in_reply(one.reply)] for one in exchanges]
        both = [*zip(asked, replies, strict=True)]
        self._whole = {steps([*shown, *reply]) for shown, reply in both}
        self._said = {of_model([*shown, *reply]) for shown, reply in both}
        self._answers = {(self._of_others(shown), of_model(reply)) for shown, reply in both}
        self.replies = {of_model(reply) for reply in replies}

    def has(self, atoms: Sequence[Atom]) -> bool:
        """Whether this is a request with its reply."""
        return steps(atoms) in self._whole

    def has_said(self, atoms: Sequence[Atom]) -> bool:
        """The same for what the model said alone."""
        return of_model(atoms) in self._said

    def has_answer(self, before: Iterable[Atom], reply: Iterable[Atom]) -> bool:
        """Whether this reply was one to a request with these words of others."""
        return (self._of_others(before), of_model(reply)) in self._answers

    def _of_others(self, atoms: Iterable[Atom]) -> str:
        """What was shown, but for the model's own words and volatile texts, in any order.

        Agents send results of calls that ran at once as they come; rows have the order of the
        calls.
        """
        said = (self._volatile.sub("", str(value)) for kind, value in atoms if kind == "said")
        stripped = (line.strip() for text in said for line in text.splitlines())
        return "\n".join(sorted(filter(None, stripped)))


def _as_list(request: Row) -> Row:
    """A request whose `input` may be a text, with messages."""
    if not isinstance(text := request.get("input"), str):
        return request
    return {**request, "input": [{"role": "user", "content": text}]}


def check_segments(directory: Path, log: Log) -> int:
    """Compare rows of segments and their copies; returns how many turns they learn.

    Those of `openai` say all that the model was shown; those of ShareGPT are compared in what the
    model said, for their system messages and results have forms of their own.
    """
    exported = _export(directory, ",".join((*_CONVERSATIONS, "parquet", "hf")), "--segments")
    learnt = 0
    for row in exported["openai"].rows:
        for n in _learnt(row["messages"]):
            learnt += 1
            assert log.has([*in_row(row["messages"][:n])]), (row["id"], n)
    for name in _SHAREGPT:
        rows = exported[name].rows
        assert len(rows) == learnt, (name, len(rows), learnt)
        for row in rows:
            assert log.has_said([*in_sharegpt(row["conversations"])]), (name, row["id"])
    for name in _CONVERSATIONS:
        part, rows = exported[name]
        segments = part["segments"]
        assert (segments["turns"], segments["unknown_turns"]) == (learnt, 0), (name, segments)
        # What has another model, or a flaw, is named.
        assert not segments["rejected"], (name, segments)
        _check_copies(_dataset(directory), name, rows)
    return learnt


def _check_copies(dataset: Path, name: str, rows: Sequence[Row]) -> None:
    copies = pq.read_table(dataset / f"{name}_parquet/train.parquet").to_pylist()
    loaded = load_from_disk(str(dataset / f"{name}_hf"))["train"].to_list()
    for row, copy, other in zip(rows, copies, loaded, strict=True):
        assert _with_tools(other) == _with_tools(row), (name, row["id"])
        if "messages" not in row:
            assert copy == row, (name, row["id"])
            continue
        assert copy["id"] == row["id"]
        mine, theirs = row["messages"], copy["messages"]
        assert steps(in_row(mine)) == steps(in_row(theirs)), row["id"]
        assert _learnt(mine) == _learnt(theirs), row["id"]


def _with_tools(row: Row) -> Row:
    """A row whose tools are a list: they may be its JSON."""
    tools = row["tools"]
    return {**row, "tools": json.loads(tools or "[]") if isinstance(tools, str) else tools}


def check_conversations(directory: Path, log: Log) -> int:
    """Compare rows of whole conversations; returns how many turns those of `openai` learn."""
    _score(directory)
    exported = _export(directory, ",".join((*_CONVERSATIONS, "atif", "kto", "raw")))
    learnt = 0
    for row in exported["openai"].rows:
        messages = row["messages"]
        ends = _learnt(messages)
        learnt += len(ends)
        for n in ends:
            before, reply = in_row(messages[: n - 1]), [*in_row([messages[n - 1]])]
            assert of_model(reply) in log.replies, (row["id"], n)
            assert _seen_otherwise(row) or log.has_answer(before, reply), (row["id"], n)
    whole = {row["id"]: row for row in exported["openai"].rows}
    for name in _SHAREGPT:
        for row in exported[name].rows:
            atoms = [*in_sharegpt(row["conversations"])]
            assert of_model(atoms) == of_model(in_row(whole[row["id"]]["messages"])), row["id"]
    for row in exported["kto"].rows:
        messages = whole[row["id"]]["messages"]
        assert steps(in_row([*row["prompt"], *row["completion"]])) == steps(in_row(messages))
        assert row["label"] == (int(row["id"][1:3]) % 2 == 0), row["id"]
    counts = {name: len(exported[name].rows) for name in (*_CONVERSATIONS, "kto", "raw")}
    records = lines(directory / "trajectories/r/records.jsonl")
    assert set(counts.values()) == {len(records)}, counts
    assert sorted(exported["raw"].rows, key=_id_of) == sorted(records, key=_id_of)
    for document in exported["atif"].rows:
        _check_document(document, log)
    return learnt


def _id_of(row: Row) -> str:
    return str(row["id"])


def _check_document(document: Row, log: Log) -> None:
    """A document of `atif` and those inside it: each step of the agent is a reply."""
    for step in document["steps"]:
        if step["source"] == "agent" and not step.get("is_copied_context"):
            assert of_model(_of_step(step)) in log.replies, (document["trajectory_id"], step)
    for inner in document.get("subagent_trajectories", ()):
        _check_document(inner, log)


def _of_step(step: Row) -> Iterator[Atom]:
    yield "thought", step.get("reasoning_content", "")
    yield "text", step["message"]
    for call in step.get("tool_calls", ()):
        yield "call", [call["function_name"], call["arguments"]]


def _seen_otherwise(row: Row) -> bool:
    return any(json.loads(row["metadata"]).get(key) for key in _SEEN_OTHERWISE)


def _learnt(messages: Sequence[Row]) -> list[int]:
    """After how many messages each turn that is learnt ends."""
    return [
        n
        for n, message in enumerate(messages, start=1)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]


def check_ids(directory: Path, log: Log) -> int:
    """Compare rows of token ids; returns how many turns they learn."""
    part, rows = _export(directory, "rl", "--subagents")["rl"]
    assert part["turns_without_ids"] == part["subagents_left_out"] == 0, part
    logged = Counter(
        (tuple(one.reply["prompt_token_ids"]), tuple(one.reply["choices"][0]["token_ids"]))
        for one in log.exchanges
    )
    learnt = Counter(turn for row in rows for turn in _turns_of(row))
    assert learnt <= logged, learnt - logged
    assert learnt.total() == sum(len(row["turns"]) for row in rows)
    return learnt.total()


def _turns_of(row: Row) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a row learns: all ids before it, and its own."""
    ids = row["prompt_ids"] + row["response_ids"]
    place = len(row["prompt_ids"])
    for is_learnt, tokens in groupby(row["loss_mask"]):
        end = place + len([*tokens])
        if is_learnt:
            yield tuple(ids[:place]), tuple(ids[place:end])
        place = end


def _dataset(directory: Path) -> Path:
    return directory / "trajectories/r/exports/dataset"


def _score(directory: Path) -> None:
    (directory / "rewards.py").write_text(_REWARD)
    _command(directory, "score", "trajectories/r", "--reward=rewards.py:even")


def _export(directory: Path, formats: str, *flags: str) -> dict[str, Exported]:
    """What the manifest says of each format, and its rows."""
    if formats != "rl":
        flags = (*flags, _ACCEPTED)
    _command(directory, "export", "trajectories/r", f"--format={formats}", *flags)
    dataset = _dataset(directory)
    parts = json.loads((dataset / "manifest.json").read_text())["formats"]
    jsonl = {part["format"]: dataset / part["format"] / "train.jsonl" for part in parts}
    return {
        part["format"]: Exported(part, lines(jsonl[part["format"]]))
        for part in parts
        if jsonl[part["format"]].exists()
    }


def _command(directory: Path, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "batch_runner.py"), *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
