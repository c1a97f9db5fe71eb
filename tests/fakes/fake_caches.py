"""A prompt cache as inference servers have it: blocks of 16 tokens, found by all that is before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

_BLOCK_TOKENS = 16
_CHARS_PER_TOKEN = 4
_BLOCK = _BLOCK_TOKENS * _CHARS_PER_TOKEN


class PrefixCache:
    """Keeps the latest blocks of prompts."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def take(self, request: Mapping[str, Any], room: int) -> int:
        """How many of a request's first tokens are here. Then all of them are, within `room`."""
        prompt = _prompt_of(request)
        before, found, is_found = b"", 0, True
        for start in range(0, len(prompt) - _BLOCK + 1, _BLOCK):
            before = blake2b(before + prompt[start : start + _BLOCK], digest_size=16).digest()
            is_found = is_found and before in self._blocks
            found += is_found
            self._blocks[before] = None
            self._blocks.move_to_end(before)
        while len(self._blocks) > room // _BLOCK_TOKENS:
            self._blocks.popitem(last=False)
        return found * _BLOCK_TOKENS


def _prompt_of(request: Mapping[str, Any]) -> bytes:
    """What a chat template makes of a request, in any dialect: it begins with the tools."""
    system = request.get("system", request.get("instructions"))
    messages = request.get("messages", request.get("input"))
    return orjson.dumps([request.get("tools"), system, messages])
