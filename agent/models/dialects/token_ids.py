"""Token ids and log-probabilities of the chat dialect: how they are asked for, and where they come.

vLLM has `prompt_token_ids` in the reply, or in the first part of a stream, and `token_ids` in the
choice. SGLang has both in the choice, the reply's as `meta_info.output_token_logprobs`, and refuses
them in streams. Others have at most log-probabilities, beside the texts of the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent.models.model import Completion, ModelSettings
from agent.models.parsing import object_of
from agent.models.providers import provider_at
from agent.tokens import Sampled, pack_ids, pack_logprobs

FIELDS = (
    *("logprobs", "top_logprobs"),
    *("return_token_ids", "return_meta_info", "return_prompt_token_ids"),
)
"""All that a request may hold for them."""


_OF_TOKEN = frozenset({"token", "logprob", "bytes", "top_logprobs"})


def request_fields(settings: ModelSettings, *, streams: bool) -> dict[str, Any]:
    """What a request asks with; providers are asked only for what OpenAI's API has."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 0}
    if provider_at(settings.base_url or "") is not None:
        return fields
    server = settings.reference.partition(":")[0]
    if server != "sglang":
        fields["return_token_ids"] = True
    if server != "vllm" and not streams:
        fields |= {"return_meta_info": True, "return_prompt_token_ids": True}
    return fields


def with_tokens(completion: Completion) -> Completion:
    """The completion with the tokens of its `extra` packed as `tokens`.

    What cannot be packed without loss stays in `extra` as it came.
    """
    extra = completion.extra or {}
    reply, choice = dict(extra.get("reply", {})), dict(extra.get("choice", {}))
    prompt = _take_ids(reply, "prompt_token_ids")
    prompt = _take_ids(choice, "prompt_token_ids", prompt) or prompt
    sampled = _take_meta_info(choice)
    ids = _take_ids(choice, "token_ids", sampled.completion)
    if sampled.completion is None:
        sampled = sampled._replace(completion=ids)
    sampled = _take_logprobs(choice, sampled)._replace(prompt=prompt)
    if sampled == Sampled():
        return completion
    rest = {**extra, "reply": reply, "choice": choice}
    kept = {place: fields for place, fields in rest.items() if fields}
    return replace(completion, tokens=sampled, extra=kept or None)


def _take_ids(fields: dict[str, Any], key: str, known: bytes | None = None) -> bytes | None:
    """Move a list of ids out of `fields`; None, and nothing is moved, if there is none.

    Nor is one moved that differs from the `known` ids of the same tokens.
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


def _take_meta_info(choice: dict[str, Any]) -> Sampled:
    """Move [log-probability, id, text or null] for each token out of SGLang's `meta_info`."""
    meta = object_of(choice, "meta_info")
    listed = meta.get("output_token_logprobs")
    if not isinstance(listed, list) or not listed:
        return Sampled()
    try:
        sampled = Sampled(
            completion=pack_ids([token[1] for token in listed]),
            logprobs=pack_logprobs([token[0] for token in listed]),
        )
    except (struct.error, OverflowError, TypeError, LookupError):
        return Sampled()
    if rest := {key: value for key, value in meta.items() if key != "output_token_logprobs"}:
        choice["meta_info"] = rest
    else:
        del choice["meta_info"]
    return sampled


def _take_logprobs(choice: dict[str, Any], sampled: Sampled) -> Sampled:
    """Move the choice's `logprobs` into `sampled`, unless they say more than it can hold."""
    logprobs, ids = choice.get("logprobs"), sampled.completion
    if not isinstance(logprobs, dict):
        return sampled
    content = logprobs.get("content")
    if not isinstance(content, list) or any(logprobs[key] for key in logprobs if key != "content"):
        return sampled
    try:
        if not all(_is_held(token, has_ids=ids is not None) for token in content):
            return sampled
        packed = pack_logprobs([token["logprob"] for token in content])
    except (struct.error, OverflowError, TypeError, AttributeError, LookupError):
        return sampled
    has_others = ids is not None and len(ids) != len(packed)
    if has_others or sampled.logprobs not in (None, packed):
        return sampled
    del choice["logprobs"]
    texts = [token["token"] for token in content] if ids is None else None
    return sampled._replace(logprobs=packed, texts=texts)


def _is_held(token: Mapping[str, Any], *, has_ids: bool) -> bool:
    """Whether log-probability and id, or text, are all that an entry says."""
    if not token.keys() <= _OF_TOKEN or token.get("top_logprobs"):
        return False
    if has_ids:
        return True
    text = token["token"]
    return isinstance(text, str) and token.get("bytes") in (None, list(text.encode()))
