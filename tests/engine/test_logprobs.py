"""What a start says of log-probabilities that are not those of the sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from batch_trajectories.config.models import set_up_models
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.plan import warn_about_logprobs
from tests.helpers.running import run, write_prompts

pytestmark = pytest.mark.slow


@contextmanager
def server(info: Any) -> Iterator[str]:
    """A server that says this of itself; None: nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.startswith("/server_info") and info is not None
            body = json.dumps(info).encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = Thread(target=found.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_address[1]}/v1"
        finally:
            found.shutdown()
            thread.join()


def warnings(base_url: str, **options: Any) -> list[str]:
    given = {"model": "vllm:m", "token_ids": True, "temperature": 1, **options}
    config = RunConfig(
        dataset_file=Path("p.jsonl"),
        run_name="r",
        base_url=base_url,
        enabled_toolsets=("none",),
        **given,
    )
    return [*warn_about_logprobs(set_up_models(config))]


def mode(name: str) -> Any:
    return {"vllm_config": {"model_config": {"logprobs_mode": name}}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.6, "top_p": 0.95}, "temperature 0.6, top_p 0.95;"),
        ({"extra_body": {"top_k": 20}}, "top_k 20;"),
        ({"temperature": None}, "temperature of its own (none is given);"),
        ({"model": "sglang:m", "temperature": 0.6, "top_p": 0.5}, "temperature 0.6, top_p 0.5;"),
    ],
)
def test_options_that_change_the_distribution_are_named(
    options: dict[str, Any], named: str
) -> None:
    with server(None) as url:
        (message,) = warnings(url, **options)
    assert f"m at {url} samples with {named}" in message
    assert "unless it was started with --logprobs-mode processed_logprobs" in message


def test_a_grammar_is_named_whatever_the_mode() -> None:
    for known in (None, mode("processed_logprobs")):
        with server(known) as url:
            (message,) = warnings(url, extra_body={"tool_choice": "required"})
        assert "samples by a grammar (tool_choice): its logprobs are those after" in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 1, "extra_body": {"top_k": -1, "tool_choice": "auto"}},
        {"model": "sglang:m", "temperature": 0.6},
        {"token_ids": False, "temperature": 0.6},
    ],
)
def test_nothing_is_said_where_they_are_the_same(options: dict[str, Any]) -> None:
    with server(None) as url:
        assert warnings(url, **options) == []


def test_a_server_that_tells_its_mode_decides() -> None:
    with server(mode("processed_logprobs")) as url:
        assert warnings(url, temperature=0.6) == []
    with server(mode("raw_logprobs")) as url:
        (message,) = warnings(url, temperature=0.6)
        assert "unless" not in message


@pytest.mark.parametrize("info", [[], {"vllm_config": "text"}, mode(None), {"vllm_config": {}}])  # type: ignore[arg-type]
def test_other_answers_tell_nothing(info: Any) -> None:
    with server(info) as url:
        assert "unless it was started with" in warnings(url, temperature=0.6)[0]


def test_a_start_says_it(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 1)
    with server(None) as url:
        done = run(
            tmp_path,
            "--dry_run",
            "--token_ids",
            dataset_file="p.jsonl",
            run_name="r",
            model="vllm:m",
            base_url=url,
            temperature=0.6,
        )
    assert "samples with temperature 0.6;" in done.stdout + done.stderr
