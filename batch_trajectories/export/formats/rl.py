"""Token ids as sampled, with loss masks and rewards: verl, prime-rl, SkyRL, slime.

A row is a segment of a conversation, in which each prompt begins with the prompt and completion of
the turn before. If a prompt does not (retokenized text, stripped reasoning, a summary), the
conversation is split, and the next row says so. Only tokens that this run's model sampled are
trained on.

With `subagents`, conversations of subagents have rows, too. They share id, group and reward with
the conversation that they are part of.

With `teacher`, rows have the log-probabilities that another model gave to the learnt tokens. They
are base64 of 32-bit numbers: as JSON numbers they would take two to three times as many bytes.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec.structs import replace

from agent.messages.message import COST_ONLY, NON_CHAT_CALLS, STAGES, WORKSPACE_LOST
from agent.messages.tokens import TokenTurn, token_turns
from batch_trajectories.engine.features import find_feature
from batch_trajectories.export.conversation.reading import (
    find_leaked_calls,
    find_part_flaws,
    find_rewarded_leaks,
)
from batch_trajectories.export.conversation.rewards import reward_facts, training_reward
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.tolerance import STRICT
from batch_trajectories.export.conversation.validity import Reason, Rejected, Rejection
from batch_trajectories.export.rows.files import Candidate, CandidateFiles, CustomFormat, Export
from batch_trajectories.records.checks import BY_TURN
from batch_trajectories.records.record_types import (
    DiscardedReply,
    InnerRecord,
    Record,
    StoredConversation,
    StoredTurn,
)

if TYPE_CHECKING:
    from batch_trajectories.export.masking import Masked, Masks

MAIN_THREAD = "main"
"""The `thread` of a conversation that is not a subagent's."""


_SPLIT_TEXTS = 5
"""Maximum number of texts at splits in the manifest, the most frequent ones."""


class _Segment:
    """A part of a conversation without a split."""

    def __init__(
        self, first: TokenTurn, before: list[int], texts: Mapping[str, str] | None
    ) -> None:
        """`before` is the token sequence up to the turn before, `texts` are those at the split."""
        self.split: dict[str, Any] | None = None
        if first.previous_length > first.shared:
            self.split = {"shared": first.shared, "expected": first.previous_length}
            self.split |= texts or dict.fromkeys(("sampled", "shown"))
        self.context: list[int] = before[: first.shared]
        """The tokens before the first trained token."""
        self.response: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] | None = []
        self.sampled: list[int] = []
        """The places in `response` of the tokens that this run's model sampled, masked or not."""
        self.turns: list[StoredTurn] = []

    def add(
        self,
        ids: list[int],
        logprobs: list[float] | None,
        *,
        is_sampled: bool,
        is_masked: bool = False,
    ) -> None:
        """Add tokens; all tokens before the first sampled token are context."""
        if not is_sampled and not self.response:
            self.context += ids
            return
        if is_sampled:
            self.sampled += range(len(self.response), len(self.response) + len(ids))
        self.response += ids
        self.mask += [int(is_sampled and not is_masked)] * len(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += logprobs


class SampledSegment(NamedTuple):
    """The token ids of a row, without what the row says about them."""

    turns: Sequence[int]
    """The numbers of the turns that were sampled here."""
    ids: Sequence[int]
    """The context, and all tokens up to the last sampled one."""
    sampled: Sequence[int]
    """The places in `ids` of the tokens that this run's model sampled."""


def sampled_segments(
    record: Record, *, subagents: bool = False, discarded: bool = False
) -> Iterator[SampledSegment]:
    """The segments of the rows that `make_rows` gives with the same options.

    Raises Rejected as `make_rows` does.
    """
    STRICT.refuse(find_part_flaws(record.messages))
    try:
        segments = _find_segments(record, discarded=discarded)
        if segments and subagents:
            for thread in walk_threads(record):
                if _has_same_model(record, thread):
                    segments += _find_segments(thread, discarded=discarded)
    except ValueError as error:
        raise Rejected(Reason.NO_TOKEN_IDS, str(error)) from error
    if not segments:
        raise Rejected(Reason.NO_TOKEN_IDS, f"none of {len(record.turns)} turns has token ids")
    yield from map(_sampled_part, segments)


def _find_segments(thread: StoredConversation, *, discarded: bool) -> list[_Segment]:
    segments = _segments(thread.turns, {})
    if discarded:
        for _, turns in _discarded_turns(thread):
            segments += _segments(turns, {})
    return segments


def _sampled_part(segment: _Segment) -> SampledSegment:
    length, first = segment.sampled[-1] + 1, len(segment.context)
    return SampledSegment(
        turns=[turn.turn for turn in segment.turns],
        ids=segment.context + segment.response[:length],
        sampled=[first + place for place in segment.sampled],
    )


class TokenFigures(Protocol):
    """Packed log-probabilities of some tokens by a teacher."""

    @property
    def logprobs(self) -> bytes: ...
    @property
    def top_ids(self) -> bytes: ...
    @property
    def top_logprobs(self) -> bytes: ...
    def select(self, places: Sequence[int], top: int) -> TokenFigures: ...


class _Figures(Protocol):
    """The figures of one teacher for all segments of some runs."""

    def find(self, ids: Sequence[int], sampled: Sequence[int]) -> TokenFigures | None: ...
    def close(self) -> None: ...


class Teacher:
    """The columns of a teacher, and how many rows lack them."""

    def __init__(self, figures: _Figures, top: int) -> None:
        """`top` is the number of most likely tokens at each place; 0: none."""
        self._figures = figures
        self._top = top
        self.missing = 0
        """The number of rows that the teacher has not scored."""

    def columns(self, segment: _Segment) -> dict[str, str | None]:
        """The columns of a row: a value for each 1 of its `loss_mask`; null if it lacks figures."""
        names = ("logprobs", "top_ids", "top_logprobs") if self._top else ("logprobs",)
        part = _sampled_part(segment)
        figures = self._figures.find(part.ids, part.sampled)
        if figures is None:
            self.missing += 1
            return dict.fromkeys(f"teacher_{name}" for name in names)
        learnt = [n for n, place in enumerate(segment.sampled) if segment.mask[place]]
        figures = figures.select(learnt, self._top)
        return {f"teacher_{name}": b64encode(getattr(figures, name)).decode() for name in names}

    def close(self) -> None:
        """Close the files of figures."""
        self._figures.close()


def make_rows(
    record: Record,
    reward_name: str | None = None,
    *,
    subagents: bool = False,
    discarded: bool = False,
    masks: Masks | None = None,
    teacher: Teacher | None = None,
) -> list[dict[str, Any]]:
    """The rows of a record, one per segment; `reward_name` is the reward that counts.

    Records with rewards by name or per turn have `rewards`, and `turn_rewards` of these turns.
    With `subagents`, rows of their conversations follow (see `walk_threads`), and each row names
    its `thread`. With `discarded`, a row for each discarded reply follows those of its
    conversation, and each row says why its reply was `discarded`. With `masks`, masked turns have a
    loss mask of 0, and each row has `masked`, the reasons for each of its turns. With
    `teacher`, each row has its columns.

    Raises Rejected if a message holds a picture or the like, which ids do not have, if no turn of
    this run's model has token ids, or if ids are damaged.
    """
    STRICT.refuse(find_part_flaws(record.messages))

    def rows_and_discarded(thread: StoredConversation) -> list[dict[str, Any]]:
        masked = None if masks is None else masks.masked_turns(thread)
        rows = _thread_rows(
            record,
            thread.turns,
            reward_name,
            is_main=thread is record,
            masked=masked,
            teacher=teacher,
        )
        if not discarded:
            return rows
        return [{**row, "discarded": None} for row in rows] + _discarded_rows(
            record, thread, masked=None if masks is None else {}, teacher=teacher
        )

    try:
        rows = rows_and_discarded(record)
        if rows and subagents:
            rows = [{**row, "thread": MAIN_THREAD, "thread_id": None} for row in rows]
            for thread in walk_threads(record):
                if _has_same_model(record, thread):
                    thread_columns = {"thread": thread.name, "thread_id": thread.key}
                    rows += [{**row, **thread_columns} for row in rows_and_discarded(thread)]
    except ValueError as error:
        raise Rejected(Reason.NO_TOKEN_IDS, str(error)) from error
    if not rows:
        raise Rejected(Reason.NO_TOKEN_IDS, f"none of {len(record.turns)} turns has token ids")
    return rows


def walk_threads(part: StoredConversation) -> Iterator[InnerRecord]:
    """The conversations of subagents inside a record, at any depth."""
    for inner in part.inner:
        if inner.name not in STAGES | NON_CHAT_CALLS:
            yield inner
            yield from walk_threads(inner)


def discarded_replies(thread: StoredConversation) -> list[DiscardedReply]:
    """The replies with token ids after which the model was asked again."""
    # Replies from before a loss of the workspace are left out: the turns before them are gone.
    replies = thread.discarded
    lost = [n for n, reply in enumerate(replies) if reply.discarded == WORKSPACE_LOST]
    later = replies[lost[-1] + 1 :] if lost else replies
    return [reply for reply in later if reply.discarded not in COST_ONLY and reply.has_ids]


def _discarded_turns(
    thread: StoredConversation,
) -> Iterator[tuple[DiscardedReply, list[StoredTurn]]]:
    """Yield each discarded reply as the only own turn after the turns before it."""
    for reply in discarded_replies(thread):
        before = [replace(turn, inherited=True) for turn in thread.turns[: reply.turn - 1]]
        yield reply, [*before, reply]


def _discarded_rows(
    record: Record,
    thread: StoredConversation,
    *,
    masked: Masked | None,
    teacher: Teacher | None,
) -> list[dict[str, Any]]:
    """A row for each discarded reply, which counts as a sample with an unknown reward."""
    rows = []
    for number, (reply, turns) in enumerate(_discarded_turns(thread), 1):
        for row in _thread_rows(record, turns, None, is_main=False, masked=masked, teacher=teacher):
            row |= dict.fromkeys(row.keys() & {"reward", "rewards"})
            row |= {"id": f"{record.id}#discarded{number}", "discarded": reply.discarded}
            rows.append(row)
    return rows


def _has_same_model(record: Record, thread: InnerRecord) -> bool:
    """Whether a subagent used the model of the record; token ids of other models differ."""
    models = {turn.model for turn in record.turns}
    return all(turn.model in models for turn in thread.turns)


def _thread_rows(
    record: Record,
    turns: Sequence[StoredTurn],
    reward_name: str | None,
    *,
    is_main: bool,
    masked: Masked | None,
    teacher: Teacher | None,
) -> list[dict[str, Any]]:
    """The rows of one conversation of a record: the main one, or a subagent's."""
    segments = _segments(turns, masked or {})
    missing = [turn.turn for turn in turns if turn.inherited is None and not turn.has_ids]
    return [
        {
            "id": record.id,
            "group_id": record.prompt_id,
            "sample": record.sample,
            "segment": number,
            "segments": len(segments),
            "split": segment.split,
            "turns": [turn.turn for turn in segment.turns],
            "turns_without_ids": missing,
            "prompt_ids": segment.context,
            "response_ids": segment.response,
            "loss_mask": segment.mask,
            "logprobs": segment.logprobs,
            **({} if teacher is None else teacher.columns(segment)),
            "reward": training_reward(record, reward_name),
            **_more_rewards(record, segment, is_main=is_main),
            "status": record.status,
            "finish_reasons": [turn.finish_reason for turn in segment.turns],
            "policy_versions": [_policy_version(turn) for turn in segment.turns],
            "sampling": [_sampling(turn) for turn in segment.turns],
            **(
                {}
                if masked is None
                else {"masked": [masked.get(t.turn, ()) for t in segment.turns]}
            ),
        }
        for number, segment in enumerate(segments)
    ]


def _more_rewards(record: Record, segment: _Segment, *, is_main: bool) -> dict[str, Any]:
    facts = reward_facts(record)
    facts.pop("reward", None)
    if not is_main:
        facts.pop(BY_TURN, None)  # they are of the turns of the record
    elif by_turn := facts.get(BY_TURN):
        numbers = [turn.turn for turn in record.own_turns]
        indices = [numbers.index(turn.turn) for turn in segment.turns]
        # A check after an agent does not know the number of its turns.
        facts[BY_TURN] = {
            name: [given[n] if n < len(given) else None for n in indices]
            for name, given in by_turn.items()
        }
    return facts


def _segments(turns: Sequence[StoredTurn], masked: Masked) -> list[_Segment]:
    """Segments of a conversation in which this run's model sampled a token."""
    segments: list[_Segment] = []
    sequence: list[int] = []
    for turn in token_turns([turn.tokens for turn in turns]):
        stored = turns[turn.number]
        is_own = stored.inherited is None
        if not segments or turn.shared < turn.previous_length:
            segments.append(
                _Segment(turn, sequence, None if stored.tokens is None else stored.tokens.split)
            )
        segment = segments[-1]
        segment.add(turn.prompt, [0.0] * len(turn.prompt), is_sampled=False)
        is_masked = stored.turn in masked
        logprobs = _round_logprobs(turn.logprobs)
        segment.add(turn.completion, logprobs, is_sampled=is_own, is_masked=is_masked)
        if is_own:
            segment.turns.append(stored)
        del sequence[turn.shared :]
        sequence += turn.prompt
        sequence += turn.completion
    return [segment for segment in segments if segment.response]


def _round_logprobs(logprobs: list[float] | None) -> list[float] | None:
    """Round to nine digits, which distinguish all 32-bit floats."""
    return None if logprobs is None else [float(f"{value:.9g}") for value in logprobs]


def _sampling(turn: StoredTurn) -> dict[str, Any] | None:
    return None if turn.tokens is None else turn.tokens.sampling


def _policy_version(turn: StoredTurn) -> str | None:
    """The version of the weights; if unknown, the name of the model as the endpoint returned it."""
    choice = (turn.extra or {}).get("choice") or {}
    meta = choice.get("meta_info")
    version = meta.get("weight_version") if isinstance(meta, dict) else None
    return turn.model if version is None else str(version)


class TokenFiles(CandidateFiles):
    """Rows of token ids; a record can have several."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        names = ("split", "turns_without_ids", "discarded_replies")
        self._counts = Counter(dict.fromkeys(names, 0))
        if export.recipe.subagents:
            self._counts["subagents_left_out"] = 0
        self._split_texts: Counter[tuple[str, str]] = Counter()
        self._masks = export.recipe.open_masks()
        self._teacher: Teacher | None = None
        if (name := export.recipe.teacher) is not None:
            top = export.recipe.teacher_top
            open_figures = find_feature("teacher")
            self._teacher = Teacher(open_figures(export.run_dirs, name, top=top), top)

    def finish(self) -> dict[str, Any]:
        texts = [
            {"sampled": sampled, "shown": shown, "rows": count}
            for (sampled, shown), count in self._split_texts.most_common(_SPLIT_TEXTS)
        ]
        more: dict[str, Any] = {}
        if self._masks is not None:
            more["masked"] = self._masks.counts()
        if self._teacher is not None:
            self._teacher.close()
            more["rows_without_teacher"] = self._teacher.missing
        return {**super().finish(), "split": 0, "split_texts": texts, **self._counts, **more}

    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        record, recipe = candidate.record, self.export.recipe
        recipe.style.tolerance.refuse(find_leaked_calls(record.messages, record.tools))
        recipe.style.tolerance.refuse(find_rewarded_leaks(record))
        rows = make_rows(
            record,
            recipe.reward_name,
            subagents=recipe.subagents,
            discarded=recipe.discarded,
            masks=self._masks,
            teacher=self._teacher,
        )
        if self._masks is not None:
            for row in rows:
                self._masks.count(row["masked"])
        threads = [record, *(walk_threads(record) if recipe.subagents else ())]
        self._counts["discarded_replies"] += sum(len(discarded_replies(one)) for one in threads)
        firsts = [row for row in rows if row["segment"] == 0 and not row.get("discarded")]
        for row_split in filter(None, (row["split"] for row in rows)):
            self._counts["split"] += 1
            if row_split["sampled"] is not None:
                self._split_texts[row_split["sampled"], row_split["shown"]] += 1
        self._counts["turns_without_ids"] += sum(len(row["turns_without_ids"]) for row in firsts)
        if recipe.subagents:
            self._counts["subagents_left_out"] += len(threads) - len(firsts)
        for number, row in enumerate(rows):
            self.write(split, dumps_row(row), uses=int(number == 0))
        return None


FORMAT = CustomFormat(
    name="rl",
    card="Token ids as sampled, one row per segment of a conversation: see docs/training.md of "
    "the program that wrote it.",
    trainers={"prime-rl, SkyRL, slime, verl: token ids": ("rl",)},
    shows_messages=False,
    takes_all=True,
    files=TokenFiles,
)
