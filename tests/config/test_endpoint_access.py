"""What an endpoint of a config says of its requests: headers, parameters, proxies, key commands."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.models.client.key_command import CommandKey, KeyCommandError, run_key_command
from agent.models.providers import NO_KEY
from agent.models.resolve import MissingKey, read_key
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.endpoint_config import EndpointConfig
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.models import called_models, endpoint_limits, set_up_models
from batch_trajectories.config.run_config import RunConfig
from tests.helpers.answering import Handler, listening
from tests.helpers.running import run, write_prompts

REPLY = {
    "id": "c",
    "model": "m",
    "object": "chat.completion",
    "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "Yes."}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


class Door:
    """An endpoint that takes requests with the right token only, and demands another at times."""

    def __init__(self, token_file: Path | None = None, calls_per_token: int = 0) -> None:
        self._token_file = token_file
        self._calls_per_token = calls_per_token
        self._lock = threading.Lock()
        self.answered = self.refused = 0
        self.seen: list[tuple[str, dict[str, str]]] = []
        self._written = ""
        self._demand()

    @property
    def token(self) -> str:
        turn = self.answered // self._calls_per_token if self._calls_per_token else 0
        return f"token-of-turn-{turn}-0123456789"

    def _demand(self) -> None:
        if self._token_file is not None and self._written != self.token:
            self._token_file.write_text(self.token)
            self._written = self.token

    def take(self, path: str, headers: dict[str, str]) -> bool:
        with self._lock:
            self.seen.append((path, headers))
            if self._token_file is not None and self.token not in headers.get("authorization", ""):
                self.refused += 1
                return False
            self.answered += 1
            self._demand()
            return True


@contextmanager
def serve_guarded(door: Door) -> Iterator[str]:
    class Guarded(Handler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_POST(self) -> None:
            self.body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            is_taken = door.take(self.path, headers)
            reply = REPLY if is_taken else {"error": {"message": f"no: {headers}"}}
            self.send(200 if is_taken else 401, json.dumps(reply).encode())

    with listening(Guarded) as root:
        yield root


def command(tmp_path: Path, body: str) -> list[str]:
    """A program that notes that it ran, and does what `body` says in a shell."""
    program = tmp_path / "print_key"
    program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs.txt\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return [str(program)]


def runs_of(tmp_path: Path) -> int:
    return len((tmp_path / "runs.txt").read_text().splitlines())


def start(tmp_path: Path, endpoint: dict[str, Any], *flags: str, **given: Any) -> Any:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"endpoints": {"own": endpoint}}))
    options: dict[str, Any] = {
        "config": "run.yaml",
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "own:m",
        "enabled_toolsets": "none",
        "num_workers": 2,
        "batch_size": 4,
        **given,
    }
    return run(tmp_path, *flags, **options)


def files_with(path: Path, text: str) -> list[Path]:
    paths = path.rglob("*")
    return [file for file in paths if file.is_file() and text.encode() in file.read_bytes()]


def test_a_key_command_serves_all_workers_and_its_keys_are_nowhere(tmp_path: Path) -> None:
    """The endpoint wants another key every 20 calls; every call is answered in the end."""
    write_prompts(tmp_path / "p.jsonl", 60)
    token_file = tmp_path / "token"
    door = Door(token_file, calls_per_token=20)
    with serve_guarded(door) as root:
        done = start(
            tmp_path,
            {"base_url": f"{root}/v1", "key_command": command(tmp_path, f"cat {token_file}")},
        )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_text())
    assert (summary["done"], summary["failed"]) == (60, 0)
    assert door.refused >= 2
    # Once at the start and once for each change, though calls were refused together.
    assert runs_of(tmp_path) == 3
    assert not files_with(tmp_path / "trajectories", "token-of-turn-")
    assert "token-of-turn-" not in done.stdout + done.stderr


OWN_CLIENT = """
from pathlib import Path

def make(root, token_file):
    from openai import AsyncOpenAI

    async def token():
        return Path(token_file).read_text()

    return AsyncOpenAI(base_url=root, api_key=token)
"""


@pytest.mark.slow
def test_a_client_of_one_s_own_is_used_in_workers(tmp_path: Path) -> None:
    """Its tokens change during the run; they and those of others are in no file."""
    write_prompts(tmp_path / "p.jsonl", 60)
    (tmp_path / "my_clients.py").write_text(OWN_CLIENT)
    token_file = tmp_path / "token"
    door = Door(token_file, calls_per_token=20)
    with serve_guarded(door) as root:
        options = {"root": f"{root}/v1", "token_file": str(token_file)}
        endpoint = {"client": "my_clients:make", "client_options": options}
        looked = start(tmp_path, endpoint, "--dry_run")
        assert f"m (openai_chat at {root}/v1)" in looked.stdout
        done = start(tmp_path, endpoint)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_text())
    assert (summary["done"], summary["failed"]) == (60, 0)
    assert door.refused >= 2
    assert {path for path, _ in door.seen} == {"/v1/chat/completions"}
    assert not files_with(tmp_path / "trajectories", "token-of-turn-")


@pytest.mark.slow
@pytest.mark.parametrize(
    "endpoint",
    [
        {"client": "openai:OpenAI", "key_env": "GATEWAY"},
        {"client": "foundry", "key_env": "GATEWAY", "client_options": {"resource": "mine"}},
    ],
    ids=["synchronous", "foundry"],
)
def test_batches_go_through_asynchronous_clients_of_one_s_own_only(
    tmp_path: Path, endpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY", "gateway-key-0123456789")
    write_prompts(tmp_path / "p.jsonl", 1)
    done = start(tmp_path, endpoint, "--batch_api")
    assert done.returncode == 2
    assert "batch_api: the endpoint of 'own:m' has no" in done.stderr


def test_a_key_command_that_fails_stops_the_run_before_any_call(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 3)
    door = Door()
    with serve_guarded(door) as root:
        fails = "echo oh-secret-1234; echo 'not signed in' >&2; exit 3"
        endpoint = {"base_url": root, "key_command": command(tmp_path, fails)}
        done = start(tmp_path, endpoint)
        assert done.returncode == 4
        assert "print_key' failed with exit code 3: not signed in" in done.stderr
        assert "oh-secret" not in done.stderr
        assert door.seen == []
        endpoint["key_command"] = command(tmp_path, "echo oh-secret-1234")
        assert start(tmp_path, endpoint).returncode == 0


def test_a_key_that_is_rejected_again_stops_the_run(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", 3)
    door = Door(tmp_path / "token", calls_per_token=1000)
    with serve_guarded(door) as root:
        endpoint = {"base_url": root, "key_command": command(tmp_path, "echo other-key-1234567")}
        done = start(tmp_path, endpoint, num_workers=1)
    assert done.returncode == 4
    assert "the endpoint refused the credentials (401)" in done.stderr
    assert f"The key is what key_command '{tmp_path}/print_key' prints." in done.stderr
    assert not files_with(tmp_path / "trajectories", "other-key-1234567")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 2", "failed with exit code 2"),
        ("true", "printed nothing"),
        ("echo 'two words'", "printed something that is not one key on one line"),
        ("printf 'a\\nb'", "printed something that is not one key on one line"),
        ("exec yes", "printed more than 64 KiB"),
        ("yes | head -c 300000 >&2; echo last >&2; exit 3", "exit code 3: last"),
    ],
)
def test_output_that_is_not_a_key_is_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(KeyCommandError, match=message):
        run_key_command(tuple(command(tmp_path, body)))


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyCommandError, match="'/no/such' cannot be run: No such file"):
        run_key_command(("/no/such",))


def test_a_key_is_read_again_after_its_time_and_when_it_was_rejected(tmp_path: Path) -> None:
    argv = tuple(command(tmp_path, f"wc -l < {tmp_path}/runs.txt | tr -d ' '"))
    lasting, short = CommandKey(argv, 1e9), CommandKey(argv, 1e-9)
    assert [lasting.read(), lasting.read(), lasting.read(rejected="0")] == ["1"] * 3
    assert lasting.read(rejected="1") == "2"
    assert [short.read(), short.read()] == ["3", "4"]


def test_an_old_key_is_kept_while_the_command_fails(tmp_path: Path) -> None:
    key = CommandKey(tuple(command(tmp_path, "echo key-1")), 1e-9)
    assert key.read() == "key-1"
    command(tmp_path, "exit 1")
    assert key.read() == "key-1"
    with pytest.raises(KeyCommandError):
        key.read(rejected="key-1")


def test_headers_and_parameters_go_with_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY", "gateway-key-0123456789")
    write_prompts(tmp_path / "p.jsonl", 2)
    door = Door()
    with serve_guarded(door) as root:
        endpoint = {
            "base_url": f"{root}/v1",
            "headers": {"x-team": "data", "HTTP-Referer": "https://example.com"},
            "headers_env": {"api-key": "GATEWAY"},
            "query": {"api-version": "2025-04-01"},
        }
        done = start(tmp_path, endpoint)
    assert done.returncode == 0, done.stderr
    for path, headers in door.seen:
        assert path == "/v1/chat/completions?api-version=2025-04-01"
        assert headers["api-key"] == "gateway-key-0123456789"
        assert (headers["x-team"], headers["http-referer"]) == ("data", "https://example.com")
        assert "authorization" not in headers
    assert not files_with(tmp_path / "trajectories", "gateway-key-0123456789")


def test_what_an_endpoint_sends_back_of_its_secrets_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY", "gateway-key-0123456789")
    write_prompts(tmp_path / "p.jsonl", 2)
    door = Door(tmp_path / "token", 1)
    with serve_guarded(door) as root:
        done = start(tmp_path, {"base_url": root, "headers_env": {"api-key": "GATEWAY"}})
    assert done.returncode == 4
    assert "[API key]" in done.stderr
    assert (
        "The credentials are in the environment variables of headers_env: GATEWAY." in done.stderr
    )
    assert "gateway-key" not in done.stderr
    assert not files_with(tmp_path / "trajectories", "gateway-key-0123456789")


def test_a_proxy_of_an_endpoint_is_used_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door plays the proxy: it gets whole URLs of a host that nobody knows."""
    write_prompts(tmp_path / "p.jsonl", 2)
    door = Door()
    with serve_guarded(door) as root:
        done = start(tmp_path, {"base_url": "http://llm.invalid/v1", "proxy": root})
    assert done.returncode == 0, done.stderr
    assert {path for path, _ in door.seen} == {"http://llm.invalid/v1/chat/completions"}
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    door = Door()
    with serve_guarded(door) as root:
        done = start(tmp_path, {"base_url": root, "proxy": "none"}, run_name="direct")
    assert done.returncode == 0, done.stderr


def config(**endpoint: Any) -> RunConfig:
    fields = {"dataset_file": "p.jsonl", "run_name": "r", "enabled_toolsets": "none"}
    return load_config(None, {**fields, "model": "a:m", "endpoints": {"a": endpoint}})


URL = {"base_url": "http://127.0.0.1:1/v1"}
SECRET = "s3cr3t-of-a-user-0123456789"


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ({**URL, "headers": {"Authorization": SECRET}}, "headers_env: {Authorization: VARIABLE}"),
        ({**URL, "headers": {"api-key": SECRET}}, "headers_env: {api-key: VARIABLE}"),
        ({**URL, "headers": {"Ocp-Apim-Subscription-Key": SECRET}}, "headers_env"),
        ({**URL, "headers": {"x-note": f"Bearer {SECRET}"}}, "header 'x-note' seems to hold"),
        ({**URL, "headers": {"x-note": f"sk-{SECRET}"}}, "header 'x-note' seems to hold"),
        ({**URL, "query": {"key": SECRET}}, "parameter 'key' seems to hold a secret"),
        ({**URL, "query": {"sig": SECRET}}, "parameter 'sig' seems to hold a secret"),
        (
            {"base_url": f"http://127.0.0.1/v1?key={SECRET}"},
            "must not have a password, key or query",
        ),
        (
            {"base_url": f"http://me:{SECRET}@127.0.0.1/v1"},
            "must not have a password, key or query",
        ),
        (
            {"base_url": f"http://127.0.0.1/sk-{SECRET}/v1"},
            "must not have a password, key or query",
        ),
        ({**URL, "proxy": f"http://me:{SECRET}@127.0.0.1:1"}, "give such a proxy as HTTPS_PROXY"),
        ({**URL, "key_command": ["echo", f"sk-{SECRET}"]}, "read it from a variable"),
        ({"client": "azure", "client_options": {"api_key": SECRET}}, "argument 'api_key' seems"),
        (
            {"client": "bedrock", "client_options": {"aws_secret_key": SECRET}},
            "set the variable that the client reads",
        ),
    ],
)
def test_a_secret_in_the_clear_is_refused_and_not_repeated(
    endpoint: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**endpoint)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        {**URL, "headers": {"anthropic-beta": "fine-grained-tool-streaming-2025-05-14"}},
        {**URL, "headers": {"OpenAI-Organization": "org-0123456789abcdef01234567"}},
        {**URL, "headers": {"x-tenant": "6fa459ea-ee8a-3ca4-894e-db77e160355e"}},
        {**URL, "headers": {"x-max-tokens": "4096"}},
        {**URL, "query": {"api-version": "2025-04-01-preview"}},
        {"base_url": "https://gateway.example.com/v1/0a1b2c3d4e5f60718293a4b5c6d7e8f9/llm/openai"},
        {"client": "bedrock", "client_options": {"aws_region": "us-east-1"}},
        {"client": "a:b", "client_options": {"token_file": "t", "key_vault": "v", "key_id": "k"}},
    ],
)
def test_values_that_are_not_secrets_are_accepted(endpoint: dict[str, Any]) -> None:
    config(**endpoint)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ({**URL, "headers": {"a b": "c"}}, "cannot be the name of a header"),
        ({**URL, "headers": {"a": "c\nd"}}, "cannot be the value of a header"),
        ({**URL, "headers": {"Content-Length": "3"}}, "describes the body of a request"),
        ({**URL, "headers_env": {"transfer-encoding": "A"}}, "describes the body of a request"),
        ({**URL, "headers_env": {"a": "NOT A NAME"}}, "a.headers_env.a"),
        ({**URL, "proxy": "socks5://127.0.0.1:1080"}, "SOCKS is not supported"),
        ({**URL, "proxy": "127.0.0.1"}, None),
        ({**URL, "proxy": "http://proxy host:3128"}, "'proxy host:3128' is not the name of a host"),
        ({**URL, "proxy": "http://-proxy-.corp:3128"}, "is not the name of a host"),
        ({**URL, "proxy": "http://a..b:3128"}, "is not the name of a host"),
        ({**URL, "proxy": "http://proxy:99999"}, "'proxy:99999' is not the name of a host"),
        ({**URL, "proxy": "http://[::1]:3128"}, None),
        ({**URL, "proxy": "http://my_proxy.corp.:3128"}, None),
        ({**URL, "key_command": ["x"], "key_env": "KEY"}, "give one"),
        ({**URL, "client_options": {"a": 1}}, "client_options: only with `client`"),
        ({"client": "azzure"}, "did you mean 'azure'?"),
        ({"client": "azure", "key_command": ["x"]}, "not with `client`"),
        ({}, "base_url is missing; only an endpoint with `client` needs none"),
    ],
)
def test_what_cannot_be_meant_is_refused(endpoint: dict[str, Any], message: str | None) -> None:
    if message is None:
        config(**endpoint)
        return
    with pytest.raises(ConfigError) as caught:
        config(**endpoint)
    assert message in str(caught.value)


def test_a_variable_of_a_header_must_be_set() -> None:
    given = config(**URL, headers_env={"api-key": "NO_SUCH_VARIABLE"})
    with pytest.raises(ConfigError, match=r"headers_env.api-key: .* NO_SUCH_VARIABLE"):
        set_up_models(given)


def test_accounts_at_one_url_have_limits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "key-of-one-0123456789")
    monkeypatch.setenv("TWO", "key-of-two-0123456789")
    given = load_config(
        None,
        {
            "dataset_file": "p.jsonl",
            "run_name": "r",
            "enabled_toolsets": "none",
            "models": {"a:m": 1, "b:m": 1},
            "endpoints": {
                "a": {**URL, "headers_env": {"api-key": "ONE"}, "rpm": 60},
                "b": {**URL, "headers_env": {"api-key": "TWO"}, "rpm": 30},
            },
        },
    )
    bounds = endpoint_limits(given, set_up_models(given))
    assert [one.rpm for one in bounds.values()] == [60, 30]


def test_a_key_command_s_endpoint_wants_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even at a provider's URL, whose own variable is not for it."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    given = EndpointConfig.model_validate(
        {"base_url": "https://api.openai.com/v1", "key_command": f"{sys.executable} -c 'print(1)'"}
    )
    assert given.to_endpoint().key_env == NO_KEY
    run_config = config(**given.model_dump(exclude_unset=True))
    assert read_key(called_models(set_up_models(run_config))[0]) == "no-key"
    with pytest.raises((MissingKey, ConfigError), match="OPENAI_API_KEY"):
        set_up_models(config(base_url="https://api.openai.com/v1"))
