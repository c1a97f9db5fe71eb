"""Judges a dataset by chat templates, in a process with bounded time and memory.

Nothing of a template is trusted: one that takes too long or too much memory is judged as that, and
the next one goes on in a new process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import plural
from batch_trajectories.export.parity.mending import NOTHING, Mend, mend_for
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.templates.contexts import ParityCounts, Shown, as_shown
from batch_trajectories.export.templates.names import ChatTemplate
from batch_trajectories.export.templates.rendering import load_chat, rows_of, tools_in
from batch_trajectories.export.templates.token_counts import Tokens

_RENDER_S = 10.0
"""CPU time for one row: trainers render thousands a minute, and a busy machine is no fault of a
template."""
_STUCK_S = 60
"""CPU time without the end of a rendering, where no signal handler can end it."""
_SILENCE_S = 600.0
"""Time without a word of the process; it says something every `_SAYS_S` seconds."""
_SAYS_S = 1.0
_MEMORY_BYTES = 2 << 30
_SAMPLE = 12
"""Rows that differ, by which options are chosen; all rows then prove them."""
_BLOCK = 64
_NAMED = 1000
"""Ids of rows above the length, in the manifest."""


class _TooLong(BaseException):
    """Not a reason to refuse a row: the next one may take as long."""

    def __init__(self) -> None:
        super().__init__(f"the template took more than {_RENDER_S:g} s of CPU time for one row")


def check(recipe: Recipe, templates: Sequence[ChatTemplate], max_length: int | None) -> None:
    """Raise `ConfigError` for what cannot be judged, before all work."""
    if "openai" not in recipe.formats or not recipe.writes_lines:
        raise ConfigError("--parity renders rows of the format openai; add it to --format")
    if recipe.reasoning in ("last", "none"):
        raise ConfigError("--parity compares reasoning, which --reasoning last and none take out")
    if recipe.per_turn and recipe.reasoning is None:
        raise ConfigError(
            "--parity needs all reasoning in rows of turns: add --reasoning field, which leaves it "
            "to the template"
        )
    for template in templates:
        load_chat(template.path)
        if max_length is not None and template.tokenizer is None:
            raise ConfigError(
                f"--max_length counts tokens: {template.path} has no tokenizer.json beside it; "
                "give the directory of a tokenizer"
            )


def judge(
    directory: Path,
    manifest: Mapping[str, Any],
    templates: Sequence[ChatTemplate],
    *,
    max_length: int | None,
) -> list[dict[str, Any]]:
    """What each template makes of the rows of `openai` in a dataset, for its manifest.

    Beside the counts of `ParityCounts`: `mend`, the options after which nothing differs (null: none
    needed, or none found), `tried`, the best options where none mends all, `mended`, the counts
    with either, `left`, why the rest differs, `masked_by_fit`, the turns that a recipe's `fit`
    masks then, `is_proved`, `lengths`, of a mix `runs` (rows, and those in which nothing differs),
    and `failed`, if the template could not be judged.
    """
    total = sum(
        file["rows"]
        for part in manifest["formats"]
        if part["format"] == "openai"
        for file in part["files"]
        if file["path"].endswith(".jsonl")
    )
    with LongWork("parity", total=total * len(templates)) as work:
        return [_judged(directory, manifest, one, max_length, work) for one in templates]


def _judged(
    directory: Path,
    manifest: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int | None,
    work: LongWork,
) -> dict[str, Any]:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(theirs, directory, manifest, template, max_length), daemon=True
    )
    child.start()
    theirs.close()
    failed = f"the template was silent for {_SILENCE_S:g} s"
    try:
        while ours.poll(_SILENCE_S):
            said = ours.recv()
            if isinstance(said, dict):
                return {"template": template.name, **said}
            work.advance(said)
    except EOFError:
        child.join()
        is_stuck = child.exitcode == -signal.SIGXCPU
        failed = str(_TooLong()) if is_stuck else "the process that rendered the template died"
    finally:
        child.kill()
        child.join()
        ours.close()
    return {"template": template.name, "failed": failed, "is_proved": False}


def _child(
    pipe: Connection,
    directory: Path,
    manifest: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int | None,
) -> None:
    _bound_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _raise_too_long)
    try:
        pipe.send(_judge_one(pipe, directory, manifest, template, max_length))
    except (_TooLong, MemoryError, ConfigError) as error:
        pipe.send({"failed": str(error) or "the template took too much memory", "is_proved": False})


def _bound_memory() -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_cpu() -> None:
    """Have the process end unless this is called again within `_STUCK_S` of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + _STUCK_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _raise_too_long(*_: object) -> None:
    raise _TooLong


def _judge_one(
    pipe: Connection,
    directory: Path,
    manifest: Mapping[str, Any],
    template: ChatTemplate,
    max_length: int | None,
) -> dict[str, Any]:
    render = load_chat(template.path)
    said_at = time.monotonic()

    def chat(messages: Any, tools: Any, is_prompt: bool) -> str:
        nonlocal said_at
        if (now := time.monotonic()) - said_at > _SAYS_S:
            said_at = now
            pipe.send(0)
        _bound_cpu()
        signal.setitimer(signal.ITIMER_PROF, _RENDER_S)
        try:
            return render(messages, tools, is_prompt)
        except RecursionError as error:
            raise ValueError("too deep") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    recipe = manifest["recipe"]
    key = recipe["reasoning_key"]
    lengths = None if template.tokenizer is None else _Lengths(template.tokenizer, max_length)
    tally, sample = ParityCounts(), list[Shown]()
    by_run: dict[str, dict[str, int]] = {}
    for row, shown in _rows(directory, manifest, key, pipe):
        texts: list[str] = []
        is_same = tally.add(chat, [shown], texts.append)
        if not is_same and len(sample) < _SAMPLE:
            sample.append(shown)
        if "runs" in manifest:
            of_run = by_run.setdefault(json.loads(row["metadata"])["run"], {"rows": 0, "same": 0})
            of_run["rows"] += 1
            of_run["same"] += is_same
        if lengths is not None:
            for text in texts:
                lengths.add(row["id"], text)
    mend, mended = NOTHING, tally
    if sample:
        mend = mend_for(chat, sample, is_cut=recipe["per_turn"] or recipe["segments"])
        if mend.options:
            mended = _with(mend, chat, directory, manifest, key, pipe)
    is_better = mended.is_clean and mend.options
    return {
        **tally.to_json(),
        "mend": " ".join(mend.options) if is_better else None,
        "mended": mended.to_json() if mend.options else None,
        "tried": " ".join(mend.options) if mend.options and not is_better else None,
        "left": [*mended.left()],
        "masked_by_fit": mended.turns - mended.same,
        "is_proved": tally.is_clean,
        "lengths": None if lengths is None else lengths.to_json(),
        **({"runs": dict(sorted(by_run.items()))} if by_run else {}),
    }


def _with(
    mend: Mend, chat: Any, directory: Path, manifest: Mapping[str, Any], key: str, pipe: Connection
) -> ParityCounts:
    tally = ParityCounts()
    for _, shown in _rows(directory, manifest, key, pipe, counts=False):
        tally.add(chat, mend.rows(shown), lambda _: None)
    return tally


def _rows(
    directory: Path, manifest: Mapping[str, Any], key: str, pipe: Connection, *, counts: bool = True
) -> Iterator[tuple[Mapping[str, Any], Shown]]:
    """The rows, also as shown; says now and then how many there were."""
    rows = rows_of(directory, manifest)
    while block := list(islice(rows, _BLOCK)):
        for row in block:
            yield row, as_shown(row, tools_in(row), key)
        pipe.send(len(block) if counts else 0)


class _Lengths:
    """Lengths of rows in the student's tokens."""

    def __init__(self, tokenizer: Path, max_length: int | None) -> None:
        self._tokens = Tokens(tokenizer)
        self._max_length = max_length
        self._lengths: list[int] = []
        self._above: list[str] = []

    def add(self, id: str, text: str) -> None:
        """Count the tokens of a row."""
        length = self._tokens.of(text)
        self._lengths.append(length)
        if self._max_length is not None and length > self._max_length:
            self._above.append(id)

    def to_json(self) -> dict[str, Any]:
        """Percentiles, and the rows above the length by name."""
        lengths = sorted(self._lengths)
        last = len(lengths) - 1
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        found: dict[str, Any] = {
            name: lengths[round(share * last)] if lengths else None
            for name, share in shares.items()
        }
        if self._max_length is not None:
            found |= {
                "max_length": self._max_length,
                "above": len(self._above),
                "rows_above": self._above[:_NAMED],
            }
        return found


def summary(judged: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line or two for each template."""
    for one in judged:
        name = one["template"]
        if failed := one.get("failed"):
            yield f"{name}: not judged: {failed}"
            continue
        refused = sum(one["refused"].values())
        words = [f"{one['same']:,} of {plural(one['turns'], 'turn')} in the context of inference"]
        if one["with_reasoning"]:
            words.append(f"{one['reasoning_lost']:,} of {one['with_reasoning']:,} lose reasoning")
        if refused:
            why = max(one["refused"], key=one["refused"].__getitem__)
            words.append(f"{plural(refused, 'row')} refused ({why})")
        if one["stop_token"] != "unknown":
            words.append(f"stop token {one['stop_token']}")
        yield f"{name}: {'; '.join(words)}"
        if one["mend"]:
            yield f"  mended by {one['mend']}: nothing differs"
        elif one["tried"]:
            left = one["mended"]
            yield (
                f"  best with {one['tried']}: {left['turns'] - left['same']:,} of "
                f"{left['turns']:,} contexts differ, {left['reasoning_lost']:,} lose reasoning, "
                f"{plural(sum(left['refused'].values()), 'row')} refused"
            )
        if one["left"]:
            yield f"  what is left: {'; '.join(one['left'])}"
        if one["masked_by_fit"] and one["masked_by_fit"] < (one["mended"] or one)["turns"]:
            yield (
                f"  `fit: {{template: {name}, other_context: mask}}` in a recipe takes the loss "
                f"from these {plural(one['masked_by_fit'], 'turn')}: no context differs then"
            )
        if lengths := one["lengths"]:
            above = (
                f", {lengths['above']:,} above {lengths['max_length']:,}"
                if ("above" in lengths)
                else ""
            )
            yield (
                f"  tokens per row: median {lengths['p50']}, 90% {lengths['p90']}, "
                f"99% {lengths['p99']}, longest {lengths['max']}{above}"
            )
