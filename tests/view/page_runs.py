"""Runs to look at in the page of `view`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, make_run

DIFFERENCE = """diff --git a/primes.py b/primes.py
--- a/primes.py
+++ b/primes.py
@@ -1,4 +1,4 @@
 def is_prime(n):
-    return all(n % d for d in range(2, n))
+    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
"""
TABLE = 'city,people,note\nOslo,717710,"cold, nice"\nRome,2755309,warm\nLima,10092000,\n'
RECORDS = '[{"city": "Oslo", "people": 717710}, {"city": "Rome", "people": 2755309}]'
TREE = json.dumps({"plan": {f"step {n}": {"does": "read", "lines": [n, n + 1]} for n in range(30)}})

PAYLOADS = [
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 2</script>",
    "<img src=x onerror='window.pwned = 3'>",
    "<svg onload='window.pwned = 4'><a xlink:href='javascript:window.pwned = 4'>x</a></svg>",
    "<a href='javascript:window.pwned = 5'>click</a>",
    "javascript:window.pwned = 6",
    "<iframe srcdoc='<script>parent.pwned = 7</script>'></iframe>",
    "<form action='javascript:window.pwned = 8'><button>ok</button></form>",
    '"><style>*{display:none}</style><b onmouseover="window.pwned = 9">',
    "{{constructor.constructor('window.pwned = 10')()}} ${window.pwned = 10}",
    "\x1b[31mred\x1b]0;title\x07\x1b]8;;http://x.invalid\x07",
    "\u202egnp.exe \u2066\u200f\u202a turned",
    '{"__proto__": {"pwned": 12}, "constructor": {"prototype": {"pwned": 12}}}',
    "w" * 300_000,
    "[" * 5000 + "]" * 5000 + " &lt; \u2028 <!--<script>",
]
"""Texts that would act in a page if they were anything but text."""


def talk(*parts: tuple[str, str, str], answer: str, **changes: Any) -> dict[str, Any]:
    """A record of a conversation: (reasoning, arguments, result) of each call, then an answer."""
    messages = [{"role": "system", "content": "Be brief."}, user("How many primes are below 30?")]
    for n, (thought, arguments, said) in enumerate(parts):
        messages += [
            assistant("", call(arguments, id=f"c{n}", name="shell"), reasoning=thought),
            result(said, id=f"c{n}"),
        ]
    messages.append(assistant(answer, reasoning="That is all."))
    usage = [
        {"input_tokens": 900 + 400 * n, "cache_read_tokens": 800 * n // 2, "output_tokens": 60 + n}
        for n in range(len(parts) + 1)
    ]
    record = record_of(*messages, **changes)
    record["turns"] = [
        {**turn, "turn": n, "usage": used, "cost_usd": 0.0012, "started_at": 10.0 * n}
        for n, (turn, used) in enumerate(zip(record["turns"], usage, strict=True), start=1)
    ]
    return record


def shell(command: str) -> str:
    return json.dumps({"command": command})


def make(folder: Path, records: list[dict[str, Any]], *, samples: int = 1, name: str) -> Path:
    """A run of these records, side by side the samples of a prompt."""
    source = make_run(folder, *records, samples=samples, name=name)
    path = source.run_dir / "run.json"
    run = json.loads(path.read_text())
    run["created"] = 1_790_000_000.5
    run["run_name"] = name
    run["dataset"] |= {"rows": len(records) // samples, "bad_rows": 0}
    path.write_text(json.dumps(run))
    return source.run_dir


def make_rich(folder: Path) -> Path:
    """Two samples of each prompt, whose results are all that the page draws."""
    passing = {"passed": True, "reward": 1.0, "exit_code": 0, "stdout": "3 passed\n", "stderr": ""}
    failing = {
        "passed": False,
        "reward": 0.0,
        "exit_code": 1,
        "stdout": "FAILED test_primes.py::test_one\n",
        "stderr": "assert 9 == 10\n",
    }
    first = ("I look at the file.", shell("git diff"), DIFFERENCE)
    good = talk(
        first,
        ("Now the cities.", shell("cat cities.csv"), TABLE),
        ("And as JSON.", shell("cities --json"), RECORDS),
        ("The plan.", shell("plan"), TREE),
        ("Run it.", shell("pytest -q"), '{"exit_code": 0, "stdout": "3 passed\\n", "stderr": ""}'),
        answer="There are 10 primes below 30.",
        check=passing,
        finished_at=1790000100,
    )
    bad = talk(
        first,
        ("I guess.", shell("echo 9"), '{"exit_code": 0, "stdout": "9\\n", "stderr": ""}'),
        answer="There are 9.",
        check=failing,
        finished_at=1790000160,
    )
    return make(folder, [good, bad] * 6, samples=2, name="rich")


RED = "\x1b[1mstarts\x1b[0m\ntest_a.py \x1b[32m.\x1b[31mF\x1b[0m\x1b[K\n\x1b[38;5;12mblue\x1b[0m"
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)
"""A pixel."""


def make_kinds(folder: Path) -> Path:
    """Results in colours and of binary data, and pictures as the APIs have them."""
    kinds = talk(
        ("In colours.", shell("pytest --color=yes"), RED),
        ("In bytes.", shell("cat a.out"), "\x7fELF\x00\x01\x00\x00\ufffd" * 40),
        ("A list.", shell("rows"), json.dumps([{"n": n, "sub": {"deep": n}} for n in range(500)])),
        ("A window.", shell("screenshot"), "[image]"),
        answer="A red dot.",
        finished_at=1790000300,
    )
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
        {"repeats": "0123"},
    ]
    messages = kinds["messages"]
    blocks = {"api": "openai_chat", "blocks": parts}
    messages[1] = {**user("What is here?\n[image]\n[image]"), "provider_blocks": blocks}
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    shown = [{"type": "image", "source": source}]
    messages[-2]["provider_blocks"] = {"api": "anthropic_messages", "blocks": shown}
    many = talk(
        *((f"Step {n}.", shell(f"step {n}"), f"line {n}\n" * (n % 40)) for n in range(499)),
        answer="Done.",
        finished_at=1790000400,
    )
    return make(folder, [kinds, many], name="kinds")


def make_hostile(folder: Path) -> Path:
    """A conversation for each payload, which is in all places that a model or tool can fill."""
    records = [
        talk(
            (text, json.dumps({"command": text, text[:50]: text}), text),
            ("again", text, json.dumps([{text[:40]: text[:200], "__proto__": text[:200]}] * 3)),
            answer=text,
            status_reason=text[:500],
            finished_at=1790000100 + n,
        )
        for n, text in enumerate(PAYLOADS)
    ]
    return make(folder, records, name="hostile")


def make_pairs(folder: Path, prompts: int) -> Path:
    """Two samples of each prompt, with different answers."""
    records = [call_record(f"Answer {n}.", finished_at=1790000000 + n) for n in range(2 * prompts)]
    return make(folder, records, samples=2, name="pairs")
