"""What the fake endpoint is asked and answers, in the words of no dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from tests.fakes.fake_faults import CALL_FAULTS, FAULTS, STREAM_FAULTS
from tests.fakes.fake_tokens import BETWEEN, STYLES, Template

JSON = dict[str, Any]
Key = tuple[str, int]
"""A conversation and the number of a reply in it, from 1."""

BROKEN_ARGUMENTS = '{"cut": "'
_ARGUMENTS = {
    "bad_arguments": BROKEN_ARGUMENTS,
    "list_arguments": '["a"]',
    "null_arguments": "null",
}
_ENDINGS = {
    "length": "length",
    "refusal": "refusal",
    "pause": "pause_turn",
    "context_stop": "model_context_window_exceeded",
}
"""Faults that end a reply before its calls, and the finish of each."""

_MANY = 500


def _option(parse: Callable[[str], Any], default: Any, text: str) -> Any:
    return field(default=default, metadata={"type": parse, "help": text})


def _fault(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition(":")
    return kind, float(rate)


@dataclass(kw_only=True)
class Options:
    """How the endpoint plays; every field is an option of the command line too."""

    port: int = _option(int, 0, "port on 127.0.0.1; 0 takes a free one")
    latency_s: float = _option(float, 0.2, "time from request to reply")
    turns: int | None = _option(int, None, "replies per conversation (5, or 1 without tools)")
    tool: str | None = _option(str, None, "tool to call (the first one offered)")
    arguments: str = _option(str, "{}", "JSON object; {turn}, {conversation} are replaced in it")
    calls_per_turn: int = _option(int, 1, "tool calls in every reply but the last")
    reasoning_chars: int = _option(int, 0, "length of the reasoning in each reply")
    text_chars: int = _option(int, 200, "length of the final text")
    capacity: int | None = _option(int, None, "requests in flight beyond which it answers 429")
    answers: int | None = _option(int, None, "requests that get a reply; the rest waits")
    journal_path: str | None = _option(str, None, "file that events are appended to")
    key: str | None = _option(str, None, "API key that requests must carry")
    tokens: str | None = _option(str, None, "give token ids as this does: vllm, sglang, openai")
    strip_reasoning: int = _option(int, 0, "1: prompts have no reasoning of earlier replies")
    outer_newlines: int = _option(int, 0, "1: texts keep the newlines that templates write, too")
    cache_tokens: int | None = _option(int, None, "tokens of prompts that its cache keeps")
    seed: int = _option(int, 0, "seed of the faults")
    faults: Mapping[str, float] = field(
        default_factory=dict,
        metadata={"type": _fault, "action": "append", "help": "KIND:RATE, of " + ", ".join(FAULTS)},
    )

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {', '.join(FAULTS)}")
        if self.tokens not in (None, *STYLES):
            raise ValueError(f"unknown tokens {self.tokens!r}; known are {', '.join(STYLES)}")
        # One draw decides between all kinds, so that each keeps exactly its rate.
        if min(self.faults.values(), default=0) < 0 or sum(self.faults.values()) > 1 + 1e-9:
            raise ValueError("fault rates must not be negative, nor above 1 in sum")
        if not isinstance(orjson.loads(self.arguments), dict):
            raise ValueError("arguments must be a JSON object")


class Reply(NamedTuple):
    """One reply of the model, before a dialect puts it into its words."""

    key: Key
    model: str
    thought: str
    text: str
    calls: list[JSON]
    """Each with `id` (None where it is missing), `name` and `arguments`; these are text."""
    finish: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class BaseUrls:
    """Where clients find an endpoint on the loopback interface."""

    port: int

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL for Anthropic clients."""
        return f"http://127.0.0.1:{self.port}"


class Dialect(NamedTuple):
    """How one API speaks."""

    opening: Callable[[JSON], tuple[str, int]]
    """The first words of the user in a request, and how many replies came since."""
    breach: Callable[[JSON, str, Options], str | None]
    """What the API would refuse about a request's messages."""
    body: Callable[[Reply], JSON]
    events: Callable[[JSON, JSON], list[bytes]]
    """A reply body and its request as the events of a stream."""
    error: Callable[[int, str], JSON]
    """The body of an error."""
    error_event: Callable[[JSON], bytes]
    """The event of a stream that reports an error."""
    quota: tuple[int, JSON]
    """Status and body that say that nothing is left to pay with."""
    too_long: str
    hollow: JSON
    """What a reply body says where it says nothing."""
    lacks: frozenset[str]
    """Faults that it has no words for."""


class Ask(NamedTuple):
    """One accepted request."""

    dialect: Dialect
    request: JSON
    key: Key
    chars: int
    has_calls: bool
    fault: str | None
    tokens: str | None
    """As whom it gives token ids; see `tests.fakes.fake_tokens`."""
    template: Template
    cached_tokens: int | None = None
    """Of its first tokens so many were in the cache, if there is one."""


def draw(ask: Ask, attempt: int, options: Options) -> Ask:
    """Decide on the fault of a request: the same in every run, however requests interleave."""
    if ask.fault:
        return ask._replace(fault=ask.fault if _is_in_place(ask.fault, ask) else None)
    if not options.faults:
        return ask
    point = int(digest(f"{options.seed}/{ask.key}/{attempt}", 6), 16) / 2**48
    for kind, rate in options.faults.items():
        point -= rate
        if point < 0:
            return ask._replace(fault=kind if _is_in_place(kind, ask) else None)
    return ask


def _is_in_place(kind: str, ask: Ask) -> bool:
    """Whether an answer to this can have such a fault."""
    if kind in ask.dialect.lacks or (kind in STREAM_FAULTS and not ask.request.get("stream")):
        return False
    if kind in CALL_FAULTS:
        return ask.has_calls
    return kind != "empty_text" or not ask.has_calls


def play(ask: Ask, options: Options) -> Reply:
    """The reply that is due at this point of the conversation."""
    turn, fault = ask.key[1], ask.fault or ""
    calls = _calls(ask, options) if ask.has_calls and fault not in _ENDINGS else []
    chars = 0 if calls or fault == "empty_text" else options.text_chars
    text, thought = _filler("Answer", ask.key, chars), thought_of(options, ask.key)
    if options.outer_newlines:
        text = f"{BETWEEN}{text}"
    finish = _ENDINGS.get(fault, "tool_calls" if calls else "stop")
    guessed = ask.chars // 5 if turn > 1 else 0
    said = sum(len(call["arguments"]) for call in calls) + len(text) + len(thought)
    return Reply(
        key=ask.key,
        model=str(ask.request.get("model")),
        thought=thought,
        text=text,
        calls=calls,
        finish=None if fault == "no_finish" else finish,
        input_tokens=ask.chars // 4,
        cached_tokens=cached if (cached := ask.cached_tokens) is not None else guessed,
        output_tokens=said // 4 + 1,
    )


def _calls(ask: Ask, options: Options) -> list[JSON]:
    (conversation, turn), fault = ask.key, ask.fault or ""
    tools = ask.request.get("tools") or [{"name": "tool"}]
    name = options.tool or tools[0].get("function", tools[0])["name"]
    name = {"unknown_tool": "no_such_tool", "empty_name": ""}.get(fault, name)
    arguments = options.arguments.replace("{turn}", "1" if fault == "repeated_call" else str(turn))
    arguments = arguments.replace("{conversation}", conversation)
    if fault == "wrong_types":
        arguments = orjson.dumps({name: [1] for name in orjson.loads(arguments)}).decode()
    count = {"many_calls": _MANY, "duplicate_ids": 2}.get(fault, options.calls_per_turn)
    numbers = [0] * count if fault == "duplicate_ids" else range(count)
    return [
        {
            "id": None if fault == "missing_id" else f"{conversation}_{turn}_{n}",
            "name": name,
            "arguments": _ARGUMENTS.get(fault, arguments),
        }
        for n in numbers
    ]


def thought_of(options: Options, key: Key) -> str:
    """The reasoning of a reply."""
    return _filler("Thought", key, options.reasoning_chars)


def digest(text: str, size: int) -> str:
    """A short text that stands for `text`."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


def _filler(word: str, key: Key, chars: int) -> str:
    sentence = "{} {} of conversation {}. ".format(word, *reversed(key))
    return (sentence * (chars // len(sentence) + 1))[:chars]
