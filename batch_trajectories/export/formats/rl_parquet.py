"""Rows of rl as Parquet, whose ids and log-probabilities are arrays.

The arrays have numbers of 32 bits. Columns whose keys differ from row to row (`split`, `rewards`,
`turn_rewards`, `sampling`) hold JSON text. All columns are always there; those that were not asked
for are null.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from typing import Any

from agent.messages.tokens import ID_BYTES
from batch_trajectories.export.conversation.row_json import compact_json
from batch_trajectories.export.formats.rl import TokenFiles
from batch_trajectories.export.rows.files import CustomFormat
from batch_trajectories.export.rows.row_files import HashingFile, MakeWriter, RowTables

_AS_JSON = ("split", "rewards", "turn_rewards", "sampling")
_PACKED = {"teacher_logprobs": "f", "teacher_top_ids": "I", "teacher_top_logprobs": "f"}
"""The columns that rows hold as base64, with the type of their numbers."""


def _parquet_writer() -> MakeWriter:
    """A function that begins Parquet files of rows of token ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number = pa.string(), pa.int32()
    ids, floats, texts = pa.list_(number), pa.list_(pa.float32()), pa.list_(text)
    schema = pa.schema(
        [
            ("id", text),
            ("group_id", text),
            ("sample", number),
            ("segment", number),
            ("segments", number),
            ("split", text),
            ("turns", ids),
            ("turns_without_ids", ids),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", floats),
            ("teacher_logprobs", floats),
            ("teacher_top_ids", ids),
            ("teacher_top_logprobs", floats),
            ("reward", pa.float64()),
            ("rewards", text),
            ("turn_rewards", text),
            ("status", text),
            ("finish_reasons", texts),
            ("policy_versions", texts),
            ("sampling", text),
            ("masked", pa.list_(texts)),
            ("discarded", text),
            ("thread", text),
            ("thread_id", text),
        ]
    )

    def make_table(rows: list[dict[str, Any]]) -> Any:
        for row in rows:
            for name in _AS_JSON:
                if row.get(name) is not None:
                    row[name] = compact_json(row[name])
            for name, form in _PACKED.items():
                if row.get(name) is not None:
                    row[name] = _unpack(row[name], form)
        return pa.Table.from_pylist(rows, schema=schema)

    def begin(file: HashingFile) -> RowTables:
        writer = pq.ParquetWriter(file, schema, compression="zstd", store_schema=False)
        return RowTables(writer, make_table)

    return begin


def _unpack(packed: str, form: str) -> list[float] | list[int]:
    content = b64decode(packed)
    return list(struct.unpack(f"<{len(content) // ID_BYTES}{form}", content))


FORMAT = CustomFormat(
    name="rl_parquet",
    card="The rows of `rl` as Parquet: see docs/training.md of the program that wrote it.",
    trainers={"readers of token ids as Parquet": ("rl_parquet",)},
    parquet=_parquet_writer,
    shows_messages=False,
    takes_all=True,
    files=TokenFiles,
)
