"""The providers and servers that a model's prefix can name: one row each.

A row says where the endpoint is, which variable holds its key, which API it speaks, and what it
calls things. `client` names the client of an SDK that knows URL and credentials instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

Api = Literal["openai_chat", "openai_responses", "anthropic_messages", "gemini"]

ONLY_RELAYED: frozenset[str] = frozenset({"gemini"})
"""Those only for agents that run as commands: this program writes no requests in them."""

NO_KEY = "none"
"""The value of `key_env` for an endpoint that needs no key."""


class Provider(NamedTuple):
    """One row of the table."""

    base_url: str
    """"" where the client of an SDK knows it."""
    key_env: str
    """The variable that holds the key, `NO_KEY` where none is needed."""
    prices: str | None = None
    """Its id in the price table; None lets the table guess from the model's name."""
    api: Api = "openai_chat"
    reasoning_field: str | None = "reasoning_content"
    """Chat API: the field of an assistant message that takes reasoning which came from elsewhere;
    None where messages with such a field are refused."""
    max_tokens_name: str = "max_tokens"
    """Chat API: the field of a request that limits the reply."""
    has_batches: bool = False
    """Its Batch API is one that this program speaks."""
    client: str | None = None
    """See `Connection.client`."""
    other_credentials: str = ""
    """The credentials that a client uses if the variable is not set."""
    url_env: str = ""
    """The variable by which its SDK finds another base URL."""
    is_own_server: bool = False
    """The program runs on users' machines, so its prefix holds at any `--base_url`."""


_NEW_NAME = "max_completion_tokens"

PROVIDERS: Mapping[str, Provider] = {
    "openai": Provider(
        "https://api.openai.com/v1", "OPENAI_API_KEY", "openai",
        max_tokens_name=_NEW_NAME, has_batches=True, url_env="OPENAI_BASE_URL",
    ),
    "responses": Provider(
        "https://api.openai.com/v1", "OPENAI_API_KEY", "openai", "openai_responses",
        max_tokens_name=_NEW_NAME, has_batches=True, url_env="OPENAI_BASE_URL",
    ),
    "anthropic": Provider(
        "https://api.anthropic.com", "ANTHROPIC_API_KEY", "anthropic", "anthropic_messages",
        has_batches=True, url_env="ANTHROPIC_BASE_URL",
    ),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", "openrouter"),
    "gemini": Provider(
        "https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY", "google",
        reasoning_field=None,
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", "deepseek"),
    "groq": Provider(
        "https://api.groq.com/openai/v1", "GROQ_API_KEY", "groq",
        reasoning_field="reasoning", max_tokens_name=_NEW_NAME, has_batches=True,
    ),
    "together": Provider(
        "https://api.together.xyz/v1", "TOGETHER_API_KEY", "together",
        reasoning_field="reasoning",
    ),
    "fireworks": Provider(
        "https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY", "fireworks"
    ),
    "mistral": Provider(
        "https://api.mistral.ai/v1", "MISTRAL_API_KEY", "mistral", reasoning_field=None
    ),
    "xai": Provider("https://api.x.ai/v1", "XAI_API_KEY", "x-ai"),
    "moonshot": Provider("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", "moonshotai"),
    "nvidia": Provider("https://integrate.api.nvidia.com/v1", "NVIDIA_API_KEY"),
    "cerebras": Provider(
        "https://api.cerebras.ai/v1", "CEREBRAS_API_KEY", "cerebras",
        reasoning_field="reasoning", max_tokens_name=_NEW_NAME,
    ),
    "huggingface": Provider("https://router.huggingface.co/v1", "HF_TOKEN"),
    "azure": Provider(
        "", "AZURE_OPENAI_API_KEY", "azure",
        reasoning_field=None, max_tokens_name=_NEW_NAME, client="azure",
        other_credentials="Microsoft Entra (azure-identity)",
    ),
    "bedrock": Provider(
        "", "AWS_BEARER_TOKEN_BEDROCK", "aws",
        reasoning_field=None, max_tokens_name=_NEW_NAME, client="bedrock",
        other_credentials="AWS credentials (boto3)",
    ),
    "vertex": Provider(
        "", NO_KEY, "google", "anthropic_messages", client="vertex",
        other_credentials="application default credentials (google-auth)",
    ),
    "foundry": Provider(
        "", "ANTHROPIC_FOUNDRY_API_KEY", "anthropic", "anthropic_messages", client="foundry",
        other_credentials="Microsoft Entra (azure-identity)",
    ),
    "litellm": Provider("http://127.0.0.1:4000/v1", "LITELLM_API_KEY", is_own_server=True),
    "lmstudio": Provider("http://127.0.0.1:1234/v1", NO_KEY, is_own_server=True),
    "ollama": Provider(
        "http://127.0.0.1:11434/v1", NO_KEY, reasoning_field="reasoning", is_own_server=True
    ),
    "sglang": Provider("http://127.0.0.1:30000/v1", NO_KEY, is_own_server=True),
    "vllm": Provider("http://127.0.0.1:8000/v1", NO_KEY, is_own_server=True),
}  # fmt: skip
"""By prefix."""

CLIENTS = tuple(row.client for row in PROVIDERS.values() if row.client is not None)
"""Clients known by name."""

FIRST = ("openai", "responses", "anthropic", "openrouter")
"""Prefixes that hold at any `--base_url`, and that no endpoint of a config may have as its name.
The names of all others may be given to endpoints, which then win."""

_HOSTS: Mapping[str, Provider] = {
    host: row
    for prefix, row in PROVIDERS.items()
    if prefix != "responses" and not row.is_own_server
    if (host := urlsplit(row.base_url).hostname)
}


def provider_at(base_url: str) -> Provider | None:
    """The provider whose host a base URL names, of those in the table."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    return next((row for known, row in _HOSTS.items() if f".{host}".endswith(f".{known}")), None)


def holds_at(prefix: str, base_url: str | None) -> bool:
    """Whether a model's prefix names a row of the table, given the user's own base URL, if any.

    Names of models at other servers have colons too, such as `mistral:7b`.
    """
    if (row := PROVIDERS.get(prefix)) is None:
        return False
    is_anywhere = base_url is None or prefix in FIRST or row.is_own_server
    return is_anywhere or row.client is not None or provider_at(base_url or "") is row
