"""Masks turns of records, by the key `mask` of a recipe: masked turns carry no loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agent.messages.message import TOOL_TEXT_END
from agent.options import Float
from agent.state.tally import MALFORMED_CALLS, canonical
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.authors import other_models
from batch_trajectories.export.conversation.ending import is_answered
from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.export.conversation.own_work import AuthoredWork, failure_kind
from batch_trajectories.export.conversation.rewards import judgement_with_reward
from batch_trajectories.export.conversation.row_json import is_object
from batch_trajectories.export.conversation.turns import Conversation, Entry, Turn
from batch_trajectories.records.checks import MAIN, record_rewards
from batch_trajectories.records.record_types import (
    Record,
    StoredConversation,
    StoredMessage,
    StoredTurn,
)
from batch_trajectories.records.scores import marked_turns
from toolsets.catalog.custom import CustomToolError, import_function

# The key `mask` of a recipe: which turns carry no loss.

NOT_PASSED = "not_passed"
"""The name for conversations that did not pass, or ended early."""


def _read_bounds(value: Any) -> Any:
    """Read a number alone as the bound of `reward`."""
    return {MAIN: value} if isinstance(value, int | float) else value


Bound = Annotated[Float, Field(allow_inf_nan=False)]


class Mask(BaseModel):
    """Reasons why a turn carries no loss; each field has the name of its reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turn_reward: Annotated[dict[str, Bound], BeforeValidator(_read_bounds)] = {}
    """A turn reward is below its bound. Bounds are by name; a number alone is for `reward`."""
    failed_call: bool = False
    """A call failed."""
    repeated_call: bool = False
    """A call is the same as in the turn before, with the same arguments and result."""
    bad_arguments: bool = False
    """A call had invalid arguments, or had to be repaired."""
    interrupted_result: bool = False
    """A stop of the run interrupted a call."""
    leak_suspected: bool = False
    """A call looked for the solution of a checked task."""
    label: bool = False
    """A reviewer marked the turn to carry no loss."""
    wrong_answer: bool = False
    """The turn is the answer of a conversation that did not pass."""
    model: Literal["own_model"] | None = None
    """`own_model`: another model that an agent called wrote the reply."""
    function: Annotated[str, Field(pattern=r"^.+:[\w.]+$")] | None = None
    """MODULE:FUNCTION, called with the record; returns a list with an item for each turn of this
    run's model: true or a text (the reason) for a turn without loss."""

    @model_validator(mode="after")
    def _names_a_reason(self) -> Mask:
        if self == Mask.model_construct():
            raise ValueError(f"masks nothing; set one of {', '.join(Mask.model_fields)}")
        return self


DEFAULT_MASK: dict[str, Any] = {
    **{name: True for name, field in Mask.model_fields.items() if field.annotation is bool},
    "model": "own_model",
}
"""The mask if failures are included and the recipe has none: reasons without a parameter."""


Masked = Mapping[int, tuple[str, ...]]
"""The reasons of masked turns, by the turn's number in its record."""

_UNFINISHED_FAILURES = frozenset({"not_run", "interrupted"})
"""Failures of calls that might have succeeded."""

_MAX_REASON_CHARS = 80
"""Maximum characters of a reason that a user's function gives."""

_MAX_REASONS = 100
"""Maximum number of reasons that are counted by name; further ones count as `function`."""


def masks_to_json(masked: Masked) -> list[dict[str, Any]]:
    """The value of `masked` in the metadata of a row."""
    return [{"turn": turn, "reasons": list(names)} for turn, names in masked.items()]


class Masks:
    """Masks turns and counts them."""

    def __init__(self, mask: Mask, *, threshold: float, reward_name: str | None = None) -> None:
        """`threshold` and `reward_name` decide what has passed. Raises `ConfigError`."""
        self._mask = mask
        self._threshold = threshold
        self._reward_name = reward_name
        self._function: Callable[[dict[str, Any]], Any] | None = None
        if mask.function is not None:
            try:
                self._function = import_function(mask.function, "mask.function")
            except CustomToolError as error:
                raise ConfigError(str(error)) from error
        self._missing = set(mask.turn_reward)
        self._known: set[str] = set()
        self._turns = self._masked = 0
        self._reasons: Counter[str] = Counter()

    def masked_turns(self, part: StoredConversation) -> Masked:
        """The masked turns of this run's model in a record or a conversation inside one.

        Raises `ConfigError` if the user's function fails.
        """
        found: dict[int, dict[str, None]] = {}
        for turn, reason in self._find_reasons(part):
            found.setdefault(turn, {})[reason] = None
        return {turn: tuple(found[turn]) for turn in sorted(found)}

    def apply(self, conversation: Conversation) -> Conversation:
        """Mask the turns of a conversation, and add `masked` to its metadata.

        An answer that was part of a reply with calls is masked with that reply.
        """
        masked = self.masked_turns(conversation.record)
        if not masked:
            return conversation
        replies = conversation.replies_by_turn
        entries: list[Entry] = []
        reasons: tuple[str, ...] = ()
        for entry in conversation.entries:
            if isinstance(entry, Turn) and not entry.is_prior:
                if made := replies.get(entry.number):
                    names = [name for reply in made for name in masked.get(reply.turn, ())]
                    reasons = tuple(dict.fromkeys(names))
                entry = msgspec.structs.replace(entry, masked=(*entry.masked, *reasons))
            entries.append(entry)
        metadata = {**conversation.metadata, "masked": masks_to_json(masked)}
        return msgspec.structs.replace(conversation, entries=entries, metadata=metadata)

    def did_not_pass(self, record: Record) -> bool:
        """Whether a conversation did not pass, or ended early."""
        return record.status != "completed" or self._has_failed(record)

    def count(self, turns: Iterable[Sequence[str]]) -> None:
        """Count turns that are in rows; each item has the reasons of one turn, none: not masked."""
        for reasons in turns:
            self._turns += 1
            self._masked += bool(reasons)
            for reason in reasons:
                is_new = reason not in self._reasons and len(self._reasons) >= _MAX_REASONS
                self._reasons["function" if is_new else reason] += 1

    def counts(self) -> dict[str, Any]:
        """The counts for the manifest: masked `turns`, all turns (`masked_turns`), and `by_reason`.

        A turn can have several reasons. Raises `ConfigError` for a bound of a turn reward that no
        conversation has.
        """
        if self._missing and self._turns:
            name = min(self._missing)
            known = ", ".join(sorted(self._known)) or "none"
            raise ConfigError(
                f"mask.turn_reward: no conversation of this export has turn rewards named {name!r} "
                f"(known: {known}); see docs/rewards.md"
            )
        by_reason = dict(sorted(self._reasons.items(), key=lambda found: (-found[1], found[0])))
        return {"turns": self._masked, "of": self._turns, "by_reason": by_reason}

    def _find_reasons(self, part: StoredConversation) -> Iterator[tuple[int, str]]:
        mask = self._mask
        yield from _result_reasons(part, mask)
        if not isinstance(part, Record):
            return
        turns = part.own_turns
        if mask.turn_reward:
            yield from self._reward_reasons(part, turns)
        if mask.model is not None and (others := other_models(part)):
            for turn in turns:
                if turn.model in others:
                    yield turn.turn, "model"
        if mask.leak_suspected:
            for leak in find_leaks(part):
                yield part.turns[leak.turn - 1].turn, "leak_suspected"
        if mask.label:
            numbers = {turn.turn for turn in turns}
            for number in marked_turns(part):
                if number in numbers:
                    yield number, "label"
        if mask.wrong_answer and turns and is_answered(part) and self._has_failed(part):
            yield turns[-1].turn, "wrong_answer"
        if self._function is not None:
            for turn, item in zip(turns, self._call_function(part, len(turns)), strict=True):
                if item:
                    yield turn.turn, "function" if item is True else f"function: {item}"

    def _has_failed(self, record: Record) -> bool:
        return judgement_with_reward(record, self._reward_name).is_good(self._threshold) is False

    def _reward_reasons(
        self, record: Record, turns: Sequence[StoredTurn]
    ) -> Iterator[tuple[int, str]]:
        by_turn = record_rewards(record).by_turn
        self._known |= by_turn.keys()
        self._missing -= by_turn.keys()
        for name, bound in self._mask.turn_reward.items():
            # A check after an agent does not know the number of its turns.
            for turn, reward in zip(turns, by_turn.get(name, ()), strict=False):
                if reward is not None and reward < bound:
                    yield turn.turn, "turn_reward"

    def _call_function(self, record: Record, turns: int) -> list[Any]:
        """Call the user's function; returns a reason, true, false or None for each turn."""
        assert self._function is not None
        where = f"mask.function: {self._mask.function}"
        try:
            given = self._function(record.as_dict())
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise ConfigError(
                f"{where} failed for {record.id}: {type(error).__name__}: {error}; it is called "
                "with the record"
            ) from error
        if not isinstance(given, list | tuple) or len(given) != turns:
            what = f"{len(given)} items" if isinstance(given, list | tuple) else repr(given)[:80]
            raise ConfigError(
                f"{where} gave {what} for {record.id}; it must return a list with an item for each "
                f"of the {turns} turns of the run's model"
            )
        for item in given:
            if not isinstance(item, bool | None) and not (
                isinstance(item, str) and item.strip() and len(item) <= _MAX_REASON_CHARS
            ):
                raise ConfigError(
                    f"{where} gave {repr(item)[:80]} for a turn of {record.id}; give true, false, "
                    f"null or a reason of 1 to {_MAX_REASON_CHARS} characters"
                )
        return list(given)


def _result_reasons(part: StoredConversation, mask: Mask) -> Iterator[tuple[int, str]]:
    """Turns of a conversation with the reasons that follow from calls and results."""
    before: set[tuple[str, str | bytes, str]] = set()
    added = [(note.turn, f"\n\n{note.text}") for note in reversed(part.notes) if note.text]
    for turn, reply, results in _steps(AuthoredWork(part)):
        kinds = {failure_kind(one.details) for one in results.values() if one.is_error}
        if mask.failed_call and kinds - _UNFINISHED_FAILURES:
            yield turn, "failed_call"
        if mask.bad_arguments and (kinds & MALFORMED_CALLS or _has_bad_arguments(reply)):
            yield turn, "bad_arguments"
        if mask.interrupted_result and "interrupted" in kinds:
            yield turn, "interrupted_result"
        if mask.repeated_call:
            now = set(
                _call_identities(reply, results, [text for after, text in added if after == turn])
            )
            if now & before:
                yield turn, "repeated_call"
            before = now


def _has_bad_arguments(reply: StoredMessage) -> bool:
    """Whether a reply has arguments that were repaired or are no object."""
    # Agents that run as commands do not say what became of a call, so the arguments are parsed.
    if reply.repairs or reply.unusable:
        return True
    return not all(is_object(call.function.arguments) for call in reply.tool_calls)


def _steps(
    authored: AuthoredWork,
) -> Iterator[tuple[int, StoredMessage, dict[str | None, StoredMessage]]]:
    """The replies of this run's model: number of the turn, message, results by id of the call."""
    turns = iter(authored.turns)
    reply: StoredMessage | None = None
    number = 0
    results: dict[str | None, StoredMessage] = {}
    for message in authored.messages:
        if message.role == "tool":
            results[message.tool_call_id] = message
        elif message.role == "assistant":
            if reply is not None:
                yield number, reply, results
            reply, number, results = message, next(turns).turn, {}
    if reply is not None:
        yield number, reply, results


def _call_identities(
    reply: StoredMessage, results: Mapping[str | None, StoredMessage], added: Sequence[str]
) -> Iterator[tuple[str, str | bytes, str]]:
    """Name, arguments and the tool's own text of each call that has a result.

    `added` are texts that the runtime appended to results, the last one first.
    """
    for call in reply.tool_calls:
        result = results.get(call.id)
        if result is None or failure_kind(result.details) in _UNFINISHED_FAILURES:
            continue
        content = result.content[: result.details.get(TOOL_TEXT_END)]
        for text in added:
            content = content.removesuffix(text)
        yield call.function.name, canonical(call.function.arguments), content
