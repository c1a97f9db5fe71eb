"""The record of each conversation, unchanged."""

from __future__ import annotations

from collections.abc import Hashable

from batch_trajectories.export.conversation.validity import Rejection
from batch_trajectories.export.rows.files import Candidate, CandidateFiles, CustomFormat


class _RawFiles(CandidateFiles):
    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        self.write(split, candidate.record.whole_line())
        return None


FORMAT = CustomFormat(
    name="raw",
    card="The records of the run, whole; not meant for `load_dataset`.",
    shows_messages=False,
    files=_RawFiles,
)
