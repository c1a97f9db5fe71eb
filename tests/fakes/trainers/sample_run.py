"""A run for checks of labels: no text in it is like another, so that a token shows whose it is.

    python -m tests.fakes.trainers.sample_run DIR [--prompts 12]

Runs prompts with two samples each against an endpoint on loopback that plays turns made of their
number and gives token ids. The turns have what exports mask: a call that fails, its repetition,
arguments that are refused, an answer that is wrong in every second sample, and the one before it
ends early in some.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import click
import orjson

from tests.fakes.fake_answers import DIALECTS
from tests.fakes.fake_dialects import CHAT
from tests.fakes.fake_script import JSON, Reply
from tests.fakes.fake_tokens import Template, add_tokens
from tests.fakes.served import Served
from tests.fakes.trainers.environment import ROOT

SAMPLES = 2
TURNS = 7
"""Replies of a conversation that ends by itself; the fifth is an answer, after which the user
speaks again."""
_ANSWERS = (4, 6)
_CUT_AT = 3
"""The turn after which some conversations end early."""
_TASK = re.compile(r"\[task (\d+)\]")
_SAMPLE = re.compile(r"\[sample (\d+)\]")
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "tu", "vé", "wy")


def make_sample_run(folder: Path, *, prompts: int = 12) -> Path:
    """Make the run `sample` in an empty folder; gives its directory."""
    rows = [
        {
            "id": f"p{n:03}",
            "prompt": f"[task {n}] {_words(n, 'asks')}?",
            "user_turns": [f"{_words(n, 'goes on')}."],
            "expected": _answer(n, is_right=True),
        }
        for n in range(prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "dataset_file": "prompts.jsonl",
        "run_name": "sample",
        "num_samples": SAMPLES,
        "num_workers": 1,
        "expected_attempts": 1,
        "enabled_toolsets": "file",
        "model": "vllm:sample",
    }
    with _Endpoint() as endpoint:
        line = [sys.executable, str(ROOT / "batch_runner.py"), "--token_ids", "--check_expected"]
        line += [f"--{name}={value}" for name, value in options.items()]
        line.append(f"--base_url={endpoint.url}/v1")
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"the sample run ended with {done.returncode}: {done.stderr}")
    return folder / "trajectories" / "sample"


def _words(*of: object, count: int = 9) -> str:
    """Words that no other text has."""
    rng = random.Random("/".join(map(str, of)))
    return " ".join("".join(rng.choices(_SYLLABLES, k=5)) for _ in range(count))


def _answer(task: int, *, is_right: bool) -> str:
    return f"{_words(task, 'answer', is_right)}."


def _said(task: int, sample: int, turn: int) -> dict[str, Any]:
    """Reasoning, text and calls of a turn; some have no reasoning, or no text beside calls."""
    place = (task, sample, turn)
    thought = "" if turn == 2 else f"{_words(*place, 'thinks')}.\n\n{_words(*place, 'then')}!"
    text = "" if turn == 1 else f"{_words(*place, 'says')}:\n{_words(*place, 'more')}."
    if turn == 0:
        text = f"[sample {sample}] {text}"
    path = _words(task, sample, "file", count=1)
    missing = {"path": f"{_words(task, sample, 'no file', count=1)}.txt"}
    # U+2028 and U+0085 end lines for some readers of JSON lines.
    content = f'{_words(*place, "writes")}\n"{_words(*place, "quotes")}" \\ \u2028\u0085'
    calls: Sequence[tuple[str, dict[str, Any]]] = {
        0: [("write_file", {"path": path, "content": content})],
        1: [("read_file", {"path": path}), ("read_file", missing)],
        2: [("read_file", missing)],
        3: [("write_file", {"path": path, "contents": content})],
        5: [("write_file", {"path": f"{path}.{turn}", "content": content})],
    }.get(turn, [])
    if turn == TURNS - 1:
        text = _answer(task, is_right=sample == 0)
    return {"thought": thought, "text": text, "calls": calls}


class _Endpoint(Served):
    """The endpoint in a thread, for the time of a `with` block."""

    def __init__(self) -> None:
        super().__init__(_handler_of(self))
        self._lock = threading.Lock()
        self._begun: Counter[int] = Counter()

    def reply_to(self, request: JSON) -> tuple[JSON, list[bytes] | None]:
        """The body of a reply, and its events where the request asks for a stream."""
        text = orjson.dumps(request["messages"]).decode()
        if (task := _TASK.search(text)) is None:
            raise ValueError("no task is named")
        number = int(task[1])
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        if (found := _SAMPLE.search(text)) is not None:
            sample = int(found[1])
        else:
            with self._lock:
                sample = self._begun[number] % SAMPLES
                self._begun[number] += 1
        said = _said(number, sample, turn)
        is_cut = turn == _CUT_AT and sample and number % 4 == 3
        finish = "length" if is_cut else "stop" if turn in _ANSWERS else "tool_calls"
        calls = [
            {
                "id": f"{number}_{sample}_{turn}_{n}",
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
            for n, (name, arguments) in enumerate(said["calls"])
        ]
        reply = Reply(
            key=(f"task{number}s{sample}", turn + 1),
            model=request["model"],
            thought=said["thought"],
            text=said["text"],
            calls=[] if is_cut else calls,
            finish=finish,
            input_tokens=len(text) // 4,
            cached_tokens=0,
            output_tokens=100,
        )
        body = CHAT.body(reply)
        add_tokens(body, request, "vllm", Template())
        events = None
        if request.get("stream"):
            events = CHAT.events(orjson.loads(orjson.dumps(body)), request)
        return body, events


def _handler_of(endpoint: _Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", 0))
            request = orjson.loads(self.rfile.read(size))
            if self.path not in DIALECTS or DIALECTS[self.path] is not CHAT:
                return self._send(404, b"{}", "application/json")
            body, events = endpoint.reply_to(request)
            if events is None:
                return self._send(200, orjson.dumps(body), "application/json")
            return self._send(200, b"".join(events), "text/event-stream")

        def do_GET(self) -> None:
            self._send(404, b"{}", "application/json")

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompts", default=12, show_default=True)
def main(folder: Path, prompts: int) -> None:
    """Make the run, and say where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(make_sample_run(folder, prompts=prompts))


if __name__ == "__main__":
    main()
