"""A format of rows: one object, `FORMAT`, in the module of `export/formats/` that has its name.

An export imports the formats that its recipe names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from batch_trajectories.export.conversation.style import ReasoningStyle, Style
from batch_trajectories.export.conversation.tolerance import (
    COMMON_FLAWS,
    NON_OBJECT_ARGUMENTS,
    TAG_FLAWS,
)
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Reason
from batch_trajectories.export.rows.row_files import MakeWriter

_HOLDERS: Mapping[str, str] = {
    **dict.fromkeys(COMMON_FLAWS | NON_OBJECT_ARGUMENTS, "hermes"),
    **dict.fromkeys(TAG_FLAWS, "openai"),
}
"""A format that can hold each flaw, by the reason of the flaw."""


class Format(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The properties of a format, whatever its rows are made from."""

    name: str
    card: str
    """Instructions for reading the rows, for the dataset card."""
    trainers: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Programs that read the rows, each with the folders that it can read, the best folder
    first."""
    columns: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Columns and their types, in order, for copies and the hub; none without a fixed schema.

    Types are those of `datasets`, and `turns` (objects of `from` and `value`) and `messages`
    (objects of any form). The column `tools` is text, or with messages a list if a recipe says so.
    """
    parquet: Callable[[], MakeWriter] | None = None
    """Makes the function that begins Parquet files; None if rows are JSON lines."""
    holds: frozenset[Reason] = frozenset()
    """The flaws of conversations that rows can represent."""
    accepts: frozenset[Reason] = frozenset()
    """The flaws of `holds` with which rows are kept even without `accept_rows`."""
    marks_loss: bool = False
    """Whether rows mark the turns that carry no loss."""
    shows_messages: bool = True
    """Whether rows show messages, so that a conversation with other flaws has no row."""
    takes_all: bool = False
    """Whether failures and duplicates have rows, too, unless a recipe says otherwise."""
    has_turns: bool = False
    """Whether a row can be for one turn, which is the only one to be learnt."""
    by_prompt: bool = False
    """Whether a row is made from all samples of a prompt."""
    compares_samples: bool = False
    """Whether rows say which of the samples are better, so those that did not pass are needed."""
    side_files: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    """Makes the JSON files beside the rows, by name. Takes the format's part of the manifest and
    the name of the run."""

    def limit(self, style: Style) -> Style:
        """The style, accepting only flaws that the format can represent."""
        tolerance = style.tolerance
        holds = self.holds
        if style.arguments == "text" and self.has_messages:
            holds |= NON_OBJECT_ARGUMENTS
        accepts = self.accepts | (tolerance.accepts & holds)
        return replace(style, tolerance=replace(tolerance, accepts=accepts))

    def list_columns(self, *, lists_tools: bool) -> Mapping[str, str]:
        """The columns, with tools as text or as a list."""
        if lists_tools and self.has_messages:
            return {**self.columns, "tools": "messages"}
        return self.columns

    @property
    def has_messages(self) -> bool:
        """Whether a column holds messages, and so arguments of calls apart from text."""
        return "messages" in self.columns.values()

    def how_to_keep(self, reason: str) -> str:
        """The advice how to keep rows refused for this reason; "" if no format can hold them."""
        if reason in self.holds:
            return f"--accept_rows={reason} keeps such rows"
        if reason in NON_OBJECT_ARGUMENTS and self.has_messages:
            return f"--arguments=text --accept_rows={reason} keeps such rows"
        if (holder := _HOLDERS.get(reason)) is None:
            return ""
        return f"{self.name} cannot hold this; export --format={holder} --accept_rows={reason} can"


class RowFormat(Format, frozen=True, kw_only=True, eq=False):
    """A format with one row for each conversation."""

    row_of: Callable[[Conversation, Style], dict[str, Any]]
    """Makes the row of a conversation; raises Rejected."""
    reasoning: frozenset[ReasoningStyle]
    """The places where reasoning can be: `field`, `inline` or both."""
    holds: frozenset[Reason] = COMMON_FLAWS
    splits_calls: bool = True
    """Whether `parallel_calls: split` divides turns."""
    has_segments: bool = True
    """Whether rows can show parts of a conversation as the model saw them."""


class Copies(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A kind of files to which rows of formats with columns are copied."""

    takes_all: ClassVar = False
    has_turns: ClassVar = True
    name: str
    suffix: str
    writer: Callable[[Format, bool], MakeWriter]
    """Makes the function that begins files of a format. The flag says whether tools are lists;
    kinds of files that can only hold text ignore the flag."""
    packages: tuple[str, ...]
    """Packages whose versions the bytes depend on."""
    file_name: str | None = None
    """The beginning of file names, for kinds that have a folder for each split; else None."""
    side_files: Callable[[Format, list[Mapping[str, Any]], bool], Mapping[str, Any]] | None = None
    """Makes the JSON files beside these files, by name. Takes the files as a manifest lists them;
    the flag says whether tools are lists."""


@cache
def load_kind(name: str) -> Format | Copies:
    """Import the format or kind of copies with this name, one of `format_names.names`."""
    found = import_module(f"batch_trajectories.export.formats.{name}").FORMAT
    assert isinstance(found, Format | Copies)
    return found


def load_format(name: str) -> Format:
    """Import the format with this name; raises KeyError for a kind of copies."""
    loaded = load_kind(name)
    if isinstance(loaded, Copies):
        raise KeyError(name)
    return loaded
