"""What a single flipped bit on disk does to a finished run.

    python -m tests.fakes.bit_flips [--flips 2000] [--file records.jsonl] [--seed 1]

Makes a small run once. Then flips one bit of one of its files, `--flips` times, and runs the
commands that check, show and export the run. Prints how many flips each command noticed, how many
ended in a bug of the program (exit 70), and how many reached a training row unnoticed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import click

from batch_runner import main as command_line

ROOT = Path(__file__).resolve().parents[2]
_NOTE = {"tool_calls": [{"name": "write_file", "arguments": {"path": "n", "content": "1"}}]}
_LOOKS = (("stats", "r"), ("report", "r"), ("compare", "r", "r"), ("status", "r"))
DEFECT = 70
FOUND = 6


class Seen(NamedTuple):
    """What the commands made of one flip."""

    verify: int
    """Exit codes."""
    export: int
    others: tuple[int, ...]
    rows_changed: bool
    """The training file is written, and not what it was."""
    is_named: bool
    """`verify` names the file."""

    def is_silent(self) -> bool:
        """A changed training row, and the export says that all is well."""
        return self.rows_changed and self.export == 0

    def has_defect(self) -> bool:
        """Some command ended in a traceback."""
        return DEFECT in (self.verify, self.export, *self.others)


def make_run(cwd: Path, *, prompts: int = 6) -> Path:
    """A finished run `r` of `prompts` scripted conversations; gives its directory."""
    rows = [
        {
            "id": f"p{n}",
            "prompt": f"Question {n}",
            "script": [_NOTE, {"content": f"Answer {n}.", "reasoning": "One thing, then another."}],
        }
        for n in range(prompts)
    ]
    (cwd / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset_file=p.jsonl", "--run_name=r", "--model=scripted", "--num_workers=1"]
    line = [sys.executable, str(ROOT / "batch_runner.py"), *flags, "--enabled_toolsets=file"]
    subprocess.run(line, cwd=cwd, check=True, capture_output=True)
    return cwd / "trajectories" / "r"


def flips(file: Path, count: int, *, seed: int) -> Iterator[int]:
    """The numbers of `count` different bits of a file, or of all where it has no more."""
    bits = 8 * file.stat().st_size
    yield from sorted(random.Random(seed).sample(range(bits), min(count, bits)))


def attack(whole: Path, name: str, bit: int, *, look: bool = False) -> Seen:
    """Flip one bit of the file `name` of a copy of the run in `whole`, and use the run.

    `look` uses all the commands that only look at it too.
    """
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        shutil.copytree(whole.parent, cwd / "trajectories")
        shutil.copy(whole.parent.parent / "p.jsonl", cwd)
        file = cwd / "trajectories" / "r" / name
        content = bytearray(file.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        right = whole.with_suffix(".jsonl").read_bytes()
        with chdir(cwd):
            verify, output = run("verify", "r")
            others = tuple(run(*one)[0] for one in _LOOKS) if look else ()
            export, _ = run("export", "r")
        after = (cwd / "trajectories" / "r.jsonl").read_bytes()
        return Seen(
            verify=verify,
            export=export,
            others=others,
            rows_changed=after != right,
            is_named=name in output,
        )


def run(*args: str) -> tuple[int, str]:
    """Give one command, in this process; its exit code and all that it says."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            command_line(list(args), standalone_mode=False)
        except SystemExit as end:
            code: Any = end.code
            return int(code or 0), said.getvalue()
    return 0, said.getvalue()


@click.command()
@click.option("--flips", "count", default=2000)
@click.option("--file", "name", default="records.jsonl", help="In the directory of the run.")
@click.option("--seed", default=1)
@click.option("--look", is_flag=True, help="Give stats, report, compare and status too.")
def main(count: int, name: str, seed: int, look: bool) -> None:
    """Make a run, flip bits of it, print what came of that."""
    with tempfile.TemporaryDirectory() as folder:
        whole = make_run(Path(folder))
        collected: list[tuple[int, Seen]] = []
        for bit in flips(whole / name, count, seed=seed):
            collected.append((bit, attack(whole, name, bit, look=look)))
        seen = [one for _, one in collected]
        click.echo(f"{len(seen):,} of {8 * (whole / name).stat().st_size:,} bits of {name}:")
    click.echo(f"  found by verify            {sum(one.verify == FOUND for one in seen):7,}")
    click.echo(f"  and the file is named      {sum(one.is_named for one in seen):7,}")
    for label, codes in (
        ("verify", Counter(one.verify for one in seen)),
        ("export", Counter(one.export for one in seen)),
        ("others", Counter(code for one in seen for code in one.others)),
    ):
        codes_seen = ", ".join(f"{code}: {times:,}" for code, times in sorted(codes.items()))
        click.echo(f"  {label} ended with         {codes_seen}")
    click.echo(f"  a bug (exit {DEFECT})         {sum(one.has_defect() for one in seen):7,}")
    silent = [bit for bit, one in collected if one.is_silent()]
    click.echo(f"  silently in a training row {len(silent):7,}")
    for bit, one in collected:
        if one.has_defect():
            click.echo(f"    defect at bit {bit}: {one}")
            break


if __name__ == "__main__":
    main()
