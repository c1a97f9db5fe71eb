"""A row per prompt, for trainers that make their own rollouts: verl.

Columns as verl 0.9.1 reads them: `prompt` has role and content of each message; `data_source`
chooses the reward function; `reward_model` has the `ground_truth` for this function, which also
gets `extra_info`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import refuse_control_tokens
from batch_trajectories.export.conversation.rewards import training_reward
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.tolerance import STRICT
from batch_trajectories.export.conversation.validity import Reason, Rejected, Rejection
from batch_trajectories.export.rows.files import Candidate, CustomFormat, FormatFiles
from batch_trajectories.export.rows.row_files import HashingFile, MakeWriter, RowTables
from batch_trajectories.records.checks import expected_column
from batch_trajectories.records.record_types import Record

DATA_SOURCE = "data_source"
"""The column of the dataset that names the source of a prompt; without it, the run is named."""


def make_row(
    records: Sequence[Record], *, index: int, run: str, reward_name: str | None
) -> dict[str, Any]:
    """The row of a prompt, from the records of its samples.

    Raises Rejected for a prompt with calls or results, which verl's columns cannot hold, and for a
    prompt with a token of chat templates.
    """
    first = records[0]
    row = first.row
    rewards = [training_reward(record, reward_name) for record in records]
    known = [reward for reward in rewards if reward is not None]
    expected = row.get(expected_column(row))
    return {
        "prompt": _messages(first),
        "data_source": str(row.get(DATA_SOURCE) or run),
        "reward_model": {
            "style": "rule",
            "ground_truth": None if expected is None else str(expected),
        },
        "extra_info": {
            "index": index,
            "id": first.prompt_id,
            "samples": len(records),
            "mean_reward": sum(known) / len(known) if known else None,
        },
    }


def _messages(record: Record) -> list[dict[str, str]]:
    messages = record.messages[: AuthoredWork(record).start]
    if any(message.role == "tool" or message.tool_calls for message in messages):
        raise Rejected(Reason.NOT_TEXT, "the prompt holds tool calls")
    if not messages or messages[-1].role != "user":
        raise Rejected(Reason.NO_REPLY, "its simulated user wrote no first message")
    for message in messages:
        refuse_control_tokens(message.content, STRICT, where="prompt")
    return [{"role": message.role, "content": message.content} for message in messages]


def _parquet_writer() -> MakeWriter:
    """A function that begins Parquet files of rows of prompts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, message = pa.string(), [("role", pa.string()), ("content", pa.string())]
    info = [("index", pa.int64()), ("id", text), ("samples", pa.int64())]
    schema = pa.schema(
        [
            ("prompt", pa.list_(pa.struct(message))),
            ("data_source", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([*info, ("mean_reward", pa.float64())])),
        ]
    )

    def make_table(rows: list[dict[str, Any]]) -> Any:
        return pa.Table.from_pylist(rows, schema=schema)

    def begin(file: HashingFile) -> RowTables:
        writer = pq.ParquetWriter(file, schema, compression="zstd", store_schema=False)
        return RowTables(writer, make_table)

    return begin


class _PromptFiles(FormatFiles):
    def add(
        self, split: str, candidates: Sequence[Candidate], left_out: Mapping[str, Rejection]
    ) -> Iterator[tuple[Candidate, Rejection]]:
        records = [candidate.record for candidate in candidates]
        try:
            reward_name = self.export.recipe.reward_name
            row = make_row(
                records, index=self._rows, run=candidates[0].run, reward_name=reward_name
            )
        except Rejected as rejected:
            for candidate in candidates:
                yield self.reject(candidate, rejected.as_rejection())
            return
        self.write(split, dumps_row(row), uses=len(candidates))


FORMAT = CustomFormat(
    name="prompts",
    card="A row per prompt for verl's own rollouts (`data.train_files`).",
    trainers={"verl: prompts for its own rollouts": ("prompts",)},
    parquet=_parquet_writer,
    shows_messages=False,
    takes_all=True,
    by_prompt=True,
    files=_PromptFiles,
)
