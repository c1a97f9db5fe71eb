"""The requests for log-probabilities of given tokens to vLLM and SGLang, and their replies.

vLLM answers a completion of one token with `prompt_logprobs`: null for the first token, then an
object by token id, for all tokens of the prompt. SGLang answers with `meta_info`, which has triples
of log-probability, token id and text from a given place on, of which the first has null.

What a reply says is checked against the tokens that were sent: their number, and each sampled id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from agent.messages.message import Usage
from agent.messages.tokens import pack_ids
from agent.models.error_bodies import error_behind_200
from agent.models.errors import ModelError
from batch_trajectories.basics.text import one_line_excerpt
from batch_trajectories.export.formats.rl import SampledSegment
from batch_trajectories.teacher.figures import Figures, pack_floats

_MAX_LOGPROB = 1e-3
"""A log-probability is at most 0, but for rounding."""


_LEAST_ENTRY = '"1000":{"logprob":-1.0,"rank":1,"decoded_token":""},'
_LEAST_TRIPLE = "[-1.0,1000,null],"
"""The shortest usual texts for one token in replies of vLLM and SGLang."""


class MisfitReply(Exception):
    """A whole reply whose figures are not those of the tokens that were sent."""

    def __init__(self, message: str, *, usage: Usage | None = None) -> None:
        """`usage` is what the reply says that it cost."""
        super().__init__(message)
        self.usage = usage


class TeacherReply(NamedTuple):
    """The reply of a server about one segment."""

    figures: Figures
    model: str | None
    """The name of the model in the reply; None if its server does not say."""
    usage: Usage | None


class InferenceServer(Protocol):
    """A kind of inference server."""

    @property
    def path(self) -> str:
        """The path from the root of the server."""

    def body(self, name: str, segment: SampledSegment, top: int) -> Mapping[str, Any]:
        """The body of a request for the figures of a segment by the model with this name."""

    def least_reply_bytes(self, segment: SampledSegment, top: int) -> int:
        """The size that a reply has at least."""

    def read(self, body: bytes, segment: SampledSegment, top: int) -> TeacherReply:
        """Read the body of a reply. Raises `ModelError` and `MisfitReply`."""


class _VLLM:
    path = "/v1/completions"

    def body(self, name: str, segment: SampledSegment, top: int) -> Mapping[str, Any]:
        return {
            "model": name,
            "prompt": segment.ids,
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top,
        }

    def least_reply_bytes(self, segment: SampledSegment, top: int) -> int:
        # It has at least `top` tokens for each place but the first, whatever is asked about.
        return len(_LEAST_ENTRY) * (len(segment.ids) - 1) * max(top, 1)

    def read(self, body: bytes, segment: SampledSegment, top: int) -> TeacherReply:
        reply = _parse(body, needed="choices")
        choices = reply["choices"]
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ModelError("malformed", "`choices` is not a list of one object")
        usage = _usage(reply.get("usage"), cached=_cached_tokens(reply.get("usage")))
        check = _Check("choices[0].prompt_logprobs", usage)
        entries = check.entries(choices[0].get("prompt_logprobs"), len(segment.ids))
        places = [check.by_id(entries, place, segment.ids[place]) for place in segment.sampled]
        own = [
            found[segment.ids[place]] for found, place in zip(places, segment.sampled, strict=True)
        ]
        ranked = [_rank(found.items(), top) for found in places]
        return TeacherReply(
            check.figures(segment, own, ranked, top), _text(reply.get("model")), usage
        )


class _SGLang:
    path = "/generate"

    def body(self, name: str, segment: SampledSegment, top: int) -> Mapping[str, Any]:
        return {
            "input_ids": segment.ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": _start(segment),
            "top_logprobs_num": top,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def least_reply_bytes(self, segment: SampledSegment, top: int) -> int:
        places = len(segment.ids) - segment.sampled[0]
        return len(_LEAST_TRIPLE) * places * (top + 1)

    def read(self, body: bytes, segment: SampledSegment, top: int) -> TeacherReply:
        reply = _parse(body, needed="meta_info")
        meta = reply["meta_info"]
        if not isinstance(meta, dict):
            raise ModelError("malformed", "`meta_info` is not an object")
        usage = _usage(meta, cached=_count(meta.get("cached_tokens")))
        start = _start(segment)
        length = len(segment.ids) - start
        check = _Check("meta_info.input_token_logprobs", usage)
        entries = check.entries(meta.get("input_token_logprobs"), length)
        own = [
            check.triple(entries, place - start, segment.ids[place]) for place in segment.sampled
        ]
        ranked: list[list[tuple[int, float]]] = [[] for _ in own]
        if top:
            check = _Check("meta_info.input_top_logprobs", usage)
            entries = check.entries(meta.get("input_top_logprobs"), length)
            ranked = [
                _rank(check.triples(entries, place - start), top) for place in segment.sampled
            ]
        return TeacherReply(check.figures(segment, own, ranked, top), None, usage)


SERVERS: Mapping[str, InferenceServer] = {"vllm": _VLLM(), "sglang": _SGLang()}
"""The kinds of servers by the prefix of a model's name."""


def _start(segment: SampledSegment) -> int:
    """The place before the first sampled token: SGLang gives null for the first one asked for."""
    return segment.sampled[0] - 1


class _Check:
    """Reads a field of a reply and refuses what does not fit the tokens that were sent."""

    def __init__(self, field: str, usage: Usage | None) -> None:
        self._field = field
        self._usage = usage

    def entries(self, entries: Any, length: int) -> list[Any]:
        """The field, which must be a list with an entry for each token."""
        if not isinstance(entries, list):
            raise self._misfit("", "is missing: this server does not give it")
        if len(entries) != length:
            raise self._misfit("", f"{len(entries):,} entries for {length:,} tokens")
        return entries

    def by_id(self, entries: list[Any], place: int, id: int) -> dict[int, float]:
        """The log-probabilities at a place, by token id."""
        found = entries[place]
        if not isinstance(found, dict):
            raise self._misfit(place, f"is {_excerpt(found)}, not an object")
        if str(id) not in found:
            raise self._misfit(place, f"lacks token {id}, which was sent")
        try:
            return {int(key): self._number(value["logprob"], place) for key, value in found.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise self._misfit(place, f"is not token ids with a logprob ({error!r:.60})") from error

    def triple(self, entries: list[Any], place: int, id: int) -> float:
        """The log-probability in the triple at a place, which must be of this token."""
        found = self._pair(entries[place], place)
        if found[0] != id:
            raise self._misfit(place, f"is of token {found[0]}, and {id} was sent")
        return found[1]

    def triples(self, entries: list[Any], place: int) -> list[tuple[int, float]]:
        """The tokens in the list of triples at a place, with their log-probabilities."""
        found = entries[place]
        if not isinstance(found, list):
            raise self._misfit(place, f"is {_excerpt(found)}, not a list")
        return [self._pair(one, place) for one in found]

    def _pair(self, triple: Any, place: int) -> tuple[int, float]:
        if not isinstance(triple, list) or len(triple) < 2 or type(triple[1]) is not int:
            raise self._misfit(
                place, f"is {_excerpt(triple)}, not a log-probability and a token id"
            )
        return triple[1], self._number(triple[0], place)

    def _number(self, value: Any, place: int) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._misfit(place, f"has {_excerpt(value)} for a log-probability")
        if value > _MAX_LOGPROB:
            raise self._misfit(place, f"has {value:g}, and a log-probability is at most 0")
        return float(value)

    def figures(
        self,
        segment: SampledSegment,
        own: Sequence[float],
        ranked: Sequence[Sequence[tuple[int, float]]],
        top: int,
    ) -> Figures:
        """Pack the figures, after a check that each place has the `top` most likely tokens."""
        for place, tokens in zip(segment.sampled, ranked, strict=True):
            if len(tokens) != top:
                raise self._misfit(place, f"has {len(tokens)} most likely tokens, not {top}")
        ids = [id for tokens in ranked for id, _ in tokens]
        values = [value for tokens in ranked for _, value in tokens]
        return Figures(pack_floats(own), top, pack_ids(ids), pack_floats(values))

    def _misfit(self, place: int | str, problem: str) -> MisfitReply:
        where = f"[{place}]" if isinstance(place, int) else ""
        return MisfitReply(f"{self._field}{where} {problem}", usage=self._usage)


def _rank(tokens: Any, top: int) -> list[tuple[int, float]]:
    """The `top` most likely tokens, the most likely first; equal ones by id."""
    return sorted(tokens, key=lambda token: (-token[1], token[0]))[:top]


def _parse(body: bytes, *, needed: str) -> dict[str, Any]:
    """The object in a reply that has the key `needed`. Raises `ModelError`."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ModelError("malformed", f"the reply is not JSON: {error}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", "the reply is not a JSON object")
    if needed not in reply:
        if reply.get("error"):
            raise error_behind_200(reply, "the reply")
        raise ModelError("malformed", f"the reply has no `{needed}`")
    return reply


def _usage(given: Any, *, cached: int | None) -> Usage | None:
    if not isinstance(given, dict):
        return None
    return Usage(
        input_tokens=_count(given.get("prompt_tokens")),
        output_tokens=_count(given.get("completion_tokens")),
        cache_read_tokens=cached,
        cache_write_tokens=None,
        reasoning_tokens=None,
    )


def _cached_tokens(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _excerpt(value: object) -> str:
    return one_line_excerpt(repr(value), max_chars=60)
