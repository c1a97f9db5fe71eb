"""Virtual environments of trainers and servers: made the first time, and kept."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[3]


def interpreter_in(
    place: Path,
    packages: Sequence[str],
    *,
    bare: Sequence[str] = (),
    mend: Callable[[Path], None] | None = None,
) -> Path:
    """The interpreter of the environment in `place`, which is made if it is not there.

    `bare` are installed without what they depend on; `mend` changes what was installed. Raises
    `subprocess.CalledProcessError`.
    """
    python = place / "bin" / "python"
    done = place / "installed"
    if not done.exists():
        click.echo(f"installing {', '.join(packages)} into {place}", err=True)
        venv.create(place, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *packages], check=True)
        if bare:
            # What is read of them needs no newer Python, though the rest of them may.
            subprocess.run([*install, "--no-deps", "--ignore-requires-python", *bare], check=True)
        if mend is not None:
            mend(python)
        done.touch()
    return python


def run_module(python: Path, module: str, *arguments: object) -> str | None:
    """Run a module of this project with an environment's interpreter, and print what it says.

    That are the lines that begin with `= `: trainers print as they please. Returns why it failed.
    """
    line = [str(python), "-W", "ignore", "-m", module, *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    said = [text[2:] for text in done.stdout.splitlines() if text.startswith("= ")]
    click.echo("\n".join(said))
    if done.returncode == 0 and said:
        return None
    return f"ended with {done.returncode}: {done.stderr[-3000:].strip() or 'it said nothing'}"
