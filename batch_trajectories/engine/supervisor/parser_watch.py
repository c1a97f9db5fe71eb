"""Watches whether servers read the tool calls and thoughts of their models.

The first reply that says they do not is reported at once, and a start that gets nothing else is
stopped: none of its conversations could be trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from agent.messages.leaked_calls import REASONING_REMEDY
from batch_trajectories.engine.parser_signs import WARNING_OF_THOUGHT, ParserSigns, warning_of_call

log = logging.getLogger(__name__)

_MIN_CONVERSATIONS = 10
"""Number of conversations without a readable reply that are no accident any more."""


@dataclass(slots=True)
class _Seen:
    """Conversations of one endpoint in this start."""

    ended: int = 0
    leaked: int = 0
    """Conversations with a tool call in a text."""
    open_thoughts: int = 0
    """Conversations with the end of a thought in a text."""
    reads_calls: bool = False
    reads_thoughts: bool = False
    call: str = ""
    """The last call in a text, with the remedy."""


class ParserWatch:
    """Watches the conversations of a start for signs that a server parses no calls or thoughts."""

    def __init__(
        self, say: Callable[[str], None], *, may_stop: bool, accepts: Collection[str] = ()
    ) -> None:
        """`may_stop`: the conversations are held by this program's own agent. `accepts` are the
        reasons for rejecting rows that the user accepts; the run is not stopped for these."""
        self._say = say
        self._stops_for_calls = may_stop and "leaked_call" not in accepts
        self._stops_for_thoughts = may_stop and "marker_in_text" not in accepts
        self._seen: dict[str, _Seen] = {}

    def on_ended(self, signs: ParserSigns | None) -> None:
        """A conversation has ended; warn at the first of a kind, the 10th, the 100th and so on."""
        if signs is None:
            return
        seen = self._seen.setdefault(signs["endpoint"], _Seen())
        seen.ended += 1
        seen.reads_calls |= signs["reads_calls"]
        seen.reads_thoughts |= signs["reads_thoughts"]
        if signs["call"] is not None:
            seen.leaked += 1
            seen.call = signs["call"]
            if _is_told(seen.leaked):
                self._tell(
                    f"{signs['endpoint']}: {warning_of_call(seen.call)} ({seen.leaked} of "
                    f"{seen.ended} so far)"
                )
        if signs["thought"]:
            seen.open_thoughts += 1
            if _is_told(seen.open_thoughts):
                self._tell(
                    f"{signs['endpoint']}: {WARNING_OF_THOUGHT} ({seen.open_thoughts} of "
                    f"{seen.ended} so far)"
                )

    def problem(self) -> str | None:
        """The reason why the run must stop; None if it need not."""
        for endpoint, seen in self._seen.items():
            if (
                self._stops_for_calls
                and not seen.reads_calls
                and _are_most(seen.leaked, seen.ended)
            ):
                return (
                    f"{endpoint}: {seen.leaked} of the first {seen.ended} conversations ended with "
                    "a tool call that the server left in the text, and it has read none: "
                    f"{seen.call}. {_AGAIN}"
                )
            if (
                self._stops_for_thoughts
                and not seen.reads_thoughts
                and _are_most(seen.open_thoughts, seen.ended)
            ):
                return (
                    f"{endpoint}: {seen.open_thoughts} of the first {seen.ended} conversations "
                    "have </think> in a text, and no reply had a thought beside its text. "
                    f"{REASONING_REMEDY}. {_AGAIN}; to keep such rows, add "
                    "--accept_rows=marker_in_text"
                )
        return None

    def tell_sums(self) -> None:
        """Repeat the warnings with the sums of the start, at its end."""
        for endpoint, seen in self._seen.items():
            if seen.leaked:
                self._tell(
                    f"{endpoint}: {seen.leaked} of {seen.ended} conversations ended as leaked_call "
                    f"and are in no export; the last one with {seen.call}"
                )
            if seen.open_thoughts:
                self._tell(
                    f"{endpoint}: {seen.open_thoughts} of {seen.ended} conversations have </think> "
                    f"in a text and are rejected. {REASONING_REMEDY}"
                )

    def _tell(self, message: str) -> None:
        log.warning("%s", message)
        self._say(message)


_AGAIN = (
    "Then run the same command again: it runs what is pending (another --run_name also runs "
    "again what ended so)"
)


def _is_told(count: int) -> bool:
    return count in (1, 10, 100, 1_000, 10_000, 100_000)


def _are_most(count: int, ended: int) -> bool:
    return count >= _MIN_CONVERSATIONS and 2 * count >= ended
