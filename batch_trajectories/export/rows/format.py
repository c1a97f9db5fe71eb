"""A format of rows: one object, `FORMAT`, in the module of `export/formats/` that has its name.

An export imports the formats that its recipe names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from batch_trajectories.export.conversation.style import ReasoningStyle, Style
from batch_trajectories.export.conversation.tolerance import COMMON_FLAWS, NO_OBJECT, TAG_FLAWS
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Reason
from batch_trajectories.export.rows.row_files import MakeWriter

_HOLDERS: Mapping[str, str] = {
    **dict.fromkeys(COMMON_FLAWS | NO_OBJECT, "hermes"),
    **dict.fromkeys(TAG_FLAWS, "openai"),
}
"""For each flaw that a row can have, a format that can represent it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Format:
    """What there is to know of a format, whatever its rows are made from."""

    name: str
    card: str
    """How to read the rows, for the dataset card."""
    trainers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Programs that read the rows, each with the folders that it can read, the best one first."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns and their types, in order, for copies and the hub; none without a fixed schema.

    Types are those of `datasets`, and `turns` (objects of `from` and `value`) and `messages`
    (objects of any form). The column `tools` is text, or with messages a list if a recipe says so.
    """
    parquet: Callable[[], MakeWriter] | None = None
    """Returns what begins Parquet files of the rows, if rows are not JSON lines."""
    holds: frozenset[Reason] = frozenset()
    """The flaws of conversations that rows can represent."""
    accepts: frozenset[Reason] = frozenset()
    """Those of them with which rows are kept without `accept_rows`."""
    marks_loss: bool = False
    """Whether rows mark the turns that carry no loss."""
    shows_messages: bool = True
    """Whether rows show messages, so that only conversations without other flaws have a row."""
    takes_all: bool = False
    """Whether failures and equal samples have rows, too, unless a recipe says otherwise."""
    has_turns: bool = False
    """Whether a row can be for one turn, which alone is learnt."""
    by_prompt: bool = False
    """Whether a row is made from all samples of a prompt."""
    prefers: bool = False
    """Whether rows say which of the samples are better, so those that did not pass are needed."""
    beside: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    """Gives JSON files beside the rows, by name, for the format's part of the manifest and the name
    of the run."""

    def limit(self, style: Style) -> Style:
        """The style, accepting only flaws that the format can represent."""
        tolerance = style.tolerance
        holds = self.holds
        if style.arguments == "text" and self.has_messages:
            holds |= NO_OBJECT
        accepts = self.accepts | (tolerance.accepts & holds)
        return replace(style, tolerance=replace(tolerance, accepts=accepts))

    def columns_with(self, *, lists_tools: bool) -> Mapping[str, str]:
        """The columns, with tools as text or as a list."""
        if lists_tools and self.has_messages:
            return {**self.columns, "tools": "messages"}
        return self.columns

    @property
    def has_messages(self) -> bool:
        """Whether a column holds messages, and so arguments of calls apart from text."""
        return "messages" in self.columns.values()

    def how_to_keep(self, reason: str) -> str:
        """How to keep rows that were refused for this reason, "" if that is impossible."""
        if reason in self.holds:
            return f"--accept_rows={reason} keeps such rows"
        if reason in NO_OBJECT and self.has_messages:
            return f"--arguments=text --accept_rows={reason} keeps such rows"
        if (holder := _HOLDERS.get(reason)) is None:
            return ""
        return f"{self.name} cannot hold this; export --format={holder} --accept_rows={reason} can"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowFormat(Format):
    """A format with one row for each conversation."""

    row_of: Callable[[Conversation, Style], dict[str, Any]]
    """Raises Rejected."""
    reasoning: frozenset[ReasoningStyle]
    """Where reasoning can be: `field`, `inline` or both."""
    holds: frozenset[Reason] = COMMON_FLAWS
    splits_calls: bool = True
    """Whether `parallel_calls: split` divides turns."""
    has_segments: bool = True
    """Whether rows can show parts of a conversation as the model saw them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """Files of another kind that rows of formats with columns are copied to."""

    takes_all: ClassVar = False
    has_turns: ClassVar = True
    name: str
    suffix: str
    writer: Callable[[Format, bool], MakeWriter]
    """Gives what begins such files of a format. The flag: tools are lists, unless the recipe wants
    them as text; kinds that can only hold text ignore it."""
    packages: tuple[str, ...]
    """Packages whose versions the bytes depend on."""
    file_name: str | None = None
    """Begins the names of files, which are then in a folder for each split."""
    beside: Callable[[Format, list[Mapping[str, Any]], bool], Mapping[str, Any]] | None = None
    """Gives JSON files beside these files, which are given as a manifest lists them; the flag as
    above."""


@cache
def named(name: str) -> Format | Copies:
    """The format or kind of copies of this name, one of `format_names.names`."""
    found = import_module(f"batch_trajectories.export.formats.{name}").FORMAT
    assert isinstance(found, Format | Copies)
    return found


def format_named(name: str) -> Format:
    """The format of this name; raises KeyError for copies."""
    loaded = named(name)
    if isinstance(loaded, Copies):
        raise KeyError(name)
    return loaded
