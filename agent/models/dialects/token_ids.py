"""Asks for token ids and log-probabilities in the chat dialect, and takes them out of replies.

vLLM has `prompt_token_ids` in the reply, or in the first part of a stream, and `token_ids` in the
choice. SGLang has both in the choice, the reply's as `meta_info.output_token_logprobs`, and refuses
them in streams: a stream that another program asks SGLang for is requested in one piece. Other
servers have at most log-probabilities, beside the texts of the tokens.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.messages.tokens import (
    SampledTokens,
    has_outer_newlines,
    pack_ids,
    pack_logprobs,
    sampling_fields,
    unpack_ids,
)
from agent.models.model import Completion, ModelSettings
from agent.models.parsing import get_object
from agent.models.providers import find_provider
from batch_trajectories.basics import exact_json

FIELDS = (
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_meta_info",
    "return_prompt_token_ids",
)
"""All fields of a request that ask for token ids or log-probabilities."""

_ID_FIELDS = ("return_token_ids", "return_meta_info", "return_prompt_token_ids")

_ASKING_FIELDS = {
    "prompt_token_ids": ("return_token_ids", "return_prompt_token_ids"),
    "token_ids": ("return_token_ids",),
    "meta_info": ("return_meta_info",),
    "logprobs": ("logprobs",),
}
"""Fields of replies, each with the fields of requests that ask for it."""

_TOKEN_TEXTS: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
"""Texts of tokens by id, for each (endpoint, model); never larger than the vocabularies."""

_TOKEN_FIELDS = frozenset({"token", "logprob", "bytes", "top_logprobs"})
"""The fields of a token in the `logprobs` of a choice."""

_SGLANG = "sglang"


def _server_kind(settings: ModelSettings) -> str:
    return settings.reference.partition(":")[0]


def request_fields(settings: ModelSettings, *, streams: bool) -> dict[str, Any]:
    """The fields that ask for tokens; known providers get only the fields of OpenAI's API."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 0}
    if find_provider(settings.base_url or "") is not None:
        return fields
    server = _server_kind(settings)
    if server != _SGLANG:
        fields["return_token_ids"] = True
    if server != "vllm" and not streams:
        fields |= {"return_meta_info": True, "return_prompt_token_ids": True}
    return fields


def trim_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Remove the newlines around the texts of assistants from the messages of a request."""
    # Parsers of vLLM leave the newlines between thought, text and calls in the text, and templates
    # write newlines, too. With both, the prompt would differ from the tokens that were sampled.
    return [
        {**message, "content": _trim(message)} if _is_trimmed(message) else message
        for message in messages
    ]


def _is_trimmed(message: Mapping[str, Any]) -> bool:
    content = message.get("content") if message.get("role") == "assistant" else None
    return isinstance(content, str) and has_outer_newlines(content)


def _trim(message: Mapping[str, Any]) -> str | None:
    text = str(message["content"]).strip("\n")
    return text if text or not message.get("tool_calls") else None


def asks_for_ids(body: Mapping[str, Any]) -> bool:
    """Whether the body of a request asks for token ids."""
    return any(body.get(name) for name in _ID_FIELDS)


def add_token_request(settings: ModelSettings, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make the body of another program's request ask for tokens; fields that it has win."""
    streams = bool(body.get("stream")) and _server_kind(settings) != _SGLANG
    fields = request_fields(settings, streams=streams)
    missing = {name: value for name, value in fields.items() if not body.get(name)}
    asking = {**body, **missing, "messages": trim_messages(body["messages"])}
    if not streams:
        asking = {key: asking[key] for key in asking.keys() - {"stream", "stream_options"}}
    return asking


def remove_tokens(reply: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the tokens that `request` did not ask for from the body of a reply."""
    hidden = {field for field, asks in _ASKING_FIELDS.items() if not any(map(request.get, asks))}
    fields = {key: value for key, value in reply.items() if key not in hidden}
    if isinstance(choices := reply.get("choices"), list):
        fields["choices"] = [
            {key: value for key, value in choice.items() if key not in hidden}
            if isinstance(choice, dict)
            else choice
            for choice in choices
        ]
    return fields


def remove_tokens_from_event(event: bytes, data: str, request: Mapping[str, Any]) -> bytes:
    """Remove the tokens that `request` did not ask for from an event with the text `data`."""
    if not any(f'"{field}"' in data for field in _ASKING_FIELDS):
        return event
    part = exact_json.loads_part(data)
    if not isinstance(part, dict) or (rest := remove_tokens(part, request)) == part:
        return event
    return b"data: " + json.dumps(rest).encode() + b"\n\n"  # halves of emojis stay escaped


def take_tokens(
    completion: Completion, settings: ModelSettings, request: Mapping[str, Any] | None = None
) -> Completion:
    """Move the tokens in a completion's `extra` to `tokens`, packed.

    Data that cannot be packed without loss stays in `extra`. `request` is the body of the request;
    None if it is not at hand.
    """
    extra = completion.extra or {}
    reply, choice = dict(extra.get("reply", {})), dict(extra.get("choice", {}))
    prompt = _take_ids(reply, "prompt_token_ids")
    prompt = _take_ids(choice, "prompt_token_ids", prompt) or prompt
    sampled = _take_meta_info(choice)
    ids = _take_ids(choice, "token_ids", sampled.completion)
    if sampled.completion is None:
        sampled = sampled._replace(completion=ids)
    texts = _TOKEN_TEXTS[settings.endpoint, settings.name]
    sampled = _take_logprobs(choice, sampled, texts)._replace(prompt=prompt)
    if sampled == SampledTokens():
        return completion
    rest = {**extra, "reply": reply, "choice": choice}
    remaining = {place: fields for place, fields in rest.items() if fields}
    return replace(
        completion,
        tokens=sampled,
        token_texts=texts,
        sampling=None if request is None else sampling_fields(request),
        extra=remaining or None,
    )


def _take_ids(fields: dict[str, Any], key: str, known: bytes | None = None) -> bytes | None:
    """Move a list of ids out of `fields`; None, and nothing is moved, if there is none.

    A list that differs from `known`, the ids of the same tokens, is not moved either.
    """
    ids = fields.get(key)
    if not isinstance(ids, list):
        return None
    try:
        packed = pack_ids(ids)
    except struct.error:
        return None
    if known not in (None, packed):
        return None
    del fields[key]
    return packed


def _take_meta_info(choice: dict[str, Any]) -> SampledTokens:
    """Move the tokens out of SGLang's `meta_info`: [log-probability, id, text or null] for each."""
    meta = get_object(choice, "meta_info")
    listed = meta.get("output_token_logprobs")
    if not isinstance(listed, list) or not listed:
        return SampledTokens()
    try:
        sampled = SampledTokens(
            completion=pack_ids([token[1] for token in listed]),
            logprobs=pack_logprobs([token[0] for token in listed]),
        )
    except (struct.error, OverflowError, TypeError, LookupError):
        return SampledTokens()
    if rest := {key: value for key, value in meta.items() if key != "output_token_logprobs"}:
        choice["meta_info"] = rest
    else:
        del choice["meta_info"]
    return sampled


def _take_logprobs(
    choice: dict[str, Any], sampled: SampledTokens, texts: dict[int, str]
) -> SampledTokens:
    """Copy the choice's `logprobs` to `sampled`; remove them if nothing in them would be lost.

    Texts of tokens that have ids are added to `texts`.
    """
    logprobs, ids = choice.get("logprobs"), sampled.completion
    if not isinstance(logprobs, dict):
        return sampled
    content = logprobs.get("content")
    if not isinstance(content, list) or any(logprobs[key] for key in logprobs if key != "content"):
        return sampled
    try:
        packed = pack_logprobs([token["logprob"] for token in content])
        token_texts = [token["token"] for token in content]
        is_lossless = all(_packs_without_loss(token, has_ids=ids is not None) for token in content)
    except (struct.error, OverflowError, TypeError, AttributeError, LookupError):
        return sampled
    has_other_tokens = ids is not None and len(ids) != len(packed)
    if has_other_tokens or sampled.logprobs not in (None, packed):
        return sampled
    if not all(isinstance(text, str) for text in token_texts):
        return sampled
    if is_lossless:
        del choice["logprobs"]
    if ids is not None:
        texts.update(zip(unpack_ids(ids), token_texts, strict=True))
    return sampled._replace(logprobs=packed, texts=token_texts if ids is None else None)


def _packs_without_loss(token: Mapping[str, Any], *, has_ids: bool) -> bool:
    """Whether an entry has no more data than a log-probability and an id or a text."""
    if not token.keys() <= _TOKEN_FIELDS or token.get("top_logprobs"):
        return False
    if has_ids:
        return True
    text = str(token["token"])
    return token.get("bytes") in (None, list(text.encode()))
