"""Judges a dataset by chat templates, in a process with bounded time and memory.

Templates are not trusted. A template that takes too long or too much memory fails, and the next one
is judged in a new process.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import plural
from batch_trajectories.export.rows.messages import EMPTY_THINK
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.templates.contexts import (
    LearntTurn,
    Message,
    ParityCounts,
    TrainerRow,
    read_trainer_row,
)
from batch_trajectories.export.templates.rendering import (
    Chat,
    Tokens,
    load_chat,
    openai_row_files,
    read_rows,
    template_text,
    tools_in,
)
from batch_trajectories.export.templates.template_names import ChatTemplate

# The search for options of an export with which a template trains on what inference saw.
#
# Rows are changed as the options would change them, and rendered again.

Change = Callable[[TrainerRow], Iterator[TrainerRow]]


class Remedy(NamedTuple):
    """Options of an export, and how they change a row."""

    options: tuple[str, ...]
    changes: tuple[Change, ...]

    def rows(self, row: TrainerRow) -> list[TrainerRow]:
        """The rows that one row becomes with these options."""
        rows = [row]
        for change in self.changes:
            rows = [after for before in rows for after in change(before)]
        return rows


_MAX_TRIED = 3
"""Number of rows on which all choices are tried, and of choices tried on the whole sample."""
NO_REMEDY = Remedy((), ())
_REASONING = ("reasoning_content", "reasoning", "thinking")


def find_remedy(chat: Chat, sample: Sequence[TrainerRow], *, is_cut: bool) -> Remedy:
    """The fewest options with which nothing differs in a sample of rows, else the best ones.

    `is_cut`: rows are already for single views or turns.
    """
    choices = [
        Remedy(options, changes)
        for options, changes in _choices(is_cut=is_cut)
        if not changes or any(_have_effect(changes, row) for row in sample[:_MAX_TRIED])
    ]
    bad = [_badness(_tally(chat, choice, sample[:_MAX_TRIED])) for choice in choices]
    order = sorted(range(len(choices)), key=lambda n: (bad[n], len(choices[n].options)))
    tallies = [(choices[n], _tally(chat, choices[n], sample)) for n in order[:_MAX_TRIED]]
    return min(tallies, key=lambda it: _badness(it[1]))[0]


def _choices(*, is_cut: bool) -> Iterator[tuple[tuple[str, ...], tuple[Change, ...]]]:
    """Combinations of options, each in the order in which an export applies them."""
    forms = [_subset(_FORMS, n) for n in range(1 << len(_FORMS))]
    for form, key in product(forms, ({}, *({name: _KEYS[name]} for name in _KEYS))):
        cuts = {} if is_cut else _INLINE_CUTS if _INLINE in key else _CUTS
        for cut, empty in product(({}, *({name: cuts[name]} for name in cuts)), ({}, _EMPTY)):
            chosen = {**form, **cut, **key, **empty}
            yield (*chosen,), (*chosen.values(),)


def _subset(choices: Mapping[str, Change], bits: int) -> Mapping[str, Change]:
    return {name: choices[name] for n, name in enumerate(choices) if bits >> n & 1}


def _have_effect(changes: Sequence[Change], row: TrainerRow) -> bool:
    """Whether each of the changes has an effect on a row."""
    for change in changes:
        rows = [*change(row)]
        if [one.messages for one in rows] == [row.messages]:
            return False
    return True


def _tally(chat: Chat, choice: Remedy, rows: Sequence[TrainerRow]) -> ParityCounts:
    tally = ParityCounts()
    for row in rows:
        tally.add(chat, choice.rows(row), lambda _: None)
    return tally


def _badness(tally: ParityCounts) -> tuple[float, ...]:
    """A sort key, lower is better: refused rows, then lost reasoning, then other contexts."""
    turns, with_reasoning = max(1, tally.turns), max(1, tally.with_reasoning)
    lost = tally.reasoning_lost / with_reasoning
    return (
        tally.refused.total() / max(1, tally.rows),
        lost,
        (tally.turns - tally.same) / turns,
    )


def _change_messages(row: TrainerRow, change: Callable[[Message], Message]) -> Iterator[TrainerRow]:
    """Change all messages of a row, also in the contexts of inference."""
    turns = [
        turn._replace(before=[change(message) for message in turn.before]) for turn in row.turns
    ]
    yield row._replace(messages=[change(message) for message in row.messages], turns=turns)


def _arguments_as_text(row: TrainerRow) -> Iterator[TrainerRow]:
    def change(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    return _change_messages(row, change)


def _split_calls(row: TrainerRow) -> Iterator[TrainerRow]:
    """Split turns into one call per turn, as `--parallel_calls split` does."""
    messages: list[Message] = []
    learnt = {turn.at: turn for turn in row.turns}
    turns: list[LearntTurn] = []
    for n, message in enumerate(row.messages):
        calls: list[Any] = message.get("tool_calls") or []
        answers = {}
        for result in row.messages[n + 1 :]:
            if result["role"] != "tool":
                break
            answers[result["tool_call_id"]] = result
        if message["role"] == "tool":
            continue
        parts: list[Message] = [message]
        if len(calls) > 1:
            first, *rest = calls
            parts = [{**message, "tool_calls": [first]}]
            parts += [{"role": "assistant", "content": "", "tool_calls": [one]} for one in rest]
        for number, part in enumerate(parts):
            if n in learnt:
                thought = learnt[n].reasoning if number == 0 else ""
                turns.append(LearntTurn(len(messages), [*messages], thought))
            messages.append(part)
            for call in part.get("tool_calls") or ():
                if call["id"] in answers:
                    messages.append(answers[call["id"]])
    yield row._replace(messages=messages, turns=turns)


def _template_option(key: str) -> Change:
    def change(message: Message) -> Message:
        if "reasoning_content" not in message:
            return message
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}
        return {**kept, key: message["reasoning_content"]}

    return lambda row: _change_messages(row, change)


def _inline(row: TrainerRow) -> Iterator[TrainerRow]:
    def change(message: Message) -> Message:
        if not (thought := message.get("reasoning_content")):
            return message
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}
        text = f"<think>\n{thought}\n</think>\n\n{message['content']}".rstrip()
        return {**kept, "content": text}

    return _change_messages(row, change)


def _call_text(row: TrainerRow) -> Iterator[TrainerRow]:
    def change(message: Message) -> Message:
        text = message.get("content")
        if not message.get("tool_calls") or not text:
            return message
        key = next((name for name in _REASONING if name in message), _REASONING[0])
        thought = "\n\n".join(filter(None, (message.get(key), text)))
        return {**message, "content": "", key: thought}

    for changed in _change_messages(row, change):
        turns = [
            turn._replace(reasoning=_find_reasoning(changed.messages[turn.at]))
            for turn in changed.turns
        ]
        yield changed._replace(turns=turns)


def _find_reasoning(message: Message) -> str:
    return next((message[key] for key in _REASONING if message.get(key)), "")


def _empty_think(row: TrainerRow) -> Iterator[TrainerRow]:
    def change(message: Message) -> Message:
        if message["role"] != "assistant" or _find_reasoning(message):
            return message
        text = message["content"]
        return message if "<think>" in text else {**message, "content": EMPTY_THINK + text}

    return _change_messages(row, change)


def _split_at_users(row: TrainerRow) -> Iterator[TrainerRow]:
    """Make a row for each user message, as `--segments --reasoning since_user` does."""
    asked = [n for n, message in enumerate(row.messages) if message["role"] == "user"]
    for begin, end in zip(asked, [*asked[1:], len(row.messages)], strict=True):
        turns = [turn for turn in row.turns if begin < turn.at < end]
        if turns:
            earlier = [_remove_reasoning(message) for message in row.messages[:begin]]
            last = turns[-1].at + 1
            yield row._replace(messages=[*earlier, *row.messages[begin:last]], turns=turns)


def _remove_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in _REASONING}


def _split_at_users_and_turns(row: TrainerRow) -> Iterator[TrainerRow]:
    return (one for part in _split_at_users(row) for one in _split_turns(part))


def _split_turns(row: TrainerRow) -> Iterator[TrainerRow]:
    for turn in row.turns:
        yield row._replace(messages=row.messages[: turn.at + 1], turns=[turn])


_FORMS: Mapping[str, Change] = {
    "--arguments text": _arguments_as_text,
    "--parallel_calls split": _split_calls,
    "--call_text reasoning": _call_text,
}
_INLINE = "--reasoning inline"
_KEYS: Mapping[str, Change] = {
    "--reasoning_key thinking": _template_option("thinking"),
    "--reasoning_key reasoning": _template_option("reasoning"),
    _INLINE: _inline,
}
_CUTS: Mapping[str, Change] = {
    "--segments --reasoning since_user": _split_at_users,
    "--per_turn --reasoning field": _split_turns,
}
_INLINE_CUTS: Mapping[str, Change] = {"--per_turn": _split_at_users_and_turns}
_EMPTY: Mapping[str, Change] = {"--empty_think text": _empty_think}


_RENDER_S = 10.0
"""Maximum CPU time for one row. Trainers render thousands of rows a minute."""
_STUCK_S = 60
"""CPU time after which the process is killed, if no signal handler could end a rendering."""
_SILENCE_S = 600.0
"""Seconds without a message after which the process counts as stuck."""
_ALIVE_EVERY_S = 1.0
"""The process sends a message at least this often while it renders."""
_MEMORY_BYTES = 2 << 30
_SAMPLE = 12
"""Number of differing rows by which options are chosen. The choice is then tried on all rows."""
_ROWS_AT_ONCE = 64
_MAX_IDS = 1000
"""Maximum number of ids of rows above the length in the manifest."""


class _TooLong(BaseException):
    """A row took too long. This ends the judgement, as the next row may take as long."""

    def __init__(self) -> None:
        super().__init__(f"the template took more than {_RENDER_S:g} s of CPU time for one row")


def check_parity_options(
    recipe: Recipe, templates: Sequence[ChatTemplate], max_length: int | None
) -> None:
    """Raise `ConfigError` if the rows of a recipe, or a template, cannot be judged."""
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


def judge_templates(
    directory: Path,
    manifest: Mapping[str, Any],
    templates: Sequence[ChatTemplate],
    *,
    max_length: int | None,
) -> list[dict[str, Any]]:
    """Judge the rows of `openai` in a dataset by each template; a dictionary each, for the
    manifest.

    Keys, besides those of `ParityCounts`:

    - `template`, `source`, `sha256`: the name, where it comes from ("" for a path), and the digest
      of the template's text
    - `mend`: the options with which nothing differs (null: none needed, or none found)
    - `tried`: the best options, if none remedy all differences
    - `mended`: the counts with the options of `mend` or `tried`
    - `left`: descriptions of the remaining differences
    - `masked_by_fit`: the turns that a recipe's `fit` would then mask
    - `is_proved`: whether nothing differs without further options
    - `lengths`: see `_Lengths`
    - `runs`: of a mix, the rows of each run, and those in which nothing differs (`same`)
    - `failed`: why the template could not be judged; then there is no other key but `is_proved`
    """
    total = sum(file["rows"] for file in openai_row_files(manifest))
    with LongWork("parity", total=total * len(templates)) as work:
        return [
            _judge_template(directory, manifest, one, max_length=max_length, work=work)
            for one in templates
        ]


def _judge_template(
    directory: Path,
    manifest: Mapping[str, Any],
    template: ChatTemplate,
    *,
    max_length: int | None,
    work: LongWork,
) -> dict[str, Any]:
    """Judge by one template, in a process of its own."""
    digest = hashlib.sha256(template_text(template.path).encode()).hexdigest()
    named = {"template": template.name, "source": template.source, "sha256": digest}
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_child,
        args=(theirs, directory, manifest, template),
        kwargs={"max_length": max_length},
        daemon=True,
    )
    child.start()
    theirs.close()
    failed = f"the template was silent for {_SILENCE_S:g} s"
    try:
        while ours.poll(_SILENCE_S):
            message = ours.recv()
            if isinstance(message, dict):
                return {**named, **message}
            work.advance(message)
    except EOFError:
        child.join()
        is_stuck = child.exitcode == -signal.SIGXCPU
        failed = str(_TooLong()) if is_stuck else "the process that rendered the template died"
    finally:
        child.kill()
        child.join()
        ours.close()
    return {**named, "failed": failed, "is_proved": False}


def _child(
    pipe: Connection,
    directory: Path,
    manifest: Mapping[str, Any],
    template: ChatTemplate,
    *,
    max_length: int | None,
) -> None:
    _bound_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _raise_too_long)
    try:
        chat = _BoundedChat(load_chat(template.path), pipe)
        dataset = _Dataset(directory, manifest, pipe)
        pipe.send(_judge_rows(chat, dataset, template.tokenizer, max_length=max_length))
    except (_TooLong, MemoryError, ConfigError) as error:
        pipe.send({"failed": str(error) or "the template took too much memory", "is_proved": False})


def _bound_memory() -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_cpu() -> None:
    """Let the process be killed unless this is called again within `_STUCK_S` of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + _STUCK_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _raise_too_long(*_: object) -> None:
    raise _TooLong


class _BoundedChat:
    """Renders with limits of time, and sends signs of life to the parent."""

    def __init__(self, render: Chat, pipe: Connection) -> None:
        self._render = render
        self._pipe = pipe
        self._sent_at = time.monotonic()

    def __call__(self, messages: Any, tools: Any, *, is_prompt: bool = False) -> str:
        """Render messages and tools. Raises `_TooLong`, and what the template raises."""
        if (now := time.monotonic()) - self._sent_at > _ALIVE_EVERY_S:
            self._sent_at = now
            self._pipe.send(0)
        _bound_cpu()
        signal.setitimer(signal.ITIMER_PROF, _RENDER_S)
        try:
            return self._render(messages, tools, is_prompt=is_prompt)
        except RecursionError as error:
            raise ValueError("too deep") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


class _Dataset:
    """Reads the rows of a dataset, and tells the parent how many there were."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any], pipe: Connection) -> None:
        self._directory = directory
        self.manifest = manifest
        self._pipe = pipe

    def rows(self, *, counts: bool = True) -> Iterator[tuple[Mapping[str, Any], TrainerRow]]:
        """The rows, each also as a trainer gets it; `counts`: whether they advance the progress."""
        key = self.manifest["recipe"]["reasoning_key"]
        rows = read_rows(self._directory, self.manifest)
        while block := list(islice(rows, _ROWS_AT_ONCE)):
            for row in block:
                yield row, read_trainer_row(row, tools_in(row), key)
            self._pipe.send(len(block) if counts else 0)


def _judge_rows(
    chat: Chat, dataset: _Dataset, tokenizer: Path | None, *, max_length: int | None
) -> dict[str, Any]:
    recipe = dataset.manifest["recipe"]
    lengths = None if tokenizer is None else _Lengths(tokenizer, max_length)
    tally, sample = ParityCounts(), list[TrainerRow]()
    by_run: dict[str, dict[str, int]] = {}
    for row, shown in dataset.rows():
        texts: list[str] = []
        is_same = tally.add(chat, [shown], texts.append)
        if not is_same and len(sample) < _SAMPLE:
            sample.append(shown)
        if "runs" in dataset.manifest:
            counts = by_run.setdefault(json.loads(row["metadata"])["run"], {"rows": 0, "same": 0})
            counts["rows"] += 1
            counts["same"] += is_same
        if lengths is not None:
            for text in texts:
                lengths.add(row["id"], text)
    remedy, remedied = NO_REMEDY, tally
    if sample:
        remedy = find_remedy(chat, sample, is_cut=recipe["per_turn"] or recipe["segments"])
        if remedy.options:
            remedied = ParityCounts()
            for _, shown in dataset.rows(counts=False):
                remedied.add(chat, remedy.rows(shown), lambda _: None)
    is_better = remedied.is_clean and remedy.options
    return {
        **tally.to_json(),
        "mend": " ".join(remedy.options) if is_better else None,
        "mended": remedied.to_json() if remedy.options else None,
        "tried": " ".join(remedy.options) if remedy.options and not is_better else None,
        "left": [*remedied.describe_differences()],
        "masked_by_fit": remedied.turns - remedied.same,
        "is_proved": tally.is_clean,
        "lengths": None if lengths is None else lengths.to_json(),
        **({"runs": dict(sorted(by_run.items()))} if by_run else {}),
    }


class _Lengths:
    """The lengths of rows in tokens of the model that is trained."""

    def __init__(self, tokenizer: Path, max_length: int | None) -> None:
        self._tokens = Tokens(tokenizer)
        self._max_length = max_length
        self._lengths: list[int] = []
        self._above: list[str] = []

    def add(self, id: str, text: str) -> None:
        """Count the tokens of a row."""
        length = self._tokens.count(text)
        self._lengths.append(length)
        if self._max_length is not None and length > self._max_length:
            self._above.append(id)

    def to_json(self) -> dict[str, Any]:
        """Percentiles; with a maximum length also the number and ids of rows above it."""
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
                "rows_above": self._above[:_MAX_IDS],
            }
        return found


def describe_judgements(judged: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe the result of each template, a line or more for each."""
    for one in judged:
        name = one["template"]
        if failed := one.get("failed"):
            yield f"{name}: not judged: {failed}"
            continue
        refused = sum(one["refused"].values())
        facts = [f"{one['same']:,} of {plural(one['turns'], 'turn')} in the context of inference"]
        if one["with_reasoning"]:
            facts.append(f"{one['reasoning_lost']:,} of {one['with_reasoning']:,} lose reasoning")
        if refused:
            why = max(one["refused"], key=one["refused"].__getitem__)
            facts.append(f"{plural(refused, 'row')} refused ({why})")
        if one["stop_token"] != "unknown":
            facts.append(f"stop token {one['stop_token']}")
        yield f"{name}: {'; '.join(facts)}"
        if one["source"]:
            yield f"  its template: {one['source']}, SHA-256 {one['sha256'][:12]}"
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
