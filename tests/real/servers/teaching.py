"""Figures of a teacher in rows of rl against what the teacher itself says.

    python -m tests.real.servers.teaching MODEL EXPORT

EXPORT holds rows in the format rl with the columns of `--teacher`. Asserts that each learnt token
has the log-probability that transformers computes, and that so have the most likely tokens.
"""

from __future__ import annotations

import struct
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from tests.fakes.trainers.rows import not_checked
from tests.fakes.trainers.rows import rows as rows_of

_TOLERANCE = 1e-4


def _unpack(packed: str, form: str) -> list[Any]:
    content = b64decode(packed)
    return list(struct.unpack(f"<{len(content) // 4}{form}", content))


def main(model_dir: Path, export: Path) -> None:
    """Compare all rows; ends with an AssertionError at the end if any figure differs."""
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = list(rows_of(export, "rl"))
    if not rows:
        not_checked("the run has no rows of rl")
    tokens = turns = beyond = 0
    worst = worst_top = 0.0
    for row in rows:
        assert row["teacher_logprobs"] is not None, f"{row['id']}: not scored"
        ids, first = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        places = [first + n for n, loss in enumerate(row["loss_mask"]) if loss]
        with torch.no_grad():
            own = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        before = own[torch.tensor(places) - 1]
        sampled = before.gather(-1, torch.tensor([[ids[place]] for place in places]))[:, 0]
        given = torch.tensor(_unpack(row["teacher_logprobs"], "f"))
        differences = (given - sampled).abs()
        top_ids = torch.tensor(_unpack(row["teacher_top_ids"], "I")).reshape(len(places), -1)
        top = torch.tensor(_unpack(row["teacher_top_logprobs"], "f")).reshape(len(places), -1)
        by_id = (top - before.gather(-1, top_ids)).abs()
        by_rank = (top - before.topk(top.shape[1]).values).abs()
        worst = max(worst, float(differences.max()))
        worst_top = max(worst_top, float(by_id.max()), float(by_rank.max()))
        beyond += int((differences > _TOLERANCE).sum() + (by_id > _TOLERANCE).sum())
        tokens += len(places)
        turns += len(row["turns"])
    assert not beyond, f"{beyond} figures differ by more than {_TOLERANCE:g}, by up to {worst:.3g}"
    assert worst_top < _TOLERANCE, f"the most likely tokens differ by {worst_top:.3g}"
    print(
        f"= teacher: {turns} turns in {len(rows)} rows, {tokens} tokens within {worst:.2g} of "
        f"transformers; the most likely within {worst_top:.2g}; 0 beyond {_TOLERANCE:g}"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
