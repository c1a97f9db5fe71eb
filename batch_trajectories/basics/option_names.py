"""Former and foreign names of options, each with its replacement.

Stored configs of earlier versions may have any of these names. If a user gives one, it is accepted
only if other programs have such an option, too; otherwise it is refused with advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from batch_trajectories.basics.validation import did_you_mean


class FormerOption(NamedTuple):
    """An option that was renamed or removed, or that another program has."""

    advice: str
    """Advice for the user if the option is refused."""
    today: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    """Makes the options that replace this one from all options that were given."""
    is_accepted: bool = False
    fixed: Any = None
    """The value for all conversations today, if the option affected the data."""


def _effort_none(values: Mapping[str, Any]) -> Mapping[str, Any]:
    is_set = str(values["reasoning_disabled"]).lower() in ("true", "yes", "on", "1")
    return {"reasoning_effort": "none"} if is_set else {}


def _prefill_path(values: Mapping[str, Any]) -> Mapping[str, Any]:
    path = values["prefill_messages_file"]
    return {} if path is None or "prefill_messages" in values else {"prefill_messages": path}


FORMER: Mapping[str, FormerOption] = {
    "api_key_env": FormerOption(
        "use key_env", lambda values: {"key_env": values["api_key_env"]}, is_accepted=True
    ),
    "batch_live_share": FormerOption("calls are made live when 95 % of the tasks have ended"),
    "blank_reasoning": FormerOption("an endpoint that asks for blank reasoning gets it"),
    "live": FormerOption(
        "watch the run from another terminal: `status RUN --watch`, or `view` in a browser"
    ),
    "plan_step_turns": FormerOption("a step of a plan has 5 replies", fixed=5),
    "prefill_messages_file": FormerOption(
        "use prefill_messages=FILE", _prefill_path, is_accepted=True
    ),
    "preparation_attempts": FormerOption("a preparation has 2 attempts", fixed=2),
    "ray_scratch_dir": FormerOption("set the variable TMPDIR where Ray starts on the nodes"),
    "reasoning_disabled": FormerOption("use reasoning_effort=none", _effort_none, is_accepted=True),
    "resume": FormerOption("the same command always resumes", is_accepted=True),
    "web_search_url": FormerOption("set the variable TAVILY_SEARCH_URL or BRAVE_SEARCH_URL"),
}

FIXED = {name: former.fixed for name, former in FORMER.items() if former.fixed is not None}


def rename_former(values: Mapping[str, Any], *, is_stored: bool = False) -> dict[str, Any]:
    """Replace former names of options. If a user gave the options, only accepted names."""
    renamed = dict(values)
    for name in values.keys() & FORMER.keys():
        if is_stored or FORMER[name].is_accepted:
            del renamed[name]
            renamed |= FORMER[name].today(values)
    return renamed


def describe_unknown(name: str, known: Iterable[str], advice: str) -> str:
    """The reason to refuse an option, and what to write instead: `advice` if no name is close."""
    if (former := FORMER.get(name)) is not None:
        return f"no longer an option; {former.advice}"
    return f"unknown option; {did_you_mean(name, known) or advice}"
