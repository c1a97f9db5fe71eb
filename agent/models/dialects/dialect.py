"""A dialect: the form of an API's requests and replies. This module finds all dialects by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, get_args

import orjson

from agent.messages.message import FinishReason, Message, Usage
from agent.models.endpoint_words import find_ending
from agent.models.error_bodies import error_behind_200, find_error, quote, says_error
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, StreamHandler
from agent.models.parsing import load_object, text_or_none
from agent.models.providers import ONLY_RELAYED, Api
from agent.models.usage import hour_writes_in, reported_cost

# A reply that arrives in parts: they are passed on and put together.
#
# An assembly builds the body that the endpoint would have sent in one piece. So there is one way to
# read a reply, and records do not depend on streaming.


class Assembly(Protocol):
    """Puts one streamed reply together."""

    has_reason: bool
    """The parts so far say why the reply ended; only token counts may follow."""
    is_over: bool
    """Whether the stream has announced its end."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Take the next part, which may also be a whole reply."""
        ...

    def finish(self) -> bytes:
        """Build the body of the whole reply.

        The body of a cut stream reads as a cut reply. If a part cannot be understood, the body is
        an error that says so, so that a reply never has less than its stream.
        """
        ...


def incomplete_body(reason: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    """The body for a reply that cannot be put together; `reply` has its token counts."""
    costs = {key: reply[key] for key in ("id", "model", "usage") if reply.get(key)}
    return {**costs, "error": {"code": "malformed_stream", "message": reason}}


class PartialObject:
    """A JSON object whose texts arrive in parts; appending to a text does not copy it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self._texts: dict[str, list[str]] = {}

    def append(self, key: str, text: str) -> None:
        """Append to the text under `key`, which may have begun as one of `fields`."""
        if key not in self._texts:
            start = self.fields.get(key)
            self._texts[key] = [start] if isinstance(start, str) else []
        self._texts[key].append(text)

    def build(self) -> dict[str, Any]:
        """Build the object from its fields and texts so far."""
        return self.fields | {key: "".join(parts) for key, parts in self._texts.items()}


def to_body(reply: Mapping[str, Any]) -> bytes:
    """Write a reply as JSON."""
    try:
        return orjson.dumps(reply)
    except TypeError:
        # Parts held halves of an emoji: escaped to ASCII, they are one again.
        return json.dumps(reply).encode()


def update_counts(known: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Update the counts of earlier parts by the counts of a part, which are totals."""
    # Some servers later leave out, or set to zero, counts that they gave before.
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            update_counts(known[key], value)
        elif value or known.get(key) is None:
            known[key] = value


class Dialect(NamedTuple):
    """The functions that write requests and read replies of one API."""

    path: str
    """The path of requests, from the root of the endpoint."""
    headers: Callable[[ModelSettings, str], dict[str, str]]
    """Makes the headers of every request, with the key."""
    body: Callable[[ModelSettings, Request], dict[str, Any]]
    """Makes the body of one request, to be sent as JSON."""
    read: Callable[[bytes], Completion]
    """Reads the body of a reply; raises `ModelError`."""
    usage: Callable[[Mapping[str, Any]], Usage | None]
    """Reads the token counts in the body of a reply, even if other parts of it are wrong."""
    assembly: Callable[[StreamHandler], Assembly]
    """Makes the assembly of a streamed reply; it passes the parts to the handler."""


def api_base_url(api: str, root: str) -> str:
    """The base URL of an API on a server with this root; for some APIs clients add the version."""
    return root if get_dialect(api).path.startswith("/v1") else f"{root}/v1"


RELAYED = get_args(Api)
"""The names of all dialects, as in `ModelSettings.api`; agents' calls can be in any of them."""

DIALECTS = tuple(api for api in RELAYED if api not in ONLY_RELAYED)
"""The dialects of our own requests."""


@cache
def get_dialect(api: str) -> Dialect:
    """Find the dialect that `ModelSettings.api` names; the first call imports its module."""
    if api not in RELAYED:
        raise ValueError(f"no such API: {api!r}")
    dialect = import_module(f"agent.models.dialects.{api}").DIALECT
    assert isinstance(dialect, Dialect)
    return dialect


def read_own_reply(
    settings: ModelSettings, body: bytes, request: Mapping[str, Any] | None = None
) -> Completion:
    """Read the reply to a request of this program; see `read_reply`.

    `request` is the body of the request; None if it is not at hand.
    """
    completion = read_reply(settings.api, body)
    if not settings.token_ids:
        return completion
    from agent.models.dialects.token_ids import take_tokens

    return take_tokens(completion, settings, request)


def read_reply(api: str, body: bytes) -> Completion:
    """Read the body of a reply in the dialect `api`.

    Raises `ModelError`, which has the cost of the reply if the body reports it.
    """
    dialect = get_dialect(api)
    try:
        return dialect.read(body)
    except ModelError as error:
        if error.kind == "malformed":
            error = _explain(error, body)
        with suppress(ModelError):
            reply = load_object(body)
            error.paid = _read_cost(dialect, reply)
            error.had_begun = error.kind == "overloaded" or any(map(reply.get, _OUTPUTS))
        raise error from None


def is_usable(api: str, body: bytes) -> bool:
    """Whether the body of a reply can be read, and ends for a known reason."""
    try:
        return get_dialect(api).read(body).unknown_ending is None
    except ModelError:
        return False


def read_paid(api: str, body: bytes) -> Completion | None:
    """Read the cost of a reply that cannot be used; None if its body has no token counts."""
    with suppress(ModelError):
        return _read_cost(get_dialect(api), load_object(body))
    return None


def _explain(error: ModelError, body: bytes) -> ModelError:
    """Replace an error by the one that the body reports, or else add a quote of the body."""
    try:
        reply = load_object(body)
    except ModelError:
        return error  # its message has the quote already
    if says_error(reply):
        return error  # it is the error of the body already
    if (reported := find_error(reply)) is not None:
        return error_behind_200(reported, "a 200 reply")
    return ModelError("malformed", f"{error}: {quote(body)}")


_OUTPUTS = ("choices", "content", "output", "candidates")
"""The fields in which APIs put the output of the model."""


def _read_cost(dialect: Dialect, reply: Mapping[str, Any]) -> Completion | None:
    """Read a reply without its text, for its cost; None if its body has no token counts."""
    usage = dialect.usage(reply)
    if usage is None or not (usage["input_tokens"] or usage["output_tokens"]):
        return None
    return Completion(
        message=Message(role="assistant", content=""),
        finish_reason="stop",
        usage=usage,
        model=text_or_none(reply.get("model") or reply.get("modelVersion")),
        response_id=text_or_none(reply.get("id") or reply.get("responseId")),
        cost_usd=reported_cost(reply),
        hour_cache_writes=hour_writes_in(reply, usage),
    )


# The reasons why replies end, in the same words for every API.


NO_ENDING = "null"
"""The word for a reason of null."""


class ReplyEnding(NamedTuple):
    """The reason why a reply ended."""

    reason: FinishReason
    unknown: Mapping[str, Any]
    """The API's word for the reason, under the API's name for it, if the word is doubtful.

    The table lacks such a word, or it speaks of calls although the reply has none. Else empty.
    """

    @property
    def word(self) -> str | None:
        """The doubtful word; None if there is none."""
        return next(iter(self.unknown.values()), None)


def read_ending(field: str, given: Mapping[str, Any], message: Message) -> ReplyEnding:
    """Read the word in `field` of `given` with which an API says why `message` ended.

    A word that the table lacks counts as a usual end, but is reported in `unknown`. So is null, and
    a word that speaks of calls although the reply has only a text. Raises `ModelError("malformed")`
    if the field is missing, since the body of a cut stream looks so, if the word says that the
    server broke the reply off, or if the reply is empty but for an unknown word.
    """
    if field not in given:
        raise ModelError("malformed", f"the reply has no {field}")
    word = NO_ENDING if given[field] is None else given[field]
    ending = find_ending(word)
    has_calls = bool(message.get("tool_calls"))
    is_empty = not (has_calls or message["content"].strip())
    if ending == "tool_calls" and not (has_calls or is_empty):  # the server has lost the calls
        return ReplyEnding("stop", {field: word})
    if ending is not None and ending != "cut" and ending != "open":
        return ReplyEnding(ending, {})
    if ending == "cut":
        raise ModelError("malformed", f"the server broke the reply off: its {field} is {word!r}")
    if not isinstance(word, str) or not word.strip() or is_empty:
        raise ModelError("malformed", f"the reply's {field} is {word!r}")
    return ReplyEnding("tool_calls" if has_calls else "stop", {field: word})


# The fields of a reply that are not read: they are stored as they came, whole or in parts.
#
# Parts are merged by one rule. Objects are merged field by field. Lists of tokens (`token_ids`,
# and all lists in `logprobs`) are joined. Another list replaces the earlier one if it begins with
# it, and is appended if it does not. Texts that are known to come in pieces are joined. Of any
# other values the last one that is not empty counts.

_TOKENS = frozenset({"logprobs", "token_ids", "completion_token_ids", "output_token_ids"})
"""Fields in which each part of a stream has only the tokens of that part."""

_PIECES = frozenset(
    {
        ("audio", "data"),
        ("audio", "transcript"),
        ("function_call", "arguments"),
        ("custom", "input"),
    }
)
"""Texts that come in pieces: (object, field)."""


def unknown_in(fields: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """The fields that are not `known`, except null and empty ones."""
    if fields.keys() <= known:
        return {}
    return {key: value for key, value in fields.items() if key not in known and _is_set(value)}


def uncounted_in(usage: Any, known: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Counts of usage beyond the `known` ones, except zeros.

    `known` has the names of the counts; for an object of counts, also the names in it.
    """
    if not isinstance(usage, dict):
        return {}
    uncounted: dict[str, Any] = {}
    for key, value in usage.items():
        if isinstance(value, dict):
            value = uncounted_in(value, dict.fromkeys(known.get(key, ()), ()))
        elif key in known:
            continue
        if value:
            uncounted[key] = value
    return uncounted


def make_extra(**parts: Any) -> dict[str, Any] | None:
    """Collect the parts that are not empty; None if all are. See `Completion.extra`."""
    return {name: part for name, part in parts.items() if part} or None


def merge(kept: dict[str, Any], given: Mapping[str, Any], place: str = "") -> None:
    """Merge a part into the earlier parts `kept`, by the rule above.

    `place` is the name of the object that both belong to; "" for the outermost one.
    """
    for key, value in given.items():
        before = kept.get(key)
        # Everything inside an object of tokens is merged as tokens.
        inside = place if place in _TOKENS else key
        if isinstance(value, dict):
            kept[key] = before if isinstance(before, dict) else {}
            merge(kept[key], value, inside)
        elif isinstance(value, list):
            _merge_list(kept, key, value, are_tokens=inside in _TOKENS)
        elif isinstance(before, str) and isinstance(value, str) and (place, key) in _PIECES:
            kept[key] = before + value
        elif _is_set(value) or key not in kept:
            kept[key] = value


def _merge_list(kept: dict[str, Any], key: str, value: list[Any], *, are_tokens: bool) -> None:
    before = kept.get(key)
    if not isinstance(before, list) or (not are_tokens and value[: len(before)] == before):
        if value or not isinstance(before, list):
            kept[key] = list(value)
    else:
        before.extend(value)


def _is_set(value: Any) -> bool:
    return bool(value) or isinstance(value, bool | int | float)
