"""Rows of token ids, as trainers read them, by the functions of docs/training.md.

prime-rl and slime are in no registry: put the modules that hold TrainingSample and Sample on
PYTHONPATH, as `prime_rl_types` and `slime_types`.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

from tests.fakes.trainers.rows import not_checked, training_page
from tests.fakes.trainers.rows import rows as rows_of

Rows = list[dict[str, Any]]


def verl(rows: Rows, functions: dict[str, Any]) -> str:
    """What an agent loop returns, as tensors."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    for row in rows:
        made = AgentLoopOutput(**functions["to_verl"](row)).as_dict()
        assert made["responses"].tolist() == row["response_ids"]
        assert made["response_mask"].tolist() == row["loss_mask"]
        assert made["rollout_log_probs"].shape == made["responses"].shape
        if row["reward"] is not None:
            assert made["rm_scores"].sum().item() == row["reward"]
    return "AgentLoopOutput.as_dict"


def skyrl(rows: Rows, functions: dict[str, Any]) -> str:
    """The check of a generator's output, and the tensors of a batch."""
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    class Tokenizer:
        pad_token_id = 0

    made = functions["to_skyrl"](rows)
    rewards = [[0.0] * (len(ids) - 1) + [1.0] for ids in made["response_ids"]]
    tensors = convert_prompts_responses_to_batch_tensors(
        Tokenizer(),
        made["prompt_token_ids"],
        made["response_ids"],
        rewards,
        made["loss_masks"],
        made["rollout_logprobs"],
    )
    masks, logprobs = tensors[4], tensors[5]
    assert masks.shape == logprobs.shape
    for mask, told in zip(masks.tolist(), made["loss_masks"], strict=True):
        assert mask[len(mask) - len(told) :] == told
        assert not any(mask[: len(mask) - len(told)])
    return "convert_prompts_responses_to_batch_tensors"


def prime_rl(rows: Rows, functions: dict[str, Any]) -> str:
    """A training sample, to bytes and back."""
    import msgspec
    from prime_rl_types import TrainingSample

    more = {"temperatures": [], "env_name": "e"}
    if "advantages" in TrainingSample.__struct_fields__:
        more["advantages"] = []
    for row in rows:
        sample = TrainingSample(**functions["to_prime_rl"](row), **more)
        packed = msgspec.msgpack.encode(sample)
        again = msgspec.msgpack.decode(packed, type=TrainingSample)
        assert sum(again.mask) == sum(row["loss_mask"])
        assert len(again.token_ids) == len(again.mask) == len(again.logprobs)
    return "TrainingSample"


def slime(rows: Rows, functions: dict[str, Any]) -> str:
    """A sample, read as from a file of rollouts."""
    from slime_types import Sample

    for made in functions["to_slime"](rows):
        sample = Sample.from_dict(made)
        assert len(sample.loss_mask) == sample.response_length
        assert sample.effective_response_length == sum(made["loss_mask"])
    return "Sample.from_dict"


_READERS = {reader.__name__: reader for reader in (verl, skyrl, prime_rl, slime)}


def main(directory: Path, name: str) -> None:
    """Have a trainer read the rows of an export."""
    functions: dict[str, Any] = {}
    exec(re.findall(r"```python\n# rl.py\n(.*?)```", training_page(), re.DOTALL)[0], functions)
    rows = [row for row in rows_of(directory, "rl") if row["logprobs"] is not None]
    if not rows:
        not_checked("the run has no rows of rl with logprobs; it needs --token_ids")
    for row in rows:
        _check_masks(row)
    done = _READERS[name](rows, functions)
    learnt = sum(sum(row["loss_mask"]) for row in rows)
    masked = sum(map(bool, (reasons for row in rows for reasons in row.get("masked", ()))))
    print(
        f"= {name}, {directory.name}: {done} takes {len(rows)} rows of token ids; {learnt:,} carry "
        f"loss, none of {masked} masked turns"
    )


def _check_masks(row: dict[str, Any]) -> None:
    """Between two turns are tokens that nobody sampled: each turn with loss is a run of ones."""
    runs = sum(1 for kind, _ in itertools.groupby(row["loss_mask"]) if kind)
    told = sum(not reasons for reasons in row.get("masked", [[]] * len(row["turns"])))
    assert runs == told, f"{row['id']}: {runs} turns carry loss, {told} should"


if __name__ == "__main__":
    main(Path(*sys.argv[1:-1]), sys.argv[-1])
