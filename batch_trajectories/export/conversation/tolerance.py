"""Flaws of conversations that some trainers accept, and which of them a user accepts.

Reading a record finds its flaws, once for all formats. A format always refuses flaws that it cannot
represent, and refuses the others unless the user accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from batch_trajectories.export.conversation.row_json import Token
from batch_trajectories.export.conversation.validity import Reason, Rejected

Tokens = Literal["template", "all"]

TAG_FLAWS = frozenset((Reason.MARKER_IN_TEXT, Reason.MARKER_IN_ARGUMENTS, Reason.MARKER_IN_RESULT))
"""Flaws by tags of calls, results and reasoning; formats that show text as it is can hold them."""
NON_OBJECT_ARGUMENTS = frozenset((Reason.ARGUMENTS_NOT_JSON, Reason.ARGUMENTS_NOT_OBJECT))
"""Flaws by arguments that are no object, which rows can only hold as text."""
NON_TEXT_FLAWS = frozenset((Reason.HAS_IMAGES, Reason.HAS_FILES))
"""Flaws by content parts that are not text. Rows hold a placeholder, not what the model saw."""
COMMON_FLAWS = NON_TEXT_FLAWS | frozenset(
    (
        Reason.CONTROL_TOKEN,
        Reason.PROVIDER_CALL,
        Reason.UNKNOWN_TOOL,
        Reason.INTERRUPTED,
        Reason.LEAK_SUSPECTED,
        Reason.LEAKED_CALL,
    )
)
"""Flaws that rows of every format can hold."""


class Flaw(NamedTuple):
    """A flaw of a conversation; `reason` and `detail` are those of `Rejected`."""

    reason: Reason
    detail: str
    token: Token | None = None
    """The control token, if the flaw is by one."""


class Tolerance(msgspec.Struct, frozen=True):
    """The flaws with which rows are kept."""

    accepts: frozenset[Reason] = frozenset()
    tokens: Tokens = "template"
    """The control tokens for which rows are refused. `template`: tokens that only chat templates
    use; `all`: also tokens that are structure to some tokenizers, but ordinary markup to most
    (`<s>`, `[INST]`)."""

    def refuses(self, flaw: Flaw) -> bool:
        """Whether a row is refused for a flaw."""
        if flaw.reason in self.accepts:
            return False
        return flaw.token is None or self.refuses_token(flaw.token)

    def refuses_token(self, token: Token) -> bool:
        """Whether a row is refused for a control token."""
        if Reason.CONTROL_TOKEN in self.accepts:
            return False
        return self.tokens == "all" or not token.is_markup

    def refuse(self, flaws: Iterable[Flaw]) -> None:
        """Raise Rejected for the first flaw that is not accepted."""
        for flaw in flaws:
            if self.refuses(flaw):
                raise Rejected(flaw.reason, flaw.detail)


STRICT = Tolerance()
"""A tolerance that accepts no flaw."""


def refuse_everywhere(flaws: Sequence[Flaw], tolerances: Iterable[Tolerance]) -> None:
    """Raise Rejected, as the first format does, if no format accepts the flaws."""
    refused: Rejected | None = None
    for tolerance in tolerances:
        try:
            tolerance.refuse(flaws)
        except Rejected as rejected:
            refused = refused or rejected
        else:
            return
    if refused is not None:
        raise refused


def parse_reasons(names: Iterable[Any]) -> frozenset[Reason]:
    """The reasons with these names. Raises ValueError for unknown ones."""
    return frozenset(map(Reason, names))
