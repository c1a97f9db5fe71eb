"""`endpoints`: where models can be asked, and which keys are set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from genai_prices.data_snapshot import get_snapshot

from agent.messages.message import Message
from agent.models.batches.calls import has_batches
from agent.models.dialects import openai_chat
from agent.models.model import ModelSettings, Request
from agent.models.providers import NO_KEY, PROVIDERS, find_provider
from agent.models.resolve import resolve_model, resolve_sibling
from tests.helpers.running import run

HOSTED = [
    prefix
    for prefix, row in PROVIDERS.items()
    if not row.is_own_server and row.client is None and prefix != "responses"
]


def resolve(name: str, base_url: str | None = None, **options: Any) -> ModelSettings:
    return resolve_model(name, base_url=base_url, api=None, key_env=None, **options)


def test_it_says_which_keys_are_set_and_never_what_they_are(tmp_path: Path) -> None:
    own = {
        "gate": {"base_url": "http://127.0.0.1:1/v1", "headers_env": {"api-key": "GATE_KEY"}},
        "vllm": {"base_url": "http://10.0.0.5:8000/v1"},
        "signed": {"base_url": "http://127.0.0.1:2", "key_command": ["gcloud", "auth"]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"endpoints": own}))
    secrets = {"GROQ_API_KEY": "gsk_0123456789abcdef", "GATE_KEY": "gate-0123456789"}
    done = run(tmp_path, "endpoints", config="run.yaml", env={**secrets, "XAI_API_KEY": ""})
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines.keys() >= {*PROVIDERS, *own}
    assert lines["groq"].split()[1:] == ["https://api.groq.com/openai/v1", "GROQ_API_KEY", "yes"]
    assert lines["xai"].endswith(" no")
    assert lines["gate"].split()[1:] == ["http://127.0.0.1:1/v1", "GATE_KEY", "yes"]
    assert lines["vllm"].split()[1:] == ["http://10.0.0.5:8000/v1", "no", "key"]
    assert "key_command gcloud" in lines["signed"]
    assert not any(secret in done.stdout for secret in secrets.values())
    done = run(tmp_path, "endpoints", "--json", env=secrets)
    output = {entry["prefix"]: entry for entry in json.loads(done.stdout)}
    assert output["groq"]["variables"] == {"GROQ_API_KEY": True}
    assert (output["groq"]["reasoning_field"], output["groq"]["prices"]) == ("reasoning", "groq")


@pytest.mark.parametrize("prefix", HOSTED)
def test_a_provider_s_prefix_and_its_url_mean_the_same(prefix: str) -> None:
    row = PROVIDERS[prefix]
    by_prefix, by_url = resolve(f"{prefix}:m"), resolve("m", row.base_url)
    assert by_prefix.key_env == by_url.key_env == row.key_env
    assert (by_url.base_url, by_url.provider, by_url.api) == (
        by_prefix.base_url,
        by_prefix.provider,
        by_prefix.api,
    )
    assert by_prefix.base_url == row.base_url
    assert has_batches(by_prefix) == has_batches(by_url) == row.has_batches
    assert find_provider(row.base_url) is row


@pytest.mark.parametrize("prefix", HOSTED)
def test_a_provider_s_prices_are_in_the_table(prefix: str) -> None:
    known = {provider.id for provider in get_snapshot().providers}
    assert PROVIDERS[prefix].prices in {*known, None}


@pytest.mark.parametrize("prefix", [name for name in HOSTED if name != "anthropic"])
def test_a_request_has_the_provider_s_names(prefix: str) -> None:
    """Of the reply's limit, and of reasoning that came from elsewhere."""
    row = PROVIDERS[prefix]
    thought = Message(role="assistant", content="hi", reasoning="why")
    body = openai_chat.request_body(
        resolve(f"{prefix}:m", max_tokens=7), Request([Message(role="user", content="?"), thought])
    )
    assert body[row.max_tokens_name] == 7
    sent = body["messages"][1]
    fields = {} if row.reasoning_field is None else {row.reasoning_field: "why"}
    assert sent == {"role": "assistant", "content": "hi", **fields}


@pytest.mark.parametrize("prefix", ["litellm", "lmstudio", "ollama", "sglang", "vllm"])
def test_a_server_of_one_s_own_can_be_anywhere(prefix: str) -> None:
    assert urlsplit(resolve(f"{prefix}:m").base_url or "").hostname == "127.0.0.1"
    model = resolve(f"{prefix}:m:7b", "http://10.0.0.5:9000/v1")
    assert (model.name, model.base_url) == ("m:7b", "http://10.0.0.5:9000/v1")
    assert model.reasoning_field == PROVIDERS[prefix].reasoning_field
    assert model.key_env in (NO_KEY, "LITELLM_API_KEY")


def test_names_of_models_at_other_servers_may_begin_like_a_prefix() -> None:
    ollama = resolve("mistral:7b", "http://127.0.0.1:11434/v1")
    assert (ollama.name, ollama.key_env, ollama.provider) == ("mistral:7b", None, None)
    beside = resolve_sibling("deepseek:r1", ollama)
    assert (beside.name, beside.base_url) == ("deepseek:r1", ollama.base_url)
    elsewhere = resolve_sibling("deepseek:r1", resolve("groq:m"))
    assert (elsewhere.name, elsewhere.key_env) == ("r1", "DEEPSEEK_API_KEY")
    assert resolve_sibling("vllm:b", resolve("sglang:a")).base_url == PROVIDERS["vllm"].base_url
    own = resolve_sibling("vllm:b", resolve("vllm:a", "http://10.0.0.5:9000/v1"))
    assert own.base_url == "http://10.0.0.5:9000/v1"
