"""Long texts of a row that its conversation repeats: a record stores each once, among the messages.

    "row":{"id":"p1","prompt":null}, … ,"row_texts":[[["prompt"],[0,"content"]]]

Each item of `row_texts` is the place of a text in the row and that in the messages. Records without
long texts, and those of earlier versions, have no such key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import msgspec

ROW_TEXTS = "row_texts"
_LONG = 4096
"""Characters of a text that is worth a reference."""

Step = str | int
Texts = Sequence[tuple[list[Step], list[Step]]]


def shared(record: dict[str, Any]) -> dict[str, Any]:
    """The record as stored: without texts of its row that its messages also have."""
    in_row = dict(_long_texts(record["row"]))
    if not in_row:
        return record
    place_of = {text: list(place) for place, text in _long_texts(record["messages"])}
    texts: Texts = [(list(p), place_of[text]) for p, text in in_row.items() if text in place_of]
    if not texts:
        return record
    row = deepcopy(record["row"])
    for place, _ in texts:
        _parent(row, place)[place[-1]] = None
    return {**record, "row": row, ROW_TEXTS: texts}


def restore(row: dict[str, Any], messages: Sequence[Any], texts: Texts) -> None:
    """Put the texts back into a stored row. Raises `ValueError` for a place that does not exist."""
    for place, source in texts:
        try:
            _parent(row, place)[place[-1]] = _at(messages, source)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"`{ROW_TEXTS}` names a place that does not exist: {error}") from error


def _long_texts(value: Any, *place: Step) -> Iterator[tuple[tuple[Step, ...], str]]:
    if isinstance(value, str):
        if len(value) >= _LONG:
            yield place, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _long_texts(member, *place, key)
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _long_texts(member, *place, number)


def _parent(value: Any, place: Sequence[Step]) -> Any:
    return _at(value, place[:-1])


def _at(value: Any, place: Sequence[Step]) -> Any:
    for step in place:
        value = getattr(value, str(step)) if isinstance(value, msgspec.Struct) else value[step]
    return value
