"""The providers and servers that a model's prefix can name: one row each.

A row has the endpoint's URL, the variable that holds its key, its API, and its names for fields.
Or its `client` names the client of an SDK, which knows URL and credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

Api = Literal["openai_chat", "openai_responses", "anthropic_messages", "gemini"]

ONLY_RELAYED: frozenset[str] = frozenset({"gemini"})
"""APIs only for agents that run as commands: this program writes no requests in them."""

NO_KEY = "none"
"""The value of `key_env` for an endpoint that needs no key."""

PLACEHOLDER = "no-key"
"""The key that is sent if none is known: some servers refuse requests without a key."""


class Provider(NamedTuple):
    """One row of the table."""

    base_url: str
    """The base URL; "" if the client of an SDK knows it."""
    key_env: str
    """The variable that holds the key; `NO_KEY` if none is needed."""
    prices: str | None = None
    """The provider's id in the price table; None: the table guesses from the model's name."""
    api: Api = "openai_chat"
    reasoning_field: str | None = "reasoning_content"
    """Chat API: the field of an assistant message for reasoning that came from another provider.

    None if the provider refuses messages with such a field.
    """
    max_tokens_name: str = "max_tokens"
    """Chat API: the field of a request that limits the reply."""
    has_batches: bool = False
    """The provider has a Batch API that this program speaks."""
    client: str | None = None
    """See `Connection.client`."""
    other_credentials: str = ""
    """The credentials that the client uses if the variable is not set."""
    url_env: str = ""
    """The variable in which the provider's SDK looks for another base URL; "" for none."""
    is_own_server: bool = False
    """The server runs on users' machines, so its prefix is valid at any `--base_url`."""
    session_headers: tuple[str, ...] = ()
    """The headers in which the provider reads the id of a conversation; see `SESSION_HEADERS`."""
    cache_key_apis: tuple[Api, ...] = ()
    """The APIs in which the provider reads the id from `prompt_cache_key` in the body."""
    session_source: str = ""
    """The provider's documentation of the id; "" if it reads none, and so gets none."""


SESSION_HEADERS: Mapping[str, str] = {
    "x-session-affinity": (
        "Cloudflare Workers AI: developers.cloudflare.com/workers-ai/features/prompt-caching; "
        "Fireworks: docs.fireworks.ai/guides/prompt-caching; sent by opencode and crush: "
        "github.com/charmbracelet/crush/pull/3277"
    ),
    "x-session-id": (
        "vllm-router, its first choice of consistent_hash: github.com/vllm-project/router "
        "docs/load_balancing; OpenRouter: openrouter.ai/docs/guides/best-practices/prompt-caching; "
        "llm-d by its session_id_header: github.com/llm-d/llm-d-router/pull/2238; what nginx and "
        "Caddy are told to hash"
    ),
    "x-smg-routing-key": (
        "SGLang's model gateway, policies manual and consistent_hashing: "
        "github.com/smg-project/smg-docs concepts/routing/sticky-sessions"
    ),
    "x-dynamo-session-id": "Dynamo: docs.nvidia.com/dynamo/dev/agents/identify-agent-sessions",
    "x-litellm-session-id": "LiteLLM: docs.litellm.ai/docs/proxy/cache_aware_routing",
    "x-grok-conv-id": "xAI: docs.x.ai/developers/advanced-api-usage/prompt-caching",
}
"""Headers with the id of a conversation, by which routers keep it on one replica.

The values say who reads each header.
"""

AGENTS_SESSION_HEADERS = (
    *SESSION_HEADERS,
    "session_id",
    "session-id",
    "conversation_id",
    "thread-id",  # Codex
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-hermes-session-id",
)
"""Headers in which agents send an id of their own conversation, the best known first."""

OWN_SERVERS_HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "x-smg-routing-key",
    "x-dynamo-session-id",
)
"""The headers for servers of the user's own: any router may be in front of them."""

_NEW_NAME = "max_completion_tokens"
_OPENAI_APIS: tuple[Api, ...] = ("openai_chat", "openai_responses")
_OPENAIS_CACHING = "platform.openai.com/docs/guides/prompt-caching"
_ROUTERS = "that of the routers in front of it: see SESSION_HEADERS"

PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        "openai",
        max_tokens_name=_NEW_NAME,
        has_batches=True,
        url_env="OPENAI_BASE_URL",
        cache_key_apis=_OPENAI_APIS,
        session_source=_OPENAIS_CACHING,
    ),
    "responses": Provider(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        "openai",
        "openai_responses",
        max_tokens_name=_NEW_NAME,
        has_batches=True,
        url_env="OPENAI_BASE_URL",
        cache_key_apis=_OPENAI_APIS,
        session_source=_OPENAIS_CACHING,
    ),
    "anthropic": Provider(
        "https://api.anthropic.com",
        "ANTHROPIC_API_KEY",
        "anthropic",
        "anthropic_messages",
        has_batches=True,
        url_env="ANTHROPIC_BASE_URL",
    ),
    "openrouter": Provider(
        "https://openrouter.ai/api/v1",
        "OPENROUTER_API_KEY",
        "openrouter",
        session_headers=("x-session-id",),
        session_source="openrouter.ai/docs/guides/best-practices/prompt-caching",
    ),
    "gemini": Provider(
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        "google",
        reasoning_field=None,
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", "deepseek"),
    "groq": Provider(
        "https://api.groq.com/openai/v1",
        "GROQ_API_KEY",
        "groq",
        reasoning_field="reasoning",
        max_tokens_name=_NEW_NAME,
        has_batches=True,
    ),
    "together": Provider(
        "https://api.together.xyz/v1",
        "TOGETHER_API_KEY",
        "together",
        reasoning_field="reasoning",
    ),
    "fireworks": Provider(
        "https://api.fireworks.ai/inference/v1",
        "FIREWORKS_API_KEY",
        "fireworks",
        session_headers=("x-session-affinity",),
        session_source="docs.fireworks.ai/guides/prompt-caching",
    ),
    "mistral": Provider(
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        "mistral",
        reasoning_field=None,
        cache_key_apis=("openai_chat",),
        session_source="docs.mistral.ai/studio-api/conversations/advanced/prompt-caching",
    ),
    "xai": Provider(
        "https://api.x.ai/v1",
        "XAI_API_KEY",
        "x-ai",
        session_headers=("x-grok-conv-id",),
        cache_key_apis=("openai_responses",),
        session_source="docs.x.ai/developers/advanced-api-usage/prompt-caching",
    ),
    "moonshot": Provider("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", "moonshotai"),
    "nvidia": Provider("https://integrate.api.nvidia.com/v1", "NVIDIA_API_KEY"),
    "cerebras": Provider(
        "https://api.cerebras.ai/v1",
        "CEREBRAS_API_KEY",
        "cerebras",
        reasoning_field="reasoning",
        max_tokens_name=_NEW_NAME,
    ),
    "huggingface": Provider("https://router.huggingface.co/v1", "HF_TOKEN"),
    "azure": Provider(
        "",
        "AZURE_OPENAI_API_KEY",
        "azure",
        reasoning_field=None,
        max_tokens_name=_NEW_NAME,
        client="azure",
        other_credentials="Microsoft Entra (azure-identity)",
        cache_key_apis=_OPENAI_APIS,
        session_source="learn.microsoft.com/azure/foundry/openai/how-to/prompt-caching",
    ),
    "bedrock": Provider(
        "",
        "AWS_BEARER_TOKEN_BEDROCK",
        "aws",
        reasoning_field=None,
        max_tokens_name=_NEW_NAME,
        client="bedrock",
        other_credentials="AWS credentials (boto3)",
    ),
    "vertex": Provider(
        "",
        NO_KEY,
        "google",
        "anthropic_messages",
        client="vertex",
        other_credentials="application default credentials (google-auth)",
    ),
    "foundry": Provider(
        "",
        "ANTHROPIC_FOUNDRY_API_KEY",
        "anthropic",
        "anthropic_messages",
        client="foundry",
        other_credentials="Microsoft Entra (azure-identity)",
    ),
    "litellm": Provider(
        "http://127.0.0.1:4000/v1",
        "LITELLM_API_KEY",
        is_own_server=True,
        session_headers=("x-litellm-session-id", *OWN_SERVERS_HEADERS),
        session_source="docs.litellm.ai/docs/proxy/cache_aware_routing",
    ),
    "lmstudio": Provider(
        "http://127.0.0.1:1234/v1",
        NO_KEY,
        is_own_server=True,
        session_headers=OWN_SERVERS_HEADERS,
        session_source=_ROUTERS,
    ),
    "ollama": Provider(
        "http://127.0.0.1:11434/v1",
        NO_KEY,
        reasoning_field="reasoning",
        is_own_server=True,
        session_headers=OWN_SERVERS_HEADERS,
        session_source=_ROUTERS,
    ),
    "sglang": Provider(
        "http://127.0.0.1:30000/v1",
        NO_KEY,
        is_own_server=True,
        session_headers=OWN_SERVERS_HEADERS,
        session_source=_ROUTERS,
    ),
    "vllm": Provider(
        "http://127.0.0.1:8000/v1",
        NO_KEY,
        is_own_server=True,
        session_headers=OWN_SERVERS_HEADERS,
        session_source=_ROUTERS,
    ),
}
"""The providers by prefix."""

CLIENTS = tuple(row.client for row in PROVIDERS.values() if row.client is not None)
"""Clients known by name."""

RESERVED_PREFIXES = ("openai", "responses", "anthropic", "openrouter")
"""Prefixes that are valid at any `--base_url`, and that no endpoint of a config may have as name.

An endpoint may have the name of any other prefix, and then replaces it.
"""

_HOSTS: Mapping[str, Provider] = {
    host: row
    for prefix, row in PROVIDERS.items()
    if prefix != "responses" and not row.is_own_server
    if (host := urlsplit(row.base_url).hostname)
}


def find_provider(base_url: str) -> Provider | None:
    """The provider in the table whose host a base URL names; None if there is none."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    return next((row for known, row in _HOSTS.items() if f".{host}".endswith(f".{known}")), None)


def is_known_prefix(prefix: str, base_url: str | None) -> bool:
    """Whether a model's prefix names a row of the table at this base URL; None: at none given."""
    # At other servers, names of models have colons, too, such as `mistral:7b`.
    if (row := PROVIDERS.get(prefix)) is None:
        return False
    is_anywhere = base_url is None or prefix in RESERVED_PREFIXES or row.is_own_server
    return is_anywhere or row.client is not None or find_provider(base_url or "") is row
