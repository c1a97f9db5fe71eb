"""Endpoints behind clients of the openai and anthropic packages, asked over our own connections.

Which clients there are depends on the versions of the packages, and signing needs boto3.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.models.client.endpoint import open_model
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request
from agent.models.resolve import read_key, resolve_model
from agent.models.sdk_clients import UnusableClient
from batch_trajectories.config.endpoint_config import EndpointConfig
from run_agent import AIAgent
from tests.agent.models import cloud_clients
from tests.agent.models.cloud_clients import CALLS_PER_TOKEN, Seen, cloud

pytestmark = pytest.mark.slow

CALLS = 300

HELLO = Request([{"role": "user", "content": "Hello"}])


NEEDS = {
    "google_cloud": ("anthropic", "AsyncAnthropicGoogleCloud"),
    "aws_signed": ("anthropic", "AsyncAnthropicAWS"),
    "openai_on_bedrock": ("openai.providers", "bedrock"),
    "openai_on_bedrock_signed": ("openai.providers", "bedrock"),
    "openai_on_vertex": ("openai.providers", "vertex"),
}
"""What of the packages their older versions lack."""

RENEWED = [
    ("azure", None),
    ("azure", "openai_responses"),
    ("azure_sync", None),
    ("azure_v1", None),
    ("openai_on_bedrock", None),
    ("openai_on_vertex", "openai_responses"),
    ("foundry", None),
    ("foundry_sync", None),
    ("vertex", None),
    ("google_cloud", None),
    ("anthropic_workload", None),
]
"""Clients that ask for a token again, and the API to ask for."""

SIGNED = ["openai_on_bedrock_signed", "mantle_signed", "aws_signed"]
"""Clients that sign each request."""

FIXED = [*SIGNED, "mantle_with_key"]


def check_installed(name: str) -> None:
    """Skip the test of a client that the installed packages do not have."""
    if name in SIGNED:
        pytest.importorskip("boto3")
    if name == "vertex":
        pytest.importorskip("google.auth")
    module, what = NEEDS.get(name, ("openai", "OpenAI"))
    if not hasattr(pytest.importorskip(module), what):
        pytest.skip(f"this version of {module} has no {what}")


def settings_of(name: str, root: str, api: str | None = None, **given: Any) -> ModelSettings:
    check_installed(name)
    endpoint = EndpointConfig.model_validate(
        {
            "client": f"tests.agent.models.cloud_clients:{name}",
            "client_options": {"root": root},
            "api": api,
            **given,
        }
    ).to_endpoint()
    return resolve_model(
        "cloud:m", base_url=None, api=None, key_env=None, endpoints={"cloud": endpoint}
    )


async def ask(settings: ModelSettings, times: int) -> list[str]:
    model = open_model(settings, api_key=read_key(settings), on_retry=lambda retry: None)
    try:
        return [(await model.complete(HELLO)).message["content"] for _ in range(times)]
    finally:
        await model.close()


@pytest.mark.parametrize(("name", "api"), RENEWED)
def test_a_client_s_tokens_are_replaced_and_no_call_is_lost(name: str, api: str | None) -> None:
    """One refusal for each change, and hardly more questions for a token than there are changes."""
    with cloud() as (root, tokens):
        said = asyncio.run(ask(settings_of(name, root, api), CALLS))
        assert said == ["Yes."] * CALLS
        assert tokens.refused == CALLS // CALLS_PER_TOKEN - 1
        assert tokens.given <= 3 * CALLS // CALLS_PER_TOKEN


@pytest.mark.parametrize("name", FIXED)
def test_a_client_with_fixed_credentials_is_asked_as_often(name: str) -> None:
    with cloud(rotates=False) as (root, tokens):
        assert asyncio.run(ask(settings_of(name, root), CALLS)) == ["Yes."] * CALLS
        assert tokens.refused == 0


def test_signed_requests_take_up_new_credentials_by_themselves() -> None:
    with cloud() as (root, tokens):
        said = asyncio.run(ask(settings_of("openai_on_bedrock_signed", root), CALLS))
        assert (len(said), tokens.refused) == (CALLS, 0)


@pytest.mark.parametrize("name", SIGNED)
def test_a_signature_is_that_of_the_bytes_that_were_sent(name: str) -> None:
    """Computed again by botocore from what the endpoint got."""
    with cloud(rotates=False) as (root, tokens):
        asyncio.run(ask(settings_of(name, root), 1))
        [seen] = tokens.seen
    signed = signature_of(seen, root)
    assert signed == seen.headers["authorization"]


def signature_of(seen: Seen, root: str) -> str:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    scope = seen.headers["authorization"].partition("Credential=")[2].partition(",")[0].split("/")
    names = seen.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0]
    wanted = {name: seen.headers[name] for name in names.split(";") if name != "x-amz-date"}
    body = orjson_like(seen.body)
    assert str(len(body)) == seen.headers["content-length"]
    request = AWSRequest("POST", root + seen.target, headers=wanted, data=body)
    request.context["timestamp"] = seen.headers["x-amz-date"]
    signer = SigV4Auth(Credentials(scope[0], "secret-of-the-account-1"), scope[3], scope[2])
    request.headers["X-Amz-Date"] = seen.headers["x-amz-date"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    return (
        f"AWS4-HMAC-SHA256 Credential={'/'.join(scope)}, SignedHeaders={names}, "
        f"Signature={signer.signature(text, request)}"
    )


def orjson_like(body: Any) -> bytes:
    """The clients write JSON without blanks."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


OF_THE_CONNECTION = frozenset(
    {"host", "connection", "accept-encoding", "content-length", "user-agent", "x-amz-date"}
)


def essence(seen: Seen) -> Seen:
    headers = {
        name: value
        for name, value in seen.headers.items()
        if name not in OF_THE_CONNECTION and not name.startswith("x-stainless-")
    }
    if headers["authorization" if "authorization" in headers else "api-key"].startswith("AWS4-"):
        del headers["authorization"]  # it holds the time; compared by another test
        headers.pop("x-amz-content-sha256", None)
    return seen._replace(headers=headers)


async def theirs(client: Any, api: str, body: dict[str, Any]) -> None:
    """The same call, made by the client itself."""
    create: Callable[..., Any]
    if api == "openai_chat":
        create = client.chat.completions.create
    elif api == "openai_responses":
        create = client.responses.create
    else:
        create = client.messages.create
    made = create(**body)
    if asyncio.iscoroutine(made):
        await made
    closed = client.close()
    if asyncio.iscoroutine(closed):
        await closed


@pytest.mark.parametrize(("name", "api"), [*RENEWED, *((name, None) for name in FIXED)])
def test_a_request_is_that_of_the_client(name: str, api: str | None) -> None:
    """URL, headers and body are those that the client itself sends for the same call."""
    with cloud(rotates=False) as (root, tokens):
        settings = settings_of(name, root, api)
        asyncio.run(ask(settings, 1))
        [ours] = tokens.seen
        tokens.seen.clear()
        body = {"model": "m", **ours.body}
        body.pop("anthropic_version", None)
        asyncio.run(theirs(getattr(cloud_clients, name)(root), settings.api, body))
        [other] = tokens.seen
    assert essence(ours) == essence(other)


def test_a_stream_is_asked_for_where_the_client_asks() -> None:
    async def ask_for_stream(settings: ModelSettings) -> str:
        model = open_model(settings, api_key=read_key(settings), on_retry=lambda retry: None)
        try:
            request = Request(HELLO.messages, on_delta=lambda event: None)
            return (await model.complete(request)).message["content"]
        finally:
            await model.close()

    with cloud(rotates=False) as (root, tokens):
        assert asyncio.run(ask_for_stream(settings_of("vertex", root))) == "Yes."
        [seen] = tokens.seen
    assert seen.target.endswith("/publishers/anthropic/models/m:streamRawPredict")
    assert seen.body["stream"] is True
    assert "anthropic_version" in seen.body
    assert "model" not in seen.body


def test_extra_headers_and_parameters_go_through_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "gateway-key-0123456789")
    with cloud(rotates=False) as (root, tokens):
        settings = settings_of(
            "azure",
            root,
            headers={"x-team": "data"},
            headers_env={"x-gate": "GATEWAY_KEY"},
            query={"trace": "on"},
        )
        asyncio.run(ask(settings, 1))
        [seen] = tokens.seen
    assert (seen.headers["x-team"], seen.headers["x-gate"]) == ("data", "gateway-key-0123456789")
    assert seen.target.endswith("?api-version=2025-04-01-preview&trace=on")


def test_a_client_that_only_gives_rejected_tokens_stops_the_run() -> None:
    with cloud() as (root, tokens):
        settings = settings_of("mantle_with_key", root)
        tokens.answered = 5 * CALLS_PER_TOKEN
        with pytest.raises(ModelError) as caught:
            asyncio.run(ask(settings, 1))
    assert (caught.value.kind, caught.value.action) == ("auth", "stop_run")
    assert "client tests.agent.models.cloud_clients:mantle_with_key" in caught.value.key_source


def test_a_client_without_credentials_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no identity on this machine")

    with cloud() as (root, tokens):
        monkeypatch.setattr(tokens, "give", broken)
        with pytest.raises(ModelError, match="no identity on this machine") as caught:
            asyncio.run(ask(settings_of("azure", root), 1))
    assert caught.value.action == "stop_run"
    assert not caught.value.may_have_cost


NAMED = [
    (
        {"client": "azure", "client_options": {"api_version": "v", "azure_endpoint": "https://r"}},
        {"AZURE_OPENAI_API_KEY": "k-1234567890"},
        ("openai_chat", "https://r/openai", "azure"),
    ),
    (
        {"client": "foundry", "client_options": {"resource": "r"}},
        {"ANTHROPIC_FOUNDRY_API_KEY": "k-1234567890"},
        ("anthropic_messages", "https://r.services.ai.azure.com/anthropic", "anthropic"),
    ),
    (
        {"client": "vertex", "client_options": {"region": "us-east5", "project_id": "p"}},
        {},
        ("anthropic_messages", "https://us-east5-aiplatform.googleapis.com/v1", "google"),
    ),
    (
        {"client": "bedrock", "client_options": {"aws_region": "us-east-1"}},
        {"AWS_BEARER_TOKEN_BEDROCK": "k-1234567890"},
        ("anthropic_messages", "https://bedrock-mantle.us-east-1.api.aws/anthropic", "aws"),
    ),
]


@pytest.mark.parametrize(
    ("given", "environment", "found"), NAMED, ids=[str(one[0]["client"]) for one in NAMED]
)
def test_a_named_client_knows_its_url(
    given: dict[str, Any],
    environment: dict[str, str],
    found: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    endpoint = EndpointConfig.model_validate(given).to_endpoint()
    name = "cloud:anthropic.claude-x" if given["client"] == "bedrock" else "cloud:claude-x"
    settings = resolve_model(
        name, base_url=None, api=None, key_env=None, endpoints={"cloud": endpoint}
    )
    assert (settings.api, settings.base_url, settings.provider) == found


def test_a_prefix_of_a_cloud_needs_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "azure-key-0123456789")
    monkeypatch.setenv("OPENAI_API_VERSION", "2025-04-01-preview")
    with cloud(rotates=False) as (root, tokens):
        monkeypatch.setattr(tokens, "valid", lambda: "azure-key-0123456789")
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", root)
        settings = resolve_model("azure:m", base_url=None, api=None, key_env=None, max_tokens=5)
        assert asyncio.run(ask(settings, 2)) == ["Yes.", "Yes."]
    first = tokens.seen[0]
    assert first.target == "/openai/deployments/m/chat/completions?api-version=2025-04-01-preview"
    assert (first.body["max_completion_tokens"], first.headers["api-key"]) == (
        5,
        "azure-key-0123456789",
    )


def service_account(path: Path, root: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "k",
        "private_key": key.decode(),
        "client_email": "a@p",
        "token_uri": f"{root}/token",
    }
    path.write_text(json.dumps(account))


@pytest.mark.parametrize(
    ("client", "needed", "options"),
    [
        ("azure", "azure.identity", {"api_version": "v"}),
        ("foundry", "azure.identity", {}),
        ("vertex", "google.auth", {"region": "us-east5", "project_id": "p"}),
        ("bedrock", "boto3", {"aws_region": "us-east-1"}),
    ],
)
def test_a_named_client_signs_in_with_the_identity_of_the_machine(
    client: str,
    needed: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clouds' own packages, from what their hosts provide."""
    pytest.importorskip(needed)
    pytest.importorskip("cryptography")
    with cloud(rotates=client != "bedrock") as (root, tokens):
        service_account(tmp_path / "account.json", root)
        environment = {
            "IDENTITY_ENDPOINT": f"{root}/identity",
            "IDENTITY_HEADER": "h",
            "AWS_ACCESS_KEY_ID": tokens.valid(),
            "AWS_SECRET_ACCESS_KEY": "s",
            "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        endpoint = EndpointConfig.model_validate(
            {"client": client, "base_url": root, "client_options": options}
        ).to_endpoint()
        name = "cloud:anthropic.claude-x" if client == "bedrock" else "cloud:claude-x"
        settings = resolve_model(
            name, base_url=None, api=None, key_env=None, endpoints={"cloud": endpoint}
        )
        assert asyncio.run(ask(settings, CALLS)) == ["Yes."] * CALLS
        assert tokens.refused == (0 if client == "bedrock" else CALLS // CALLS_PER_TOKEN - 1)


def test_one_agent_is_asked_through_a_client_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "azure-key-0123456789")
    monkeypatch.setenv("OPENAI_API_VERSION", "v")
    with cloud(rotates=False) as (root, tokens):
        monkeypatch.setattr(tokens, "valid", lambda: "azure-key-0123456789")
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", root)
        given: dict[str, Any] = {"model": "azure:m", "enabled_toolsets": []}
        assert AIAgent(**given, key_env="KEY_OF_MINE").chat("Hello") == "Yes."
        with pytest.raises(ValueError, match="api_key: the client of 'azure:m' has its own"):
            AIAgent(**given, key_env="KEY_OF_MINE", api_key="azure-key-0123456789")


def test_two_resources_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ONE", "azure-key-of-one-0123")
    options = {"api_version": "v", "azure_endpoint": "https://one"}
    entry = EndpointConfig.model_validate(
        {"client": "azure", "key_env": "KEY_OF_ONE", "client_options": options}
    )
    other = EndpointConfig.model_validate(
        {"client": "azure", "key_env": "KEY_OF_TWO", "client_options": options}
    )
    endpoints = {"one": entry.to_endpoint(), "two": other.to_endpoint()}

    def resolve(name: str) -> ModelSettings:
        return resolve_model(name, base_url=None, api=None, key_env=None, endpoints=endpoints)

    assert read_key(resolve("one:m")) == "azure-key-of-one-0123"
    with pytest.raises(UnusableClient, match="KEY_OF_TWO"):
        resolve("two:m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client": "azure", "client_options": {"azure_endpoint": "https://r"}}, "api_version"),
        (
            {
                "client": "azure",
                "api": "anthropic_messages",
                "client_options": {"azure_endpoint": "https://r", "api_version": "v"},
            },
            "does not speak anthropic_messages",
        ),
        ({"client": "tests.agent.models.cloud_clients:nothing"}, "cannot import"),
        ({"client": "tests.agent.models.cloud_clients:Tokens"}, "is not a client of the openai or"),
        (
            {
                "client": "tests.agent.models.cloud_clients:bedrock_classic",
                "client_options": {"root": "http://127.0.0.1:1"},
            },
            "streams replies as AWS events",
        ),
        ({"client": "vertex", "client_options": {"region": "r"}}, "only Claude models"),
        ({"client": "sys:exit", "client_options": {}}, "client 'sys:exit': SystemExit"),
    ],
)
def test_what_a_client_cannot_do_is_said_before_the_run(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "k-1234567890")
    endpoint = EndpointConfig.model_validate(given).to_endpoint()
    with pytest.raises(UnusableClient, match=message):
        resolve_model("x:m", base_url=None, api=None, key_env=None, endpoints={"x": endpoint})
