"""Clients of the openai and anthropic packages against an endpoint whose tokens change.

The packages are imported where they are used: each pytest process imports this file.
The functions that make them are what a user's `client: MODULE:FUNCTION` would name.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from agent.models.sdk_clients import _open
from tests.helpers.answering import Handler, listening

CALLS_PER_TOKEN = 100

REPLIES: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "id": "c",
        "model": "m",
        "object": "chat.completion",
        "created": 1,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Yes."},
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
    "openai_responses": {
        "id": "r",
        "model": "m",
        "object": "response",
        "status": "completed",
        "created_at": 1,
        "output": [
            {
                "type": "message",
                "id": "o",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
            }
        ],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    },
    "anthropic_messages": {
        "id": "msg",
        "type": "message",
        "model": "m",
        "role": "assistant",
        "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "Yes."}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}


class Seen(NamedTuple):
    """A request as the endpoint sees it."""

    method: str
    target: str
    headers: dict[str, str]
    body: Any


class Tokens:
    """What gives out tokens, and an endpoint that takes only the newest.

    Thread-safe; every `CALLS_PER_TOKEN` calls that it answers, it demands another token.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = 0
        self.refused = 0
        self.given = 0
        """How often a client asked for a token."""
        self.seen: list[Seen] = []
        self.rotates = True

    def valid(self) -> str:
        """The token that is taken now."""
        return f"token-{self.answered // CALLS_PER_TOKEN if self.rotates else 0}-of-the-cloud"

    def give(self) -> str:
        """A token that is good now."""
        with self._lock:
            self.given += 1
            return self.valid()

    async def give_async(self) -> str:
        """The same, for clients that wait for it."""
        return self.give()

    def take(self, seen: Seen) -> bool:
        """Whether a request has the right token."""
        with self._lock:
            self.seen.append(seen)
            shown = seen.headers.get("authorization", "") + seen.headers.get("api-key", "")
            if self.valid() in shown:
                self.answered += 1
                return True
            self.refused += 1
            return False


TOKENS = Tokens()
"""Of the test that runs."""


def azure(root: str) -> Any:
    import openai

    return openai.AsyncAzureOpenAI(
        base_url=f"{root}/openai",
        api_version="2025-04-01-preview",
        azure_ad_token_provider=TOKENS.give_async,
    )


def azure_sync(root: str) -> Any:
    import openai

    return openai.AzureOpenAI(
        base_url=f"{root}/openai",
        api_version="2025-04-01-preview",
        azure_ad_token_provider=TOKENS.give,
    )


def azure_v1(root: str) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=f"{root}/openai/v1", api_key=TOKENS.give_async)


def openai_on_bedrock(root: str) -> Any:
    import openai
    from openai.providers import bedrock

    return openai.AsyncOpenAI(
        provider=bedrock(
            region="us-east-1", base_url=f"{root}/openai/v1", token_provider=TOKENS.give_async
        )
    )


def openai_on_bedrock_signed(root: str) -> Any:
    import openai
    from botocore.credentials import Credentials
    from openai.providers import bedrock

    return openai.AsyncOpenAI(
        provider=bedrock(
            region="us-east-1",
            base_url=f"{root}/openai/v1",
            credential_provider=lambda: Credentials(TOKENS.give(), "secret-of-the-account-1"),
        )
    )


def openai_on_vertex(root: str) -> Any:
    import openai
    from openai.providers import vertex

    return openai.AsyncOpenAI(
        provider=vertex(base_url=f"{root}/openai/v1", token_provider=TOKENS.give_async)
    )


def foundry(root: str) -> Any:
    import anthropic

    return anthropic.AsyncAnthropicFoundry(
        base_url=f"{root}/anthropic", azure_ad_token_provider=TOKENS.give_async
    )


def foundry_sync(root: str) -> Any:
    import anthropic

    return anthropic.AnthropicFoundry(
        base_url=f"{root}/anthropic", azure_ad_token_provider=TOKENS.give
    )


def google_cloud(root: str) -> Any:
    import anthropic

    made: Any = anthropic.AsyncAnthropicGoogleCloud
    return made(base_url=root, project="p", workspace_id="w", token_provider=TOKENS.give_async)


class GoogleCredentials:
    """As those of google-auth that have expired whenever they are looked at."""

    expired = True
    token: str | None = None

    def refresh(self, request: object) -> None:
        """Ask for another token."""
        self.token = TOKENS.give()


def vertex(root: str) -> Any:
    import anthropic

    credentials: Any = GoogleCredentials()
    return anthropic.AsyncAnthropicVertex(
        base_url=f"{root}/v1", region="us-east5", project_id="p", credentials=credentials
    )


def anthropic_workload(root: str) -> Any:
    import anthropic

    """Claude's own API with credentials that the client caches until it hears a 401."""
    from anthropic.lib.credentials import AccessToken

    def provide(**_: Any) -> Any:
        return AccessToken(token=TOKENS.give(), expires_at=None)

    made: Any = anthropic.AsyncAnthropic
    return made(base_url=root, credentials=provide)


def mantle_with_key(root: str) -> Any:
    import anthropic

    return anthropic.AsyncAnthropicBedrockMantle(
        base_url=f"{root}/anthropic", aws_region="us-east-1", api_key=TOKENS.give()
    )


def mantle_signed(root: str) -> Any:
    import anthropic

    return anthropic.AsyncAnthropicBedrockMantle(
        base_url=f"{root}/anthropic",
        aws_region="us-east-1",
        aws_access_key=TOKENS.give(),
        aws_secret_key="secret-of-the-account-1",
    )


def aws_signed(root: str) -> Any:
    import anthropic

    made: Any = anthropic.AsyncAnthropicAWS
    return made(
        base_url=root,
        aws_region="us-east-1",
        workspace_id="w",
        aws_access_key=TOKENS.give(),
        aws_secret_key="secret-of-the-account-1",
    )


def bedrock_classic(root: str) -> Any:
    import anthropic

    return anthropic.AsyncAnthropicBedrock(
        base_url=root, aws_region="us-east-1", aws_access_key="a", aws_secret_key="b"
    )


def api_of_path(target: str) -> str:
    """The API of a request, by its path."""
    path = target.partition("?")[0]
    if path.endswith("/chat/completions"):
        return "openai_chat"
    return "openai_responses" if path.endswith("/responses") else "anthropic_messages"


@contextmanager
def cloud(*, rotates: bool = True) -> Iterator[tuple[str, Tokens]]:
    """The root URL of an endpoint that answers requests with the right token, and its tokens."""
    global TOKENS
    TOKENS = tokens = Tokens()
    tokens.rotates = rotates
    # A client of an earlier endpoint, with a token of that one, is kept by its URL: ports return.
    _open.cache_clear()

    class Cloud(Handler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_GET(self) -> None:
            """Of a machine's identity, as Azure's hosts give it."""
            token = {"access_token": tokens.give(), "token_type": "Bearer", "resource": "r"}
            self._reply(200, {**token, "expires_on": str(int(time.time()) + 60)})

        def do_POST(self) -> None:
            content = self.body()
            if self.path == "/token":  # as Google gives them to service accounts
                self._reply(200, {"access_token": tokens.give(), "expires_in": 60})
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            is_taken = tokens.take(Seen("POST", self.path, headers, json.loads(content)))
            refused = {"error": {"type": "authentication_error", "message": "expired"}}
            self._reply(*((200, REPLIES[api_of_path(self.path)]) if is_taken else (401, refused)))

        def _reply(self, status: int, said: dict[str, Any]) -> None:
            self.send(status, json.dumps(said).encode())

    with listening(Cloud) as root:
        yield root, tokens
