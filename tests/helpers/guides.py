"""Runs the blocks of a guide one after the other, as a reader pastes them.

A block after "Save this as `NAME`:" becomes that file. `bash` blocks run in the reader's directory,
and the variables that they export stay. A `text` block after a `bash` block is what the commands
print: each of its lines must be printed, in this order, where `...` stands for any text. `sh`
blocks need a cluster, a GPU or a network; `tests/test_docs.py` reads their options.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.helpers.running import ROOT

GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SAVE = re.compile(r"Save this as `([\w./-]+)`:\s*\Z")
_HEADING = re.compile(r"^##? (.*)$", re.MULTILINE)
_EXPORT = re.compile(r"^export (\w+)=(\S+)", re.MULTILINE)


class GuideBlock(NamedTuple):
    """A fenced block of a guide and what stands around it."""

    heading: str
    line: int
    language: str
    text: str
    file: str | None
    """The file that the reader saves the block as, or None."""


def blocks_of(page: Path) -> list[GuideBlock]:
    """The fenced blocks of a guide, from top to bottom."""
    text = page.read_text()
    blocks = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        save = _SAVE.search(before)
        headings = _HEADING.findall(_FENCE.sub("", before))
        blocks.append(
            GuideBlock(
                heading=headings[-1],
                line=before.count("\n") + 1,
                language=fence[2],
                text=textwrap.dedent(fence[3]),
                file=save[1] if save else None,
            )
        )
    return blocks


@dataclass(kw_only=True)
class Reader:
    """A reader with an empty directory, who pastes the blocks of a guide."""

    directory: Path
    endpoint: str = ""
    """The address that stands for the one in `export ENDPOINT=...`."""
    env: dict[str, str] = field(default_factory=dict)
    printed: str = ""
    """The output of the last commands, with that of stderr."""

    def __post_init__(self) -> None:
        programs = self.directory.parent / f"{self.directory.name}-programs"
        programs.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(exist_ok=True)
        program = programs / "batch-runner"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/batch_runner.py "$@"\n')
        program.chmod(0o755)
        # Start scripts of version managers do not work in the sandbox.
        (programs / "python3").symlink_to(Path(sys.executable).resolve())
        self.env = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.directory.parent),
            "OPENAI_API_KEY": "no-key",
            "COLUMNS": "200",
            **self.env,
        }

    def read(self, block: GuideBlock, env: Mapping[str, str] | None = None) -> None:
        """Save or run a block, or compare it with what was printed."""
        if block.file is not None:
            path = self.directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "bash":
            self._run(block, env or {})
        elif block.language == "text":
            self._compare(block)

    def _run(self, block: GuideBlock, env: Mapping[str, str]) -> None:
        text = re.sub(r"(?m)^(export ENDPOINT=)\S+", rf"\g<1>{self.endpoint}", block.text)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.directory,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.printed = done.stdout
        assert done.returncode == 0, f"line {block.line}: {done.stdout}"
        self.env |= dict(_EXPORT.findall(text))

    def _compare(self, block: GuideBlock) -> None:
        rest = " ".join(self.printed.split())
        for line in block.text.splitlines():
            words = " ".join(line.split())
            pattern = re.escape(words).replace(re.escape("..."), ".*?")
            found = re.search(pattern, rest)
            assert found, f"line {block.line}: not printed: {words}\nprinted: {self.printed}"
            rest = rest[found.end() :]
