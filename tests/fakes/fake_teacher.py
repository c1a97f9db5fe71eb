"""A vLLM and an SGLang that give log-probabilities of given tokens, in the shape of real replies.

A log-probability depends on the token and on all tokens before it, so figures of a wrong place or
context are seen. 32-bit floats hold each of them exactly.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal
from zlib import crc32

from tests.fakes.served import Served

JSON = dict[str, Any]
Kind = Literal["vllm", "sglang"]
NAME = "Org/Teacher-1B"
VOCABULARY = 1000

Change = Callable[[JSON, JSON], "tuple[int, Any] | None"]
"""From the body of a request and its good reply to another status and reply; None: the good one.
A reply that is bytes is sent as it is."""


def logprob_of(before: Sequence[int], id: int) -> float:
    """The log-probability of a token after others."""
    return -(crc32(struct.pack(f"<{len(before) + 1}I", *before, id)) % 4000) / 256 - 1


def most_likely(before: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The most likely tokens after others, the most likely first."""
    ids = range(VOCABULARY)
    ranked = sorted(((logprob_of(before, id), id) for id in ids), key=lambda one: (-one[0], one[1]))
    return [(id, value) for value, id in ranked[:count]]


def as_vllm(request: JSON) -> JSON:
    """The reply to a completion with `prompt_logprobs`, as vLLM 0.33 writes it."""
    ids, top = request["prompt"], request["prompt_logprobs"]
    assert request["max_tokens"] == 1
    entries: list[Any] = [None]
    for place in range(1, len(ids)):
        before, id = ids[:place], ids[place]
        found = {id: logprob_of(before, id), **dict(most_likely(before, top) if top else ())}
        entries.append(
            {
                str(one): {"logprob": value, "rank": rank, "decoded_token": f"t{one}"}
                for rank, (one, value) in enumerate(found.items(), 1)
            }
        )
    choice = {
        "index": 0,
        "text": " x",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": entries,
        "prompt_token_ids": None,
        "routed_experts": None,
    }
    usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1}
    return {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1764403200,
        "model": request["model"],
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {**usage, "prompt_tokens_details": None},
        "kv_transfer_params": None,
    }


def as_sglang(request: JSON) -> JSON:
    """The reply of `/generate` with `return_logprob`, as SGLang 0.5 writes it."""
    ids, start, top = (
        request["input_ids"],
        request["logprob_start_len"],
        request["top_logprobs_num"],
    )
    tokens: list[Any] = [[None, ids[start], None]]
    tops: list[Any] = [None]
    for place in range(start + 1, len(ids)):
        before = ids[:place]
        tokens.append([logprob_of(before, ids[place]), ids[place], None])
        tops.append([[value, id, None] for id, value in most_likely(before, top)] if top else None)
    meta = {
        "id": "0123456789abcdef",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "weight_version": "default",
        "total_retractions": 0,
        "input_token_logprobs": tokens,
        "output_token_logprobs": [],
        **({"input_top_logprobs": tops, "output_top_logprobs": []} if top else {}),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "e2e_latency": 0.01,
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


PATHS: dict[str, Kind] = {"/v1/completions": "vllm", "/generate": "sglang"}


class Teacher:
    """A running teacher."""

    def __init__(self) -> None:
        self.url = ""
        self.models = [NAME]
        """The names that it serves; all are of the same weights."""
        self.requests: list[JSON] = []
        """The requests for figures, as they came."""
        self.answered: list[list[int]] = []
        """The ids of each request whose reply was sent whole."""
        self.latency_s = 0.0
        self.most_at_once = 0
        self._at_once = 0
        self.lock = threading.Lock()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A request is in flight while the block lasts."""
        with self.lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self.lock:
                self._at_once -= 1


@contextmanager
def teaching(change: Change | None = None) -> Iterator[Teacher]:
    """A teacher at a free port that answers as both kinds of servers; `change` breaks replies."""
    teacher = Teacher()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models", self.path
            entries = [
                {
                    "id": name,
                    "object": "model",
                    "created": 1764403200,
                    "owned_by": "vllm",
                    "root": "/models/teacher",
                    "parent": None,
                    "max_model_len": 4096,
                }
                for name in teacher.models
            ]
            self._send(200, {"object": "list", "data": entries})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with teacher.counting():
                with teacher.lock:
                    teacher.requests.append(request)
                kind = PATHS[self.path]
                reply = as_vllm(request) if kind == "vllm" else as_sglang(request)
                changed = None if change is None else change(request, reply)
                status, sent = changed or (200, reply)
                time.sleep(teacher.latency_s)
                try:
                    self._send(status, sent)
                except ConnectionError:
                    return  # the caller was killed
                if status == 200:
                    with teacher.lock:
                        teacher.answered.append(request.get("prompt") or request["input_ids"])

        def _send(self, status: int, sent: Any) -> None:
            content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with Served(Answering) as served:
        teacher.url = served.url
        yield teacher
