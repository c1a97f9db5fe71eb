"""Options that a model refuses: the call is repeated without them, and the log says so once.

A thinking model that demands the reasoning of earlier replies gets a blank one where they have
none, in the same way.

Reasoning models take no temperature, some take no effort, and the limit on a reply's tokens has
two names in the chat dialect. Only a 400 that names one of our own options as unsupported counts;
values out of range, and those in `extra_body`, are for the user to fix.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from agent.models.bodies.token_ids import FIELDS
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings

log = logging.getLogger(__name__)

_OPTION_OF: Mapping[str, str] = {
    # Where two cannot be given both, the temperature stays.
    "top_p": "top_p",
    "temperature": "temperature",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "reasoning_effort": "reasoning_effort",
    "reasoning.effort": "reasoning_effort",
    "reasoning": "reasoning_effort",
    "output_config.effort": "reasoning_effort",
    "output_config": "reasoning_effort",
    "thinking.type": "reasoning_effort",
    "effort parameter": "reasoning_effort",
    "adaptive thinking": "reasoning_effort",
    **dict.fromkeys(FIELDS, "token_ids"),
    **dict.fromkeys(("stream_options", "stream_options.include_usage"), "stream_options"),
    "reasoning_content": "blank_reasoning",
}
"""The option behind each name that an error may give to a field."""

_REASONING = "reasoning_content"

_MISSES_REASONING = re.compile(rf"{_REASONING}\b[^.;]{{0,60}}?\b(?:missing|must be passed)", re.I)
"""The wording of DeepSeek and Moonshot."""

_CHAT_BOUNDS = frozenset({"max_tokens", "max_completion_tokens"})

_CODES = frozenset(
    {"unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden"}
)

_WORDS = (
    "unsupported|not support(?:ed)?|not permitted|extra_forbidden|unrecognized|unknown|unexpected"
    "|n't support|only supports|deprecated|cannot both be specified|may only be set"
)


@cache
def _named(field: str) -> re.Pattern[str]:
    """A text with `field` and the refusal close together: some servers quote the request."""
    name = rf"(?<![\w.]){re.escape(field)}(?![\w.]*\w)"
    return re.compile(rf"{name}[^.;]{{0,60}}?(?:{_WORDS})|(?:{_WORDS})[^.;]{{0,40}}?{name}", re.I)


_NAMED = tuple(field for field in _OPTION_OF if field not in ("reasoning", _REASONING))
"""Fields that may be named in a text. "reasoning" is a word that errors about other things use too:
it counts as a `param` alone."""


class UnsupportedOptions:
    """The options that the endpoint of one adapter is known to refuse."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._refused: frozenset[str] = frozenset()

    @property
    def settings(self) -> ModelSettings:
        """The settings in use now."""
        return without(self._settings, self._refused)

    async def ask(self, attempt: Callable[[ModelSettings], Awaitable[Completion]]) -> Completion:
        """Make an attempt with the settings, and again without what it is refused for.

        Only a reply proves that the rest is taken, and has it remembered. Raises what `attempt`
        raises where that names no option, or one that is left out already.
        """
        refused, errors = self._refused, dict[str, ModelError]()
        while True:
            try:
                completion = await attempt(without(self._settings, refused))
            except ModelError as error:
                field = refused_field(error)
                if field is not None and field in refused & _CHAT_BOUNDS:
                    # Gateways name the field that they passed on, not the one that they were sent.
                    (field,) = _CHAT_BOUNDS - {field}
                if field is None or field in refused:
                    raise
                if not _can_go(field, without(self._settings, refused)):
                    raise
                refused |= {field}
                errors[field] = error
            else:
                for field, reason in errors.items():
                    self._remember(field, reason)
                return completion

    def _remember(self, field: str, error: ModelError) -> None:
        if field in self._refused:  # another call, made at the same time, was quicker
            return
        self._refused |= {field}
        now = without(self._settings, self._refused)
        option = _OPTION_OF[field]
        what = f"--{option}={getattr(self._settings, option)}"
        instead = f"with {now.max_tokens_name}" if getattr(now, option) else "without it"
        if option == "stream_options":
            what, instead = "stream_options", "without them, so streams may lack token counts,"
        if field == _REASONING:
            what, instead = "replies without reasoning", "with a blank one in them"
        log.warning(
            "%s at %s refuses %s: asked %s from now on (%s)",
            self._settings.name,
            self._settings.base_url,
            what,
            instead,
            error,
        )


def refused_field(error: ModelError) -> str | None:
    """The field that the endpoint does not support, or demands; None for any other error."""
    if error.kind != "bad_request":
        return None
    if _MISSES_REASONING.search(str(error)):
        return _REASONING
    if error.param:
        is_meant = error.param in _OPTION_OF and (
            error.code in _CODES or _says(error.param, str(error))
        )
        return error.param if is_meant else None
    return next((field for field in _NAMED if _says(field, str(error))), None)


def _says(field: str, text: str) -> bool:
    return field in _NAMED and _named(field).search(text) is not None


def _can_go(field: str, settings: ModelSettings) -> bool:
    """Whether an option of the user's, and nothing else, has put this field there."""
    option = _OPTION_OF[field]
    is_demanded = option == "max_tokens" and settings.api == "anthropic_messages"
    is_demanded |= (
        option == "max_tokens"
        and settings.needs_bound
        and (settings.api != "openai_chat" or settings.max_tokens_name is not None)
    )
    is_theirs = field.partition(".")[0] in (settings.extra_body or {})
    return getattr(settings, option) is not None and not is_demanded and not is_theirs


def without(settings: ModelSettings, refused: frozenset[str]) -> ModelSettings:
    """The settings less the options behind `refused`; a limit is sent by its other name first."""
    if not refused:
        return settings
    changes: dict[str, Any] = {_OPTION_OF[field]: field == _REASONING or None for field in refused}
    limits = refused & _CHAT_BOUNDS
    if settings.api == "openai_chat" and len(limits) == 1:
        (other,) = _CHAT_BOUNDS - limits
        changes |= {"max_tokens": settings.max_tokens, "max_tokens_name": other}
    return replace(settings, **changes)
