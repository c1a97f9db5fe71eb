"""Every template of LLaMA-Factory on an export, compared with the table of docs/training.md.

Rows per turn are read with `mask_history` and `preserve_thinking`. Pictures are none, so what
templates do with them is left out.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import transformers
from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.data.loader import _get_merged_dataset
from llamafactory.data.processor import SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES

from tests.benchmarks.consuming.llamafactory_loader import arguments_of, marks_of
from tests.fakes.trainers import tiny
from tests.fakes.trainers.labels import Labels
from tests.fakes.trainers.rows import rows as rows_of
from tests.fakes.trainers.rows import training_page

_PARALLEL, _TEXT, _REASONING, _ENDS, _TAGS = (
    "stop at parallel calls",
    "stop at calls with reasoning or text",
    "stop at calls with reasoning",
    "learn an end after other turns",
    "give each result its tags",
)
"""How the second cells of the table begin."""


class _Found(NamedTuple):
    """What a template makes of the rows: why it stops, or the labels."""

    refusal: str
    labels: Labels
    ends: int
    """Tokens that end another turn than the one to be learnt, and carry loss."""


def main(directory: Path) -> None:
    """Read the rows with every template, and compare each kind with the page."""
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    per_turn = directory.name.endswith("turns")
    ours = {row["id"]: row for row in rows_of(directory)}
    order = [row["id"] for row in rows_of(directory, "llamafactory")]
    kinds: dict[str, set[str]] = defaultdict(set)
    turns = [sum(m["role"] == "assistant" for m in row["messages"]) for row in ours.values()]
    ends = sum(max(0, count - 1 - per_turn) for count in turns)  # not that before the last turn
    with tempfile.TemporaryDirectory() as place:
        tokenizer = tiny.tokenizer_for(directory)
        tokenizer.save_pretrained(place)
        model, data, training = arguments_of(directory, "qwen3", Path(place))
        names = data.dataset
        examples = _get_merged_dataset(names, model, data, training, stage="sft")[:]
        for name in TEMPLATES:
            found = _read(name, copy.deepcopy(tokenizer), data, examples, order, ours)
            if "parallel" in found.refusal:
                kinds[_PARALLEL].add(name)
            elif found.refusal:
                kinds[_TEXT].add(name)
            elif found.ends:
                kinds[_ENDS].add(name)
                assert found.ends == ends, f"{name}: {found.ends} ends carry loss, not {ends}"
            if "<tool_response>" in "".join(map(str, TEMPLATES[name].format_observation.slots)):
                kinds[_TAGS].add(name)
            if per_turn and not found.refusal:
                assert not found.labels.left_out, f"{name}: {found.labels}"
    _compare(kinds, _table(), [message for row in ours.values() for message in row["messages"]])
    taken = len(TEMPLATES) - len(kinds[_PARALLEL] | kinds[_TEXT])
    told = ", ".join(f"{len(names)} {kind}" for kind, names in sorted(kinds.items()))
    print(
        f"= LLaMA-Factory {metadata.version('llamafactory')}, {directory.name}: {taken} of "
        f"{len(TEMPLATES)} templates take all {len(order)} rows, and learn all of the turns that "
        f"are to be learnt; {told}, as the page says"
    )


def _read(
    name: str,
    tokenizer: Any,
    data: Any,
    examples: Mapping[str, list[Any]],
    order: list[str],
    ours: Mapping[str, dict[str, Any]],
) -> _Found:
    template = TEMPLATES[name]
    formatters = [value for key, value in vars(template).items() if key.startswith("format_")]
    slots = [slot for formatter in formatters for slot in formatter.slots]
    roles = {slot["token"] for slot in slots if isinstance(slot, dict)}
    tokenizer.add_tokens(sorted(roles), special_tokens=True)
    data.template = name
    template = copy.copy(get_template_and_fix_tokenizer(tokenizer, data))
    template.mm_plugin = TEMPLATES["qwen3"].mm_plugin  # others want the processor of a model
    labels = Labels(tokenizer)
    reader = SupervisedDatasetProcessor(template, tokenizer, None, data)
    try:
        made = reader.preprocess_dataset(dict(examples))
    except (RuntimeError, ValueError) as error:  # that it stops is the finding
        return _Found(str(error), labels, 0)
    assert len(made["input_ids"]) == len(order), f"{name} dropped rows"
    ends = 0
    for id_, ids, told in zip(order, made["input_ids"], made["labels"], strict=True):
        learnt, more = marks_of(ids, told)
        labels.add(ours[id_], ids, learnt)
        ends += more
    return _Found("", labels, ends)


def _table() -> dict[str, set[str]]:
    """Which templates the page names, by how the second cell of their row begins."""
    page = training_page()
    rows = re.findall(r"^(`.+`) \| (.+)$", page, re.MULTILINE)
    return {
        kind: {
            name
            for names, told in rows
            if told.startswith(kind)
            for name in re.findall(r"`(.+?)`", names)
        }
        for kind in (_PARALLEL, _TEXT, _REASONING, _ENDS, _TAGS)
    }


def _compare(
    kinds: Mapping[str, set[str]], page: Mapping[str, set[str]], messages: Sequence[dict[str, Any]]
) -> None:
    """Assert that the page names the templates of each kind that these rows show."""
    is_parallel = any(len(message.get("tool_calls", ())) > 1 for message in messages)
    refused = page[_PARALLEL] if is_parallel else set()
    thinks = any("reasoning_content" in message for message in messages)
    stopped = page[_TEXT] | page[_REASONING] if thinks else page[_TEXT]
    expected = {
        _PARALLEL: refused,
        _TEXT: stopped,
        _ENDS: page[_ENDS] - refused - stopped,
        _TAGS: page[_TAGS],
    }
    for kind, named in expected.items():
        found = kinds.get(kind, set())
        assert found == named, f"{kind}: {sorted(found - named)}, not {sorted(named - found)}"


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
