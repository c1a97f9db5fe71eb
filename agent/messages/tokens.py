"""Token ids and log-probabilities as they were sampled, in the compact form of records.

Ids are little-endian unsigned 32-bit integers and log-probabilities 32-bit floats, both as base64:
readers that do not need them parse one text and no numbers. Of a prompt only the tokens are stored
that it adds to the turn before, because each turn repeats the whole conversation.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from agent.messages.message import TurnTokens

ID_BYTES = 4

_EXCERPT_TOKENS = 4
"""The number of tokens that are shown, as text, at the place where two sequences differ."""

GRAMMAR = ("tool_choice", "response_format", "structured_outputs", "regex", "ebnf")
"""Fields of a request that allow only some tokens at each place."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    *GRAMMAR,
)
"""Fields of a request that change which tokens are likely, as OpenAI, vLLM and SGLang call them."""


class SampledTokens(NamedTuple):
    """The tokens of one reply as its endpoint gave them, packed; None for parts that it did not."""

    prompt: bytes | None = None
    """Ids of the prompt."""
    completion: bytes | None = None
    """Ids of the reply, with the token that ended it if the endpoint lists that token."""
    logprobs: bytes | None = None
    """Log-probabilities, one per token of the reply."""
    texts: list[str] | None = None
    """The tokens of the reply as texts, from an endpoint that gives no ids."""


class TokenTurn(NamedTuple):
    """A turn with token ids, unpacked; see `token_turns`."""

    number: int
    """Index among the turns of the conversation."""
    shared: int
    """The number of tokens, from the start, shared with the latest turn that has ids."""
    previous_length: int
    """The length of that turn, prompt and completion together.

    If `shared` is less, the prompt does not begin with that turn.
    """
    prompt: list[int]
    """Ids of the prompt after the shared tokens."""
    completion: list[int]
    logprobs: list[float] | None


def pack_ids(ids: Sequence[Any]) -> bytes:
    """Pack ids. Raises `struct.error` for a value that is no id."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Unpack ids that `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // ID_BYTES}I", packed)


def pack_logprobs(values: Sequence[Any]) -> bytes:
    """Pack log-probabilities. Raises `struct.error` or `OverflowError` for any other value."""
    return struct.pack(f"<{len(values)}f", *values)


def sampling_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that change how likely tokens are; objects and lists become true."""
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    return {
        name: True if isinstance(value, dict | list) else value for name, value in given.items()
    }


def encode_tokens(
    sampled: SampledTokens,
    turns: Iterable[Mapping[str, Any]],
    token_texts: Mapping[int, str] = MappingProxyType({}),
) -> TurnTokens:
    """Encode the tokens of a reply as its event holds them; `turns` are the turns before it.

    `token_texts` are the texts of ids that are known.
    """
    stored = TurnTokens()
    if sampled.prompt is not None:
        before = _last_sequence(turns)
        shared = _shared_length(before, sampled.prompt)
        stored["shared"] = shared
        stored["prompt"] = _encode(sampled.prompt[ID_BYTES * shared :])
        if token_texts and ID_BYTES * shared < len(before):
            stored["split"] = {
                "sampled": _show_tokens(before, shared, token_texts),
                "shown": _show_tokens(sampled.prompt, shared, token_texts),
            }
    if sampled.completion is not None:
        stored["completion"] = _encode(sampled.completion)
    if sampled.logprobs is not None:
        stored["logprobs"] = _encode(sampled.logprobs)
    if sampled.texts is not None:
        stored["texts"] = sampled.texts
    return stored


def rebase_tokens(
    chain: Sequence[Mapping[str, Any]], turns: Iterable[Mapping[str, Any]]
) -> TurnTokens:
    """Encode the tokens of the last turn of `chain` again, now relative to `turns`."""
    last: TurnTokens = chain[-1]["tokens"]
    sequence = _last_sequence(chain)
    prompt = sequence[: len(sequence) - len(b64decode(last["completion"]))]
    stored = encode_tokens(SampledTokens(prompt=prompt), turns)
    return {**last, **stored}


def has_ids(turn: Mapping[str, Any]) -> bool:
    """Whether a turn has the ids of both its prompt and its completion."""
    tokens = turn.get("tokens")
    return tokens is not None and "prompt" in tokens and "completion" in tokens


def has_outer_newlines(text: str) -> bool:
    """Whether a text begins or ends with a newline."""
    return "\n" in (text[:1], text[-1:])


def trimmed_replies(replies: Sequence[str]) -> int:
    """Count the replies that a later request repeats without the newlines around them."""
    return sum(map(has_outer_newlines, replies[:-1]))


def missing_token_data(turn: Mapping[str, Any]) -> str:
    """The data that a turn lacks for reinforcement learning, as a text; "" if it has all."""
    tokens = turn.get("tokens") or {}
    names = {"prompt": "prompt token ids", "completion": "token ids", "logprobs": "logprobs"}
    return ", ".join(label for key, label in names.items() if key not in tokens)


class StoredIds(Protocol):
    """The tokens of a turn as a record has them; see `TurnTokens`."""

    shared: int
    prompt: str | None
    completion: str | None
    logprobs: str | None


def token_turns(turns: Iterable[StoredIds | None]) -> Iterator[TokenTurn]:
    """Decode the tokens of a conversation's turns, in order; turns without token ids are skipped.

    Raises `ValueError` for tokens that this module did not write.
    """
    length = 0
    for number, tokens in enumerate(turns):
        if tokens is None or tokens.prompt is None or tokens.completion is None:
            continue
        shared = tokens.shared
        prompt = _decode("I", tokens.prompt)
        completion = _decode("I", tokens.completion)
        logprobs = None if tokens.logprobs is None else _decode("f", tokens.logprobs)
        fits = logprobs is None or len(logprobs) == len(completion)
        if not fits or not 0 <= shared <= length:
            raise ValueError(f"turn {number + 1}: the lengths of its tokens do not fit")
        yield TokenTurn(
            number=number,
            shared=shared,
            previous_length=length,
            prompt=prompt,
            completion=completion,
            logprobs=logprobs,
        )
        length = shared + len(prompt) + len(completion)


def _last_sequence(turns: Iterable[Mapping[str, Any]]) -> bytes:
    """Prompt and completion of the last turn with ids."""
    sequence = bytearray()
    for turn in turns:
        if has_ids(turn):
            tokens: TurnTokens = turn["tokens"]
            del sequence[ID_BYTES * tokens["shared"] :]
            sequence += b64decode(tokens["prompt"])
            sequence += b64decode(tokens["completion"])
    return bytes(sequence)


def _shared_length(before: bytes, prompt: bytes) -> int:
    """The length of the common beginning of two sequences of ids."""
    if prompt.startswith(before):
        return len(before) // ID_BYTES
    low, high = 0, min(len(before), len(prompt)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if before[: ID_BYTES * middle] == prompt[: ID_BYTES * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _show_tokens(sequence: bytes, place: int, texts: Mapping[int, str]) -> str:
    """A few tokens as text, from index `place` on; an unknown token is its id in brackets."""
    part = sequence[ID_BYTES * place : ID_BYTES * (place + _EXCERPT_TOKENS)]
    return "".join(texts.get(id, f"[{id}]") for id in unpack_ids(part))


def _encode(packed: bytes) -> str:
    return b64encode(packed).decode()


def _decode(form: str, text: str) -> list[Any]:
    packed = b64decode(text, validate=True)
    count, rest = divmod(len(packed), ID_BYTES)
    if rest:
        raise ValueError(f"{len(packed)} bytes are not a whole number of tokens")
    return list(struct.unpack(f"<{count}{form}", packed))
