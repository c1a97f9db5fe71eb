"""A record's line with other members: the same JSON, however the line is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from batch_trajectories.basics import exact_json
from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.record_types import decode_record
from tests.helpers.builders import assistant, user
from tests.helpers.stored import complete

TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}
SAID = [user('Say ,"tools":[] and \\",\\"tools\\":[].'), assistant("Done.")]
INNER = {"key": "1.0", "name": "sub", "tools": [TOOL], "messages": [], "turns": []}
RECORDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "no tools": {"tools": []},
    "a column of this name": {"row": {"n": 1, "tools": [TOOL]}},
    "inner conversations with the same tools": {"inner": [INNER, INNER]},
    "a schema with this property": {
        "tools": [{"type": "function", "function": {"name": "t", "n": 1, "tools": []}}]
    },
    "keys of later versions": {"later": {"n": 1, "tools": [TOOL]}, "form": 1},
    "a long integer": {"row": {"n": 2**70}},
}
WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "ours": lambda record: add_checksum(exact_json.dumps(record)),
    "no checksum": lambda record: exact_json.dumps(record) + b"\n",
    "blanks": lambda record: json.dumps(record).encode() + b" \n",
    "blanks between members": lambda record: add_checksum(json.dumps(record).encode()),
    "tools first": lambda record: add_checksum(
        exact_json.dumps({"tools": record["tools"], **record})
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", RECORDS)
def test_only_the_members_given_are_others(name: str, writer: str) -> None:
    made = complete({"tools": [TOOL], "messages": SAID, "turns": [{}], **RECORDS[name]})
    record = decode_record(WRITERS[writer](made))
    assert json.loads(record.splice({})) == made
    spliced = json.loads(record.splice({"tools": b'["0-1"]', "form": b'{"file":"training"}'}))
    assert spliced == made | {"tools": ["0-1"], "form": {"file": "training"}}
