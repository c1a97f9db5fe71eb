"""Token ids and log-probabilities of the fake endpoint, as vLLM, SGLang and OpenAI give them.

A toy tokenizer and a toy chat template: a piece of text is always the same id, and each message is
rendered on its own, so a prompt begins with all that was sampled before. With `strip_reasoning` the
template leaves out the reasoning of earlier replies, as those of many models do, and it does not.
With `outer_newlines` the template writes newlines between thought and text, and replies keep those
that the model wrote there in their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args
from zlib import crc32

Style = Literal["vllm", "sglang", "openai"]
STYLES = get_args(Style)

WEIGHTS = "7"
"""The version of the weights that SGLang names."""

_PIECES = re.compile(r"<\|\w+\|>|\s*\w+|[^\w]")

_WORDS = 150_000

_BEGIN, _END = "<|begin|>", "<|end|>"


BETWEEN = "\n\n"
"""What a template writes between thought and text."""


class Template(NamedTuple):
    """What the template of the fake model does; see above."""

    strips: bool = False
    newlines: bool = False


def ids_of(text: str) -> list[int]:
    """The ids of a text."""
    return [crc32(piece.encode(errors="surrogatepass")) % _WORDS for piece in _PIECES.findall(text)]


def logprob_of(id: int) -> float:
    """The same for all places of a token; a 32-bit float holds it exactly."""
    return -(id % 1000) / 256


def refusal(request: Mapping[str, Any], style: str | None) -> str | None:
    """What a server of this kind says of a request that it refuses."""
    if style != "sglang" or not request.get("stream"):
        return None
    for field in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
        if request.get(field):
            return f"{field} is not supported with streaming. Please set stream=false."
    return None


def add_tokens(
    body: dict[str, Any], request: Mapping[str, Any], style: str | None, template: Template
) -> None:
    """Give a body of the chat dialect the tokens that its request asks for."""
    if style is None:
        return
    choice = body["choices"][0]
    texts = _PIECES.findall(_said(choice["message"], is_earlier=False, template=template) + _END)
    ids = [ids_of(text)[0] for text in texts]
    prompt = [*_prompt(request, template)]
    if request.get("logprobs"):
        choice["logprobs"] = {
            "content": [
                {
                    "token": text,
                    "logprob": logprob_of(id),
                    "bytes": [*text.encode()],
                    "top_logprobs": [],
                }
                for text, id in zip(texts, ids, strict=True)
            ]
        }
    if style == "vllm" and request.get("return_token_ids"):
        body["prompt_token_ids"] = prompt
        choice["token_ids"] = ids
    if style == "sglang" and request.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = prompt
    if style == "sglang" and request.get("return_meta_info"):
        choice["meta_info"] = {
            "output_token_logprobs": [[logprob_of(id), id, None] for id in ids],
            "weight_version": WEIGHTS,
        }


def in_parts(choice: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """The tokens of a choice in `count` parts, to be streamed."""
    ids = choice.get("token_ids", [])
    content = (choice.get("logprobs") or {}).get("content", [])
    size = -(-max(len(ids), len(content)) // count)
    for first in range(0, count * size, size) if size else [0] * count:
        part: dict[str, Any] = {}
        if ids:
            part["token_ids"] = ids[first : first + size]
        if content:
            part["logprobs"] = {"content": content[first : first + size]}
        yield part


def _prompt(request: Mapping[str, Any], template: Template) -> Iterator[int]:
    for message in request["messages"]:
        yield from ids_of(f"{_BEGIN}{message['role']}\n")
        if message["role"] == "assistant":
            yield from ids_of(_said(message, is_earlier=True, template=template))
        else:
            yield from ids_of(_text_of(message))
        yield from ids_of(f"{_END}")
    yield from ids_of(f"{_BEGIN}assistant\n")


def _said(message: Mapping[str, Any], *, is_earlier: bool, template: Template) -> str:
    """A reply as the template renders it."""
    thought = message.get("reasoning_content")
    is_shown = thought and not (is_earlier and template.strips)
    parts = [f"<|think|>{thought}<|said|>"] if is_shown else []
    if template.newlines and is_earlier:
        parts.append(BETWEEN)
    parts.append(_text_of(message))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"<|call|>{function['name']} {function['arguments']}")
    return "".join(parts)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
