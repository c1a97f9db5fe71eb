"""Rows of token ids against what the server sent and what the model itself says.

    python -m tests.real.servers.comparing MODEL EXPORT WIRE

EXPORT holds rows in the format rl, WIRE one reply per line (see `wire`). Asserts that what carries
loss is whole replies of the server, each at most once, with the prompt, ids and logprobs that it
sent; that logprobs are those of the model at the row's temperature; and that no row begins at a
split whose texts differ by white space alone.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests.fakes.trainers.rows import not_checked
from tests.fakes.trainers.rows import rows as rows_of

_TOLERANCE = 1e-3
"""Two programs add floats in another order; an error of one token or of the temperature is 100
times as large."""


class _Turn(NamedTuple):
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float


def _turns(row: dict[str, Any]) -> Iterator[_Turn]:
    """The trained parts of a row, each with all tokens before it."""
    ids = [*row["prompt_ids"], *row["response_ids"]]
    start = len(row["prompt_ids"])
    mask = [0] * start + row["loss_mask"]
    samplings = iter(row["sampling"])
    place = start
    while place < len(ids):
        end = place
        while end < len(ids) and mask[end] == mask[place]:
            end += 1
        if mask[place]:
            yield _Turn(
                tuple(ids[:place]),
                tuple(ids[place:end]),
                tuple(row["logprobs"][place - start : end - start]),
                next(samplings).get("temperature", 1.0),
            )
        place = end


def _as_stored(values: list[float]) -> tuple[float, ...]:
    """Records hold 32-bit floats, rows nine digits of them."""
    packed = struct.pack(f"<{len(values)}f", *values)
    return tuple(float(f"{value:.9g}") for (value,) in struct.iter_unpack("<f", packed))


def main(model_dir: Path, export: Path, wire: Path) -> None:
    """Compare all rows; ends with an AssertionError at the first difference."""
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    sent = Counter(
        (tuple(one["prompt"]), tuple(one["completion"]), _as_stored(one["logprobs"]))
        for one in map(json.loads, wire.read_text().splitlines())
    )
    rows = list(rows_of(export, "rl"))
    if not rows:
        not_checked("the run has no rows of rl")
    trained = Counter[Any]()
    worst = tokens = 0.0
    for row in rows:
        for turn in _turns(row):
            key = turn[:3]
            trained[key] += 1
            assert trained[key] <= sent[key], f"{row['id']}: a turn that the server did not send"
            worst = max(worst, _difference(model, turn))
            tokens += len(turn.completion)
    assert worst < _TOLERANCE, f"logprobs differ by {worst:.3g} from those of the model"
    splits = [row["split"] for row in rows if row["split"]]
    needless = [
        one for one in splits if (one["sampled"] or "").rstrip() == (one["shown"] or "").rstrip()
    ]
    assert not needless, f"needless splits: {needless[:3]}"
    text = tokenizer.decode(rows[0]["response_ids"])
    assert "</think>" in text, f"no reasoning in {text[:200]!r}"
    print(
        f"= {len(rows)} rows, {trained.total()} turns equal the server's ids and logprobs, of "
        f"{sent.total()} replies; {len(splits)} rows begin at a split; logprobs of {tokens:.0f} "
        f"tokens within {worst:.2g} of the model's"
    )


def _difference(model: Qwen3ForCausalLM, turn: _Turn) -> float:
    """The largest difference between the logprobs of a turn and those of the model itself."""
    ids = torch.tensor([[*turn.prompt, *turn.completion]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt) - 1 : -1].float()
    own = (
        (logits / turn.temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(turn.completion)[:, None])[:, 0]
    )
    return float((own - torch.tensor(turn.logprobs)).abs().max())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
